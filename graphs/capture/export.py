"""Traces by torch.export, kept quiet: for inference, and from programs exported elsewhere."""

from __future__ import annotations

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

from graphs.capture.costs import general_kernels
from graphs.capture.record import output_tensors
from graphs.capture.trace import BUFFER, CONSTANT, PARAMETER, State, Trace, describe, value_of


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """Export a model for inference; whatever type it returns, the program returns the tensors in it."""
    # torch.export refuses outputs of types it does not know, such as caches.
    flat_output = model.register_forward_hook(lambda module, inputs, output: tuple(output_tensors(output)))
    try:
        with torch.no_grad(), general_kernels(), _quiet():
            return torch.export.export(model, args, kwargs, strict=False)
    finally:
        flat_output.remove()


def trace_of(program: ExportedProgram) -> Trace:
    """The trace inside an exported program."""
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    states: dict[fx.Node, State] = {}
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
    return Trace(program.graph, states, inputs, tuple(results), tuple(writes))


_STATE_KINDS = {InputKind.PARAMETER: PARAMETER, InputKind.BUFFER: BUFFER, InputKind.CONSTANT_TENSOR: CONSTANT}


def _state(program: ExportedProgram, name: str, kind: str, node: fx.Node) -> State:
    # The program's own tensors show which names are tied; placeholders of a program read from a file do not.
    value = program.state_dict.get(name)
    if value is None:
        value = program.constants.get(name)
    info = describe(value) if isinstance(value, torch.Tensor) else value_of(node)
    return State(name, kind, info)


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
