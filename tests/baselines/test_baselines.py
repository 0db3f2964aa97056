"""Every heuristic through one suite, then each on an instance worked out by hand."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import problems

from baselines import ENTRIES, METHODS, Plan
from baselines.paths import importance, longest_paths, slowness
from baselines.placers.expert import balanced_cut
from env.cluster import UNLIMITED_BYTES, Cluster, Device, both_ways
from env.objectives import OBJECTIVES
from env.problem import Problem
from env.simulation.simulator import Simulator
from env.units import Units
from graphs.errors import InfeasibleError
from graphs.generators import layered
from graphs.opgraph import Op, OpGraph, Phase, Tensor

NAMES = tuple(METHODS)
SEVERAL = tuple(name for name in NAMES if name != "single_device")


def mesh(*devices: tuple[str, str, int], bandwidth: float = 1.0) -> Cluster:
    """Devices (name, kind, memory bytes), each pair joined both ways."""
    made = tuple(Device(name, kind, memory, {"float32": 1.0}, 1.0) for name, kind, memory in devices)
    pairs = [(a.name, b.name) for k, a in enumerate(made) for b in made[:k]]
    links = tuple(link for a, b in pairs for link in both_ways(a, b, bandwidth, 0.0))
    return Cluster("mesh", made, links)


def gpus(count: int, memory: int = UNLIMITED_BYTES) -> Cluster:
    return mesh(*((f"gpu{i}", "gpu", memory) for i in range(count)))


def path_of(ops: list[Op], size_bytes: int = 0) -> OpGraph:
    """Ops one after the other."""
    return OpGraph.build(ops, [Tensor(a.name, size_bytes, (b.name,)) for a, b in itertools.pairwise(ops)])


def chains(*times: list[float], size_bytes: int = 0) -> OpGraph:
    """One chain per list of op times; ops are named c0.0, c0.1, ..., c1.0, ..."""
    rows = [[Op(f"c{c}.{k}", time_s={"*": t}) for k, t in enumerate(chain)] for c, chain in enumerate(times)]
    tensors = [Tensor(a.name, size_bytes, (b.name,)) for row in rows for a, b in itertools.pairwise(row)]
    return OpGraph.build([op for row in rows for op in row], tensors)


def place(name: str, graph: OpGraph, cluster: Cluster, seed: int = 0) -> dict[str, str]:
    plan = METHODS[name](Problem(graph, cluster), seed)
    return {op: cluster.devices[d].name for op, d in zip(graph.op_names, plan.device.tolist(), strict=True)}


# -- all of them -----------------------------------------------------------------------------------------------


def test_every_entry_starts_where_it_serves_and_no_two_in_one_place() -> None:
    for objective in OBJECTIVES:
        places = [entry.starts[objective] for entry in ENTRIES.values() if objective in entry.starts]
        assert len(set(places)) == len(places)
    assert all(set(entry.starts) <= set(entry.objectives) <= set(OBJECTIVES) for entry in ENTRIES.values())


def test_importing_the_registry_loads_neither_compiler_nor_torch() -> None:
    code = "import sys, baselines; print([m for m in ('numba', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def check(problem: Problem, plan: Plan) -> None:
    """Complete, allowed, groups together, and within memory as the simulator sees it."""
    n, n_devices = problem.op_s.shape
    assert plan.device.shape == (n,)
    assert plan.device.min() >= 0
    assert plan.device.max() < n_devices
    assert problem.allowed[np.arange(n), plan.device].all()
    for members in problem.units:
        assert len(set(plan.device[members].tolist())) == 1
    assert Simulator(problem).score(plan).feasible


def unlimited(problem: Problem) -> Problem:
    return Problem(problem.graph, mesh(*((d.name, d.kind, UNLIMITED_BYTES) for d in problem.cluster.devices)))


def check_sentence(problem: Problem, sentence: str) -> None:
    """It names op, device, bytes needed and bytes free."""
    assert any(repr(op) in sentence for op in problem.graph.op_names)
    assert any(device.name in sentence for device in problem.cluster.devices)
    assert re.search(r"\d bytes.* \d+ bytes are free.*\.$", sentence)


@given(problems(max_ops=12, edges=20, shared=True), st.integers(0, 3))
def test_a_plan_keeps_every_rule_or_the_error_says_why(problem: Problem, seed: int) -> None:
    for name in NAMES:
        try:
            plan = METHODS[name](problem, seed)
        except InfeasibleError as error:
            check_sentence(problem, str(error))
            continue
        check(problem, plan)
        again = METHODS[name](problem, seed)
        np.testing.assert_array_equal(plan.device, again.device, name)
        assert (plan.order is None) == (again.order is None)
        if plan.order is not None:
            np.testing.assert_array_equal(plan.order, again.order, name)


@given(problems(max_ops=12, edges=20))
def test_with_memory_to_spare_there_is_always_a_plan(problem: Problem) -> None:
    roomy = unlimited(problem)
    for name in NAMES:
        check(roomy, METHODS[name](roomy, 0))


@pytest.mark.parametrize("name", NAMES)
def test_an_op_too_large_for_every_device_is_named(name: str) -> None:
    graph = OpGraph.build([Op("small", kept_bytes=1, time_s={"*": 1.0}), Op("large", kept_bytes=60)], [])
    with pytest.raises(InfeasibleError, match=r"'large' .*60 bytes .*gpu\d.* \d+ bytes are free"):
        place(name, graph, gpus(2, memory=50))


@pytest.mark.parametrize("name", SEVERAL)
def test_kept_bytes_that_fill_every_device_still_fit(name: str) -> None:
    graph = OpGraph.build([Op(f"op{i}", kept_bytes=10, time_s={"*": 1.0}) for i in range(6)], [])
    placed = place(name, graph, gpus(3, memory=20))
    assert sorted(placed.values()) == ["gpu0", "gpu0", "gpu1", "gpu1", "gpu2", "gpu2"]


def training(layers: int) -> OpGraph:
    """A chain forwards and back; every layer holds 10 bytes from its forward op to its backward op."""
    forward = [Op(f"f{i}", time_s={"*": 1.0}, colocation=i, module=f"layers.{i}") for i in range(layers)]
    backward = [
        Op(f"b{i}", time_s={"*": 2.0}, colocation=i, phase=Phase.BACKWARD, forward_of=f"f{i}") for i in range(layers)
    ]
    stash = [Tensor(f"f{i}", 10, (f"b{i}",)) for i in range(layers)]
    hidden = [Tensor(f"f{i}", 0, (f"f{i + 1}",)) for i in range(layers - 1)]
    gradients = [Tensor(f"b{i + 1}", 0, (f"b{i}",)) for i in range(layers - 1)]
    return OpGraph.build([*forward, *backward], [*stash, *hidden, *gradients])


@pytest.mark.parametrize("name", SEVERAL)
def test_activations_that_wait_for_the_backward_pass_are_spread(name: str) -> None:
    problem = Problem(training(6), gpus(3, memory=25))
    check(problem, METHODS[name](problem, 0))  # at most two layers' activations fit on one device


# -- one by one ------------------------------------------------------------------------------------------------


def test_single_device_takes_the_fastest_that_has_the_memory() -> None:
    ops = [Op(f"op{i}", kept_bytes=10, time_s={"tiny": 1.0, "slow": 3.0, "fast": 2.0}) for i in range(3)]
    cluster = mesh(("tiny", "gpu", 20), ("slow", "gpu", 100), ("fast", "gpu", 100))
    assert set(place("single_device", OpGraph.build(ops, []), cluster).values()) == {"fast"}


def test_single_device_leaves_only_pinned_ops_elsewhere() -> None:
    graph = path_of([Op("read", pins=("cpu",), time_s={"*": 1.0}), Op("compute", time_s={"gpu": 1.0, "cpu": 9.0})])
    cluster = mesh(("cpu0", "cpu", UNLIMITED_BYTES), ("gpu0", "gpu", UNLIMITED_BYTES))
    assert place("single_device", graph, cluster) == {"read": "cpu0", "compute": "gpu0"}


def test_random_is_even_and_seeded() -> None:
    problem = Problem(layered(4000, seed=0), gpus(4))
    first, second = METHODS["random"](problem, 0).device, METHODS["random"](problem, 1).device
    assert np.all(np.abs(np.bincount(first) - 1000) < 120)  # over four standard deviations
    assert not np.array_equal(first, second)


def test_round_robin_takes_turns_and_passes_over_what_is_not_allowed() -> None:
    graph = path_of([Op(f"op{i}", time_s={"*": 1.0}, pins=("cpu",) if i == 2 else ()) for i in range(6)])
    cluster = mesh(("gpu0", "gpu", 99), ("cpu0", "cpu", 99), ("gpu1", "gpu", 99))
    # It is gpu1's turn for op2, which may run on cpu0 alone; after cpu0 it is gpu1's turn again.
    expected = ["gpu0", "cpu0", "cpu0", "gpu1", "gpu0", "cpu0"]
    assert list(place("round_robin", graph, cluster).values()) == expected


def test_hash_is_in_proportion_to_speed() -> None:
    cluster = mesh(("fast", "gpu", UNLIMITED_BYTES), ("slow", "gpu", UNLIMITED_BYTES))
    graph = OpGraph.build([Op(f"op{i}", time_s={"fast": 1.0, "slow": 3.0}) for i in range(4000)], [])
    placed = METHODS["hash"](Problem(graph, cluster), 0).device
    assert abs((placed == 0).mean() - 0.75) < 0.03


def test_hash_depends_on_name_and_seed_alone() -> None:
    graph = OpGraph.build([Op(name, time_s={"*": 1.0}) for name in "abcdefgh"], [])
    reordered = OpGraph.build([Op(name, time_s={"*": 1.0}) for name in "hgfedcba"], [])
    placed = METHODS["hash"](Problem(graph, gpus(4)), 0).device.tolist()
    assert placed == [2, 3, 2, 1, 3, 1, 1, 0]  # the same on every machine
    assert METHODS["hash"](Problem(reordered, gpus(4)), 0).device.tolist() == placed[::-1]
    assert METHODS["hash"](Problem(graph, gpus(4)), 1).device.tolist() != placed


def unequal() -> Cluster:
    return mesh(("slow", "gpu", UNLIMITED_BYTES), ("fast", "gpu", UNLIMITED_BYTES))


def on_unequal(*lengths: int) -> OpGraph:
    """Chains of ops that take 2 s on "slow" and 1 s on "fast"."""
    rows = [[Op(f"c{c}.{k}", time_s={"slow": 2.0, "fast": 1.0}) for k in range(n)] for c, n in enumerate(lengths)]
    tensors = [Tensor(a.name, 0, (b.name,)) for row in rows for a, b in itertools.pairwise(row)]
    return OpGraph.build([op for row in rows for op in row], tensors)


def test_batch_split_gives_the_important_half_to_the_fastest_device() -> None:
    placed = place("batch_split", on_unequal(1, 1, 1, 3), unequal())
    assert {op for op, device in placed.items() if device == "fast"} == {"c3.0", "c3.1", "c3.2"}


def test_critical_path_goes_to_the_fastest_and_the_rest_to_the_least_loaded_device() -> None:
    placed = place("critical_path", on_unequal(1, 1, 1, 3), unequal())
    # "fast" has 3 s of work after the path; "slow" takes 2 s, another 2 s, and then "fast" has less.
    assert [placed[f"c{c}.0"] for c in range(3)] == ["slow", "slow", "fast"]
    assert [placed[f"c3.{k}"] for k in range(3)] == ["fast"] * 3


def test_divide_path_gives_path_after_path_to_the_least_loaded_device() -> None:
    placed = place("divide_path", chains([1.0, 1.0], [3.0, 1.0], [1.0], [1.5]), gpus(2))
    # Paths of 4, 2, 1.5 and 1 s.
    expected = {"c1.0": "gpu0", "c1.1": "gpu0", "c0.0": "gpu1", "c0.1": "gpu1", "c3.0": "gpu1", "c2.0": "gpu1"}
    assert placed == expected


def test_divide_path_splits_a_path_that_does_not_fit() -> None:
    graph = path_of([Op(f"op{i}", kept_bytes=10, time_s={"*": 1.0}) for i in range(5)])
    assert list(place("divide_path", graph, gpus(2, memory=30)).values()) == ["gpu0"] * 3 + ["gpu1"] * 2


def test_divide_path_leaves_a_pinned_op_aside() -> None:
    graph = path_of([Op(f"op{i}", time_s={"*": 1.0}, pins=("cpu",) if i == 1 else ()) for i in range(4)])
    cluster = mesh(("gpu0", "gpu", UNLIMITED_BYTES), ("cpu0", "cpu", UNLIMITED_BYTES))
    assert list(place("divide_path", graph, cluster).values()) == ["gpu0", "cpu0", "gpu0", "gpu0"]


def test_mite_follows_traffic_and_evens_out_work_without_it() -> None:
    placed = place("mite", chains([1.0, 1.0, 1.0], [1.0], size_bytes=5), gpus(2))
    assert placed == {"c0.0": "gpu0", "c0.1": "gpu0", "c0.2": "gpu0", "c1.0": "gpu1"}


def test_mite_evens_out_memory() -> None:
    graph = OpGraph.build([Op(f"op{i}", kept_bytes=10) for i in range(4)], [])
    assert sorted(place("mite", graph, gpus(2, memory=1000)).values()) == ["gpu0", "gpu0", "gpu1", "gpu1"]


def test_mite_sends_what_is_important_to_the_fastest_device() -> None:
    # Alone, Execution would move c1.1 away from the work of c1.0; its Importance outweighs that, c0.0's does not.
    placed = place("mite", on_unequal(1, 2), unequal())
    assert placed == {"c0.0": "fast", "c1.0": "fast", "c1.1": "fast"}


def test_dfs_starts_at_the_most_important_source() -> None:
    # By op number the two light chains would be parted first, and the heavy one would join one of them.
    placed = place("dfs", chains([2.0], [2.0], [3.0, 3.0], size_bytes=5), gpus(2))
    assert placed["c0.0"] == placed["c1.0"] != placed["c2.0"] == placed["c2.1"]


def rnn() -> OpGraph:
    """Two recurrent layers over three time steps, forwards and back; the backward ops name no module."""
    steps, both = range(3), range(2)
    ops = [Op("words", kernels=0)]
    ops += [
        Op(f"f{layer}.{t}", time_s={"*": 1.0}, module=f"lstm.layers.{layer}.i2h", colocation=layer)
        for t in steps
        for layer in both
    ]
    ops += [
        Op(f"b{layer}.{t}", time_s={"*": 2.0}, phase=Phase.BACKWARD, forward_of=f"f{layer}.{t}")
        for t in reversed(steps)
        for layer in reversed(both)
    ]
    tensors = [Tensor("words", 4, tuple(f"f0.{t}" for t in steps))]
    for t, layer in itertools.product(steps, both):
        up = (f"f{layer + 1}.{t}",) if layer == 0 else ()
        right = (f"f{layer}.{t + 1}",) if t < 2 else ()
        down = (f"b{layer - 1}.{t}",) if layer == 1 else ()
        left = (f"b{layer}.{t - 1}",) if t > 0 else ()
        tensors.append(Tensor(f"f{layer}.{t}", 4, (*up, *right, f"b{layer}.{t}")))
        tensors.append(Tensor(f"b{layer}.{t}", 4, (*down, *left)))
    return OpGraph.build(ops, tensors)


def test_expert_gives_every_recurrent_layer_its_own_gpu() -> None:
    cluster = mesh(*((name, name[:3], UNLIMITED_BYTES) for name in ("cpu0", "gpu0", "gpu1")))
    for op, device in place("expert", rnn(), cluster).items():
        assert device == ("gpu1" if op[1] == "1" else "gpu0")  # the words go with the layer that reads them


def test_expert_cuts_a_graph_without_modules_in_topological_order() -> None:
    graph = chains([1.0, 1.0, 1.0, 1.0, 4.0, 2.0, 2.0])
    assert list(place("expert", graph, gpus(3)).values()) == ["gpu0"] * 4 + ["gpu1"] + ["gpu2"] * 2


def test_expert_opens_a_list_but_keeps_a_residual_block_whole() -> None:
    ops = [
        Op(f"{k}/{part}", time_s={"*": 1.0}, module=f"net.blocks.{k}" + (".conv" if part == "conv" else ""))
        for k in range(3)
        for part in ("conv", "add")
    ]
    placed = place("expert", path_of(ops), gpus(6))
    assert all(placed[f"{k}/conv"] == placed[f"{k}/add"] for k in range(3))
    assert len(set(placed.values())) == 3


@given(st.data())
def test_balanced_cut_is_the_best_of_all_cuts(data: st.DataObject) -> None:
    n, n_devices = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))

    def numbers(most: int, count: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, most), min_size=count, max_size=count))

    load = np.array(numbers(9, n * n_devices), dtype=float).reshape(n, n_devices)
    size, room = np.array(numbers(5, n)), np.array(numbers(20, n_devices))
    best = np.inf
    for cuts in itertools.combinations_with_replacement(range(n + 1), n_devices - 1):
        runs = [slice(a, b) for a, b in itertools.pairwise([0, *cuts, n])]
        if all(size[run].sum() <= room[d] for d, run in enumerate(runs)):
            best = min(best, max(load[run, d].sum() for d, run in enumerate(runs)))
    device = balanced_cut(load, size, room)
    assert np.all(np.diff(device) >= 0)
    assert device[-1] < n_devices
    if np.isfinite(best):
        assert max(load[device == d, d].sum() for d in range(n_devices)) == pytest.approx(best, rel=1e-12)
        assert all(size[device == d].sum() <= room[d] for d in range(n_devices))


def stack(layers: int) -> OpGraph:
    """Layers that keep 10 bytes, of a forward and a backward op."""
    forward = [Op(f"f{i}", time_s={"*": 1.0}, kept_bytes=10, module=f"layers.{i}") for i in range(layers)]
    backward = [Op(f"b{i}", time_s={"*": 1.0}, phase=Phase.BACKWARD, forward_of=f"f{i}") for i in range(layers)]
    return path_of([*forward, *reversed(backward)])


def test_sequential_fill_fills_one_gpu_after_the_other_and_the_cpu_last() -> None:
    placed = place("sequential_fill", stack(7), mesh(("cpu0", "cpu", 100), ("gpu0", "gpu", 25), ("gpu1", "gpu", 35)))
    expected = ["gpu0"] * 2 + ["gpu1"] * 3 + ["cpu0"] * 2
    assert [placed[f"f{i}"] for i in range(7)] == expected
    assert [placed[f"b{i}"] for i in range(7)] == expected


def test_sequential_fill_leaves_the_other_devices_idle_if_one_is_enough() -> None:
    assert set(place("sequential_fill", stack(7), gpus(3, memory=70)).values()) == {"gpu0"}


def test_sequential_fill_splits_a_layer_that_no_device_can_hold() -> None:
    graph = path_of([Op(f"op{i}", time_s={"*": 1.0}, kept_bytes=10, module="layers.0") for i in range(4)])
    assert list(place("sequential_fill", graph, gpus(2, memory=25)).values()) == ["gpu0"] * 2 + ["gpu1"] * 2


# -- paths, speeds and units -----------------------------------------------------------------------------------


@given(problems(max_ops=10))
def test_importance_is_the_longest_path_through_an_op(problem: Problem) -> None:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(problem.graph.n_ops))
    for u, v, t in zip(*(part.tolist() for part in problem.graph.edge_list), strict=True):
        known = graph.edges[u, v]["seconds"] if graph.has_edge(u, v) else 0.0
        graph.add_edge(u, v, seconds=max(problem.mean_transfer_s[t], known))
    expected = np.zeros(problem.graph.n_ops)
    for source, target in itertools.product(graph, graph):
        for path in [[source]] if source == target else nx.all_simple_paths(graph, source, target):
            length = sum(problem.mean_op_s[i] for i in path)
            length += sum(graph.edges[edge]["seconds"] for edge in itertools.pairwise(path))
            expected[path] = np.maximum(expected[path], length)
    np.testing.assert_allclose(importance(problem), expected, rtol=1e-9)


@given(problems(max_ops=12))
def test_longest_paths_cover_every_op_once_and_start_with_the_critical_path(problem: Problem) -> None:
    edges = set(zip(*(part.tolist() for part in problem.graph.edge_list[:2]), strict=True))
    gone = np.zeros(problem.graph.n_ops, dtype=np.bool_)
    found = []
    for path in longest_paths(problem, gone):
        assert all(pair in edges for pair in itertools.pairwise(path.tolist()))
        if not found:
            np.testing.assert_allclose(importance(problem)[path], importance(problem).max(), rtol=1e-9)
        gone[path] = True
        found += path.tolist()
    assert sorted(found) == list(range(problem.graph.n_ops))


def test_slowness_compares_over_the_ops_a_device_may_run() -> None:
    both = Op("both", pins=("cpu", "gpu"), time_s={"slow": 3.0, "fast": 1.0})
    graph = OpGraph.build([both, Op("one", pins=("cpu",), time_s={"*": 50.0})], [])
    problem = Problem(graph, mesh(("slow", "cpu", 9), ("fast", "gpu", 9), ("never", "fpga", 9)))
    # Mean seconds are 2 and 50; "fast" is not blamed for the op it may not run.
    np.testing.assert_allclose(slowness(problem), [53 / 52, 1 / 2, np.inf])


def test_working_bytes_are_those_of_the_largest_op_of_a_unit() -> None:
    both = [Op(name, colocation=1, workspace_bytes=4, time_s={"*": 1.0}) for name in "ab"]
    units = Units.of(Problem(OpGraph.build([*both, Op("c")], [Tensor("a", 5, ("b",)), Tensor("b", 7, ())]), gpus(1)))
    assert units.working_bytes.tolist() == [16, 0]
    assert units.size.tolist() == [2, 1]
