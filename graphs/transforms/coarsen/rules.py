"""Merging by rule: chains, element-wise followers, modules."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from graphs.errors import GraphError
from graphs.op_kinds import ELEMENTWISE, base_name
from graphs.opgraph import OpGraph
from graphs.transforms.coarsen.contraction import contract, merge_classes, neighbours
from graphs.transforms.derived import Derived


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
