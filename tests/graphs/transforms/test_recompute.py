"""Recompute: what runs again computes the same, waits for the backward pass, and frees what the first run wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opgraph_strategies import opgraphs

from env.cluster import Cluster
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs import GraphError, Op, OpGraph, Phase, Replicate, SplitRow, State, Tensor
from graphs.generators import convolution_chain, layered
from graphs.transforms.derived import Derived
from graphs.transforms.recomputing import recompute, recompute_stretches, unmatched

RULES: dict[str, Callable[[OpGraph], Derived]] = {
    "a": lambda graph: recompute(graph, ["a"]),
    "children": lambda graph: recompute(graph, ["a.*", "d"]),
    "any": lambda graph: recompute(graph, ["*"]),
    "kind": lambda graph: recompute(graph, ["kind:*mm*", "kind:op"]),
    "but": lambda graph: recompute(graph, ["*", "!kind:*mm*", "!a.b"]),
    "kind in": lambda graph: recompute(graph, ["a", "kind:*@d", "!kind:*@a.*"]),
    "both": lambda graph: recompute(graph, ["d", "kind:*"]),
    "least": recompute_stretches,
    "stretches": lambda graph: recompute_stretches(graph, 3),
    "levels": lambda graph: recompute_stretches(graph, 2, 3),
}
rules = st.sampled_from(sorted(RULES)).map(RULES.__getitem__)


def tensor_sources(derived: Derived) -> list[tuple[int, int]]:
    """Per tensor the op of the source that wrote it and its number there; (-1, op) for a gate."""
    graph, written = derived.graph, np.diff(derived.source.output_ptr)
    result = []
    for t, producer in enumerate(graph.tensor_producer.tolist()):
        number, origin = t - int(graph.output_ptr[producer]), int(derived.origin[producer])
        result.append((origin, number) if number < written[origin] else (-1, producer))
    return result


def inputs_of(graph: OpGraph, op: int) -> list[int]:
    ptr, tensors = graph.inputs
    return list(tensors[ptr[op] : ptr[op + 1]].tolist())


def names_read(graph: OpGraph, name: str) -> set[str]:
    op = graph.op_names.index(name)
    return {graph.op_names[graph.tensor_producer[t]] for t in inputs_of(graph, op)}


def peak_bytes(graph: OpGraph) -> int:
    order = np.arange(graph.n_ops, dtype=np.float64)
    simulator = Simulator(Problem(graph, Cluster.preset("8xA100-nvswitch")))
    score = simulator.score(Plan(np.zeros(graph.n_ops, dtype=np.int64), order=order))
    return int(score.peak_bytes[0] - graph.kept_bytes.sum())


# -- laws -----------------------------------------------------------------------------------------------------------


@given(rule=rules, graph=opgraphs(max_ops=10))
def test_every_run_reads_what_the_first_run_read(rule: Callable[[OpGraph], Derived], graph: OpGraph) -> None:
    derived = rule(graph)
    sources, before = tensor_sources(derived), tensor_sources(Derived.identity(graph))
    assert derived.source is graph
    assert set(derived.origin.tolist()) == set(range(graph.n_ops))
    for op, origin in enumerate(derived.origin.tolist()):
        read = sorted(source for t in inputs_of(derived.graph, op) if (source := sources[t])[0] >= 0)
        assert read == [before[t] for t in inputs_of(graph, origin)]
    for t, source in enumerate(sources):
        size = graph.tensor_bytes[graph.output_ptr[source[0]] + source[1]] if source[0] >= 0 else 0
        assert derived.graph.tensor_bytes[t] == size


@given(rule=rules, graph=opgraphs(max_ops=10))
def test_only_the_repeated_work_is_added(rule: Callable[[OpGraph], Derived], graph: OpGraph) -> None:
    derived = rule(graph)
    result, origin = derived.graph, derived.origin
    assert OpGraph.build(*result.records(), result.name, result.origin, result.states) == result  # so it is acyclic
    for what in ("flops", "bytes_moved", "kernels", "workspace_bytes"):
        np.testing.assert_array_equal(getattr(result, what), getattr(graph, what)[origin])
    for part in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert getattr(result, part).sum() == getattr(graph, part).sum()
    is_first = np.array([name == graph.op_names[i] for name, i in zip(result.op_names, origin, strict=True)])
    assert is_first.sum() == graph.n_ops
    assert (graph.phase[origin[~is_first]] == Phase.FORWARD).all()
    assert (result.phase[~is_first] == Phase.BACKWARD).all()
    for op in np.flatnonzero(~is_first).tolist():
        first = int(np.flatnonzero(is_first & (origin == origin[op]))[0])
        users = {user for state in graph.states for user in state.users}
        if graph.kept_bytes[origin[op]] or graph.op_names[origin[op]] in users:
            assert result.colocation[op] == result.colocation[first] >= 0
    if is_first.all():
        assert result.hash == graph.hash


@given(rule=rules, graph=opgraphs(max_ops=10))
def test_rows_and_states_stay_with_their_tensors(rule: Callable[[OpGraph], Derived], graph: OpGraph) -> None:
    derived = rule(graph)
    result, sources, before = derived.graph, tensor_sources(derived), tensor_sources(Derived.identity(graph))
    for op, origin in enumerate(derived.origin.tolist()):
        assert len(result.split_rows[op]) == len(graph.split_rows[origin])
        for row, old in zip(result.split_rows[op], graph.split_rows[origin], strict=True):
            read, read_before = inputs_of(result, op), [before[t] for t in inputs_of(graph, origin)]
            expected = dict(zip(read_before, old.inputs, strict=False))
            assert list(row.inputs[: len(read)]) == [expected.get(sources[t], Replicate()) for t in read]
            assert row.inputs[len(read) :] == old.inputs[len(read_before) :]
            assert row.outputs[: len(old.outputs)] == old.outputs
            assert set(row.outputs[len(old.outputs) :]) <= {Replicate()}
    number = {name: i for i, name in enumerate(result.op_names)}
    for state, old_state in zip(result.states, graph.states, strict=True):
        used = {derived.graph.op_names[i] for i in np.flatnonzero(np.isin(derived.origin, _numbers(graph, old_state)))}
        assert set(state.users) == used
        assert [number[user] for user in state.users] == sorted(number[user] for user in state.users)


def _numbers(graph: OpGraph, state: State) -> list[int]:
    return [graph.op_names.index(user) for user in state.users]


@settings(max_examples=30)
@given(graph=opgraphs(max_ops=10))
def test_what_matches_nothing_changes_nothing(graph: OpGraph) -> None:
    for patterns in ([], ["nothing.*"], ["kind:nothing"]):
        assert recompute(graph, patterns).graph.hash == graph.hash


def test_a_graph_without_backward_pass_stays_as_it_is() -> None:
    graph = layered(50, seed=0)
    assert recompute_stretches(graph, 4).graph is graph
    assert recompute(graph, ["kind:*"]).graph is graph


# -- what runs again, and when --------------------------------------------------------------------------------------


def blocks(n: int = 3, layers: str = "layers") -> OpGraph:
    """n blocks "layers.i" of two ops a, b with weights; the gradient of a reads its input, that of b what a wrote."""
    ops, reads = [Op("x", "input", kernels=0)], dict[str, list[str]]()

    def add(name: str, module: str, inputs: list[str], of: str | None = None, kind: str = "op") -> str:
        phase = Phase.FORWARD if of is None else Phase.BACKWARD
        ops.append(Op(name, kind, 1.0, parameter_bytes=0 if of else 8, phase=phase, forward_of=of, module=module))
        for source in inputs:
            reads.setdefault(source, []).append(name)
        return name

    last, fed = "x", []
    for i in range(n):
        fed.append(last)
        inner = add(f"a{i}", f"{layers}.{i}.a", [last], kind="softmax")
        last = add(f"b{i}", f"{layers}.{i}", [inner])
    add("loss", "", [last])
    last = add("loss'", "", ["loss", last], of="loss")
    for i in reversed(range(n)):
        last = add(f"b{i}'", f"{layers}.{i}", [last, f"a{i}"], of=f"b{i}")
        last = add(f"a{i}'", f"{layers}.{i}.a", [last, fed[i]], of=f"a{i}")
    tensors = [Tensor(op.name, 100, tuple(reads.get(op.name, ()))) for op in ops]
    return OpGraph.build(ops, tensors, "blocks")


@pytest.mark.parametrize("pattern", ["layers.*", "layers.?", "*", "lay*"])
def test_each_matching_module_runs_again_when_the_backward_pass_comes_to_it(pattern: str) -> None:
    graph = recompute(blocks(), [pattern]).graph
    # What b writes for the next block is kept, so only a runs again; each just before its block's backward pass.
    backward = [name for name, phase in zip(graph.op_names, graph.phase, strict=True) if phase == Phase.BACKWARD]
    assert backward == ["loss'", "a2.again", "b2'", "a2'", "a1.again", "b1'", "a1'", "a0.again", "b0'", "a0'"]
    assert names_read(graph, "a1.again") == {"b0", "a2'"}  # its input, and the gradient that has come so far
    assert names_read(graph, "b1'") == {"a2'", "a1.again"}
    assert names_read(graph, "a1'") == {"b1'", "b0"}
    assert names_read(graph, "b1") == {"a1"}


@pytest.mark.parametrize("kept", ["!layers.[12]", "!kind:soft*@layers.[12]", "!layers.[12].a"])
def test_what_is_kept_does_not_run_again(kept: str) -> None:
    graph = recompute(blocks(), ["layers.*", kept]).graph
    assert [name for name in graph.op_names if name.endswith(".again")] == ["a0.again"]
    assert names_read(graph, "b1'") == {"a2'", "a1"}
    assert names_read(graph, "b0'") == {"a1'", "a0.again"}


def test_what_is_computed_again_reads_what_is_kept() -> None:
    """Of three ops the middle one is kept: the first runs again for its gradient, the last reads what is kept."""
    ops = [
        *(Op(name, kind, 1.0, module="m") for name, kind in (("a", "op"), ("b", "mm"), ("c", "op"))),
        Op("loss"),
        *(Op(f"{name}'", phase=Phase.BACKWARD, forward_of=name, module="m") for name in "cba"),
    ]
    tensors = [
        *(Tensor("a", 4, ("b", "b'")), Tensor("b", 4, ("c", "c'")), Tensor("c", 4, ("loss", "c'"))),
        *(Tensor("loss", 4, ("c'",)), Tensor("c'", 4, ("b'",)), Tensor("b'", 4, ("a'",)), Tensor("a'", 4)),
    ]
    graph = recompute(OpGraph.build(ops, tensors, "three"), ["m", "!kind:mm"]).graph
    assert [name for name in graph.op_names if name.endswith(".again")] == ["a.again", "c.again"]
    assert names_read(graph, "c.again") == {"b", "c"}  # there is no gradient yet: when the forward pass has ended
    assert names_read(graph, "b'") == {"c'", "a.again"}


def test_the_gate_carries_nothing() -> None:
    graph = recompute(blocks(), ["layers.*"]).graph
    producer, reader, tensor = graph.edge_list
    gates = [
        (graph.op_names[p], graph.op_names[r], int(graph.tensor_bytes[t]))
        for p, r, t in zip(producer, reader, tensor, strict=True)
        if graph.op_names[r].endswith(".again") and graph.phase[p] == Phase.BACKWARD
    ]
    assert gates == [("loss'", "a2.again", 0), ("a2'", "a1.again", 0), ("a1'", "a0.again", 0)]


def test_without_a_gradient_yet_it_waits_for_the_forward_pass() -> None:
    whole = OpGraph.build(
        [
            Op("a", module="m"),
            Op("b", module="m"),
            Op("b'", phase=Phase.BACKWARD, forward_of="b", module="m"),
        ],
        [Tensor("a", 4, ("b", "b'")), Tensor("b", 4)],
    )
    assert names_read(recompute(whole, ["m"]).graph, "a.again") == {"b"}


def test_the_outermost_matching_module_is_one_segment() -> None:
    by_both = recompute(blocks(), ["layers.*.a", "layers"])
    assert by_both.graph.hash == recompute(blocks(), ["layers"]).graph.hash
    assert names_read(by_both.graph, "a2.again") >= {"b1.again"}
    assert names_read(by_both.graph, "a0.again") == {"x", "loss'"}


def test_a_module_around_most_of_the_model_is_no_segment() -> None:
    wrapped = blocks(layers="net.model.layers")
    assert recompute(wrapped, ["*"]).graph.hash == recompute(wrapped, ["net.model.layers.*"]).graph.hash
    assert recompute(wrapped, ["net.model"]).graph.hash != recompute(wrapped, ["*"]).graph.hash
    assert recompute(wrapped, ["net.model*"]).graph.hash == recompute(wrapped, ["*"]).graph.hash


def test_patterns_without_a_match_are_named() -> None:
    assert unmatched(blocks(), ["layers.*", "layer.*", "kind:soft*", "kind:gelu", "*"]) == ["layer.*", "kind:gelu"]
    inside = ["kind:softmax@*.a", "kind:softmax@*.b", "!layers.0", "!layer.0"]
    assert unmatched(blocks(), inside) == ["kind:softmax@*.b", "!layer.0"]


def test_a_second_run_keeps_no_bytes_and_stays_with_the_first() -> None:
    derived = recompute(blocks(), ["layers.*"])
    graph = derived.graph
    again = graph.op_names.index("a1.again")
    first = graph.op_names.index("a1")
    assert graph.kept_bytes[again] == 0
    assert graph.colocation[again] == graph.colocation[first] >= 0
    assert graph.forward_of[again] == first
    assert derived.source.op_names[derived.origin[again]] == "a1"


def test_data_and_updated_statistics_are_left_alone() -> None:
    ops = [
        Op("mask", "buffer", kernels=0, parameter_bytes=4, module="n"),
        Op("norm", module="n"),
        Op("count", module="n"),  # of the batches so far: nobody in the backward pass reads it
        Op("loss"),
        Op("norm'", phase=Phase.BACKWARD, forward_of="norm", module="n"),
    ]
    tensors = [
        Tensor("mask", 4, ("norm", "norm'")),
        Tensor("norm", 4, ("loss", "count", "norm'")),
        Tensor("count", 4),
        Tensor("loss", 4, ("norm'",)),
    ]
    graph = recompute(OpGraph.build(ops, tensors), ["n"]).graph
    assert [name for name in graph.op_names if "again" in name] == ["norm.again"]
    assert names_read(graph, "norm'") == {"mask", "norm.again", "loss"}


def test_ops_of_different_numbers_are_segments_of_their_own() -> None:
    graph = blocks()
    apart = np.array([int("2" in name or name.startswith("b1")) for name in graph.op_names])
    again = recompute(graph, ["*"], apart=apart).graph
    producer, reader, _ = again.edge_list
    origin = recompute(graph, ["*"], apart=apart).origin
    is_second = np.array([name.endswith(".again") for name in again.op_names])
    whole = recompute(graph, ["*"]).graph.hash
    assert is_second.any()
    assert again.hash != whole
    assert (apart[origin[producer]] == apart[origin[reader]])[is_second[producer]].all()
    alike = np.zeros(graph.n_ops, dtype=np.int64)
    assert recompute(graph, ["*"], apart=alike).graph.hash == whole


def test_positions_of_all_samples_are_not_made_again() -> None:
    """A row along the batch says that noise is drawn for each sample; positions are the same for all."""
    rows = {"noise": "batch: ->S(0,4)", "x": "batch: ->S(0,4)", "add": "batch: S(0,4),R,S(0,4)->S(0,4)"}
    ops = [
        Op("x", "linear", module="m"),
        Op("positions", module="m"),
        Op("noise", module="m"),
        Op("add", module="m"),
        Op("loss"),
        Op("add'", phase=Phase.BACKWARD, forward_of="add", module="m"),
    ]
    ops = [replace(op, split_rows=(SplitRow.parse(rows[op.name]),)) if op.name in rows else op for op in ops]
    reads = {
        "x": ("add", "add'"),
        "positions": ("add", "add'"),
        "noise": ("add", "add'"),
        "add": ("loss", "add'"),
        "loss": ("add'",),
    }
    graph = OpGraph.build(ops, [Tensor(name, 8, readers) for name, readers in reads.items()])
    for in_time, expected in ((True, {"x", "noise", "add"}), (False, {"x", "positions", "noise", "add"})):
        names = recompute(graph, ["m"], in_time).graph.op_names
        assert {name.removesuffix(".again") for name in names if name.endswith(".again")} == expected


def test_kinds_take_what_lies_between_them() -> None:
    """An attention's core: noise that is made from nothing comes along, what only follows does not."""
    wide = {"forward": ("qk", "scale", "softmax", "noise", "drop", "pv", "project")}
    ops = [Op(name, "bmm" if name in ("qk", "pv") else name, module="attention") for name in wide["forward"]]
    ops += [
        Op(f"{name}'", phase=Phase.BACKWARD, forward_of=name, module="attention")
        for name in ("project", "pv", "drop", "softmax", "qk")
    ]
    ops = [Op("x", "linear"), *ops]
    reads = {
        "x": ("qk", "pv", "qk'", "pv'"),
        "qk": ("scale",),
        "scale": ("softmax",),
        "softmax": ("drop", "softmax'"),
        "noise": ("drop", "drop'"),
        "drop": ("pv", "pv'"),
        "pv": ("project", "project'"),
        "project": (),
        "project'": ("pv'",),
        "pv'": ("drop'",),
        "drop'": ("softmax'",),
        "softmax'": ("qk'",),
        "qk'": (),
    }
    graph = OpGraph.build(ops, [Tensor(name, 8, readers) for name, readers in reads.items()])
    derived = recompute(graph, ["kind:bmm"]).graph
    again = [name.removesuffix(".again") for name in derived.op_names if name.endswith(".again")]
    assert again == ["qk", "scale", "softmax", "noise", "drop"]
    assert names_read(derived, "project'") == {"pv"}
    assert names_read(derived, "drop'") == {"noise.again", "pv'"}
    # The kind alone: its input waits instead.
    alone = recompute(graph, ["kind:softmax"]).graph
    assert names_read(alone, "softmax.again") == {"scale", "drop'"}


