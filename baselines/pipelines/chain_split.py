"""Chain split: contiguous runs of ops, balanced by time or by bytes, as pipeline libraries offer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from baselines.layers import layers
from baselines.memory import Allowance, Ledger, place_within_memory
from baselines.placers.expert import balanced_cut
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.opgraph import FloatArray, IntArray, Phase


def chain_time(problem: Problem, seed: int) -> Plan:
    """Forward ops in topological order, cut into one run per device so that the longest run is as short as possible.

    After ``torchgpipe.balance.balance_by_time`` (C. Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for
    Training Giant Models", 2020, section 4, doi:10.48550/arXiv.2004.09910), whose block partition minimises the
    largest of k consecutive blocks. Beyond the library: a run's time is that on its own device, runs are bounded by
    memory, and any graph will do, not only a sequence of layers. Backward and update ops run with their forward op.
    CPUs, pins and full devices are dealt with as in `baselines.placers.expert`. O(n log n + e + U D).

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    units = Units.of(problem)
    return _split(units, units.op_s[:, problem.cluster.compute_devices])


def chain_bytes(problem: Problem, seed: int) -> Plan:
    """As `chain_time`, but the run with the most bytes is made as small as possible: kept bytes and forward outputs.

    After ``torchgpipe.balance.balance_by_size`` (as there), which adds the size of a layer's parameters, with what the
    optimizer keeps of them, to that of its activations.

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    units = Units.of(problem)
    graph = problem.graph
    outputs = np.where(graph.phase[graph.tensor_producer] == Phase.FORWARD, graph.tensor_memory_bytes, 0)
    per_op = graph.kept_bytes + np.bincount(graph.tensor_producer, outputs, graph.n_ops)
    per_unit = np.add.reduceat(per_op[units.members], units.ptr[:-1])
    return _split(units, np.repeat(per_unit[:, np.newaxis], len(problem.cluster.compute_devices), axis=1))


def chain(units: Units) -> list[list[int]]:
    """Units as a chain of links, as fine as possible: a forward op with the backward and update ops that mirror it.

    In topological order, equals by op number. An op that takes no time joins the link of its largest input, or else
    of its first reader. O(n log n + e).
    """
    problem = units.problem
    timed = (problem.graph.phase == Phase.FORWARD) & (problem.mean_op_s > 0)
    # Layers in the sense of `baselines.layers`, if every op that computes were a module of its own.
    modules = tuple(f"op{i}" if own else "" for i, own in enumerate(timed.tolist()))
    alone = Problem(replace(problem.graph, modules=modules), problem.cluster, problem.objective)
    return layers(Units.of(alone))


def place_runs(units: Units, allowance: Allowance, order: IntArray, wanted: IntArray) -> Plan:
    """Every unit where it is wanted; where it may not run or finds no room there, on the fastest device that is left.

    Args:
        order: int64 [U], units in the order in which they take their room.
        wanted: int64 [U], device of each unit of `order`.

    Raises:
        InfeasibleError: a unit finds no room anywhere.
    """
    ledger = Ledger(units, allowance)
    device = np.empty(units.n_units, dtype=np.int64)
    for unit, first_choice in zip(order.tolist(), wanted.tolist(), strict=True):
        feasible = ledger.feasible(unit)
        suits = (feasible == first_choice).any()
        device[unit] = first_choice if suits else feasible[units.op_s[unit, feasible].argmin()]
        ledger.place(unit, int(device[unit]))
    return Plan(device[units.problem.unit_of])


def _split(units: Units, load: FloatArray) -> Plan:
    """Runs of the chain on the main devices with the least largest load, float64 [U, main devices]."""
    problem = units.problem
    main = problem.cluster.compute_devices
    links = chain(units)
    size = [len(link) for link in links]
    order = np.array([unit for link in links for unit in link], dtype=np.int64)
    starts = np.cumsum([0, *size[:-1]])
    link_load = np.add.reduceat(load[order], starts, axis=0)

    def build(allowance: Allowance) -> Plan:
        link_bytes = np.add.reduceat(allowance.unit_bytes[order], starts)
        room = problem.capacity_bytes[main] - allowance.working_bytes.max()
        cut = balanced_cut(link_load, link_bytes, room)
        return place_runs(units, allowance, order, np.repeat(main[cut], size))

    return place_within_memory(units, build)
