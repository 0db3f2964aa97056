"""Traces by torch.export, kept quiet: for inference, and from programs exported elsewhere."""

from __future__ import annotations

import dataclasses
import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from graphs.capture.costs import general_kernels, out_of_place, shows_other_memory
from graphs.capture.record import argument_tensors, output_tensors
from graphs.capture.trace import (
    BUFFER,
    CONSTANT,
    PARAMETER,
    Outputs,
    TensorInfo,
    Trace,
    TracedState,
    describe,
    subgraphs_of,
    value_of,
)

# Gradients off, autocast, checkpointing.
_WRAPPERS = ("wrap", "tag_activation_checkpoint", "invoke_subgraph")
_AUTOCAST = "wrap_with_autocast"


def flattened(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, Any]]:
    """The graph with every wrapper's subgraph in its place and no view in place, and what became of each old node.

    A wrapper of several results becomes a tuple of nodes. Nodes under autocast keep its arguments in
    ``meta["autocast"]``. The node of a subgraph's own constant is named by its path from the outermost module.
    """
    if not any(_is_wrapper(n) or torch.Tag.inplace_view in getattr(n.target, "tags", ()) for n in graph.nodes):
        return graph, {node: node for node in graph.nodes}
    result = fx.Graph(owning_module=graph.owning_module)
    into: dict[fx.Node, Any] = {}
    _copy(graph, result, into, "", None)
    return result, into


def _is_wrapper(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith(_WRAPPERS) and len(subgraphs_of(node)) == 1


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


def trace_inference(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """Export a model for inference; whatever type it returns, the program returns the tensors in it."""
    returned: list[Any] = []

    def flat_output(module: nn.Module, inputs: Any, output: Any) -> tuple[torch.Tensor, ...]:
        returned[:] = [output]
        return tuple(output_tensors(output))

    # torch.export refuses outputs of types it does not know, such as caches.
    hook = model.register_forward_hook(flat_output)
    try:
        with torch.no_grad(), general_kernels(), _quiet(), _DataAssignments():
            program = torch.export.export(model, args, kwargs, strict=False)
    finally:
        hook.remove()
    trace = trace_of(program)
    names: dict[int, list[str]] = {}
    for name, tensor in argument_tensors(model, args, kwargs):
        names.setdefault(id(tensor), []).append(name)
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    taken = [node for node in trace.inputs if isinstance(value_of(node), TensorInfo)]
    arguments = {names[id(leaf)].pop(0): node for leaf, node in zip(given, taken, strict=True)}
    outputs = Outputs.of(returned[0], output_tensors(returned[0]), trace.results, {})
    return dataclasses.replace(trace, arguments=arguments, outputs=outputs)


class _DataAssignments(TorchFunctionMode):
    """Refuses what torch.export does not see: a tensor that is given the data of another.

    Raises:
        NotImplementedError: ``x.data = y``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise NotImplementedError("torch.export does not see x.data = y")
        return func(*args, **(kwargs or {}))


def trace_of(program: ExportedProgram) -> Trace:
    """The trace inside an exported program."""
    signature = program.graph_signature
    graph, into = flattened(program.graph)
    nodes = {node.name: into[node] for node in program.graph.nodes if isinstance(into.get(node), fx.Node)}
    states: dict[fx.Node, TracedState] = {}
    inputs: dict[fx.Node, str] = {}
    for spec in signature.input_specs:
        node = nodes.get(getattr(spec.arg, "name", ""))
        if node is None or node.op != "placeholder":
            continue
        kind = _STATE_KINDS.get(spec.kind)
        if kind is not None:
            states[node] = _state(program, str(spec.target), kind, node)
        elif spec.kind is InputKind.USER_INPUT and value_of(node) is not None:
            inputs[node] = node.name
    placeholder = {state.name: node for node, state in states.items()}
    results: list[fx.Node] = []
    writes: list[tuple[fx.Node, fx.Node]] = []
    for output in signature.output_specs:
        node = nodes.get(getattr(output.arg, "name", ""))
        if node is None:
            continue
        if output.kind is OutputKind.BUFFER_MUTATION and output.target in placeholder:
            writes.append((placeholder[output.target], node))
        else:
            results.append(node)
    return Trace(graph, states, inputs, tuple(results), tuple(writes))


_STATE_KINDS = {InputKind.PARAMETER: PARAMETER, InputKind.BUFFER: BUFFER, InputKind.CONSTANT_TENSOR: CONSTANT}


def _state(program: ExportedProgram, name: str, kind: str, node: fx.Node) -> TracedState:
    # The program's own tensors show which names are tied; placeholders of a program read from a file do not.
    value = program.state_dict.get(name)
    if value is None:
        value = program.constants.get(name)
    info = describe(value) if isinstance(value, torch.Tensor) else value_of(node)
    return TracedState(name, kind, info, value if kind == CONSTANT else None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings about the borrowed weights, and the half-made graph that a failed export prints, off the screen."""
    printed = io.StringIO()
    with redirect_stderr(printed), warnings.catch_warnings():
        # Recurrent layers rebuild their list of weights when these are replaced; that is undone afterwards.
        warnings.filterwarnings("ignore", message="The tensor attributes? ", category=UserWarning)
        yield
    # It went well, so what was printed is the model's own.
    sys.stderr.write(printed.getvalue())
