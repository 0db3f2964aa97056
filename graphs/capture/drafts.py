"""Ops, tensors and states while a graph is being captured: numbered lists, still with dead code in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from graphs.capture.trace import BUFFER, CONSTANT, PARAMETER, TensorInfo
from graphs.opgraph import Phase, Work
from graphs.ops.table import NO_FACTS, WorkFacts
from graphs.recipes import number_bytes
from graphs.records import Part

# Ops whose result is a gradient of a weight where what they read is one of it, or of a part of it.
_HANDS_ON = frozenset(("add", "add_", "cat", "clone", "copy_", "_to_copy", "select_backward", "slice_backward"))
_MAKES_BOTH = "convolution_backward"  # gradients of both factors; of a weight alone it is known for what it is


@dataclass(eq=False, slots=True)
class Root:
    """Memory of its own, which views share.

    Attributes:
        info: the tensor as its producer writes it, or the state as it is.
        size_bytes: its size.
        value: number of its current version, None while nothing in the step has written it.
        state: number of the state that it is, if it is one.
    """

    info: TensorInfo
    size_bytes: int
    value: int | None = None
    state: int | None = None


class Operand(NamedTuple):
    """A tensor that a call reads or writes: a version of a root, through a view."""

    root: Root
    value: int | None
    info: TensorInfo


class DraftCall(NamedTuple):
    """The call that a draft was made of, for those who ask how it may be split.

    Attributes:
        draft: number of the draft.
        target: what is called.
        args, kwargs: its arguments with a `Layout` for each tensor.
        inputs: its tensor arguments, in order.
        outputs: its results, flat; None for what is no tensor.
        written: the arguments written in place, as they are afterwards.
        gathers: it reads no more of its first argument than it writes.
    """

    draft: int
    target: Any
    args: Any
    kwargs: Any
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand | None, ...]
    written: tuple[Operand, ...]
    gathers: bool


@dataclass(slots=True, eq=False)
class DraftRow:
    """A way to split a draft.

    Attributes:
        axis: as in `graphs.records.SplitRow`.
        values, states: the part of each tensor and state that is not replicated, by number.
        whole_bytes: bytes read that every part has in full.
        is_whole: nothing is divided: every part does the whole work.
        sums_bytes: as in `graphs.records.SplitRow`.
    """

    axis: str
    values: dict[int, Part]
    states: dict[int, Part]
    whole_bytes: float = 0.0
    is_whole: bool = False
    sums_bytes: float = 0.0


@dataclass(slots=True, eq=False)
class Draft:
    """An op to be; values, states and other drafts are named by their numbers.

    Attributes:
        label: last part of the op's name, e.g. ``"conv2d"``; ``module`` is put before it.
        kind, module, dtype, flops, kernels, workspace_bytes, phase: as in `graphs.opgraph.Op`.
        moved_bytes: bytes read, and written in place; what it writes to ``outputs`` is added if somebody reads it.
        inputs: values read, in order, each once.
        outputs: values written.
        states: states read or written.
        writes_state: it changes a state, so it stays even if nobody reads its outputs.
        mirror: forward draft a backward draft belongs to.
        call: number of the leaf module call it was made in, None outside.
        number: of the op it became, None while it is none.
        rows: the ways in which it may be split.
        facts: its work and its extents.
    """

    label: str
    kind: str
    module: str = ""
    dtype: str = "float32"
    flops: float = 0.0
    kernels: int = 1
    moved_bytes: float = 0.0
    workspace_bytes: int = 0
    phase: Phase = Phase.FORWARD
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    writes_state: bool = False
    mirror: int | None = None
    call: int | None = None
    number: int | None = None
    rows: list[DraftRow] = field(default_factory=list)
    facts: WorkFacts = NO_FACTS

    @property
    def is_input(self) -> bool:
        return self.kind == "input"

    @property
    def is_table(self) -> bool:
        """Whether it only hands out a state that nobody writes."""
        return self.kind in (BUFFER, CONSTANT) and self.kernels == 0


@dataclass(slots=True, eq=False)
class Value:
    """A tensor to be.

    Attributes:
        producer: the draft that writes it.
        size_bytes: its size; 0 for a new version of a state, whose bytes are kept anyway.
        is_result: it leaves the step.
        gradient_of: states it is the final gradient of.
        is_float: whether gradients can flow through it.
        is_fresh: it is written as a whole; else only the part that ``moved_bytes`` of its producer counts already.
        in_place: it lies in the bytes that its states keep, and ``moved_bytes`` of its producer counts it already.
    """

    producer: int
    size_bytes: int
    is_result: bool = False
    gradient_of: list[int] = field(default_factory=list)
    is_float: bool = True
    is_fresh: bool = True
    in_place: bool = False

    @property
    def written_bytes(self) -> int:
        return self.size_bytes if self.is_fresh and not self.in_place else 0


@dataclass(slots=True, eq=False)
class StateUse:
    """A parameter, buffer or constant; tied ones are one state.

    Attributes:
        name: of the first of the tied ones.
        kind: as in `graphs.capture.trace.State`.
        size_bytes: its bytes, once.
        dtype: of its elements.
        trained: an update op writes it.
        gradient_bytes, optimizer_bytes: kept beside it: its gradient, and what the optimizer remembers.
        written: some op of the step writes it.
        rows: the ways in which it may be split: an axis and the part of it.
    """

    name: str
    kind: str
    size_bytes: int
    dtype: str
    trained: bool = False
    written: bool = False
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    rows: list[tuple[str, Part]] = field(default_factory=list)

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def binds(self) -> bool:
        """All its readers must share a device: it is learned or written in place, so it cannot be in two places."""
        return self.kind == PARAMETER or self.written


@dataclass(slots=True, eq=False)
class Drafts:
    """Findings of one walk over a trace; `inputs` come first in ``ops``.

    ``of_node``: the draft of each node of the trace that computes; ``of_state``: the state each placeholder stands for;
    ``memory``: for each node a number for every piece of memory that its value lies in, nested as the value is;
    ``calls``: the calls of drafts; ``sources``: (draft, tensor) of each input; ``updates``: (draft, gradients,
    parameter) of each update; ``roots``: of each state.
    """

    ops: list[Draft] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    states: list[StateUse] = field(default_factory=list)
    of_node: dict[fx.Node, int] = field(default_factory=dict)
    of_state: dict[fx.Node, int] = field(default_factory=dict)
    memory: dict[fx.Node, Any] = field(default_factory=dict)
    calls: list[DraftCall] = field(default_factory=list)
    sources: list[tuple[int, Operand]] = field(default_factory=list)
    updates: list[tuple[int, tuple[Operand, ...], Root]] = field(default_factory=list)
    roots: list[Root] = field(default_factory=list)

    def add(self, draft: Draft) -> int:
        self.ops.append(draft)
        return len(self.ops) - 1

    def add_value(self, value: Value) -> int:
        self.values.append(value)
        self.ops[value.producer].outputs.append(len(self.values) - 1)
        return len(self.values) - 1

    def mark_weight_gradients(self) -> None:
        """Find the products whose result is the gradient of a state, or is added to others or copied to be one."""
        stack = [value.producer for value in self.values if value.gradient_of]
        seen = set(stack)
        while stack:
            op = self.ops[stack.pop()]
            if op.facts.work is Work.PRODUCT and op.phase is Phase.BACKWARD and op.label != _MAKES_BOTH:
                op.facts = op.facts._replace(work=Work.WEIGHT_GRADIENT)
            if op.label in _HANDS_ON:
                before = {self.values[v].producer for v in op.inputs} - seen
                seen |= before
                stack += before

    def narrow_masks(self) -> None:
        """Count the mask of each dropout as GPUs keep it: truth values, a byte each, made beside what is dropped.

        On the CPU, where models are traced, it is drawn and scaled in the format of what is dropped, in three kernels;
        a GPU's `native_dropout` reads the tensor and writes the result and the mask.
        """
        readers = self.readers([True] * len(self.ops))
        for drawn, op in enumerate(self.ops):
            if op.label != "bernoulli_" or len(op.outputs) != 1 or len(readers[op.outputs[0]]) != 1:
                continue
            (scaled,) = readers[op.outputs[0]]
            after = self.ops[scaled]
            if after.label != "div_" or after.inputs != op.outputs or len(after.outputs) != 1:
                continue
            (mask,) = after.outputs
            users, width = readers[mask], number_bytes(op.dtype)
            if not users or self.values[mask].is_result or any(self.ops[i].label != "mul" for i in users):
                continue
            whole = self.values[mask].size_bytes
            for number in (drawn, scaled):
                self.ops[number].dtype = "bool"
                self.values[self.ops[number].outputs[0]].size_bytes = whole // width
            op.moved_bytes, after.moved_bytes = 0.0, float(whole // width)
            for number in users:
                is_forward = self.ops[number].phase is Phase.FORWARD
                self.ops[number].moved_bytes -= whole if is_forward else whole - whole // width

    def live(self) -> list[bool]:
        """Per op, whether a result, a state or an update depends on it."""
        alive = [False] * len(self.ops)
        stack = [value.producer for value in self.values if value.is_result]
        stack += [i for i, op in enumerate(self.ops) if op.writes_state]
        while stack:
            i = stack.pop()
            if not alive[i]:
                alive[i] = True
                stack += [self.values[v].producer for v in self.ops[i].inputs]
        return alive

    def readers(self, alive: Iterable[bool]) -> list[list[int]]:
        """For each value, the live ops that read it, increasing."""
        found: list[list[int]] = [[] for _ in self.values]
        for i, is_alive in enumerate(alive):
            if is_alive:
                for value in self.ops[i].inputs:
                    found[value].append(i)
        return found
