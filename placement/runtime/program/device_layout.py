"""`DeviceLayout`: where and in which order the ops of a step run; `Section`: a stretch of it, and what it must give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from graphs.capture.trace import TensorInfo, value_of
from graphs.opgraph import Phase
from placement.runtime.program.functional import Functional

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
