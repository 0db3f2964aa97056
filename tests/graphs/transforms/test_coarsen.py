"""Coarsening: acyclic, nothing lost, back to ops, and no constraint tightened behind the user's back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opgraph_strategies import opgraphs

from graphs import GraphError, MismatchError, Op, OpGraph, Phase, Tensor
from graphs.generators import GENERATORS, fork_join, layered, random_dag
from graphs.transforms.coarsen import by_module, contract, fuse_chains, fuse_elementwise, to_size
from graphs.transforms.derived import Derived

COARSENERS: dict[str, Callable[[OpGraph], Derived]] = {
    "chains": fuse_chains,
    "elementwise": fuse_elementwise,
    "module": by_module,
    "module_1": lambda graph: by_module(graph, depth=1),
    "to_1": lambda graph: to_size(graph, 1),
    "to_3": lambda graph: to_size(graph, 3),
    "chains_to_4": lambda graph: fuse_chains(graph).then(lambda coarse: to_size(coarse, 4)),
}
coarseners = st.sampled_from(sorted(COARSENERS)).map(COARSENERS.__getitem__)


def net(*edges: str, **fields: dict[str, object]) -> OpGraph:
    """Ops of one letter, an edge "ab" or a tensor "abc" (a to b and c) of 8 bytes each; fields by op."""
    names = sorted({letter for edge in edges for letter in edge})
    ops = [Op(name, **fields.get(name, {})) for name in names]  # type: ignore[arg-type]
    return OpGraph.build(ops, [Tensor(edge[0], 8, tuple(edge[1:])) for edge in edges])


def groups(coarse: Derived) -> set[str]:
    return {
        "".join(sorted(coarse.source.op_names[op] for op in np.flatnonzero(coarse.group_of == group)))
        for group in range(coarse.graph.n_ops)
    }


# -- laws of all ----------------------------------------------------------------------------------------------------


@given(coarsen=coarseners, graph=opgraphs(max_ops=14))
def test_nothing_is_lost(coarsen: Callable[[OpGraph], Derived], graph: OpGraph) -> None:
    coarse = coarsen(graph)
    merged = coarse.graph
    assert coarse.source is graph
    assert sorted(set(coarse.group_of.tolist())) == list(range(merged.n_ops))
    assert merged.flops.sum() == pytest.approx(graph.flops.sum())
    assert merged.bytes_moved.sum() == pytest.approx(graph.bytes_moved.sum())
    for part in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert getattr(merged, part).sum() == getattr(graph, part).sum()
    assert merged.origin == graph.origin
    assert merged.kernels.sum() == graph.kernels.sum()
    assert OpGraph.build(*merged.records(), name=merged.name) == merged  # so it is acyclic, and stored as `build` would


@given(coarsen=coarseners, graph=opgraphs(max_ops=14))
def test_edges_between_groups_are_those_of_the_fine_graph(
    coarsen: Callable[[OpGraph], Derived], graph: OpGraph
) -> None:
    coarse = coarsen(graph)

    def crossing(graph: OpGraph, group: np.ndarray) -> list[tuple[int, int, tuple[int, ...]]]:
        tensors = []
        for t in range(graph.n_tensors):
            home = int(group[graph.tensor_producer[t]])
            readers = {int(group[op]) for op in graph.consumers_of(t)}
            if readers != {home}:
                tensors.append((home, int(graph.tensor_bytes[t]), tuple(sorted(readers - {home}))))
        return sorted(tensors)

    assert crossing(coarse.graph, np.arange(coarse.graph.n_ops)) == crossing(graph, coarse.group_of)


@given(coarsen=coarseners, graph=opgraphs(max_ops=14), data=st.data())
def test_expanding_keeps_every_constraint(
    coarsen: Callable[[OpGraph], Derived], graph: OpGraph, data: st.DataObject
) -> None:
    """A placement that satisfies the coarse graph's colocation and pins satisfies the fine graph's."""
    coarse = coarsen(graph)
    kinds = ["cpu", "gpu"]
    device = np.zeros(coarse.graph.n_ops, dtype=np.int64)
    for group in range(coarse.graph.n_ops):
        allowed = [kinds.index(kind) for kind in coarse.graph.pins[group] or kinds]
        together = np.flatnonzero(coarse.graph.colocation == coarse.graph.colocation[group])
        tied = coarse.graph.colocation[group] >= 0 and together[0] < group
        device[group] = device[together[0]] if tied else data.draw(st.sampled_from(allowed))
    fine = coarse.expand(device)
    for label in range(int(graph.colocation.max()) + 1):
        assert len(set(fine[graph.colocation == label].tolist())) <= 1
    for op in range(graph.n_ops):
        pins_of_group = coarse.graph.pins[coarse.group_of[op]]
        assert set(pins_of_group) <= set(graph.pins[op]) or not graph.pins[op]


@given(coarsen=coarseners, graph=opgraphs(max_ops=14))
def test_only_like_ops_are_merged(coarsen: Callable[[OpGraph], Derived], graph: OpGraph) -> None:
    coarse = coarsen(graph)
    assert np.array_equal(coarse.graph.phase[coarse.group_of], graph.phase)
    # Where no colocation group brings pins of its own, a merged op may run wherever each of its ops may.
    if np.all(graph.colocation < 0):
        for op in range(graph.n_ops):
            assert set(coarse.graph.pins[coarse.group_of[op]]) == set(graph.pins[op])


@given(coarsen=coarseners, graph=opgraphs(max_ops=14))
def test_times_are_summed_only_where_all_are_measured(coarsen: Callable[[OpGraph], Derived], graph: OpGraph) -> None:
    coarse = coarsen(graph)
    times = [op.time_s for op in graph.records()[0]]
    for group, op in enumerate(coarse.graph.records()[0]):
        members = [times[i] for i in np.flatnonzero(coarse.group_of == group)]
        for key in graph.time_keys:
            if all(key in member or "*" in member for member in members):
                assert op.time_s[key] == pytest.approx(sum(member.get(key, member.get("*")) for member in members))
            else:
                assert key not in op.time_s


@given(coarsen=coarseners, graph=opgraphs(max_ops=14))
def test_memory_is_never_underestimated(coarsen: Callable[[OpGraph], Derived], graph: OpGraph) -> None:
    """Run group after group, a group's ops in topological order: the fine peak is at most the coarse one."""
    coarse = coarsen(graph)
    fine_order = [
        op for group in coarse.graph.topological_order for op in graph.topological_order if coarse.group_of[op] == group
    ]
    assert peak_bytes(graph, fine_order) <= peak_bytes(coarse.graph, coarse.graph.topological_order.tolist())


