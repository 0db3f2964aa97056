"""A captured program without writes in place, so that the versions of a tensor can be on different devices.

A write makes a new version of the memory it writes; who reads that memory later, also through views, reads the new
version. Writes to parameters and buffers stay what they are, for all their readers are on one device, except writes
that are no op of the graph (step counters): these make versions too, and the last one is copied back.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx

from graphs.capture.again import draws, set_state
from graphs.capture.costs import signature
from graphs.capture.trace import TensorInfo, flat, value_of

if TYPE_CHECKING:
    from graphs.capture import Program


@dataclass(frozen=True, eq=False)
class Functional:
    """A program's nodes in program order; only nodes in ``overwrites`` change an argument.

    Attributes:
        program: what it was made of.
        graph: its nodes; the program's own are left alone.
        new: the program's nodes -> the nodes that have their value when the step has ended.
        made_by: number of the op whose work each node is, for nodes whose value may be sent.
        state_of: index into the program's states of each placeholder that is one.
        names: of each placeholder that is a state its dotted path, of each that is an argument its path.
        overwrites: nodes that overwrite their first argument, and those that copy it so that the copy can be written
            -> the nodes that lie in the memory of that argument: where nobody else reads one of them, it may be
            overwritten, else a copy of it.
        state_writes: nodes that write a parameter or buffer, with the index of that state.
        random: nodes that draw random numbers and read no data.
        redraws: random nodes of a forward pass that is run again (checkpointing) -> the node that drew first.
    """

    program: Program
    graph: fx.Graph
    new: dict[fx.Node, fx.Node] = field(default_factory=dict)
    made_by: dict[fx.Node, int] = field(default_factory=dict)
    state_of: dict[fx.Node, int] = field(default_factory=dict)
    names: dict[fx.Node, str] = field(default_factory=dict)
    overwrites: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    state_writes: dict[fx.Node, int] = field(default_factory=dict)
    random: set[fx.Node] = field(default_factory=set)
    redraws: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @cached_property
    def draws(self) -> tuple[tuple[int, fx.Node], ...]:
        """The nodes of ``random`` in program order, each with its number among all nodes."""
        return tuple((number, node) for number, node in enumerate(self.graph.nodes) if node in self.random)

    @cached_property
    def counters(self) -> frozenset[fx.Node]:
        """States that are written back at the end of a section, by no op of the graph."""
        writes = [node for node in self.state_writes if node not in self.made_by]
        return frozenset(node for write in writes for node in write.all_input_nodes if node in self.state_of)

    @cached_property
    def counted(self) -> frozenset[fx.Node]:
        """Nodes of no op whose value depends on such a state, so that they have to run before it is written back."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node in self.made_by or node in self.state_of or node in self.state_writes:
                continue
            if any(source in found or source in self.counters for source in node.all_input_nodes):
                found.add(node)
        return frozenset(found)


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


# Functions that return their argument where nothing is differentiated.
HANDING_ON = {after, *(getattr(torch.ops.aten, name).default for name in ("detach", "alias", "lift_fresh"))}


