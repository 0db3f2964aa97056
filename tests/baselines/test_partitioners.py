"""Splits of chains and min-cut: legal, balanced, and cut where little is sent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from cases.partitioned_graphs import gpus, hosts, row, training
from hypothesis import given
from hypothesis import strategies as st
from strategies import problems

from baselines.pipelines.chain_split import chain, chain_bytes, chain_time
from baselines.pipelines.pipedream import pipedream, pipedream_hierarchical
from baselines.placers.min_cut import UnitGraph, min_cut
from env.cluster import Cluster
from env.objectives import LATENCY, OBJECTIVES, THROUGHPUT
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import loads
from env.simulation.simulator import Simulator
from env.units import Units
from graphs.errors import InfeasibleError
from graphs.generators import layered
from graphs.opgraph import IntArray, Op, OpGraph, Tensor

METHODS = {
    "min_cut": min_cut,
    "chain_time": chain_time,
    "chain_bytes": chain_bytes,
    "pipedream": pipedream,
    "pipedream_hierarchical": pipedream_hierarchical,
}
ALL = pytest.mark.parametrize("name", METHODS)


def check(problem: Problem, plan: Plan) -> None:
    """Complete, allowed, groups together, and within memory under the objective."""
    assert plan.device.shape == (problem.graph.n_ops,)
    assert problem.allowed[np.arange(problem.graph.n_ops), plan.device].all()
    for members in problem.units:
        assert len(set(plan.device[members].tolist())) == 1
    if problem.objective == THROUGHPUT:
        assert loads(problem, plan).feasible
    else:
        assert Simulator(problem).score(plan).feasible


# -- all of them ------------------------------------------------------------------------------------------------------


@given(problems(max_ops=10, edges=16), st.sampled_from(OBJECTIVES), st.integers(0, 3))
def test_a_plan_keeps_every_rule_and_repeats_itself(drawn: Problem, objective: str, seed: int) -> None:
    problem = Problem(drawn.graph, drawn.cluster, objective)
    for name, method in METHODS.items():
        try:
            plan = method(problem, seed)
        except InfeasibleError:
            continue
        check(problem, plan)
        again = method(problem, seed)
        np.testing.assert_array_equal(plan.device, again.device, name)
        assert plan.note == again.note


@ALL
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_one_op(name: str, objective: str) -> None:
    problem = Problem(row([1.0]), gpus(3), objective)
    check(problem, METHODS[name](problem, 0))
    alone = Problem(row([1.0]), gpus(1), objective)
    assert METHODS[name](alone, 0).device.tolist() == [0]


@ALL
def test_fewer_ops_than_devices(name: str) -> None:
    problem = Problem(row([1.0, 1.0], size_bytes=0, kept_bytes=[1, 1]), gpus(5), THROUGHPUT)
    plan = METHODS[name](problem, 0)
    assert loads(problem, plan).value_s == 1.0


@ALL
def test_an_op_that_takes_no_time_nowhere_stops_nothing(name: str) -> None:
    problem = Problem(row([0.0] * 6, kept_bytes=[1] * 6), gpus(3, memory=20), THROUGHPUT)
    check(problem, METHODS[name](problem, 0))


@ALL
def test_memory_spreads_what_time_would_not(name: str) -> None:
    """All the time is in the first op, all the bytes are in the others."""
    problem = Problem(row([9.0, 0.1, 0.1, 0.1, 0.1, 0.1], 0, [0, 10, 10, 10, 10, 10]), gpus(3, memory=20), THROUGHPUT)
    plan = METHODS[name](problem, 0)
    check(problem, plan)


@ALL
def test_too_little_memory_is_an_error_that_names_the_op(name: str) -> None:
    problem = Problem(row([1.0, 1.0], 0, [5, 60]), gpus(2, memory=50), THROUGHPUT)
    with pytest.raises(InfeasibleError, match=r"'op1' .*60 bytes .*gpu\d"):
        METHODS[name](problem, 0)


@ALL
def test_cpus_take_only_what_is_pinned_to_them(name: str) -> None:
    ops = [Op(f"op{i}", time_s={"*": 1.0}, pins=("cpu",) if i == 3 else ()) for i in range(8)]
    graph = OpGraph.build(ops, [Tensor(a.name, 1, (b.name,)) for a, b in itertools.pairwise(ops)])
    cluster = Cluster.preset("2xK40-pcie")
    plan = METHODS[name](Problem(graph, cluster), 0)
    kinds = [cluster.devices[d].kind for d in plan.device.tolist()]
    assert [i for i, kind in enumerate(kinds) if kind == "cpu"] == [3]
    assert len(set(plan.device.tolist())) == 3


def runs(n: int, n_devices: int) -> Iterator[IntArray]:
    """Every way to give contiguous runs of n links to devices in order, empty runs included."""
    for cuts in itertools.combinations_with_replacement(range(n + 1), n_devices - 1):
        yield np.repeat(np.arange(n_devices), np.diff([0, *cuts, n]))


# -- balanced splits --------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.1, 9.0), min_size=1, max_size=7), st.lists(st.floats(0.5, 2.0), min_size=1, max_size=4))
def test_chain_time_makes_the_longest_run_as_short_as_possible(times: list[float], slowness: list[float]) -> None:
    ops = [Op(f"op{i}", time_s={f"m{d}": t * s for d, s in enumerate(slowness)}) for i, t in enumerate(times)]
    graph = OpGraph.build(ops, [Tensor(a.name, 0, (b.name,)) for a, b in itertools.pairwise(ops)])
    problem = Problem(graph, gpus(len(slowness)), THROUGHPUT)

    def longest_s(device: IntArray) -> float:
        return float(np.bincount(device, problem.op_s[np.arange(len(times)), device]).max())

    best_s = min(longest_s(device) for device in runs(len(times), len(slowness)))
    assert longest_s(chain_time(problem, 0).device) == pytest.approx(best_s, rel=1e-9)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 4), st.integers(0, 9))
def test_chain_bytes_makes_the_largest_run_as_small_as_possible(kept: list[int], devices: int, size: int) -> None:
    problem = Problem(row([1.0] * len(kept), size, kept), gpus(devices))
    each = np.array(kept) + size * (np.arange(len(kept)) < len(kept) - 1)  # the last op has no output

    def largest(device: IntArray) -> int:
        return int(np.bincount(device, each).max())

    assert largest(chain_bytes(problem, 0).device) == min(map(largest, runs(len(kept), devices)))


def test_the_chain_keeps_backward_and_update_ops_with_their_forward_op() -> None:
    problem = Problem(training([1.0, 3.0, 2.0], [10] * 3, [12] * 3), gpus(2), THROUGHPUT)
    links = [
        sorted(problem.graph.op_names[i] for u in link for i in problem.units[u]) for link in chain(Units.of(problem))
    ]
    assert links == [["b0", "f0", "u0"], ["b1", "f1", "u1"], ["b2", "f2", "u2"]]
    placed = dict(zip(problem.graph.op_names, chain_time(problem, 0).device.tolist(), strict=True))
    assert [placed[f"b{i}"] for i in range(3)] == [placed[f"f{i}"] for i in range(3)] == [0, 0, 1]


def test_what_takes_no_time_stands_with_its_neighbour_in_the_chain() -> None:
    """An input joins its reader, a free op its producer, though their numbers would put them elsewhere."""
    ops = [Op("late", time_s={"*": 1.0}), Op("first", time_s={"*": 1.0}), Op("input"), Op("free", time_s={"*": 0.0})]
    tensors = [Tensor("first", 1, ("free",)), Tensor("free", 1, ("late",)), Tensor("input", 1, ("first",))]
    problem = Problem(OpGraph.build(ops, tensors), gpus(2))
    names = [{problem.graph.op_names[u] for u in link} for link in chain(Units.of(problem))]
    assert names == [{"input", "first", "free"}, {"late"}]


def cut_s(problem: Problem, device: IntArray) -> float:
    edges = UnitGraph.of(Units.of(problem))
    first = np.array([members[0] for members in problem.units])
    ends = device[first[edges.ends]]
    return float(edges.seconds[ends[:, 0] != ends[:, 1]].sum())


# -- min-cut ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_devices", [2, 3, 4, 8])
def test_parts_are_balanced_and_cut_far_less_than_a_random_split(n_devices: int) -> None:
    problem = Problem(layered(1200, seed=3, ccr=1.0, width=8), gpus(n_devices), THROUGHPUT)
    plan = min_cut(problem, 0)
    work_s = np.bincount(plan.device, problem.op_s[:, 0], n_devices)
    assert work_s.max() <= 1.04 * work_s.mean()
    shuffled = np.random.default_rng(0).permutation(plan.device)
    assert cut_s(problem, plan.device) < 0.2 * cut_s(problem, shuffled)


def test_two_chains_that_do_not_meet_are_not_cut() -> None:
    ops = [Op(f"op{i}", time_s={"*": 1.0}) for i in range(40)]
    graph = OpGraph.build(ops, [Tensor(f"op{i}", 1, (f"op{i + 2}",)) for i in range(38)])
    plan = min_cut(Problem(graph, gpus(2)), 0)
    assert len(set(plan.device[::2].tolist())) == len(set(plan.device[1::2].tolist())) == 1
    assert plan.device[0] != plan.device[1]


def test_a_device_three_times_as_fast_gets_three_quarters() -> None:
    ops = [Op(f"op{i}", time_s={"m0": 3.0, "m1": 1.0}) for i in range(100)]
    graph = OpGraph.build(ops, [Tensor(a.name, 1, (b.name,)) for a, b in itertools.pairwise(ops)])
    plan = min_cut(Problem(graph, gpus(2)), 0)
    assert np.bincount(plan.device).tolist() == pytest.approx([25, 75], abs=4)


def test_parts_that_exchange_much_share_a_host() -> None:
    """Four groups of ops in a ring, whose sides are strong and weak in turn."""
    ops = [Op(f"op{i}", time_s={"*": 1.0}) for i in range(32)]
    tensors = [Tensor(f"op{i}", 100, (f"op{i + 1}",)) for i in range(31) if i % 8 < 7]
    tensors += [Tensor("op7", 50, ("op8",)), Tensor("op15", 1, ("op16",)), Tensor("op23", 50, ("op24",))]
    problem = Problem(OpGraph.build(ops, tensors), hosts(2, 2, inside=8.0, between=1.0))
    plan = min_cut(problem, 0)
    parts = [set(plan.device[k : k + 8].tolist()) for k in range(0, 32, 8)]
    assert [len(part) for part in parts] == [1, 1, 1, 1]
    assert len(set().union(*parts)) == 4
    host = [part.pop() % 2 for part in parts]
    assert host[0] == host[1] != host[2] == host[3]


def test_a_tensor_counts_once_for_each_unit_that_reads_it() -> None:
    ops = [Op("a", colocation="x"), Op("b", colocation="x"), Op("c"), Op("d", colocation="y"), Op("e", colocation="y")]
    tensors = [Tensor("a", 6, ("b", "c", "d", "e")), Tensor("c", 2, ("d",)), Tensor("a", 1, ("c",))]
    problem = Problem(OpGraph.build(ops, tensors), gpus(2, bandwidth=2.0))
    edges = UnitGraph.of(Units.of(problem))
    unit = {problem.graph.op_names[members[0]]: u for u, members in enumerate(problem.units)}
    expected = {("a", "c"): 3.5, ("a", "d"): 3.0, ("c", "d"): 1.0}
    found = {tuple(pair): s for pair, s in zip(edges.ends.tolist(), edges.seconds.tolist(), strict=True)}
    assert found == {tuple(sorted((unit[a], unit[b]))): s for (a, b), s in expected.items()}


def test_pins_divide_what_is_cut_together() -> None:
    ops = [Op(f"op{i}", time_s={"*": 1.0}, pins=("gpu0", "gpu1") if i < 20 else ()) for i in range(60)]
    graph = OpGraph.build(ops, [Tensor(a.name, 1, (b.name,)) for a, b in itertools.pairwise(ops)])
    device = min_cut(Problem(graph, gpus(4)), 0).device
    assert set(device[:20].tolist()) == {0, 1}
    assert set(device[20:].tolist()) == {0, 1, 2, 3}


def test_bytes_count_where_balanced_work_does_not_fit() -> None:
    """Half of the ops keep all of the bytes; balanced by time alone, one device would have to keep them all."""
    ops = [Op(f"op{i}", time_s={"*": 1.0}, kept_bytes=10 if i < 20 else 0) for i in range(40)]
    graph = OpGraph.build(ops, [Tensor(a.name, 0, (b.name,)) for a, b in itertools.pairwise(ops)])
    roomy = min_cut(Problem(graph, gpus(2)), 0).device
    assert np.bincount(roomy).tolist() == pytest.approx([20, 20], abs=1)
    tight = Problem(graph, gpus(2, memory=110))
    check(tight, min_cut(tight, 0))


def test_the_last_unit_goes_where_there_is_room_and_company() -> None:
    """Two devices of five kept bytes must hold seven units of one or two bytes: no bisection by weight is exact."""
    kept = [2, 2, 2, 1, 1, 1, 1]
    problem = Problem(row([1.0] * 7, 0, kept), gpus(2, memory=5), LATENCY)
    check(problem, min_cut(problem, 0))


def test_any_seed_will_do() -> None:
    problem = Problem(layered(400, seed=1), gpus(4))
    for seed in (1, 2**40, -1):
        check(problem, min_cut(problem, seed))
