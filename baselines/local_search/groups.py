"""Groups of units that a local search moves together, by cheap structural rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from networkx.utils import UnionFind

from env.units import Units
from graphs.arrays import numbered
from graphs.opgraph import FloatArray, IntArray

_RUNS = (4, 8, 16, 32, 64, 128, 256)  # parts into which the topological order is cut
_CLUSTERS = (4, 8, 16, 32, 64, 128, 256)  # at least this many clusters share the work


def groupings(units: Units) -> list[IntArray]:
    """Partitions of the units, int64 [U] each, numbered from 0: modules, chains, clusters by traffic, runs.

    Every one has fewer groups than there are units, and no two are the same.
    """
    found: dict[bytes, IntArray] = {}
    for labels in _all(units):
        number, first = numbered(labels)
        if 1 < len(first) < units.n_units:
            found.setdefault(number.tobytes(), number)
    return list(found.values())


def _all(units: Units) -> Iterator[IntArray]:
    yield from _modules(units)
    yield from _by_traffic(units)
    yield from _runs(units)
    yield _chains(units)


def _modules(units: Units) -> Iterator[IntArray]:
    """Units whose first ops share the first k names of their module path; with all phases together, and apart."""
    graph = units.problem.graph
    paths = [tuple(graph.modules[i].split(".")) for i in units.first_op.tolist()]
    phase = graph.phase[units.first_op]
    for depth in range(1, min(6, max(map(len, paths))) + 1):
        names: dict[tuple[str, ...], int] = {}
        together = np.array([names.setdefault(path[:depth], len(names)) for path in paths], dtype=np.int64)
        yield together
        yield together * 8 + phase


def _runs(units: Units) -> Iterator[IntArray]:
    """Stretches of the topological order of about equal work."""
    order = units.topological_order
    work = units.op_s.mean(axis=1)[order]
    reached = np.cumsum(work) - work / 2
    for parts in _RUNS:
        if parts < units.n_units:
            labels = np.empty(units.n_units, dtype=np.int64)
            labels[order] = (reached / max(work.sum(), 1e-300) * parts).astype(np.int64)
            yield labels


def _chains(units: Units) -> IntArray:
    """Units joined along edges that are the only way out of one and the only way into the other."""
    source, target, _ = _unit_edges(units)
    outgoing, incoming = np.bincount(source, minlength=units.n_units), np.bincount(target, minlength=units.n_units)
    only = (outgoing[source] == 1) & (incoming[target] == 1)
    pairs = zip(source[only].tolist(), target[only].tolist(), strict=True)
    return _joined(pairs, [0.0] * units.n_units, 0.0)


def _by_traffic(units: Units) -> Iterator[IntArray]:
    """Heaviest edges first, joined while the work of a cluster stays below its share."""
    source, target, seconds = _unit_edges(units)
    order = np.argsort(-seconds, kind="stable")
    pairs = list(zip(source[order].tolist(), target[order].tolist(), strict=True))
    work = units.op_s.mean(axis=1)
    for parts in _CLUSTERS:
        if parts < units.n_units:
            yield _joined(pairs, work.tolist(), float(work.sum()) / parts)


def _unit_edges(units: Units) -> tuple[IntArray, IntArray, FloatArray]:
    """Edges between different units, each pair once: source, target int64 and the seconds of all their tensors."""
    problem = units.problem
    producer, consumer, tensor = problem.graph.edge_list
    source, target = units.unit_of[producer], units.unit_of[consumer]
    apart = source != target
    pair, where = np.unique(source[apart] * units.n_units + target[apart], return_inverse=True)
    seconds = np.bincount(where, problem.mean_transfer_s[tensor[apart]], minlength=len(pair))
    return pair // units.n_units, pair % units.n_units, seconds.astype(np.float64)


def _joined(pairs: Iterable[tuple[int, int]], work: list[float], limit: float) -> IntArray:
    """A label of each unit, with that of the other one of a pair where the work of both clusters is within a limit."""
    sets = UnionFind(range(len(work)))
    for pair in pairs:
        a, b = sets[pair[0]], sets[pair[1]]
        both = work[a] + work[b]
        if a != b and both <= limit:
            sets.union(a, b)
            work[sets[a]] = both
    return np.array([sets[unit] for unit in range(len(work))], dtype=np.int64)
