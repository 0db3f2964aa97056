"""The order of a layout, changed where it would run a read and a write of the same state the wrong way round."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import fx

from graphs.capture.costs import signature

if TYPE_CHECKING:
    from placement.runtime.program.device_layout import DeviceLayout
    from placement.runtime.program.functional import Functional


def consistent_order(layout: DeviceLayout) -> list[list[int]]:
    """The ops of each device as planned, but every op after those it depends on, in O(edges * log ops).

    A graph says who needs a value. It does not say that who reads a buffer comes before who writes it later, nor in
    which order two calls of one batch normalisation update its statistics: they follow program order here. All devices'
    orders are stretches of one sequence, so no two devices can wait for each other.
    """
    before: dict[int, set[int]] = {op: set() for op in layout.nodes_of}
    after: dict[int, list[int]] = {op: [] for op in layout.nodes_of}
    for earlier, later in _edges(layout):
        if earlier != later and earlier not in before[later]:
            before[later].add(earlier)
            after[earlier].append(later)
    rank = _ranks(layout)
    waiting = {op: len(ops) for op, ops in before.items()}
    ready = [(rank[op], op) for op, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order: list[list[int]] = [[] for _ in layout.places]
    while ready:
        _, op = heapq.heappop(ready)
        order[layout.device[op]].append(op)
        for later in after[op]:
            waiting[later] -= 1
            if waiting[later] == 0:
                heapq.heappush(ready, (rank[later], later))
    return order


def _ranks(layout: DeviceLayout) -> dict[int, tuple[float, int]]:
    """(planned start, place in its device's order) of each op."""
    place = {op: i for ops in layout.order for i, op in enumerate(ops)}
    return {op: (layout.start_s[op], place[op]) for op in layout.nodes_of}


def _edges(layout: DeviceLayout) -> Iterator[tuple[int, int]]:
    """(op, op that must come after it), along the program."""
    step = layout.step
    yield from _state_edges(step)
    sources: dict[fx.Node, frozenset[int]] = {}  # ops behind the value of a node that is no op
    for node in step.graph.nodes:
        read = frozenset(op for n in node.all_input_nodes for op in sources[n])
        op = step.made_by.get(node)
        if op is None or node.target is operator.getitem:
            sources[node] = read
            continue
        yield from ((source, op) for source in read)
        sources[node] = frozenset({op})


def _state_edges(step: Functional) -> Iterator[tuple[int, int]]:
    """(op, op that must come after it) of captured ops that use a state which one of them writes."""
    states: dict[fx.Node, frozenset[int]] = {}  # states that a node's value may lie in
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for node in step.graph.nodes:
        held = frozenset(state for n in node.all_input_nodes for state in states[n])
        if node in step.state_of:
            held |= {step.state_of[node]}
        op = step.made_by.get(node)
        if op is None or node.target is operator.getitem:
            states[node] = held
            continue
        facts = signature(node.target)
        written = frozenset(s for n in (*facts.written_by(node), *facts.statistics_of(node)) for s in states[n])
        for state in sorted(held):
            if state in writer:
                yield writer[state], op
            if state in written:
                yield from ((reader, op) for reader in readers.pop(state, []))
                writer[state] = op
            else:
                readers.setdefault(state, []).append(op)
        states[node] = written
