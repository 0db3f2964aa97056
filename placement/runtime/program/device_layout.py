"""`DeviceLayout`: where and in which order the ops of a step run; `Section`: a stretch of it, and what it must give."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from graphs.capture.costs import signature
from graphs.capture.trace import TensorInfo, value_of
from graphs.errors import MismatchError
from graphs.module_paths import prefixes
from graphs.opgraph import OpGraph, Phase
from placement.runtime.program.functional import Functional, functional

if TYPE_CHECKING:
    from graphs.capture import Program


Key = tuple[str, Any]


@dataclass(frozen=True, eq=False)
class Section:
    """The part of a step between two points where the user's code has its turn.

    Attributes:
        gives: (key, node) of all it must compute: ``("output", i)``, ``("gradient", parameter)``, ``("loss", 0)``.
        given: nodes whose value is there when it begins, with the key they come under: ``("tangent", i)``.
        effects: nodes that write a state.
    """

    gives: tuple[tuple[Key, fx.Node], ...]
    given: dict[fx.Node, Key]
    effects: tuple[fx.Node, ...]


@dataclass(frozen=True, eq=False)
class DeviceLayout:
    """A functional program on devices (n ops, D devices).

    Attributes:
        step: the program.
        device: device number of each op, n of them.
        order: op numbers of each device in the order they start, D of them.
        start_s: when each op is planned to start, n of them.
        places: the torch device that each device number stands for, D of them.
        kept: the devices that have each parameter and buffer, by name, its home first; by default those whose ops need
            it. A layout that stands in for another one has that one's.
    """

    step: Functional
    device: Sequence[int]
    order: Sequence[Sequence[int]]
    start_s: Sequence[float]
    places: Sequence[torch.device]
    kept: Mapping[str, tuple[int, ...]] | None = None

    def home(self, state: int) -> int:
        """The device that keeps a state: that of the first op that uses it, else the first."""
        if (kept := self._kept(state)) is not None:
            return kept[0]
        users = self.step.program.states[state].users
        return self.device[users[0]] if users else 0

    def keepers(self, state: int) -> tuple[int, ...]:
        """The devices that have a state, where each has a memory of its own: its home first, then who else reads it.

        Only states that are not learned, and those that are written by no op (counters), are read on several.
        """
        if (kept := self._kept(state)) is not None:
            return kept
        home = self.home(state)
        return home, *sorted(self._readers.get(state, set()) - {home})

    def _kept(self, state: int) -> tuple[int, ...] | None:
        names, constants = self.step.program.states[state].names, self.step.program.constants
        if self.kept is None or any(name in constants for name in names):
            return None
        # A tensor that no op of the other layout uses is on the first device.
        return next((self.kept[name] for name in names if name in self.kept), (0,))

    @cached_property
    def _readers(self) -> dict[int, set[int]]:
        """The devices whose ops read each state, directly or by what they make on the spot."""
        step = self.step
        behind: dict[fx.Node, frozenset[int]] = {}  # node that is no op -> the states that making it reads
        found: dict[int, set[int]] = {}
        for node in step.graph.nodes:
            if node in step.state_of:
                behind[node] = frozenset([step.state_of[node]])
                continue
            read = frozenset(state for source in node.all_input_nodes for state in behind.get(source, ()))
            if node not in step.made_by:
                behind[node] = read
                continue
            for state in read:
                found.setdefault(state, set()).add(self.device[step.made_by[node]])
        return found

    def owner(self, node: fx.Node) -> int:
        """The device where the value of a node arises."""
        while node not in self.step.made_by:
            if node in self.step.state_of:
                return self.home(self.step.state_of[node])
            sources = [n for n in node.all_input_nodes if isinstance(value_of(n), (TensorInfo, tuple))]
            if not sources:
                return 0
            node = sources[0]
        return self.device[self.step.made_by[node]]

    def receiver(self, key: Key, node: fx.Node) -> int:
        """The device that gets a result: a gradient goes to its parameter, all else stays where it arises."""
        if key[0] != "gradient":
            return self.owner(node)
        return self.home(self._state_named[key[1]])

    @cached_property
    def _state_named(self) -> dict[str, int]:
        return {name: i for i, state in enumerate(self.step.program.states) for name in state.names}

    @cached_property
    def nodes_of(self) -> dict[int, list[fx.Node]]:
        """The nodes that each op consists of, in program order."""
        found: dict[int, list[fx.Node]] = {}
        for node in self.step.graph.nodes:
            if node in self.step.made_by:
                found.setdefault(self.step.made_by[node], []).append(node)
        return found

    # -- sections ---------------------------------------------------------------------------------------------

    def forward(self) -> Section:
        """From the inputs to what the model returns."""
        outputs = self.step.program.trace.outputs
        assert outputs is not None
        gives = tuple((("output", i), self.step.new[node]) for i, node in enumerate(outputs.nodes))
        return Section(gives, {}, self._effects(Phase.FORWARD))

    def backward(self) -> Section:
        """From the gradients of what the model returns to those of its parameters."""
        trace = self.step.program.trace
        assert trace.outputs is not None
        given: dict[fx.Node, Key] = {self.step.new[node]: ("tangent", i) for i, node in trace.outputs.tangents.items()}
        return Section(self._gradients(), given, self._effects(Phase.BACKWARD))

    def whole(self) -> Section:
        """From the inputs to the loss and the gradients of the parameters."""
        loss = self.step.new[self.step.program.trace.results[0]]
        effects = (*self._effects(Phase.FORWARD), *self._effects(Phase.BACKWARD))
        return Section(((("loss", 0), loss), *self._gradients()), {}, effects)

    def _gradients(self) -> tuple[tuple[Key, fx.Node], ...]:
        trace = self.step.program.trace
        return tuple(
            (("gradient", trace.states[parameter].name), self.step.new[node]) for parameter, node in trace.gradients
        )

    def _effects(self, phase: Phase) -> tuple[fx.Node, ...]:
        return tuple(
            node
            for node in self.step.state_writes
            if (node.meta.get("phase", Phase.FORWARD) is Phase.BACKWARD) == (phase is Phase.BACKWARD)
        )


def reached(section: Section, before: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that a section must compute or read, without those behind what is there ``before`` it."""
    stop = {*section.given, *before}
    found: set[fx.Node] = set()
    stack = [*(node for _, node in section.gives), *section.effects]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        if node not in stop:
            stack += node.all_input_nodes
    return found


