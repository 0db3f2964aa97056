"""PipeDream: the best pipeline over the chain of a graph's ops, and how its stages would be replicated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from baselines.memory import Allowance, place_within_memory
from baselines.network_levels import NetworkLevel, network_levels
from baselines.paths import slowness
from baselines.pipelines.chain_split import chain, place_runs
from baselines.pipelines.pipedream_partition import (
    LayerProfile,
    Partition,
    coarse,
    partition,
    partition_hierarchical,
)
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import loads
from env.units import Units
from graphs.formatting import format_bytes, format_seconds
from graphs.kept import trained_bytes
from graphs.opgraph import FloatArray, IntArray, Phase

_Find = Callable[
    [LayerProfile, float, bool], Partition | None
]  # layers, memory in bytes, whether stages may be replicated
_LONGEST = 1000  # layers of the chain that is cut; takes about a second on 16 devices
_LONGEST_HIERARCHICAL = 256  # there, all pairs of first and last layer are looked at, not only those that end the chain


def pipedream(problem: Problem, seed: int) -> Plan:
    """The best straight pipeline (2018): `partition` without replicas, over `baselines.pipelines.chain_split.chain`.

    As published, machines are equal (times are means over the main devices, memory is that of the smallest), the
    network is one (the slowest of its levels), and computing overlaps with sending. The plan's note tells what
    `partition` finds with replicas, which a placement cannot say. Beyond the paper: in the plan itself, memory is
    that of the problem's objective rather than that of mini-batches in flight; of unequal devices, the fastest gets
    the longest stage; a chain of more than 1,000 links is shortened to that first (`coarse`). CPUs, pins and full
    devices are dealt with as in `baselines.placers.expert`. O(L^2 D^2) for L links and D devices.

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    levels, devices = network_levels(problem, problem.cluster.compute_devices)
    bandwidth_bytes_per_s = levels[-1].bandwidth_bytes_per_s

    def find(layers: LayerProfile, memory_bytes: float, replicated: bool) -> Partition | None:
        return partition(layers, len(devices), bandwidth_bytes_per_s, memory_bytes, replicated)

    return _pipeline(problem, levels, devices, find, _LONGEST)


