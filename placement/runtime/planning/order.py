"""In which order each rank works: as planned, and so that no two ranks wait for each other.

All ranks' orders are stretches of one sequence of the whole step, in which every op comes after those it reads from.
Ops start in it when the simulated plan starts them; an exchange comes as soon as the last rank has what it gives. The
graph does not say that who reads a buffer comes before who writes it later; here it does.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from graphs.arrays import FloatArray, IntArray
from graphs.errors import StrategyError

if TYPE_CHECKING:
    from baselines.strategies.applied import Applied


def sequence(
    applied: Applied, start_s: Mapping[str, float] | None = None, later: Iterable[tuple[int, int]] = ()
) -> IntArray:
    """int64 [n]: the ops of ``applied.exchanged`` in one order for all ranks. O(e log n).

    Args:
        start_s: when each op of the strategy's graph starts, by name; None: as the simulator has it.
        later: (op, op that must come after it), beside what the graph says.

    Raises:
        StrategyError: no order keeps to ``later``.
    """
    graph = applied.exchanged.graph
    start = _of_ops(applied, simulated_start(applied) if start_s is None else start_s)
    members: dict[int, tuple[int, ...]] = {}
    for collective in applied.exchanged.collectives:
        members.update(dict.fromkeys(collective.ops, collective.ops))
    producer, consumer, _ = graph.edge_list
    # An exchange is one node for all its ranks: whoever is ready first must not overtake another exchange.
    stands_for = np.arange(graph.n_ops)
    for op, ops in members.items():
        stands_for[op] = ops[0]
    listed = [*later]
    more = np.array(listed, dtype=np.int64).reshape(-1, 2)
    producer, consumer = np.concatenate([producer, more[:, 0]]), np.concatenate([consumer, more[:, 1]])
    pairs = np.unique(stands_for[producer] * graph.n_ops + stands_for[consumer])
    before, after = np.divmod(pairs, graph.n_ops)
    before, after = before[before != after], after[before != after]
    waiting = np.bincount(after, minlength=graph.n_ops).tolist()
    first = np.searchsorted(before, np.arange(graph.n_ops + 1)).tolist()
    followers = after.tolist()
    key = [-1.0 if np.isnan(s) else s for s in start.tolist()]
    ready = [(key[op], op) for op in range(graph.n_ops) if stands_for[op] == op and waiting[op] == 0]
    heapq.heapify(ready)
    found: list[int] = []
    while ready:
        now, op = heapq.heappop(ready)
        found.extend(members.get(op, (op,)))
        for other in followers[first[op] : first[op + 1]]:
            waiting[other] -= 1
            # An op that is not in the plan, an exchange, comes right after the last one that it waits for.
            key[other] = max(key[other], now)
            if waiting[other] == 0:
                heapq.heappush(ready, (key[other], other))
    if len(found) < graph.n_ops:
        left = set(range(graph.n_ops)).difference(found)
        first_op, second = next((graph.op_names[a], graph.op_names[b]) for a, b in listed if {a, b} <= left)
        raise StrategyError(
            f"op {second!r} uses a buffer after op {first_op!r}, of which one writes it, and strategy "
            f"{applied.strategy.text!r} runs them in no such order; leave out its micro-batches or its recomputation."
        )
    return np.array(found, dtype=np.int64)


def simulated_start(applied: Applied) -> dict[str, float]:
    """When each op of the strategy's graph starts, in seconds, by name."""
    from env.simulation.simulator import Simulator  # loads the compiler

    _, schedule = Simulator(applied.problem).schedule(applied.plan)
    return dict(zip(applied.problem.graph.op_names, schedule.op_start_s.tolist(), strict=True))


def _of_ops(applied: Applied, start_s: Mapping[str, float]) -> FloatArray:
    """float64 [n]: seconds at which each op of ``applied.exchanged`` is to start; NaN for exchanges."""
    in_exchange = {op for collective in applied.exchanged.collectives for op in collective.ops}
    names = applied.exchanged.graph.op_names
    times = [np.nan if op in in_exchange else start_s.get(name, np.nan) for op, name in enumerate(names)]
    return np.array(times, dtype=np.float64)
