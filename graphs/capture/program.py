"""`Program`: a captured step that can be run, each of its nodes tied to the op of the graph it became."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from graphs.capture.drafts import Drafts, Operand
from graphs.capture.trace import TensorInfo, Trace, layouts
from graphs.opgraph import OpGraph
from graphs.origin import CapturedStep, ModelCall, keep_step

_FEW = 4096  # numbers of an example input that may be kept


@dataclass(frozen=True)
class ProgramState:
    """A parameter, buffer or constant of a program; tied ones are one.

    Attributes:
        names: dotted paths of all that share its memory.
        kind: ``"parameter"``, ``"buffer"`` or ``"constant"``.
        binds: it is learned or written, so it is on one device only; else a copy is wherever it is read.
        users: ops that read or write it, increasing.
    """

    names: tuple[str, ...]
    kind: str
    binds: bool
    users: tuple[int, ...]


class CallTensors(NamedTuple):
    """The tensors of the graph that one of its ops writes.

    Attributes:
        results: of each flat result of its call, None for what is no tensor of the graph.
        written: of each argument that it writes in place.
    """

    results: tuple[int | None, ...]
    written: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """A traced step and the graph made of it.

    Nodes that are no ops (views, memory without content, sizes) have no entry in ``op_of``: whoever reads them makes
    them on the spot.

    Attributes:
        graph: as `graphs.capture.capture` gives it.
        trace: what was recorded.
        train: whether it is a training step.
        op_of: number in the graph of each node that is an op, or an input that is read.
        state_of: index into ``states`` of each placeholder that is one.
        states: parameters, buffers and constants.
        constants: the data of the constants, by name.
        memory: numbers of the pieces of memory that a node's value lies in, nested as the value is.
        settings: what each argument was that is no tensor, by its path.
        call_tensors: what each op of the graph writes, by its number.
        tensor_infos: each tensor of the graph as its producer writes it.
        state_infos: each of ``states``, as it is.
        tables: tensor of the graph -> the state that it is, of read-only states that are ops of their own.
    """

    graph: OpGraph
    trace: Trace
    train: bool
    op_of: Mapping[fx.Node, int]
    state_of: Mapping[fx.Node, int]
    states: tuple[ProgramState, ...]
    constants: Mapping[str, torch.Tensor]
    memory: Mapping[fx.Node, Any]
    settings: Mapping[str, Any]
    call_tensors: Mapping[int, CallTensors]
    tensor_infos: Mapping[int, TensorInfo]
    state_infos: tuple[TensorInfo, ...]
    tables: Mapping[int, int]


def with_step(program: Program, call: ModelCall) -> OpGraph:
    """The graph of a program, which keeps it, and knows its model for as long as somebody has that."""
    return keep_step(program.graph, replace(captured_step(program), call=_weakly(call), model=_known(call.model)))


def captured_step(program: Program) -> CapturedStep:
    """A program without the data of the model."""
    kept = replace(program, constants={})
    return CapturedStep(lambda: kept, lambda: _digest(kept))


def _weakly(call: ModelCall) -> Callable[[int], ModelCall | None]:
    """The call while its model lives. Of its inputs whole numbers are kept, and the shapes of all others."""
    reference, rest = _known(call.model), replace(call, model=None)
    args, kwargs = pytree.tree_map(_light, (call.args, call.kwargs))

    def again(samples: int) -> ModelCall | None:
        model = reference()
        return None if model is None else replace(rest, model=model, args=args, kwargs=kwargs)

    return again


def _known(model: nn.Module) -> Callable[[], nn.Module | None]:
    """The model, as long as somebody else has it, unless it takes no memory."""
    if all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return lambda: model
    return weakref.ref(model)


def _light(leaf: Any) -> Any:
    """A tensor without memory, unless it is small, or of whole numbers, which may be those of words."""
    if not isinstance(leaf, torch.Tensor) or leaf.is_meta:
        return leaf
    is_needed = leaf.numel() <= _FEW or not (leaf.is_floating_point() or leaf.is_complex())
    return leaf.detach() if is_needed else leaf.detach().to("meta")


def _digest(program: Program) -> str:
    """Hash of all calls with their shapes."""
    digest = hashlib.sha256()
    for node in program.trace.graph.nodes:
        digest.update(repr((node.name, str(node.target), node.args, node.kwargs, layouts(node))).encode())
    return digest.hexdigest()


def program_of(
    trace: Trace,
    drafts: Drafts,
    graph: OpGraph,
    train: bool,
    originals: Mapping[int, torch.Tensor],
    settings: Mapping[str, Any],
) -> Program:
    """Tie the trace to the graph that `emit` made of its drafts; ``originals``: by the id of its twin."""
    names: list[list[str]] = [[] for _ in drafts.states]
    constants = {}
    for node, index in drafts.of_state.items():
        state = trace.states.get(node)
        name = str(node.target) if state is None else state.name
        names[index].append(name)
        tensor = node.meta.get("val") if state is None else state.tensor
        if tensor is not None:
            is_fake = isinstance(tensor, FakeTensor) or tensor.is_meta
            tensor = originals.get(id(tensor), getattr(tensor, "constant", None) if is_fake else tensor)
        if tensor is not None:
            constants[name] = tensor
    users: list[list[int]] = [[] for _ in drafts.states]
    for draft in drafts.ops:
        for state_number in draft.states:
            if draft.number is not None:
                users[state_number].append(draft.number)
    states = tuple(
        ProgramState(tuple(own), use.kind, use.binds, tuple(sorted(ops)))
        for own, use, ops in zip(names, drafts.states, users, strict=True)
    )
    op_of = {node: number for node, i in drafts.of_node.items() if (number := drafts.ops[i].number) is not None}
    return Program(
        graph, trace, train, op_of, dict(drafts.of_state), states, constants, drafts.memory, settings, *_tensors(drafts)
    )


def _tensors(
    drafts: Drafts,
) -> tuple[dict[int, CallTensors], dict[int, TensorInfo], tuple[TensorInfo, ...], dict[int, int]]:
    """``call_tensors``, ``tensor_infos``, ``state_infos`` and ``tables`` of a `Program`."""
    is_read = [value.is_result for value in drafts.values]
    for op in drafts.ops:
        for value in op.inputs if op.number is not None else ():
            is_read[value] = True
    # As `emit` lists them: by the op that writes them.
    listed = sorted(
        (number, v)
        for v, value in enumerate(drafts.values)
        if is_read[v] and (number := drafts.ops[value.producer].number) is not None
    )
    tensor_of = {v: tensor for tensor, (_, v) in enumerate(listed)}
    infos: dict[int, TensorInfo] = {}

    def known(operand: Operand | None) -> int | None:
        tensor = None if operand is None or operand.value is None else tensor_of.get(operand.value)
        if tensor is not None and operand is not None:
            infos[tensor] = operand.root.info
        return tensor

    writes = {}
    for call in drafts.calls:
        number = drafts.ops[call.draft].number
        if number is not None:
            writes[number] = CallTensors(tuple(map(known, call.outputs)), tuple(map(known, call.written)))
    for draft, operand in drafts.sources:
        number = drafts.ops[draft].number
        if number is not None:
            writes[number] = CallTensors((known(operand),), ())
    tables = {}
    named = {use.name: s for s, use in enumerate(drafts.states)}
    for op in drafts.ops:
        if op.number is not None and op.is_table:
            table, state = tensor_of[op.outputs[0]], named[op.module]
            tables[table], infos[table] = state, drafts.roots[state].info
    return writes, infos, tuple(root.info for root in drafts.roots), tables
