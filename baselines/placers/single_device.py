"""The single-device placement, and the orders in which one device runs a step."""

from __future__ import annotations

import heapq

import numpy as np

from baselines.memory import excess_bytes, overflow
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from env.units import Units
from graphs.arrays import FloatArray, nearly_least, numbered
from graphs.opgraph import OpGraph


def program_order(graph: OpGraph) -> FloatArray:
    """float64 [n], an explicit order: that of the graph's ops, in which a captured model runs in PyTorch."""
    return np.arange(graph.n_ops, dtype=np.float64)


def least_memory_order(graph: OpGraph) -> FloatArray:
    """float64 [n], an explicit order by a greedy choice: of the ops that are ready, the one that adds fewest bytes.

    An op adds what it writes and takes away what it is the last one to read; ties go to the program's order. No order
    of least memory: finding that is NP-hard (R. Sethi, "Complete Register Allocation Problems", SIAM Journal on
    Computing 4(3), 1975, doi:10.1137/0204020). O((n + e) log e).
    """
    size, written = graph.tensor_memory_bytes.tolist(), graph.output_ptr.tolist()
    reads_ptr, reads = (part.tolist() for part in graph.inputs)
    readers_ptr, readers = graph.consumer_ptr.tolist(), graph.consumers.tolist()
    left = np.diff(graph.consumer_ptr).tolist()
    waits_for = np.diff(graph.inputs[0]).tolist()
    made = [sum(size[t] for t in range(written[i], written[i + 1]) if left[t]) for i in range(graph.n_ops)]
    added = [
        made[i] - sum(size[t] for t in reads[reads_ptr[i] : reads_ptr[i + 1]] if left[t] == 1)
        for i in range(graph.n_ops)
    ]
    ready = [(added[i], i) for i in range(graph.n_ops) if not waits_for[i]]
    heapq.heapify(ready)
    place = np.full(graph.n_ops, -1, dtype=np.float64)
    count = 0
    while ready:
        known, op = heapq.heappop(ready)
        if place[op] >= 0 or known != added[op]:
            continue  # it has run, or it stands here once more with what it adds now
        place[op] = count
        count += 1
        for t in reads[reads_ptr[op] : reads_ptr[op + 1]]:
            left[t] -= 1
            if left[t] == 1:
                last = next(i for i in readers[readers_ptr[t] : readers_ptr[t + 1]] if place[i] < 0)
                added[last] -= size[t]
                if not waits_for[last]:
                    heapq.heappush(ready, (added[last], last))
        for t in range(written[op], written[op + 1]):
            for reader in readers[readers_ptr[t] : readers_ptr[t + 1]]:
                waits_for[reader] -= 1
                if not waits_for[reader]:
                    heapq.heappush(ready, (added[reader], reader))
    return place


def single_device(problem: Problem, seed: int) -> Plan:
    """Every op on one device, the best of those that have the memory. It takes two scores for each kind of device.

    It runs in program order, or by the default priority where ops that are pinned elsewhere make that faster. Where
    neither fits, an order that holds little at a time is tried.

    Ops that are pinned elsewhere run on the fastest device allowed for them, so the plan is as single as possible.

    Raises:
        InfeasibleError: no device has the memory; the sentence is about the device that misses least.
    """
    units = Units.of(problem)
    elsewhere = np.where(units.allowed, units.op_s, np.inf).argmin(axis=1)
    # Devices that are alike and may run every op take equally long: one of them is enough.
    of_its_own = problem.cluster.n_devices + np.arange(problem.cluster.n_devices)
    _, devices = numbered(np.where(units.allowed.all(axis=0), problem.kind_of, of_its_own))
    placed = [np.where(units.allowed[:, d], d, elsewhere)[problem.unit_of] for d in devices.tolist()]
    in_turn = program_order(problem.graph)
    scorer = Scorer(problem)
    plans = [plan for device in placed for plan in (Plan(device, in_turn), Plan(device))]
    values = [scorer.value(plan) for plan in plans]  # a batch would compile a second loop for D placements
    if min(values) == np.inf:
        frugal = least_memory_order(problem.graph)
        plans += [Plan(device, frugal) for device in placed]
        values += [scorer.value(plan) for plan in plans[len(values) :]]
    if min(values) == np.inf:
        missing = [int(excess_bytes(problem, plan).max()) for plan in plans]
        raise overflow(problem, plans[int(np.argmin(missing))])
    return plans[nearly_least(values)[0]]