def peak_bytes(graph: OpGraph, order: list[int]) -> int:
    """Most bytes of tensors and workspace at once, everything on one device; results stay."""
    position = {op: i for i, op in enumerate(order)}
    assert all(position[u] < position[v] for u, v in zip(*(e.tolist() for e in graph.edge_list[:2]), strict=True))
    lives = []
    for t in range(graph.n_tensors):
        readers = [position[op] for op in graph.consumers_of(t).tolist()]
        start = position[int(graph.tensor_producer[t])]
        lives.append((start, max(readers, default=len(order)), int(graph.tensor_memory_bytes[t])))
    return max(
        int(graph.workspace_bytes[op]) + sum(size for start, end, size in lives if start <= i <= end)
        for i, op in enumerate(order)
    )


@given(name=st.sampled_from(sorted(GENERATORS)), n=st.integers(1, 150), seed=st.integers(0, 999), k=st.integers(1, 40))
def test_to_size_reaches_its_size_on_unconstrained_graphs(name: str, n: int, seed: int, k: int) -> None:
    coarse = to_size(GENERATORS[name](n, seed), k)
    assert coarse.graph.n_ops == min(n, k)


@pytest.mark.parametrize("degree", [1.0, 1.5, 2.0, 3.0, 6.0])
def test_to_size_makes_no_cycle_on_many_dense_graphs(degree: float) -> None:
    for seed in range(40):
        graph = random_dag(40, seed, degree=degree)
        for size in (30, 20, 10, 4):
            assert to_size(graph, size).graph.n_ops == size  # a cycle would be refused


