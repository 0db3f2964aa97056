"""Layers of a graph, as a person would see them: modules, cut no finer than needed to balance devices."""

from __future__ import annotations

import numpy as np

from env.problem import Problem
from env.units import Units
from graphs.module_paths import prefixes
from graphs.opgraph import IntArray, Phase

_FINEST = 4  # a module is opened if it is more than a quarter of one device's share of the work


def layers(units: Units) -> list[list[int]]:
    """Units by layer, layers in forward order (by their first forward op), units topologically within each.

    A layer is a module. A module is opened into its children if it is large and only holds others: it has no op of
    its own or contains a numbered list. So a list of recurrent cells gives one layer per cell over all time steps, and
    a residual block stays whole. Backward and update ops belong to the layer of their forward op; an op between
    layers to that of its producer, or else of its first consumer. Without module names every unit is a layer,
    backward and update ops still with their forward op. O(n log n + e).
    """
    graph = units.problem.graph
    layer = _labels(units.problem)
    position = graph.topological_position
    # The first forward op decides where a unit and a layer stand; data that is there from the start says nothing.
    late = np.where(graph.phase == Phase.FORWARD, 0, 2) + (units.problem.mean_op_s == 0)
    key = position + late * graph.n_ops
    by_unit = np.lexsort((key, units.problem.unit_of))
    of_unit = layer[by_unit[units.ptr[:-1]]]
    first = np.full(int(layer.max()) + 1, 4 * graph.n_ops, dtype=np.int64)
    np.minimum.at(first, layer, key)
    ordered = units.topological_order[np.argsort(first[of_unit[units.topological_order]], kind="stable")]
    cuts = np.flatnonzero(np.diff(of_unit[ordered])) + 1
    return [part.tolist() for part in np.split(ordered, cuts)]


def _labels(problem: Problem) -> IntArray:
    """int64 [n]: layer of each op, numbered arbitrarily, 0 or more."""
    graph = problem.graph
    own = np.where(graph.forward_of < 0, np.arange(graph.n_ops), -1)
    label = (_modules(problem) if any(graph.modules) else own).tolist()
    for op, mirrored in enumerate(graph.forward_of.tolist()):
        if mirrored >= 0 and label[mirrored] >= 0:
            label[op] = label[mirrored]
    producer, consumer, tensor = graph.edge_list
    order = graph.topological_position
    # The largest input decides; an op's inputs are labelled before it.
    for e in np.lexsort((-graph.transfer_bytes[tensor], order[consumer])).tolist():
        if label[consumer[e]] < 0:
            label[consumer[e]] = label[producer[e]]
    for e in np.lexsort((order[consumer], -order[producer])).tolist():
        if label[producer[e]] < 0:
            label[producer[e]] = label[consumer[e]]
    return np.maximum(np.array(label, dtype=np.int64), 0)


def _modules(problem: Problem) -> IntArray:
    """int64 [n]: number of the module that is each op's layer; -1 for ops of opened modules themselves."""
    graph = problem.graph
    own_s: dict[str, float] = {}
    has_own_op: set[str] = set()
    for path, seconds, phase in zip(graph.modules, problem.mean_op_s.tolist(), graph.phase.tolist(), strict=True):
        own_s[path] = own_s.get(path, 0.0) + seconds
        if phase == Phase.FORWARD and seconds > 0:
            has_own_op.add(path)
    work_s: dict[str, float] = {}
    has_child: set[str] = set()
    has_list: set[str] = set()
    for path, seconds in own_s.items():
        for prefix in prefixes(path):
            work_s[prefix] = work_s.get(prefix, 0.0) + seconds
            if prefix != path:
                has_child.add(prefix)
                if any(part.isdigit() for part in path[len(prefix) :].split(".")):
                    has_list.add(prefix)
    large_s = work_s[""] / (_FINEST * problem.cluster.n_devices)
    opened = {
        path
        for path in has_child
        if path == "" or (work_s[path] > large_s and (path in has_list or path not in has_own_op))
    }
    layer_of = {
        path: next((prefix for prefix in reversed(prefixes(path)) if prefix not in opened), None) for path in own_s
    }
    number = {layer: k for k, layer in enumerate(sorted({layer for layer in layer_of.values() if layer is not None}))}
    return np.array([-1 if (layer := layer_of[path]) is None else number[layer] for path in graph.modules])
