"""Calls of an exported program that only run a subgraph under some setting are opened, views in place made views."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphs.capture.costs import out_of_place, shows_other_memory
from graphs.capture.trace import subgraphs_of, value_of

# Gradients off, autocast, checkpointing.
_WRAPPERS = ("wrap", "tag_activation_checkpoint", "invoke_subgraph")
_AUTOCAST = "wrap_with_autocast"


def flattened(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, Any]]:
    """The graph with every wrapper's subgraph in its place and no view in place, and what became of each old node.

    A wrapper of several results becomes a tuple of nodes. Nodes under autocast keep its arguments in
    ``meta["autocast"]``. The node of a subgraph's own constant is named by its path from the outermost module.
    """
    if not any(_is_wrapper(node) or _is_view_in_place(node) for node in graph.nodes):
        return graph, {node: node for node in graph.nodes}
    result = fx.Graph(owning_module=graph.owning_module)
    into: dict[fx.Node, Any] = {}
    _copy(graph, result, into, "", None)
    return result, into


def _is_wrapper(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith(_WRAPPERS) and len(subgraphs_of(node)) == 1


def _is_view_in_place(node: fx.Node) -> bool:
    return torch.Tag.inplace_view in getattr(node.target, "tags", ())


def _copy(source: fx.Graph, target: fx.Graph, into: dict[fx.Node, Any], prefix: str, autocast: Any) -> Any:
    """Append the nodes of one graph; returns the value of its output."""
    for node in source.nodes:
        if node in into:
            continue
        if node.op == "output":
            value = _mapped(node.args[0], into)
            if not prefix:
                target.output(value)
            return value
        if _is_wrapper(node):
            into[node] = _opened(node, target, into, prefix, autocast)
            continue
        if node.op == "call_function" and _is_item_of_tuple(node, into):
            into[node] = into[node.args[0]][node.args[1]]
            continue
        copied = into[node] = target.node_copy(node, lambda n: into[n])
        copied.target = out_of_place(node.target)
        if shows_other_memory(node.target):
            info, shown = value_of(node), [n for n in node.args if isinstance(n, fx.Node)][-1]
            copied.target, copied.kwargs = torch.ops.aten.as_strided.default, {}
            copied.args = (into[shown], *info.layout[:2], info.offset)
        if node.op == "get_attr" and prefix:
            copied.target = f"{prefix}.{node.target}"
        if autocast is not None:
            copied.meta["autocast"] = autocast
    return None


def _opened(node: fx.Node, target: fx.Graph, into: dict[fx.Node, Any], prefix: str, autocast: Any) -> Any:
    subgraph = subgraphs_of(node)[0].graph
    path = next(str(n.target) for n in node.all_input_nodes if n.op == "get_attr")
    placeholders = [n for n in subgraph.nodes if n.op == "placeholder"]
    operands = list(node.args)
    if operands and isinstance(operands[-1], (tuple, list)):
        operands[-1:] = operands[-1]
    given = operands[len(operands) - len(placeholders) :]
    inner: dict[fx.Node, Any] = {
        placeholder: _mapped(operand, into) for placeholder, operand in zip(placeholders, given, strict=True)
    }
    if str(node.target).startswith(_AUTOCAST):
        autocast = tuple(operands[:4])
    output = _copy(subgraph, target, inner, f"{prefix}.{path}" if prefix else path, autocast)
    return tuple(output) if isinstance(output, list) else output


def _is_item_of_tuple(node: fx.Node, into: dict[fx.Node, Any]) -> bool:
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and isinstance(into.get(source), tuple) and isinstance(node.args[1], int)


def _mapped(value: Any, into: dict[fx.Node, Any]) -> Any:
    if isinstance(value, fx.Node):
        return into[value]
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(item, into) for item in value)
    return value