# -- each by hand ---------------------------------------------------------------------------------------------------


def test_chains_end_where_the_graph_branches() -> None:
    assert groups(fuse_chains(net("ab", "bc", "cd", "ce", "df", "ef", "fg"))) == {"abc", "d", "e", "fg"}


def test_a_chain_ends_where_two_colocation_groups_would_meet() -> None:
    tied = net(
        "ab", "bc", "cd", "xy", b={"colocation": 1}, x={"colocation": 1}, d={"colocation": 2}, y={"colocation": 2}
    )
    coarse = fuse_chains(tied)
    assert groups(coarse) == {"abc", "d", "x", "y"}
    assert coarse.graph.colocation.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("kind", ["aten.relu.default", "aten.relu_", "onnx.Relu", "ReLU", "aten.relu", "relu(inplace)"])
def test_elementwise_ops_join_their_producer(kind: str) -> None:
    graph = net("ab", "ac", "cd", "bd", b={"kind": kind}, c={"kind": "aten.mm"}, d={"kind": "aten.add"})
    assert groups(fuse_elementwise(graph)) == {"ab", "c", "d"}  # d has two producers


def test_modules_are_merged_and_cut_at_the_depth() -> None:
    modules = {name: {"module": path} for name, path in zip("abcd", ["m.x", "m.x", "m.y", "n"], strict=True)}
    graph = net("ab", "bc", "cd", **modules)
    assert groups(by_module(graph)) == {"ab", "c", "d"}
    coarse = by_module(graph, depth=1)
    assert groups(coarse) == {"abc", "d"}
    assert coarse.graph.modules == ("m", "n")


def test_a_module_that_would_make_a_cycle_is_split() -> None:
    modules = {name: {"module": path} for name, path in zip("abc", ["m", "n", "m"], strict=True)}
    assert groups(by_module(net("ab", "bc", "ac", **modules))) == {"a", "b", "c"}


def test_an_op_that_could_run_early_joins_its_module() -> None:
    modules = {name: {"module": path} for name, path in zip("abm", ["first", "second", "second"], strict=True)}
    assert groups(by_module(net("ab", "mb", **modules))) == {"a", "bm"}  # m, say a mask, reads nothing


def test_ops_without_a_module_stay_alone() -> None:
    assert groups(by_module(net("ab", "bc"))) == {"a", "b", "c"}


def test_phases_and_pins_are_kept_apart() -> None:
    phased = net("ab", "bc", c={"phase": Phase.BACKWARD, "forward_of": "a"})
    coarse = to_size(phased, 1)
    assert groups(coarse) == {"ab", "c"}
    assert coarse.graph.forward_of.tolist() == [-1, 0]
    assert groups(to_size(net("ab", "bd", "cd", b={"pins": ("cpu",)}, d={"pins": ("cpu",)}), 1)) == {"ac", "bd"}


def test_pins_of_a_colocation_group_bind_its_other_ops() -> None:
    tied = net("ab", "cd", "bd", a={"colocation": 0}, c={"colocation": 0, "pins": ("cpu",)})
    assert groups(to_size(tied, 1)) == {"ac", "bd"}  # merging a with b would pin b to the CPU


def test_to_size_merges_the_heavy_edge() -> None:
    graph = OpGraph.build([Op(name, flops=1.0) for name in "abc"], [Tensor("a", 1000, ("b",)), Tensor("b", 1, ("c",))])
    assert groups(to_size(graph, 2)) == {"ab", "c"}


def test_to_size_keeps_groups_of_like_work() -> None:
    graph = layered(2000, 0)
    work = np.bincount(to_size(graph, 50).group_of, weights=graph.time_s[:, 0])
    assert work.max() / work.mean() < 3


def test_to_size_keeps_branches_apart_while_there_is_an_edge_to_merge() -> None:
    graph = fork_join(402, 0, branches=4)
    coarse = to_size(graph, 100).graph
    longest = nx.dag_longest_path_length(nx.DiGraph(zip(*(e.tolist() for e in coarse.edge_list[:2]), strict=True)))
    assert longest < 80  # one chain of 100 groups would have no branches left


