"""`contract`: a graph whose ops are groups of another graph's ops.

A coarse graph keeps these promises: it is acyclic; FLOPs, bytes, kernels (so also launch overheads) and kept bytes are
those of the fine graph; and memory is never less than the fine graph needs when the ops of a group run one after the
other.
It cannot promise the same time: a group starts when all its inputs are there, its outputs appear at its end,
and the larger of two sums is not the sum of the larger terms. So coarse graphs are for searching, and a placement is
always scored on the fine graph, after `Derived.expand`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import networkx as nx
import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray, numbered, sums
from graphs.errors import GraphError
from graphs.op_kinds import ELEMENTWISE, base_name
from graphs.opgraph import ANY_DEVICE, OpGraph
from graphs.records import EXTENTS
from graphs.transforms.derived import Derived, rewired


def contract(graph: OpGraph, labels: IntArray) -> Derived:
    """Merge all ops with the same label into one op.

    A merged op sums FLOPs, bytes moved, kept bytes and kernels; has a measured time where all its ops have one (that
    for any device standing in for a missing one); takes kind and dtype from its op of most FLOPs; has the work and the
    extents of the only op among its own that has any; and has no split rows. Tensors inside a group vanish, but count
    as workspace while they live, in the fine graph's topological order. Colocation groups that meet in a merged op
    become one. Pins are intersected.

    Args:
        graph: the fine graph.
        labels: int64 [n_ops]; groups are numbered by their first op.

    Raises:
        GraphError: the groups form a cycle, or the pins of a group contradict each other.
    """
    group_of, first = numbered(labels)
    n = len(first)
    heaviest = _heaviest(graph, group_of, first)
    time_keys, time_s, fixed_s = _measured(graph, group_of, n)
    members = _members(group_of, n)
    work, extents = _facts(graph, group_of, n)
    coarse = OpGraph(
        name=f"{graph.name} ({n} groups)",
        op_names=tuple(graph.op_names[i] for i in first),
        kinds=tuple(graph.kinds[i] for i in heaviest),
        dtypes=tuple(graph.dtypes[i] for i in heaviest),
        modules=tuple(_common_module([graph.modules[i] for i in ops]) for ops in members),
        flops=sums(group_of, graph.flops, n),
        bytes_moved=sums(group_of, graph.bytes_moved, n),
        parameter_bytes=sums(group_of, graph.parameter_bytes, n),
        gradient_bytes=sums(group_of, graph.gradient_bytes, n),
        optimizer_bytes=sums(group_of, graph.optimizer_bytes, n),
        workspace_bytes=_workspace(graph, group_of, n),
        kernels=sums(group_of, graph.kernels, n),
        colocation=_colocation(graph.colocation, group_of, n),
        phase=graph.phase[first],
        forward_of=_forward_of(graph, group_of, n),
        pins=tuple(_common_pins(graph, ops) for ops in members),
        time_keys=time_keys,
        time_s=time_s,
        fixed_s=fixed_s,
        **_outer_tensors(graph, group_of),
        origin=graph.origin,
        work=work,
        extents=extents,
        stream=graph.stream[first],
    )
    return Derived.merged(coarse, graph, group_of)


def merge_classes(graph: OpGraph, by_phase: bool = True) -> IntArray:
    """int64 [n]: ops of one number have the same phase and the same allowed device kinds, and so may be merged.

    Without `by_phase` only the device kinds count.

    The pins of a colocation group bind all its ops. If they contradict each other, an op's own pins count.
    """
    allowed: dict[int, frozenset[str] | None] = {}  # by colocation group; None is any device
    for op in np.flatnonzero(graph.colocation >= 0).tolist():
        label, own = int(graph.colocation[op]), frozenset(graph.pins[op]) or None
        before = allowed.get(label)
        allowed[label] = own if before is None else before if own is None else before & own
    numbers: dict[tuple[int, frozenset[str] | None], int] = {}
    result = [
        numbers.setdefault((phase, (allowed[group] if group >= 0 else None) or frozenset(pins) or None), len(numbers))
        for phase, group, pins in zip(
            (graph.phase * by_phase).tolist(), graph.colocation.tolist(), graph.pins, strict=True
        )
    ]
    return np.array(result, dtype=np.int64)


def neighbours(graph: OpGraph) -> tuple[list[list[int]], list[list[int]]]:
    """Per op the ops it reads from, and the ops that read from it, each once."""
    producer, consumer, _ = graph.edge_list
    pairs = np.unique(producer * graph.n_ops + consumer).tolist()
    before: list[list[int]] = [[] for _ in range(graph.n_ops)]
    after: list[list[int]] = [[] for _ in range(graph.n_ops)]
    for pair in pairs:
        source, target = divmod(pair, graph.n_ops)
        before[target].append(source)
        after[source].append(target)
    return before, after


def _members(group_of: IntArray, n: int) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in range(n)]
    for op, group in enumerate(group_of.tolist()):
        result[group].append(op)
    return result


def _heaviest(graph: OpGraph, group_of: IntArray, first: IntArray) -> IntArray:
    """Per group, its op of most FLOPs, then most bytes moved, then the first."""
    order = np.lexsort((np.arange(graph.n_ops), -graph.bytes_moved, -graph.flops, group_of))
    starts = np.searchsorted(group_of[order], np.arange(len(first)))
    return order[starts].astype(np.int64)


def _common_module(modules: list[str]) -> str:
    """The longest module path that holds all: ``a.b.c`` and ``a.b.d`` give ``a.b``."""
    # A prefix of both the smallest and the largest path in sorted order is one of all between them, too.
    paths = sorted(module.split(".") for module in set(modules))
    pairs = zip(paths[0], paths[-1], strict=False)
    return ".".join(low for low, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _common_pins(graph: OpGraph, ops: list[int]) -> tuple[str, ...]:
    pinned = [op for op in ops if graph.pins[op]]
    if not pinned:
        return ()
    common = [kind for kind in graph.pins[pinned[0]] if all(kind in graph.pins[op] for op in pinned)]
    if not common:
        shown = " and ".join(f"{graph.op_names[op]!r} to {graph.pins[op]}" for op in pinned[:2])
        raise GraphError(f"ops of one group are pinned to unlike devices ({shown}); do not merge them.")
    return tuple(common)


def _measured(graph: OpGraph, group_of: IntArray, n: int) -> tuple[tuple[str, ...], FloatArray, FloatArray]:
    times, fixed_s = graph.time_s.copy(), graph.fixed_s.copy()
    if ANY_DEVICE in graph.time_keys:
        anywhere = graph.time_keys.index(ANY_DEVICE)
        fixed_s = np.where(np.isnan(times), fixed_s[:, [anywhere]], fixed_s)
        times = np.where(np.isnan(times), times[:, [anywhere]], times)
    total, fixed = np.zeros((2, n, len(graph.time_keys)))
    np.add.at(total, group_of, times)
    np.add.at(fixed, group_of, fixed_s)
    fixed[np.isnan(total)] = 0.0
    kept = [j for j in range(len(graph.time_keys)) if not np.isnan(total[:, j]).all()]
    return tuple(graph.time_keys[j] for j in kept), total[:, kept], fixed[:, kept]


def _facts(graph: OpGraph, group_of: IntArray, n: int) -> tuple[IntArray, FloatArray]:
    """`OpGraph.work` and `OpGraph.extents` of groups with one op whose work is known, or one op; others have none."""
    known = np.flatnonzero(graph.work)
    known = known[np.bincount(group_of[known], minlength=n)[group_of[known]] == 1]
    work, extents = np.zeros(n, dtype=np.int64), np.zeros((n, EXTENTS))
    alone = np.flatnonzero(np.bincount(group_of, minlength=n)[group_of] == 1)
    extents[group_of[alone]] = graph.extents[alone]
    work[group_of[known]], extents[group_of[known]] = graph.work[known], graph.extents[known]
    return work, extents


def _forward_of(graph: OpGraph, group_of: IntArray, n: int) -> IntArray:
    """The forward group, where all of a group's backward ops mirror ops of one other group; else -1."""
    backward = np.flatnonzero(graph.forward_of >= 0)
    group, mirrored = group_of[backward], group_of[graph.forward_of[backward]]
    low, high = np.full(n, n, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    np.minimum.at(low, group, mirrored)
    np.maximum.at(high, group, mirrored)
    return np.where((low == high) & (high != np.arange(n)), high, -1).astype(np.int64)


def _colocation(labels: IntArray, group_of: IntArray, n: int) -> IntArray:
    """Colocation groups of the coarse ops: united where they meet, dropped where one coarse op holds them all."""
    united = nx.utils.UnionFind()
    label_of: dict[int, int] = {}
    for op in np.flatnonzero(labels >= 0).tolist():
        label, group = int(labels[op]), int(group_of[op])
        united.union(label_of.setdefault(group, label), label)
    roots = {group: united[label] for group, label in sorted(label_of.items())}
    count: dict[int, int] = {}
    for root in roots.values():
        count[root] = count.get(root, 0) + 1
    number: dict[int, int] = {}
    result = np.full(n, -1, dtype=np.int64)
    for group, root in roots.items():
        if count[root] > 1:
            result[group] = number.setdefault(root, len(number))
    return result


def _inner(graph: OpGraph, group_of: IntArray) -> BoolArray:
    """Bool [m]: tensors that are read, and only inside their producer's group."""
    producer, consumer, tensor = graph.edge_list
    leaves = np.zeros(graph.n_tensors, dtype=bool)
    leaves[tensor[group_of[producer] != group_of[consumer]]] = True
    return ~leaves & (np.diff(graph.consumer_ptr) > 0)


def _outer_tensors(graph: OpGraph, group_of: IntArray) -> dict[str, Any]:
    """The tensor arrays of `OpGraph` for the tensors between groups and the results."""
    kept = np.flatnonzero(~_inner(graph, group_of))
    number = np.full(graph.n_tensors, -1, dtype=np.int64)
    number[kept] = np.arange(len(kept))
    producer, consumer, tensor = graph.edge_list
    crossing = group_of[producer] != group_of[consumer]
    columns = (graph.tensor_producer, graph.tensor_bytes, graph.tensor_in_place, graph.tensor_transfer_s)
    edges = number[tensor[crossing]], consumer[crossing]
    return rewired([[column[kept] for column in columns]], [edges], group_of)


def _workspace(graph: OpGraph, group_of: IntArray, n: int) -> IntArray:
    """Per group the most bytes its own workspace and inner tensors hold at once, its ops run in topological order."""
    position = graph.topological_position
    born = np.zeros(graph.n_ops, dtype=np.int64)  # inner bytes each op starts to write
    dies = np.zeros(graph.n_ops, dtype=np.int64)  # inner bytes nobody needs after each op
    for tensor in np.flatnonzero(_inner(graph, group_of)).tolist():
        readers = graph.consumers_of(tensor)
        born[graph.tensor_producer[tensor]] += graph.tensor_memory_bytes[tensor]
        dies[readers[np.argmax(position[readers])]] += graph.tensor_memory_bytes[tensor]
    live, peak = [0] * n, [0] * n
    order = graph.topological_order
    columns = (group_of[order], born[order], dies[order], graph.workspace_bytes[order])
    for group, new, old, own in zip(*(column.tolist() for column in columns), strict=True):
        live[group] += new
        peak[group] = max(peak[group], live[group] + own)
        live[group] -= old
    return np.array(peak, dtype=np.int64)


def fuse_chains(graph: OpGraph) -> Derived:
    """Merge every op into its only input op where it is that op's only reader.

    Acyclic, because a chain is entered at its head only. A chain is cut where two colocation groups would meet.
    """
    return _fuse(graph, lambda op, readers: readers == 1)


def fuse_elementwise(graph: OpGraph) -> Derived:
    """Merge every element-wise op with a single input op into that op, as fusing compilers do.

    Acyclic, because a group is entered at its first op only. Where two colocation groups would meet, it is not merged.
    """
    elementwise = [base_name(kind) in ELEMENTWISE for kind in graph.kinds]
    return _fuse(graph, lambda op, readers: elementwise[op])


def by_module(graph: OpGraph, depth: int | None = None) -> Derived:
    """Merge the ops of each module; with `depth`, of each module path cut to that many names.

    A module whose ops depend on each other through other modules is split where merging would create a cycle: ops are
    in one group if they also have the same stage, the largest number of changes of module on a path to them. An op
    without a module stays alone. Colocation groups that meet in a module become one.

    Raises:
        GraphError: `depth` is below 1.
    """
    if depth is not None and depth < 1:
        raise GraphError(f"depth is {depth}; expected 1 or more.")
    classes = merge_classes(graph).tolist()
    keys = [
        (".".join(module.split(".")[:depth]), classes[op]) if module else ("", -1 - op)
        for op, module in enumerate(graph.modules)
    ]
    numbers: dict[tuple[str, int], int] = {}
    label = [numbers.setdefault(key, len(numbers)) for key in keys]
    stage = _stages(graph, label)
    return contract(graph, np.array(label, dtype=np.int64) * (graph.n_ops + 1) + np.array(stage, dtype=np.int64))


def _fuse(graph: OpGraph, wanted: Callable[[int, int], bool]) -> Derived:
    """Merge each op with one input op into it where ``wanted(op, number of that input op's readers)``."""
    before, after = neighbours(graph)
    classes, colocation = merge_classes(graph).tolist(), graph.colocation.tolist()
    head = list(range(graph.n_ops))
    for op in graph.topological_order.tolist():
        if len(before[op]) != 1:
            continue
        (source,) = before[op]
        first = head[source]
        meet = {colocation[first], colocation[op]} - {-1}
        if classes[source] == classes[op] and len(meet) <= 1 and wanted(op, len(after[source])):
            head[op] = first
            colocation[first] = max(meet, default=-1)
    return contract(graph, np.array(head, dtype=np.int64))


def _stages(graph: OpGraph, label: list[int]) -> list[int]:
    """Per op the largest number of label changes on a path to it, raised where that joins a reader of its label.

    Along every edge the stage rises if the label changes and never falls, so groups of equal label and stage cannot
    form a cycle.
    """
    before, after = neighbours(graph)
    order = graph.topological_order.tolist()
    stage = [0] * graph.n_ops
    for op in order:
        stage[op] = max((stage[b] + (label[b] != label[op]) for b in before[op]), default=0)
    for op in reversed(order):
        latest = min((stage[a] - (label[a] != label[op]) for a in after[op]), default=stage[op])
        if any(label[a] == label[op] and stage[a] == latest for a in after[op]):
            stage[op] = latest
    return stage