# -- order -------------------------------------------------------------------------------------------------------------


def consistent_order(layout: DeviceLayout) -> list[list[int]]:
    """The ops of each device as planned, but every op after those it depends on, in O(edges * log ops).

    A graph says who needs a value. It does not say that who reads a buffer comes before who writes it later, nor in
    which order two calls of one batch normalisation update its statistics: they follow program order here. All devices'
    orders are stretches of one sequence, so no two devices can wait for each other.
    """
    before: dict[int, set[int]] = {op: set() for op in layout.nodes_of}
    after: dict[int, list[int]] = {op: [] for op in layout.nodes_of}
    for earlier, later in _edges(layout):
        if earlier != later and earlier not in before[later]:
            before[later].add(earlier)
            after[earlier].append(later)
    rank = _ranks(layout)
    waiting = {op: len(ops) for op, ops in before.items()}
    ready = [(rank[op], op) for op, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order: list[list[int]] = [[] for _ in layout.places]
    while ready:
        _, op = heapq.heappop(ready)
        order[layout.device[op]].append(op)
        for later in after[op]:
            waiting[later] -= 1
            if waiting[later] == 0:
                heapq.heappush(ready, (rank[later], later))
    return order


def _ranks(layout: DeviceLayout) -> dict[int, tuple[float, int]]:
    """(planned start, place in its device's order) of each op."""
    place = {op: i for ops in layout.order for i, op in enumerate(ops)}
    return {op: (layout.start_s[op], place[op]) for op in layout.nodes_of}


def _edges(layout: DeviceLayout) -> Iterator[tuple[int, int]]:
    """(op, op that must come after it), along the program."""
    step = layout.step
    yield from _state_edges(step)
    sources: dict[fx.Node, frozenset[int]] = {}  # ops behind the value of a node that is no op
    for node in step.graph.nodes:
        read = frozenset(op for n in node.all_input_nodes for op in sources[n])
        op = step.made_by.get(node)
        if op is None or node.target is operator.getitem:
            sources[node] = read
            continue
        yield from ((source, op) for source in read)
        sources[node] = frozenset({op})


def _state_edges(step: Functional) -> Iterator[tuple[int, int]]:
    """(op, op that must come after it) of captured ops that use a state which one of them writes."""
    states: dict[fx.Node, frozenset[int]] = {}  # states that a node's value may lie in
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for node in step.graph.nodes:
        held = frozenset(state for n in node.all_input_nodes for state in states[n])
        if node in step.state_of:
            held |= {step.state_of[node]}
        op = step.made_by.get(node)
        if op is None or node.target is operator.getitem:
            states[node] = held
            continue
        facts = signature(node.target)
        written = frozenset(s for n in (*facts.written_by(node), *facts.statistics_of(node)) for s in states[n])
        for state in sorted(held):
            if state in writer:
                yield writer[state], op
            if state in written:
                yield from ((reader, op) for reader in readers.pop(state, []))
                writer[state] = op
            else:
                readers.setdefault(state, []).append(op)
        states[node] = written


# -- other captures of the same model ----------------------------------------------------------------------------------


def same_ops(program: Program, layout: DeviceLayout) -> DeviceLayout:
    """The layout for a program of the same ops.

    Raises:
        MismatchError: it has other ops.
    """
    _check_same_ops(program, layout.step.program)
    return DeviceLayout(functional(program), layout.device, layout.order, layout.start_s, layout.places, _kept(layout))


def nearest(program: Program, layout: DeviceLayout) -> DeviceLayout:
    """The layout for a program of other ops, in program order.

    Parameters that are on another device than an op that reads them are sent to it.
    """
    kept, n_ops = _kept(layout), program.graph.n_ops
    homes = {name: devices[0] for name, devices in kept.items()}
    device = _nearest_devices(program, layout.step.program, layout.device, homes)
    order = [[op for op in range(n_ops) if device[op] == number] for number in range(len(layout.places))]
    return DeviceLayout(functional(program), device, order, [float(op) for op in range(n_ops)], layout.places, kept)


def _check_same_ops(program: Program, known: Program) -> None:
    """Raises: MismatchError: a program has other ops than the one that was placed."""
    mine, theirs = program.graph.op_names, known.graph.op_names
    if mine != theirs:
        name = next(iter(set(mine) ^ set(theirs)), "in another order")
        raise MismatchError(f"the model runs other ops than placed (op {name!r}); place it as it is called now.")


def _nearest_devices(program: Program, known: Program, device: Sequence[int], homes: Mapping[str, int]) -> list[int]:
    """The device of each op of a program, of those of another program of the same model.

    An op runs where its first parameter is, else where the op of its name is, else where an op of the nearest module
    is.

    Args:
        device: of each op of ``known``.
        homes: the device of each parameter and buffer, by name.
    """
    graph = program.graph
    by_name = {name: device[i] for i, name in enumerate(known.graph.op_names)}
    by_module = _devices_by_module(known.graph, device)
    found = [
        by_name.get(name, _nearest(module, by_module))
        for name, module in zip(graph.op_names, graph.modules, strict=True)
    ]
    for state in reversed(program.states):
        for op in state.users if state.binds else ():
            found[op] = next((homes[name] for name in state.names if name in homes), found[op])
    together: dict[int, int] = {}
    for op, group in enumerate(graph.colocation.tolist()):
        if group >= 0:
            found[op] = together.setdefault(group, found[op])
    return found


def _kept(layout: DeviceLayout) -> dict[str, tuple[int, ...]]:
    """The devices that have each parameter and buffer, by name."""
    states = layout.step.program.states
    return {name: layout.keepers(index) for index, state in enumerate(states) for name in state.names}


def _devices_by_module(graph: OpGraph, device: Sequence[int]) -> dict[str, int]:
    """Where the first op of each module runs, and of each module around it."""
    found: dict[str, int] = {}
    for op, module in enumerate(graph.modules):
        if graph.phase[op] == Phase.FORWARD:
            for path in prefixes(module):
                found.setdefault(path, device[op])
    return found


def _nearest(module: str, by_module: dict[str, int]) -> int:
    return next((by_module[path] for path in prefixes(module) if path in by_module), 0)
