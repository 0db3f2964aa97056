"""PipeDream's partitions: the best there are, flat and of hosts, and its plan of a graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from cases.partitioned_graphs import gpus, hosts, row, training
from hypothesis import given
from hypothesis import strategies as st

from baselines.network_levels import NetworkLevel
from baselines.pipelines.chain_split import chain
from baselines.pipelines.pipedream import pipedream, pipedream_hierarchical, profiled
from baselines.pipelines.pipedream_partition import (
    LayerProfile,
    Partition,
    coarse,
    fits,
    partition,
    partition_hierarchical,
)
from env.objectives import LATENCY, THROUGHPUT
from env.problem import Problem
from env.simulation.scoring import loads
from env.units import Units
from graphs.opgraph import FloatArray, Op, OpGraph, Tensor


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


# -- PipeDream's partitioners -----------------------------------------------------------------------------------------


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


@given(layer_chains(), st.integers(1, 4), st.sampled_from([math.inf, 60.0]))
def test_one_level_is_the_flat_partition(layers: LayerProfile, machines: int, memory: float) -> None:
    assert partition_hierarchical(layers, [NetworkLevel(machines, 2.0)], memory) == partition(
        layers, machines, 2.0, memory
    )


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
