"""Coarsening that keeps schedules honest: always acyclic, always expandable back to ops.

Every function gives a `Coarse` (see `graphs.contract` for what it promises). Ops of different phases, or allowed on
different device kinds (by their own pins or those of their colocation group), are never merged.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from graphs.contract import Coarse, contract
from graphs.errors import GraphError
from graphs.opgraph import IntArray, OpGraph

__all__ = ["ELEMENTWISE", "Coarse", "by_module", "contract", "fuse_chains", "fuse_elementwise", "merge_classes"]

# Kinds without prefix and overload: "aten.relu.default", "onnx.Relu" and "ReLU" are all "relu".
# fmt: off
ELEMENTWISE = frozenset({
    "abs", "add", "addcdiv", "addcmul", "cast", "ceil", "celu", "clamp", "clip", "clone", "convert_element_type",
    "copy", "cos", "div", "dropout", "elu", "eq", "erf", "exp", "floor", "ge", "gelu", "gelu_backward", "gt",
    "hardsigmoid", "hardswish", "hardtanh", "le", "leaky_relu", "leakyrelu", "log", "logical_and", "logical_not",
    "logical_or", "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "native_dropout", "ne", "neg", "not", "pow",
    "reciprocal", "relu", "relu6", "remainder", "rsqrt", "rsub", "selu", "sigmoid", "sigmoid_backward", "sign", "silu",
    "silu_backward", "sin", "softplus", "sqrt", "square", "sub", "swish", "tanh", "tanh_backward",
    "threshold_backward", "to", "to_copy", "where",
})
# fmt: on


def fuse_chains(graph: OpGraph) -> Coarse:
    """Merge every op into its only input op where it is that op's only reader.

    Acyclic, because a chain is entered at its head only. A chain is cut where two colocation groups would meet.
    """
    return _fuse(graph, lambda op, before, fan_out: fan_out[before] == 1)


def fuse_elementwise(graph: OpGraph) -> Coarse:
    """Merge every element-wise op with a single input op into that op, as fusing compilers do.

    Acyclic, because a group is entered at its first op only. Where two colocation groups would meet, it is not merged.
    """
    elementwise = [_base(kind) in ELEMENTWISE for kind in graph.kinds]
    return _fuse(graph, lambda op, before, fan_out: elementwise[op])


def by_module(graph: OpGraph, depth: int | None = None) -> Coarse:
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


def merge_classes(graph: OpGraph) -> IntArray:
    """int64 [n]: ops of one number have the same phase and the same allowed device kinds, and so may be merged."""
    allowed: dict[int, frozenset[str] | None] = {}  # by colocation group; None is any device
    for op in np.flatnonzero(graph.colocation >= 0).tolist():
        label, own = int(graph.colocation[op]), frozenset(graph.pins[op]) or None
        before = allowed.get(label)
        allowed[label] = own if before is None else before if own is None else before & own
    numbers: dict[tuple[int, frozenset[str] | None], int] = {}
    result = [
        numbers.setdefault((phase, allowed[group] if group >= 0 else frozenset(pins) or None), len(numbers))
        for phase, group, pins in zip(graph.phase.tolist(), graph.colocation.tolist(), graph.pins, strict=True)
    ]
    return np.array(result, dtype=np.int64)


def _base(kind: str) -> str:
    """``aten.relu_.default`` and ``ReLU(inplace)`` as ``relu``."""
    parts = kind.lower().split("(")[0].split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).strip("_")


def _fuse(graph: OpGraph, wanted: object) -> Coarse:
    raise NotImplementedError


def _stages(graph: OpGraph, label: list[int]) -> list[int]:
    raise NotImplementedError


_ = pairwise