def pipedream_hierarchical(problem: Problem, seed: int) -> Plan:
    """The best straight pipeline of pipelines (SOSP 2019): as `pipedream`, but by `partition_hierarchical`.

    Levels are those of `network_levels`; inside a group, stages follow each other over its own, faster network. A
    chain of more than 256 links is shortened to that. O(L^3 D^2).

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    levels, devices = network_levels(problem, problem.cluster.compute_devices)

    def find(layers: LayerProfile, memory_bytes: float, replicated: bool) -> Partition | None:
        return partition_hierarchical(layers, levels, memory_bytes, replicated)

    return _pipeline(problem, levels, devices, find, _LONGEST_HIERARCHICAL)


def profiled(problem: Problem, links: Sequence[Sequence[int]], bandwidth_bytes_per_s: float) -> LayerProfile:
    """The profile that PipeDream would measure of a chain of units, each link a layer; means over the main devices.

    Every tensor that is produced on one side and read on the other crosses from one layer to the next. A
    measured transfer time counts as the bytes that take it at this bandwidth. Weights are the parameters that have a
    gradient (where kept bytes have no parts, one copy of those that the optimizer keeps, three where it is unknown), or
    none without a backward pass; activations that a backward op reads are stashed. O(n + e).
    """
    units, graph, main = Units.of(problem), problem.graph, problem.cluster.compute_devices
    at_unit = np.empty(units.n_units, dtype=np.int64)
    for k, link in enumerate(links):
        at_unit[list(link)] = k
    at, n = at_unit[problem.unit_of], len(links)
    here = units.allowed[:, main]
    time_s = np.where(here, units.op_s[:, main], 0.0).sum(axis=1) / np.maximum(here.sum(axis=1), 1)
    _, consumer, tensor = graph.edge_list
    size = _sizes(problem, main, bandwidth_bytes_per_s)
    low, high = at[graph.tensor_producer], at[graph.tensor_producer]
    np.minimum.at(low, tensor, at[consumer])
    np.maximum.at(high, tensor, at[consumer])
    crossing = np.cumsum(np.bincount(low, size, n) - np.bincount(high, size, n))
    backward = graph.phase != Phase.FORWARD
    stashed = np.zeros(graph.n_tensors, dtype=np.bool_)
    stashed[tensor[backward[consumer]]] = True
    stashed &= ~backward[graph.tensor_producer]
    kept = np.bincount(at, graph.kept_bytes, n).astype(np.float64)
    return LayerProfile(
        time_s=np.bincount(at_unit, time_s, n).astype(np.float64),
        sent_bytes=np.maximum(crossing, 0.0),
        weight_bytes=np.bincount(at, trained_bytes(graph), n).astype(np.float64),
        kept_bytes=kept,
        stashed_bytes=np.bincount(at[graph.tensor_producer], graph.tensor_bytes * stashed, n).astype(np.float64),
    )


def _sizes(problem: Problem, main: IntArray, bandwidth_bytes_per_s: float) -> FloatArray:
    """float64 [m]: bytes of each tensor, or those that would take its measured time."""
    graph = problem.graph
    hops = problem.hops[np.ix_(main, main)]
    measured_s = graph.tensor_transfer_s * hops.sum() / max(1, len(main) * (len(main) - 1))
    with np.errstate(invalid="ignore"):  # no time at infinite bandwidth
        as_bytes = np.nan_to_num(measured_s * bandwidth_bytes_per_s, nan=0.0, posinf=0.0)
    return np.where(np.isnan(graph.tensor_transfer_s), graph.transfer_bytes, as_bytes)


def _pipeline(problem: Problem, levels: Sequence[NetworkLevel], devices: IntArray, find: _Find, longest: int) -> Plan:
    """The straight pipeline that `find` gives, machine k being device k of ``devices``, int64 [K]."""
    units = Units.of(problem)
    links = chain(units)
    layers, last = coarse(profiled(problem, links, levels[-1].bandwidth_bytes_per_s), longest)
    order = np.array([unit for link in links for unit in link], dtype=np.int64)
    ends = np.cumsum([len(link) for link in links])[last]  # of each layer, in `order`
    starts = np.concatenate([[0], ends[:-1]])
    memory_bytes = float(problem.capacity_bytes[devices].min())

    def build(allowance: Allowance) -> Plan:
        kept = np.add.reduceat(allowance.unit_bytes[order], starts).astype(np.float64)
        nothing = np.zeros(len(last))
        plain = replace(layers, weight_bytes=nothing, stashed_bytes=nothing, kept_bytes=kept)
        found = find(plain, memory_bytes - float(allowance.working_bytes.max()), False)
        found = found or find(replace(plain, kept_bytes=nothing), math.inf, False)
        assert found is not None, "without a limit of memory there is always a pipeline"
        runs_on = _fastest_first(problem, layers, found, devices) if len(levels) == 1 else devices
        wanted = np.empty(units.n_units, dtype=np.int64)
        for stage in found.stages:
            wanted[starts[stage.first] : ends[stage.last]] = runs_on[stage.machine]
        return place_runs(units, allowance, order, wanted)

    plan = place_within_memory(units, build)
    return replace(plan, note=_note(problem, loads(problem, plan).value_s, layers, memory_bytes, find))


def _fastest_first(problem: Problem, layers: LayerProfile, found: Partition, devices: IntArray) -> IntArray:
    """int64 [K]: equally close devices, so that the longest stage has the fastest; as they are where all are alike."""
    slow = slowness(problem)[devices]
    if np.allclose(slow, slow[0]):
        return devices
    length_s = [-layers.time_s[stage.first : stage.last + 1].sum() for stage in found.stages]
    result = np.full(len(devices), -1)
    result[np.argsort(length_s, kind="stable")] = devices[np.argsort(slow, kind="stable")][: len(length_s)]
    return result


def _note(problem: Problem, value_s: float, layers: LayerProfile, memory_bytes: float, find: _Find) -> str:
    """PipeDream's plan with replicated stages, in one sentence, beside a placement of this largest load."""
    if not np.isnan(problem.graph.tensor_transfer_s).all():
        return "PipeDream's replication needs sizes in bytes, but this graph has measured transfer times instead."
    best, roomy = find(layers, memory_bytes, True), find(layers, math.inf, True)
    assert roomy is not None, "without a limit of memory there is always a pipeline"
    if best is None:
        return (
            f"No pipeline of PipeDream's holds its mini-batches in flight in {format_bytes(memory_bytes)} per device; "
            f"without that limit, it would be {_described(roomy)}."
        )
    more = "" if best.stages == roomy.stages else f" (without a limit of memory, {_described(roomy)})"
    if best.time_s >= value_s:
        return (
            f"Replicating stages would gain nothing over {format_seconds(value_s)}: PipeDream, which also keeps the "
            f"weights once for each mini-batch in flight, would run {_described(best)}{more}."
        )
    return f"With stages replicated, PipeDream would run {_described(best)}{more}."


def _described(found: Partition) -> str:
    pace = f"{format_seconds(found.time_s)} per mini-batch, {found.in_flight} in flight"
    if found.machines == 1:
        return f"everything on a single device: {pace}"
    if len(found.stages) == 1:
        return f"pure data parallelism on {found.layout} devices: {pace}"
    return f"{len(found.stages)} stages on {found.layout} devices: {pace}"
