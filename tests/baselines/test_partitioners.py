"""Partitioners: chain splits, PipeDream and min-cut, each against exhaustive search or an instance done by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import clusters, problems

from baselines.network_levels import NetworkLevel, network_levels
from baselines.pipelines.chain_split import chain, chain_bytes, chain_time
from baselines.pipelines.pipedream import pipedream, pipedream_hierarchical, profiled
from baselines.pipelines.pipedream_partition import (
    LayerProfile,
    Partition,
    coarse,
    fits,
    partition,
    partition_hierarchical,
)
from baselines.placers.min_cut import UnitGraph, min_cut
from env.cluster import UNLIMITED_BYTES, Cluster, Device, Link, both_ways
from env.plan import Plan
from env.problem import LATENCY, OBJECTIVES, THROUGHPUT, Problem
from env.simulation.loads import loads
from env.simulation.simulator import Simulator
from env.units import Units
from graphs.errors import InfeasibleError
from graphs.generators import layered
from graphs.opgraph import FloatArray, IntArray, Op, OpGraph, Origin, Phase, Tensor

METHODS = {
    "min_cut": min_cut,
    "chain_time": chain_time,
    "chain_bytes": chain_bytes,
    "pipedream": pipedream,
    "pipedream_hierarchical": pipedream_hierarchical,
}
ALL = pytest.mark.parametrize("name", METHODS)


def gpus(count: int, memory: int = UNLIMITED_BYTES, bandwidth: float = 1.0) -> Cluster:
    """GPUs, each pair joined; each has a model of its own, m0, m1, ..., so that times may differ."""
    devices = tuple(Device(f"gpu{i}", "gpu", memory, {"float32": 1.0}, 1.0, model=f"m{i}") for i in range(count))
    pairs = itertools.combinations((d.name for d in devices), 2)
    return Cluster("gpus", devices, tuple(link for a, b in pairs for link in both_ways(a, b, bandwidth, 0.0)))


def hosts(count: int, each: int, inside: float, between: float) -> Cluster:
    """Hosts of GPUs, numbered across hosts (0, 2, 4 in the first of two), so that cluster order is not host order."""
    names = [f"gpu{i}" for i in range(count * each)]
    links: list[Link] = []
    for i, name in enumerate(names):
        links += both_ways(name, f"switch{i % count}", inside, 0.0)
    for h in range(count):
        links += both_ways(f"switch{h}", "network", between, 0.0)
    devices = tuple(Device(name, "gpu", UNLIMITED_BYTES, {"float32": 1.0}, 1.0) for name in names)
    return Cluster("hosts", devices, tuple(links))


def row(times: list[float], size_bytes: int = 1, kept_bytes: list[int] | None = None) -> OpGraph:
    """Ops one after the other."""
    kept = kept_bytes or [0] * len(times)
    ops = [Op(f"op{i}", time_s={"*": t}, kept_bytes=k) for i, (t, k) in enumerate(zip(times, kept, strict=True))]
    return OpGraph.build(ops, [Tensor(a.name, size_bytes, (b.name,)) for a, b in itertools.pairwise(ops)])


def training(times: list[float], sizes: list[int], kept: list[int]) -> OpGraph:
    """A chain forwards, backwards (twice the time, reading the forward op's output) and its updates by Adam."""
    n = len(times)
    ops = [Op(f"f{i}", time_s={"*": t}, kept_bytes=kept[i], colocation=i) for i, t in enumerate(times)]
    ops += [
        Op(f"b{i}", time_s={"*": 2 * times[i]}, phase=Phase.BACKWARD, forward_of=f"f{i}") for i in reversed(range(n))
    ]
    ops += [Op(f"u{i}", kind="optimizer.adam", time_s={"*": 0.0}, phase=Phase.UPDATE, colocation=i) for i in range(n)]
    tensors = [Tensor(f"f{i}", sizes[i], (*((f"f{i + 1}",) if i + 1 < n else ()), f"b{i}")) for i in range(n)]
    tensors += [Tensor(f"b{i}", sizes[i - 1], (f"b{i - 1}",)) for i in range(1, n)]
    tensors += [Tensor(f"b{i}", 0, (f"u{i}",)) for i in range(n)]
    return OpGraph.build(ops, tensors, origin=Origin(optimizer="adam"))


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


@settings(max_examples=80, deadline=None, derandomize=True)
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


# -- balanced splits --------------------------------------------------------------------------------------------------


def runs(n: int, n_devices: int) -> Iterator[IntArray]:
    """Every way to give contiguous runs of n links to devices in order, empty runs included."""
    for cuts in itertools.combinations_with_replacement(range(n + 1), n_devices - 1):
        yield np.repeat(np.arange(n_devices), np.diff([0, *cuts, n]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(0.1, 9.0), min_size=1, max_size=7), st.lists(st.floats(0.5, 2.0), min_size=1, max_size=4))
def test_chain_time_makes_the_longest_run_as_short_as_possible(times: list[float], slowness: list[float]) -> None:
    ops = [Op(f"op{i}", time_s={f"m{d}": t * s for d, s in enumerate(slowness)}) for i, t in enumerate(times)]
    graph = OpGraph.build(ops, [Tensor(a.name, 0, (b.name,)) for a, b in itertools.pairwise(ops)])
    problem = Problem(graph, gpus(len(slowness)), THROUGHPUT)

    def longest_s(device: IntArray) -> float:
        return float(np.bincount(device, problem.op_s[np.arange(len(times)), device]).max())

    best_s = min(longest_s(device) for device in runs(len(times), len(slowness)))
    assert longest_s(chain_time(problem, 0).device) == pytest.approx(best_s, rel=1e-9)


@settings(max_examples=60, deadline=None, derandomize=True)
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


# -- PipeDream's partitioners -----------------------------------------------------------------------------------------


def time_of(layers: LayerProfile, found: list[tuple[int, int, int]], bandwidth: float) -> float:
    """Of stages (first, last, replicas), by the definition."""
    times = []
    for first, last, m in found:
        inside = slice(first, last + 1)
        sync_s = 4 * (m - 1) / m * layers.weight_bytes[inside].sum() / bandwidth
        times.append(max(layers.time_s[inside].sum(), sync_s) / m)
        if last < len(layers.time_s) - 1:
            times.append(layers.sent_bytes[last] / bandwidth)
    return float(max(times))


def room_for(layers: LayerProfile, found: list[tuple[int, int, int]], memory: float) -> bool:
    left = sum(m for *_, m in found)
    for first, last, m in found:
        inside = slice(first, last + 1)
        in_flight = math.ceil(left / m)
        needed = layers.kept_bytes[inside].sum() + in_flight * layers.stashed_bytes[inside].sum()
        if needed + (in_flight - 1) * layers.weight_bytes[inside].sum() > memory:
            return False
        left -= m
    return True


def pipelines(first: int, last: int, machines: int, most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Every way to cut layers first..last into stages of 1 to ``most`` replicas on up to that many machines."""
    for end in range(first, last + 1):
        for m in range(1, min(machines, most) + 1):
            if end == last:
                yield [(first, last, m)]
            else:
                yield from ([(first, end, m), *rest] for rest in pipelines(end + 1, last, machines - m, most))


@st.composite
def layer_chains(draw: st.DrawFn, max_layers: int = 5) -> LayerProfile:
    n = draw(st.integers(1, max_layers))

    def numbers(most: int) -> FloatArray:
        return np.array(draw(st.lists(st.integers(0, most), min_size=n, max_size=n)), dtype=np.float64)

    weights = numbers(20)
    return LayerProfile(numbers(20), numbers(20), weights, weights + numbers(20), numbers(20))


def triples(found: Partition) -> list[tuple[int, int, int]]:
    return [(stage.first, stage.last, stage.replicas) for stage in found.stages]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(layer_chains(), st.integers(1, 4), st.sampled_from([math.inf, 40.0, 80.0, 160.0]), st.booleans())
def test_partition_is_the_best_of_all_cuts_and_replications(
    layers: LayerProfile, machines: int, memory: float, replicated: bool
) -> None:
    bandwidth = 2.0
    every = list(pipelines(0, len(layers.time_s) - 1, machines, machines if replicated else 1))
    fitting = [time_of(layers, found, bandwidth) for found in every if room_for(layers, found, memory)]
    found = partition(layers, machines, bandwidth, memory, replicated)
    if found is None:
        assert not fitting
        return
    assert found.time_s == pytest.approx(min(fitting), rel=1e-12)
    assert time_of(layers, triples(found), bandwidth) == pytest.approx(found.time_s, rel=1e-12)
    assert room_for(layers, triples(found), memory)
    assert fits(layers, found, memory)
    assert [stage.machine for stage in found.stages] == [
        0, *itertools.accumulate(stage.replicas for stage in found.stages[:-1])
    ]  # fmt: skip
    assert found.in_flight == math.ceil(found.machines / found.stages[0].replicas)


def nested_s(layers: LayerProfile, levels: list[NetworkLevel], first: int, last: int) -> float:
    """The best pipeline of pipelines, by trying them all."""
    if not levels:
        return float(layers.time_s[first : last + 1].sum())
    *inner, outer = levels
    rounds = math.prod(level.count for level in inner)
    best_s = math.inf
    for found in pipelines(first, last, outer.count, outer.count):
        times = []
        for a, b, m in found:
            sync_s = 4 * (m - 1) / m * layers.weight_bytes[a : b + 1].sum() / outer.bandwidth_bytes_per_s / rounds
            times.append(max(nested_s(layers, inner, a, b), sync_s) / m)
            times.append(layers.sent_bytes[b] / outer.bandwidth_bytes_per_s if b < last else 0.0)
        best_s = min(best_s, max(times))
    return best_s


@settings(max_examples=80, deadline=None, derandomize=True)
@given(layer_chains(4), st.sampled_from([(1, 2), (2, 2), (3, 2), (2, 3), (2, 1, 2)]))
def test_partition_hierarchical_is_the_best_of_all_pipelines_of_pipelines(
    layers: LayerProfile, counts: tuple[int]
) -> None:
    levels = [NetworkLevel(count, 8.0 / 2**k) for k, count in enumerate(counts)]
    found = partition_hierarchical(layers, levels)
    assert found is not None
    assert found.time_s == pytest.approx(nested_s(layers, levels, 0, len(layers.time_s) - 1), rel=1e-12)
    assert found.machines <= math.prod(counts)
    assert found.stages[0].first == 0
    assert found.stages[-1].last == len(layers.time_s) - 1
    assert all(b.first == a.last + 1 and b.machine >= a.machine + 1 for a, b in itertools.pairwise(found.stages))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(layer_chains(), st.integers(1, 4), st.sampled_from([math.inf, 60.0]))
def test_one_level_is_the_flat_partition(layers: LayerProfile, machines: int, memory: float) -> None:
    assert partition_hierarchical(layers, [NetworkLevel(machines, 2.0)], memory) == partition(
        layers, machines, 2.0, memory
    )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(layer_chains(), st.sampled_from([40.0, 80.0, 160.0]))
def test_partition_hierarchical_keeps_its_mini_batches_within_memory(layers: LayerProfile, memory: float) -> None:
    found = partition_hierarchical(layers, [NetworkLevel(2, 4.0), NetworkLevel(2, 1.0)], memory)
    if found is not None:
        assert room_for(layers, triples(found), memory)


def vgg(weights_bytes: float) -> LayerProfile:
    """Ten convolutions, which compute, and a classifier, which has nearly all parameters."""
    time_s = np.array([0.06] * 10 + [0.04])
    weights = np.array([1e6] * 10 + [weights_bytes])
    return LayerProfile(time_s, np.array([1e8] * 9 + [1e7, 0.0]), weights, 3 * weights, np.full(11, 1e8))


def test_a_classifier_of_many_parameters_gets_a_machine_of_its_own() -> None:
    found = partition(vgg(5e8), 16, 1.2e9)
    assert found is not None
    assert (found.layout, found.in_flight) == ("15-1", 2)
    assert found.time_s == pytest.approx(0.04)


def test_few_parameters_are_best_served_by_data_parallelism() -> None:
    found = partition(vgg(1e6), 16, 1.2e9)
    assert found is not None
    assert (found.layout, found.in_flight) == ("16", 1)
    assert found.time_s == pytest.approx(0.64 / 16)


def test_mini_batches_in_flight_need_memory() -> None:
    """As above, but the first stage's replicas would have to stash two mini-batches each."""
    found = partition(vgg(5e8), 16, 1.2e9, memory_bytes=2.0e9)
    assert found is not None
    assert found.layout != "15-1"
    assert partition(vgg(5e8), 16, 1.2e9, memory_bytes=1.0e9) is None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layer_chains(30), st.integers(2, 12))
def test_a_shortened_chain_adds_up(layers: LayerProfile, most: int) -> None:
    short, last = coarse(layers, most)
    n = len(layers.time_s)
    assert len(last) == len(short.time_s) <= max(1, min(n, most))
    assert len(last) == n or n > most
    assert last[-1] == n - 1
    starts = np.concatenate([[0], last[:-1] + 1])
    for k, (a, b) in enumerate(zip(starts, last, strict=True)):
        assert a <= b
        assert short.time_s[k] == layers.time_s[a : b + 1].sum()
        assert short.sent_bytes[k] == layers.sent_bytes[b]


# -- PipeDream on a graph ---------------------------------------------------------------------------------------------


def test_a_graph_is_profiled_as_the_paper_does() -> None:
    problem = Problem(training([1.0, 3.0, 2.0], [10] * 3, [12] * 3), gpus(2))
    layers = profiled(problem, chain(Units.of(problem)), 1.0)
    np.testing.assert_allclose(layers.time_s, [3.0, 9.0, 6.0])
    np.testing.assert_allclose(layers.sent_bytes, [20.0, 20.0, 0.0])  # an activation, and a gradient back
    np.testing.assert_allclose(layers.kept_bytes, [12.0] * 3)
    np.testing.assert_allclose(layers.weight_bytes, [3.0] * 3)  # Adam keeps four of them
    np.testing.assert_allclose(layers.stashed_bytes, [10.0] * 3)
    ops, tensors = problem.graph.records()
    in_parts = [replace(op, gradient_bytes=op.kept_bytes // 6, kept_bytes=op.kept_bytes) for op in ops]
    problem = Problem(OpGraph.build(in_parts, tensors), gpus(2))
    np.testing.assert_allclose(profiled(problem, chain(Units.of(problem)), 1.0).weight_bytes, [2.0] * 3)


def test_an_inference_graph_synchronises_and_stashes_nothing() -> None:
    problem = Problem(row([1.0, 1.0], 4, [6, 6]), gpus(2))
    layers = profiled(problem, chain(Units.of(problem)), 1.0)
    assert not layers.weight_bytes.any()
    assert not layers.stashed_bytes.any()
    np.testing.assert_allclose(layers.sent_bytes, [4.0, 0.0])


def test_a_tensor_that_skips_layers_crosses_every_cut_between_once() -> None:
    ops = [Op(f"op{i}", time_s={"*": 1.0}) for i in range(4)]
    tensors = [Tensor("op0", 5, ("op2", "op3")), Tensor("op1", 7, ("op2",))]
    problem = Problem(OpGraph.build(ops, tensors), gpus(2))
    np.testing.assert_allclose(profiled(problem, chain(Units.of(problem)), 1.0).sent_bytes, [5.0, 12.0, 5.0, 0.0])


def test_a_measured_transfer_counts_as_the_bytes_that_take_its_time() -> None:
    ops = [Op(f"op{i}", time_s={"*": 1.0}) for i in range(2)]
    problem = Problem(OpGraph.build(ops, [Tensor("op0", 0, ("op1",), transfer_s=3.0)]), gpus(2, bandwidth=4.0))
    assert profiled(problem, chain(Units.of(problem)), 4.0).sent_bytes[0] == 12.0
    assert "measured transfer times" in pipedream(problem, 0).note


def test_the_plan_is_the_best_straight_pipeline_and_the_note_the_replicated_one() -> None:
    problem = Problem(training([1.0, 1.0, 4.0], [1] * 3, [4] * 3), gpus(3, bandwidth=100.0), THROUGHPUT)
    plan = pipedream(problem, 0)
    placed = dict(zip(problem.graph.op_names, plan.device.tolist(), strict=True))
    assert placed["f0"] == placed["b0"] == placed["f1"]
    assert placed["f2"] == placed["b2"] != placed["f0"]
    assert plan.note == (
        "With stages replicated, PipeDream would run pure data parallelism on 3 devices: 6 s per mini-batch, 1 in "
        "flight."
    )


def test_the_note_names_stages_and_says_where_memory_changes_them() -> None:
    """Three replicas of the first two layers stash two mini-batches of 1,010 bytes each; all parameters are behind."""
    graph = training([1.5, 1.5, 1.0], [1000, 10, 10], [0, 0, 400])

    def note(memory: int) -> str:  # one step needs less memory than the steps in flight of a pipeline
        return pipedream(Problem(graph, gpus(4, memory, bandwidth=10.0), LATENCY), 0).note

    best = "2 stages on 3-1 devices: 3 s per mini-batch, 2 in flight"
    assert note(2020) == f"With stages replicated, PipeDream would run {best}."
    assert note(2019) == (
        "With stages replicated, PipeDream would run pure data parallelism on 4 devices: 7.5 s per mini-batch, 1 in "
        f"flight (without a limit of memory, {best})."
    )


def test_the_note_says_where_no_pipeline_fits() -> None:
    """Two layers of 400 bytes: with two mini-batches in flight the first needs 100 more, a second version of weights.

    Three replicas synchronise 100 bytes in 4 * 2 / 3 * 100 / 10 seconds, once for three mini-batches.
    """
    graph = training([3.0, 1.0], [10, 10], [400, 400])
    assert pipedream(Problem(graph, gpus(4, 460, bandwidth=10.0), THROUGHPUT), 0).note == (
        "No pipeline of PipeDream's holds its mini-batches in flight in 460 bytes per device; without that limit, "
        "it would be 2 stages on 3-1 devices: 8.89 s per mini-batch, 2 in flight."
    )


def test_replicas_that_are_slower_than_the_placement_are_no_advice() -> None:
    """Two mini-batches in flight do not fit into the first half; four replicas would synchronise for 40 s."""
    graph = training([1.5, 1.5, 3.0], [900, 1, 1], [400, 400, 800])
    assert pipedream(Problem(graph, gpus(2, 2700, bandwidth=10.0), LATENCY), 0).note == (
        "Replicating stages would gain nothing over 9 s: PipeDream, which also keeps the weights once for each "
        "mini-batch in flight, would run everything on a single device: 18 s per mini-batch, 1 in flight (without a "
        "limit of memory, 2 stages on 1-1 devices: 9 s per mini-batch, 2 in flight)."
    )


def test_the_longest_stage_goes_to_the_fastest_device() -> None:
    ops = [Op(f"op{i}", time_s={"m0": 4 * t, "m1": t}) for i, t in enumerate((1.0, 1.0, 1.0, 6.0))]
    graph = OpGraph.build(ops, [Tensor(a.name, 0, (b.name,)) for a, b in itertools.pairwise(ops)])
    assert pipedream(Problem(graph, gpus(2), THROUGHPUT), 0).device.tolist() == [0, 0, 0, 1]


def test_a_pipeline_of_pipelines_crosses_hosts_where_little_is_sent() -> None:
    """Four equal halves of two hosts; the cut in the middle of the chain is the only cheap one."""
    ops = [Op(f"op{i}", time_s={"*": 1.0}) for i in range(4)]
    sizes = (8, 1, 8)
    graph = OpGraph.build(ops, [Tensor(f"op{i}", s, (f"op{i + 1}",)) for i, s in enumerate(sizes)])
    problem = Problem(graph, hosts(2, 2, inside=8.0, between=1.0), THROUGHPUT)
    plan = pipedream_hierarchical(problem, 0)
    host = plan.device % 2
    assert host.tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    assert len(set(plan.device.tolist())) == 4
    assert loads(problem, plan).value_s == 1.0


# -- network levels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("4xV100-pcie", [NetworkLevel(4, 12e9)]),
        ("16xV100-10gbe", [NetworkLevel(4, 12e9), NetworkLevel(4, 1.18e9)]),
        ("2x8xH100-ib", [NetworkLevel(8, 450e9), NetworkLevel(2, 50e9)]),
        ("8xV100-nvlink", [NetworkLevel(8, 50e9)]),  # double links make a ring of all eight
    ],
)
def test_levels_of_real_machines(preset: str, expected: list[NetworkLevel]) -> None:
    problem = Problem(row([1.0]), Cluster.preset(preset, rates="peak"))
    levels, devices = network_levels(problem, np.arange(problem.cluster.n_devices))
    assert list(levels) == expected
    assert devices.tolist() == list(range(problem.cluster.n_devices))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(clusters(min_devices=1, max_devices=5))
def test_a_level_hangs_together_at_its_bandwidth(cluster: Cluster) -> None:
    problem = Problem(row([1.0]), cluster)
    levels, devices = network_levels(problem, np.arange(cluster.n_devices))
    assert sorted(devices.tolist()) == list(range(cluster.n_devices))
    both = np.minimum(problem.bandwidth_bytes_per_s, problem.bandwidth_bytes_per_s.T)
    sizes = {1} if cluster.n_devices > 1 else set()
    expected = [] if sizes else [NetworkLevel(1, math.inf)]
    for least in sorted({both[a, b] for a in range(cluster.n_devices) for b in range(a)}, reverse=True):
        joined = nx.Graph()
        joined.add_nodes_from(range(cluster.n_devices))
        joined.add_edges_from(np.argwhere(both >= least).tolist())
        counts = {len(part) for part in nx.connected_components(joined)}
        if len(counts) == 1 and max(counts) > max(sizes):
            expected.append(NetworkLevel(max(counts) // max(sizes), least))
            sizes |= counts
    assert list(levels) == expected


def test_levels_of_parts_of_a_cluster() -> None:
    problem = Problem(row([1.0]), hosts(2, 3, inside=8.0, between=1.0))
    levels, devices = network_levels(problem, np.arange(6))
    assert list(levels) == [NetworkLevel(3, 8.0), NetworkLevel(2, 1.0)]
    assert devices.tolist() == [0, 2, 4, 1, 3, 5]
    levels, devices = network_levels(problem, np.array([0, 1, 2]))  # two of one host, one of the other
    assert list(levels) == [NetworkLevel(3, 1.0)]
    levels, devices = network_levels(problem, np.array([4]))
    assert (list(levels), devices.tolist()) == ([NetworkLevel(1, math.inf)], [4])


# -- min-cut ----------------------------------------------------------------------------------------------------------


def cut_s(problem: Problem, device: IntArray) -> float:
    edges = UnitGraph.of(Units.of(problem))
    first = np.array([members[0] for members in problem.units])
    ends = device[first[edges.ends]]
    return float(edges.seconds[ends[:, 0] != ends[:, 1]].sum())


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
