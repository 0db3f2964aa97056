"""A traced step as torch.fx nodes, whoever traced it: torch.export (here) or the recorder of `capture_record`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from graphs.capture_failure import data_dependent_size
from graphs.capture_values import TensorInfo, UnknownSizeError, describe

PARAMETER, BUFFER, CONSTANT = "parameter", "buffer", "constant"


@dataclass(frozen=True)
class State:
    """A tensor that is there before the step: a parameter, a buffer or a constant.

    Attributes:
        name: dotted path, e.g. ``"encoder.0.weight"``.
        kind: ``"parameter"``, ``"buffer"`` or ``"constant"``.
        info: its layout and memory; states whose memory overlaps are tied.
    """

    name: str
    kind: str
    info: TensorInfo

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Trace:
    """A step in program order.

    Node metadata read by `capture_lower`: ``info`` (or ``val``, described on demand), ``module`` (or
    ``nn_module_stack``), ``phase``, ``mirror`` (a backward node's forward node), ``call`` (number of a module call).

    Attributes:
        graph: placeholders, calls and one output.
        states: what each state placeholder stands for.
        inputs: name of each tensor given by the caller.
        results: nodes whose values leave the step.
        writes: (state placeholder, node): the node's value replaces the state.
        gradients: (parameter placeholder, node of its gradient).
        leaves: class name of each called leaf module, by the number of its call (module granularity).
    """

    graph: fx.Graph
    states: Mapping[fx.Node, State]
    inputs: Mapping[fx.Node, str]
    results: tuple[fx.Node, ...]
    writes: tuple[tuple[fx.Node, fx.Node], ...] = ()
    gradients: tuple[tuple[fx.Node, fx.Node], ...] = ()
    leaves: Mapping[int, str] = field(default_factory=dict)


def value_of(node: fx.Node) -> Any:
    """`TensorInfo` of a node's value, nested as the value is (see `describe`).

    Raises:
        CaptureError: a size depends on data; the message names the module and the line.
    """
    info = node.meta.get("info", node)
    if info is node:
        try:
            info = node.meta["info"] = describe(node.meta.get("val"))
        except UnknownSizeError as error:
            raise data_dependent_size(module_of(node), str(node.meta.get("stack_trace", "")), str(error)) from None
    return info


def module_of(node: fx.Node) -> str:
    """Dotted path of the innermost module whose ``forward`` made the node."""
    path = node.meta.get("module")
    if path is None:
        stack = node.meta.get("nn_module_stack") or {}
        # A second call of one module is marked "path@1".
        path = next(reversed(stack.values()))[0].partition("@")[0] if stack else ""
    return str(path)


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


def input_names(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor among the arguments, named after ``forward``'s parameters."""
    try:
        bound: Mapping[str, Any] = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {**{f"arg{i}": value for i, value in enumerate(args)}, **kwargs}
    found = []
    for path, value in pytree.tree_flatten_with_path(dict(bound))[0]:
        if isinstance(value, torch.Tensor):
            keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
            found.append(("_".join(keys), value))
    return found
