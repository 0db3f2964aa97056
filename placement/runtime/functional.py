"""A captured program without writes in place, so that the versions of a tensor can be on different devices.

A write makes a new version of the memory it writes; who reads that memory later, also through views, reads the new
version. Writes to parameters and buffers stay what they are: all their readers are on one device.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphs.capture import Program
from graphs.capture.costs import signature
from graphs.capture.trace import TensorInfo, flat, value_of


@dataclass(frozen=True, eq=False)
class Functional:
    """A program's nodes in program order; only nodes in ``writes`` change an argument, which nobody reads later.

    Attributes:
        program: what it was made of.
        graph: its nodes; the program's own are left alone.
        new: the program's nodes -> the nodes that have their value when the step has ended.
        made_by: number of the op whose work each node is, for nodes whose value may be sent.
        state_of: index into the program's states of each placeholder that is one.
        names: of each placeholder that is a state its dotted path, of each that is an argument its path.
        writes: node -> position of the argument that it overwrites, where others may have a use for that argument.
        state_writes: nodes that write a parameter or buffer, with the index of that state.
        random: nodes that draw random numbers and read no data.
    """

    program: Program
    graph: fx.Graph
    new: dict[fx.Node, fx.Node] = field(default_factory=dict)
    made_by: dict[fx.Node, int] = field(default_factory=dict)
    state_of: dict[fx.Node, int] = field(default_factory=dict)
    names: dict[fx.Node, str] = field(default_factory=dict)
    writes: dict[fx.Node, int] = field(default_factory=dict)
    state_writes: dict[fx.Node, int] = field(default_factory=dict)
    random: set[fx.Node] = field(default_factory=set)


def functional(program: Program) -> Functional:
    """The program with a new version of a tensor for every write to it."""
    rewriter = _Rewriter(program)
    for node in program.trace.graph.nodes:
        rewriter.add(node)
    rewriter.finish()
    return rewriter.result


def after(value: Any, *_: Any) -> Any:
    """The first argument, once the others are there."""
    return value


def uninitialised(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory without content."""
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


@dataclass(eq=False)
class _Memory:
    """A piece of memory: the node that holds it as a whole, and how often it has been written."""

    base: fx.Node
    version: int = 0


class _Rewriter:
    """One pass over the old nodes in program order."""

    def __init__(self, program: Program) -> None:
        self.result = Functional(program, fx.Graph(owning_module=program.trace.graph.owning_module))
        self._program = program
        self._paths = {node: path for path, node in program.trace.arguments.items()}
        self._memory: dict[int, _Memory] = {}
        self._holders: set[fx.Node] = set()  # old nodes that hold a piece of memory as a whole
        self._overwritten: dict[fx.Node, fx.Node] = {}  # old node that writes -> the old node it writes to
        self._versions: dict[fx.Node, list[tuple[int, int]]] = {}  # old node -> memory and its version when made
        self._state_memory = {
            memory: index
            for node, index in program.state_of.items()
            if isinstance(memory := program.memory.get(node), int)
        }

    def add(self, node: fx.Node) -> None:
        if node.op == "output":
            return
        written = _written_argument(node)
        if node.op == "call_function" and signature(node.target).uninitialised:
            self._know(node, self._empty(node))
        elif written is None:
            self._know(node, self._copy(node))
        else:
            self._write(node, written)

    def finish(self) -> None:
        """Every old node's value as the step leaves it."""
        for node in list(self.result.new):
            self.result.new[node] = self._current(node)

    # -- values -----------------------------------------------------------------------------------------------

    def _know(self, old: fx.Node, made: fx.Node) -> None:
        program, result = self._program, self.result
        result.new[old] = made
        memory = program.memory.get(old)
        if isinstance(memory, int) and (memory not in self._memory or self._is_fresh_item(old, memory)):
            self._memory.setdefault(memory, _Memory(made))
            self._holders.add(old)
        self._note_versions(old)
        if old in program.state_of:
            result.state_of[made] = program.state_of[old]
            state = program.trace.states.get(old)
            result.names[made] = str(old.target) if state is None else state.name
        elif old.op == "placeholder":
            result.names[made] = self._paths.get(old, old.name)
        if old in program.op_of:
            result.made_by[made] = program.op_of[old]
        elif old.target is operator.getitem and made.args[0] in result.made_by:
            result.made_by[made] = result.made_by[made.args[0]]  # type: ignore[index]
        if _is_random(old) and not any(_with_content(made)):
            result.random.add(made)

    def _note_versions(self, old: fx.Node) -> None:
        own = [memory for memory in flat(self._program.memory.get(old)) if memory in self._memory]
        self._versions[old] = [(memory, self._memory[memory].version) for memory in own]

    def _is_fresh_item(self, old: fx.Node, memory: int) -> bool:
        """Whether a node takes a result that its op made out of an op's tuple."""
        source = old.args[0] if old.target is operator.getitem else None
        if not isinstance(source, fx.Node) or source not in self._program.op_of:
            return False
        return not any(memory in flat(self._program.memory.get(argument)) for argument in source.all_input_nodes)

    def _current(self, old: fx.Node) -> fx.Node:
        """The node that now has the value of an old one: made again where its memory was written since."""
        made = self.result.new[old]
        if all(self._memory[memory].version == version for memory, version in self._versions[old]):
            return made
        if old in self._holders:
            made = self._memory[self._versions[old][0][0]].base
        elif old in self._overwritten:
            made = self._current(self._overwritten[old])
        else:
            made = self._copy(old)
        self.result.new[old] = made
        self._note_versions(old)
        return made

    def _copy(self, node: fx.Node) -> fx.Node:
        return self.result.graph.node_copy(node, self._current)

    def _empty(self, node: fx.Node) -> fx.Node:
        layout = value_of(node).layout
        return self._call(uninitialised, (layout.shape, layout.stride, layout.dtype, torch.device("cpu")), node)

    def _call(self, target: Any, arguments: tuple[Any, ...], like: fx.Node) -> fx.Node:
        made = self.result.graph.call_function(target, arguments)
        made.meta["info"] = value_of(like)
        return made

    # -- writes -----------------------------------------------------------------------------------------------

    def _write(self, node: fx.Node, position: int) -> None:
        target: Any = node.args[position]
        memory = self._program.memory.get(target)
        if not isinstance(memory, int) or memory in self._state_memory:
            made = self._copy(node)
            if memory in self._state_memory:
                self.result.state_writes[made] = self._state_memory[memory]
            self._know(node, made)
            return
        held, number = self._memory[memory], self._program.op_of.get(node)
        if self._current(target) is held.base:
            made = base = self._copy(node)
            self.result.writes[made] = position
        else:
            # A part is written: that part of a copy of the whole.
            copied = self._call(torch.ops.aten.clone.default, (held.base,), held.base)
            held.base, held.version = copied, held.version + 1
            made = self._copy(node)
            base = self._call(after, (copied, made), copied)
        held.base, held.version = base, held.version + 1
        self._overwritten[node] = target
        self.result.new[node] = made
        self._note_versions(node)
        if number is not None:
            self.result.made_by[made] = self.result.made_by[base] = number
        if _is_random(node) and not any(_with_content(made)):
            self.result.random.add(made)


def _written_argument(node: fx.Node) -> int | None:
    """Position of the argument a node writes in place; None for none."""
    if node.op != "call_function":
        return None
    return next((i for i, _ in signature(node.target).writes if i < len(node.args)), None)


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _with_content(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors among a node's arguments that have content."""
    for argument in node.all_input_nodes:
        if argument.target is not uninitialised and isinstance(value_of(argument), TensorInfo):
            yield argument