def test_rows_follow_a_gate() -> None:
    source = blocks(2)
    ops, tensors = source.records()
    rows = {"a1": "S(0,4)->S(0,4)", "loss'": "S(0,4),S(0,4)->P"}
    ops = [Op(**{**vars(op), "split_rows": (SplitRow.parse(rows[op.name]),)}) if op.name in rows else op for op in ops]
    graph = recompute(OpGraph.build(ops, tensors), ["layers.*"]).graph
    row = {name: list(map(str, graph.split_rows[i])) for i, name in enumerate(graph.op_names)}
    assert row["a1"] == ["S(0,4)->S(0,4)"]
    assert row["a1.again"] == ["S(0,4),R->S(0,4)"]
    assert row["loss'"] == ["S(0,4),S(0,4)->P,R"]


# -- memory ---------------------------------------------------------------------------------------------------------


def test_modules_run_again_in_less_memory() -> None:
    graph = blocks(20)
    assert peak_bytes(graph) >= 40 * 100
    assert peak_bytes(recompute(graph, ["layers.*"]).graph) <= 26 * 100


@pytest.mark.parametrize(("with_norm", "share"), [(False, 2**0.5 / 20), (True, 1 / 20)])
def test_unlike_stretches_need_the_least_memory_of_one_more_forward_pass(with_norm: bool, share: float) -> None:
    graph = convolution_chain(400, with_norm)
    derived = recompute_stretches(graph).graph
    forward = graph.flops[graph.phase == Phase.FORWARD].sum()
    assert graph.flops.sum() < derived.flops.sum() <= graph.flops.sum() + forward
    everything = peak_bytes(graph)
    assert everything >= (2 if with_norm else 1) * 400 * 25 * 4 * 64 * 64 * 4
    assert share * 0.9 < peak_bytes(derived) / everything < share * 1.2
    equal = recompute_stretches(graph, 20).graph
    assert peak_bytes(derived) < peak_bytes(equal) < everything / 5


def test_halves_of_halves_need_memory_in_the_logarithm() -> None:
    peaks = [peak_bytes(recompute_stretches(convolution_chain(2**k), 2, k).graph) for k in (5, 6, 7, 8)]
    steps = np.diff(peaks) / (25 * 4 * 64 * 64 * 4)
    assert steps.max() <= 2  # twice the layers, at most two more maps


def test_each_level_repeats_half_a_forward_pass() -> None:
    graph = convolution_chain(256)
    forward = graph.flops[graph.phase == Phase.FORWARD].sum()
    for levels in (1, 2, 4):
        more = recompute_stretches(graph, 2, levels).graph.flops.sum() - graph.flops.sum()
        assert 0.4 * levels < more / forward <= 0.5 * levels


@pytest.mark.parametrize(("segments", "levels"), [(1, 1), (4, 0), (None, 2)])
def test_stretches_that_are_none_are_refused(segments: int | None, levels: int) -> None:
    with pytest.raises(GraphError, match="expected 2 or more segments"):
        recompute_stretches(convolution_chain(4), segments, levels)