@pytest.mark.parametrize("seed", range(3))
def test_to_size_does_not_tie_a_training_graph_into_one(seed: int) -> None:
    """Forward 1 + 2 and backward 2 + 3 would tie layers 1, 2 and 3, and so on through the whole graph."""
    ops, tensors = layered(200, seed).records()
    forward = [Op(op.name, flops=1.0, colocation=op.name) for op in ops]
    backward = [Op(f"{op.name}.backward", flops=2.0, colocation=op.name, phase=Phase.BACKWARD) for op in ops]
    gradients = [
        Tensor(f"{reader}.backward", 8, (f"{tensor.producer}.backward",))
        for tensor in tensors
        for reader in tensor.consumers
    ]
    stashed = [Tensor(t.producer, 8, (*t.consumers, f"{t.producer}.backward")) for t in tensors]
    coarse = to_size(OpGraph.build(forward + backward, stashed + gradients), 60).graph
    assert coarse.n_ops == 60
    work = np.bincount(coarse.colocation + 1, weights=coarse.flops)[1:]
    assert work.max() < 0.3 * coarse.flops.sum()


# -- the merged op --------------------------------------------------------------------------------------------------


def test_a_merged_op_by_hand() -> None:
    ops = [
        Op("a", "aten.mm", 10.0, 1.0, 100, 7, time_s={"*": 1.0, "V100": 0.5}, module="m.x"),
        Op("b", "aten.relu", 0.0, 2.0, 0, 3, time_s={"*": 2.0}, module="m.y", dtype="bfloat16"),
        Op("c", module="n"),
    ]
    graph = OpGraph.build(ops, [Tensor("a", 20, ("b",)), Tensor("b", 5, ("c",)), Tensor("b", 6, ("c",))])
    merged, last = contract(graph, np.array([4, 4, 1])).graph.records()[0]
    assert merged == Op(
        "a",
        "aten.mm",
        flops=10.0,
        bytes_moved=3.0,
        kept_bytes=100,
        workspace_bytes=27,  # the inner tensor and a's own workspace; then it and b's
        kernels=2,
        module="m",
        time_s={"*": 3.0, "V100": 2.5},
    )
    assert last.name == "c"


def test_workspace_counts_inner_tensors_while_they_live() -> None:
    graph = OpGraph.build(
        [Op("a"), Op("b"), Op("c", workspace_bytes=1), Op("d")],
        [Tensor("a", 10, ("b",)), Tensor("b", 20, ("c",)), Tensor("c", 40, ("d",)), Tensor("d", 80)],
    )
    merged = contract(graph, np.zeros(4, dtype=np.int64)).graph
    assert merged.workspace_bytes.tolist() == [61]  # while c runs; the result is a tensor of its own
    assert merged.tensor_bytes.tolist() == [80]


def test_groups_that_form_a_cycle_are_refused() -> None:
    with pytest.raises(GraphError, match="cycle: a -> b -> a"):
        contract(net("ab", "bc"), np.array([0, 1, 0]))


def test_contradicting_pins_are_refused() -> None:
    with pytest.raises(GraphError, match=r"'a' to .*'b' to .*do not merge them"):
        contract(net("ab", a={"pins": ("x",)}, b={"pins": ("y",)}), np.array([0, 0]))


def test_a_colocation_group_inside_one_merged_op_binds_nothing_more() -> None:
    graph = net("ab", "bc", a={"colocation": 1}, b={"colocation": 1})
    assert contract(graph, np.array([0, 0, 1])).graph.colocation.tolist() == [-1, -1]


def test_expanding_something_else_is_refused() -> None:
    coarse = fuse_chains(net("ab", "ac"))
    with pytest.raises(MismatchError, match="expected one value for each of 3 groups"):
        coarse.expand(np.zeros(2, dtype=np.int64))


def test_bad_sizes_are_refused() -> None:
    graph = net("ab")
    with pytest.raises(GraphError, match="n_groups is 0"):
        to_size(graph, 0)
    with pytest.raises(GraphError, match="depth is 0"):
        by_module(graph, depth=0)


def test_coarse_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        fuse_chains(net("ab")).graph = net("ab")  # type: ignore[misc]
