"""Local functions of an ONNX model, inlined; counted first, as a few small functions can stand for endless nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import networkx as nx
import onnx

from graphs.errors import GraphError
from graphs.readers.onnx_costs import subgraphs

MOST_NODES = 1_000_000  # of a model after inlining; the largest exports have some ten thousand
MOST_BYTES = 2**30  # of those nodes: less than protobuf's own limit for one message, 2 GiB
_DEEPEST = 90  # calls inside calls; onnx itself refuses 100 in newer releases, and earlier ones go as deep on the stack

_Key = tuple[str, str, str]  # domain, name, overload


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every call of a local function replaced by the function's nodes.

    Raises:
        GraphError: a function calls itself, or is there twice; or inlining would give too many nodes.
    """
    if not model.functions:
        return model
    _check_calls(model)
    from onnx import inliner

    try:
        return inliner.inline_local_functions(model)
    except Exception as error:  # onnx raises several unrelated classes here
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise GraphError(f"its local functions cannot be inlined: {reason}; export the model again.") from None


def _check_calls(model: onnx.ModelProto) -> None:
    bodies = {_key(function.domain, function.name, function.overload): function for function in model.functions}
    if len(bodies) < len(model.functions):
        raise GraphError("a local function is defined twice; export the model again.")
    calls = nx.DiGraph()
    calls.add_nodes_from(bodies)
    for key, function in bodies.items():
        called = {_called(node) for node in _nodes(function.node)}
        calls.add_edges_from((key, other) for other in called if other in bodies)
    if not nx.is_directed_acyclic_graph(calls):
        name = nx.find_cycle(calls)[0][0][1]
        raise GraphError(f"local function {name!r} calls itself, which ONNX does not allow; export the model again.")
    sizes: dict[_Key, tuple[int, int, int]] = {}
    for key in reversed(list(nx.topological_sort(calls))):
        sizes[key] = _size(bodies[key].node, sizes)
    nodes, size, depth = _size(model.graph.node, sizes)
    if nodes > MOST_NODES or size > MOST_BYTES or depth > _DEEPEST:
        raise GraphError(
            f"its local functions stand for more than {MOST_NODES:,} nodes or {MOST_BYTES:,} bytes, or call each other "
            f"more than {_DEEPEST} deep; export the model with fewer calls."
        )


def _size(nodes: Iterable[onnx.NodeProto], sizes: dict[_Key, tuple[int, int, int]]) -> tuple[int, int, int]:
    """Nodes, their bytes and the depth of calls once every call among `nodes` is replaced by what it stands for."""
    count = size = depth = 0
    for node in _nodes(nodes):
        inner = sizes.get(_called(node))
        count += 1 if inner is None else inner[0]
        size += node.ByteSize() if inner is None else inner[1]
        depth = max(depth, 0 if inner is None else inner[2] + 1)
    return min(count, MOST_NODES + 1), min(size, MOST_BYTES + 1), depth  # or they would grow with every doubling


def _called(node: onnx.NodeProto) -> _Key:
    return _key(node.domain, node.op_type, node.overload)


def _key(domain: str, name: str, overload: str) -> _Key:
    return "" if domain == "ai.onnx" else domain, name, overload


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """These nodes, and those of the graphs inside control flow."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from _nodes(graph.node)
