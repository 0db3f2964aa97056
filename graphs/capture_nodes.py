"""Arguments and results of traced nodes, taken apart and put together."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphs.capture_costs import Signature, cost
from graphs.capture_trace import value_of
from graphs.capture_values import Layout, TensorInfo


def flat(value: Any) -> list[Any]:
    """Leaves of nested lists, tuples and dicts; records are leaves."""
    if type(value) in (TensorInfo, Layout) or not isinstance(value, (tuple, list, dict)):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [leaf for item in items for leaf in flat(item)]


def nested(shape: Any, leaves: Iterator[Any]) -> Any:
    """The leaves, nested as ``shape`` is."""
    if type(shape) is TensorInfo or not isinstance(shape, (tuple, list)):
        return next(leaves)
    return tuple(nested(item, leaves) for item in shape)


def layouts(value: Any) -> Any:
    """Arguments or results with their `Layout` for each tensor, as tuples all the way down."""
    if isinstance(value, fx.Node):
        value = value_of(value)
    if type(value) is TensorInfo:
        return value.layout
    if isinstance(value, dict):
        return tuple((key, layouts(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(layouts(item) for item in value)
    return value


def subgraphs_of(node: fx.Node) -> list[fx.GraphModule]:
    """Branches, loop bodies or wrapped regions that a higher-order call is given."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    owner = node.graph.owning_module
    names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    found = [operator.attrgetter(name)(owner) for name in names]
    return [module for module in found if isinstance(module, fx.GraphModule)]


def subgraph_flops(subgraph: fx.GraphModule) -> float:
    """FLOPs of a branch or loop body, once."""
    calls = [node for node in subgraph.graph.nodes if node.op == "call_function"]
    return sum(cost(n.target, layouts(n.args), layouts(n.kwargs), layouts(n)).flops for n in calls)


def written_nodes(node: fx.Node, facts: Signature) -> list[Any]:
    """Nodes of the arguments that a call writes in place."""
    found = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in facts.writes]
    return [leaf for leaf in flat(found) if isinstance(leaf, fx.Node)]


def dtype_name(dtype: torch.dtype) -> str:
    """E.g. ``"float32"``."""
    return str(dtype).removeprefix("torch.")