def uninitialised(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory without content."""
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


@dataclass(eq=False)
class _Memory:
    """A piece of memory: the node that holds it as a whole, how often it has been written, what lies in it since."""

    base: fx.Node
    version: int = 0
    members: list[fx.Node] = field(default_factory=list)

    def becomes(self, base: fx.Node) -> None:
        self.base, self.version, self.members = base, self.version + 1, [base]


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
        self._written_by_ops = {
            memory
            for node in program.trace.graph.nodes
            if node in program.op_of
            for target in _written(node)
            for memory in flat(program.memory.get(target))
        }

    def add(self, node: fx.Node) -> None:
        if node.op == "output":
            return
        written = [*_written(node), *self._statistics(node)]
        if node.op == "call_function" and signature(node.target).uninitialised:
            self._know(node, self._empty(node))
        elif not written:
            self._know(node, self._copy(node))
        else:
            self._write(node, written)

    def finish(self) -> None:
        """Every old node's value as the step leaves it, and the states that have had versions copied back."""
        for node in list(self.result.new):
            self.result.new[node] = self._current(node)
        places = {index: node for node, index in reversed(self.result.state_of.items())}
        for number, index in self._state_memory.items():
            if self._memory[number].version:
                base = self._memory[number].base
                back = self._call(torch.ops.aten.copy_.default, (places[index], base), base)
                self.result.state_writes[back] = index
        self._pair_redraws()

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
        elif made.target is operator.getitem and made.args[0] in result.made_by:
            result.made_by[made] = result.made_by[made.args[0]]  # type: ignore[index]
        if _is_random(made):
            result.random.add(made)

    def _note_versions(self, old: fx.Node) -> None:
        memory = self._program.memory.get(old)
        own = [number for number in flat(memory) if number in self._memory]
        self._versions[old] = [(number, self._memory[number].version) for number in own]
        if isinstance(memory, int):
            self._memory[memory].members.append(self.result.new[old])

    def _is_fresh_item(self, old: fx.Node, memory: int) -> bool:
        """True if a node takes a result that its op made out of an op's tuple."""
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
        viewed: Any = node.args[0] if node.args else None
        sized = _SIZED.get(node.target)
        if node.target is operator.getitem and viewed.target is _BROADCAST:
            # Each result is a view of its own argument, wherever the others are.
            viewed, sized = viewed.args[0][node.args[1]], torch.ops.aten.expand.default
        if sized is not None:
            made = self._call(sized, (self._current(viewed), list(value_of(node).layout.shape)), node)
        elif node.target is torch.ops.aten.as_strided.default:
            info = value_of(node)
            made = self._call(node.target, (self._held(node), *info.layout[:2], info.offset), node)
        elif node.target is torch.ops.aten.cat.default and (full := _with_entries(viewed)):
            made = self._call(node.target, ([self._current(one) for one in full], *node.args[1:]), node)
            made.kwargs = dict(node.kwargs)
        elif node.target in _CASTS:
            cast = self._current(viewed), value_of(node).layout.dtype
            made = self._call(torch.ops.aten.to.dtype, (*cast, *node.args[2:]), node)
            made.kwargs = {name: value for name, value in node.kwargs.items() if name != "other"}
        else:
            return self.result.graph.node_copy(node, self._current)
        made.meta = dict(node.meta)
        return made

    def _held(self, node: fx.Node) -> fx.Node:
        """The tensor into whose memory a view by strides looks: the one that holds it as a whole, not a view of it."""
        viewed, memory = node.args[0], self._program.memory.get(node)
        assert isinstance(viewed, fx.Node)
        info = value_of(viewed)
        base = self._memory[memory].base if isinstance(memory, int) and memory in self._memory else None
        if base is None or info.is_conjugate or value_of(base).layout.dtype != info.layout.dtype:
            return self._current(viewed)
        return base

    def _empty(self, node: fx.Node) -> fx.Node:
        layout = value_of(node).layout
        return self._call(uninitialised, (layout.shape, layout.stride, layout.dtype, torch.device("cpu")), node)

    def _call(self, target: Any, arguments: tuple[Any, ...], like: fx.Node) -> fx.Node:
        made = self.result.graph.call_function(target, arguments)
        made.meta["info"] = value_of(like)
        return made

    # -- writes -----------------------------------------------------------------------------------------------

    def _write(self, node: fx.Node, targets: list[fx.Node]) -> None:
        number = self._program.op_of.get(node)
        memories = [self._program.memory.get(target) for target in targets]
        if any(self._stays(memory) for memory in memories):
            made = self._filled(node) if _fills(node) else self._copy(node)
            states = [self._state_memory[m] for m in memories if isinstance(m, int) and m in self._state_memory]
            if states:
                self.result.state_writes[made] = states[0]
            self._know(node, made)
            return
        pieces = [self._memory[memory] for memory in dict.fromkeys(memories)]  # type: ignore[index]
        if _returns_it(node, targets) and self._current(targets[0]) is pieces[0].base:
            made = self._copy(node)
            self.result.overwrites[made] = tuple(pieces[0].members)
            bases = [made]
            if _is_random(made):
                self.result.random.add(made)
        else:
            # A part is written: that part of a copy of the whole.
            copies = [self._copied(piece) for piece in pieces]
            made = self._filled(node) if _fills(node) else self._copy(node)
            bases = [self._call(after, (copied, made), copied) for copied in copies]
        for piece, base in zip(pieces, bases, strict=True):
            piece.becomes(base)
            if number is not None:
                self.result.made_by[made] = self.result.made_by[base] = number
        if 0 not in signature(node.target).returned:
            self._know(node, made)
            return
        self._overwritten[node] = targets[0]
        self.result.new[node] = made
        self._note_versions(node)

    def _statistics(self, node: fx.Node) -> list[fx.Node]:
        """Running mean and variance that a normalisation writes, though its schema does not say so; no states."""
        found = signature(node.target).statistics_of(node) if node.op == "call_function" else []
        return [argument for argument in found if self._program.memory.get(argument) not in self._state_memory]

    def _stays(self, memory: Any) -> bool:
        """True if a piece of memory is written where it is, not in versions: a state, or of no known kind."""
        return not isinstance(memory, int) or (memory in self._state_memory and memory in self._written_by_ops)

    def _copied(self, piece: _Memory) -> fx.Node:
        copied = self._call(torch.ops.aten.clone.default, (piece.base,), piece.base)
        self.result.overwrites[copied] = tuple(piece.members)
        piece.becomes(copied)
        return copied

    # -- random numbers ---------------------------------------------------------------------------------------

    def _filled(self, node: fx.Node) -> fx.Node:
        """Random numbers drawn apart and copied to where a node would have drawn them."""
        target: Any = node.args[0]
        empty = self._empty(target)
        drawn = self.result.graph.node_copy(node, lambda n: empty if n is target else self._current(n))
        self.result.random.add(drawn)
        return self._call(torch.ops.aten.copy_.default, (self._current(target), drawn), node)

    def _pair_redraws(self) -> None:
        """Match what is drawn in a forward pass that is run again with what it repeats."""
        first: dict[int, fx.Node] = {}
        for node in self.result.graph.nodes:
            if node in self.result.random and "draw" in node.meta:
                original = first.setdefault(node.meta["draw"], node)
                if original is not node:
                    self.result.redraws[node] = original


# They read the sizes alone of their second argument, which are known.
_BROADCAST = torch.ops.aten.broadcast_tensors.default
_SIZED: dict[Any, Any] = {
    torch.ops.aten.expand_as.default: torch.ops.aten.expand.default,
    torch.ops.aten.view_as.default: torch.ops.aten.view.default,
    torch.ops.aten.reshape_as.default: torch.ops.aten.reshape.default,
}
_CASTS = {torch.ops.aten.type_as.default, torch.ops.aten.to.other}  # that read its number format alone
_FILLING = {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}


def _with_entries(tensors: Any) -> list[fx.Node]:
    """Tensors put side by side that have entries; none where all have, or where their number format counts."""
    full = [one for one in tensors if value_of(one).layout.n_elements]
    formats = {value_of(one).layout.dtype for one in tensors}
    return full if len(full) < len(tensors) and len(formats) == 1 else []


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments a node writes in place."""
    return signature(node.target).written_by(node) if node.op == "call_function" else []


def _returns_it(node: fx.Node, targets: list[fx.Node]) -> bool:
    """True if a node writes its first argument, nothing else, and returns it."""
    return signature(node.target).returned == (0,) and bool(node.args) and targets == [node.args[0]]


def _fills(node: fx.Node) -> bool:
    """True if a node fills its first argument with random numbers, whatever was there."""
    return _draws(node) and signature(node.target).name in _FILLING and len(node.all_input_nodes) == 1


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def draws_by_data(node: fx.Node) -> bool:
    """True if a node draws random numbers in a way that depends on data, such as from given probabilities."""
    return draws(node) and not _is_random(node)


def _is_random(node: fx.Node) -> bool:
    """True if a node draws random numbers and reads no data, at most a shape."""
    if not _draws(node):
        return False
    if signature(node.target).name.endswith("_like"):
        return True
    read = [n for n in node.all_input_nodes if isinstance(value_of(n), TensorInfo)]
    return not read or _fills(node)


def draw(step: Functional, place: torch.device) -> dict[int, torch.Tensor]:
    """The random numbers of a step in program order, so that a seed gives what it gives without a placement.

    Args:
        place: the device whose generator draws them.
    """
    found: dict[fx.Node, torch.Tensor] = {}
    numbered = {}
    for number, node in step.draws:
        first = step.redraws.get(node)
        if "reset" in node.meta:
            set_state(cast("torch.Generator", node.kwargs["generator"]), node.meta["reset"])
        found[node] = numbered[number] = _drawn(node, place) if first is None else found[first].clone()
    return numbered


def _drawn(node: fx.Node, place: torch.device) -> torch.Tensor:
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda given: _without_content(given, place))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": place}  # what map_arg gives cannot be written
    result: torch.Tensor = target(*args, **kwargs)
    return result


def _without_content(node: fx.Node, place: torch.device) -> Any:
    info = value_of(node)
    if not hasattr(info, "layout"):
        return info
    layout = info.layout
    return uninitialised(layout.shape, layout.stride, layout.dtype, place)
