"""`PlannedStorage`: the parameters and buffers that each rank stores, and the gradients that their updates read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from graphs.opgraph import Phase
from graphs.transforms.axes import STORAGE_AXES
from graphs.transforms.splitting.sharding import SUM
from graphs.transforms.splitting.storage_ops import cast_tensor
from placement.runtime.parts.layouts import PartCut, PartLayout, ends_of
from placement.runtime.states.state_parts import StatePart, StateTable

if TYPE_CHECKING:
    from graphs.transforms.derived import Exchanged
    from placement.runtime.planning.forms import Form
    from placement.runtime.planning.values import Values


class Gradient(NamedTuple):
    """A gradient of a parameter.

    Attributes:
        state: the parameter, of the program.
        node: of the trace, whose value it is.
        update: op of the graph after recomputation that reads it.
        entry: of ``graph.inputs``, by which that reads it.
    """

    state: int
    node: torch.fx.Node
    update: int
    entry: int


@dataclass(frozen=True, eq=False)
class PlannedStorage:
    """States of a step under a strategy, by their numbers in the program.

    Attributes:
        values: the step under the strategy.
    """

    values: Values

    @cached_property
    def _named(self) -> Mapping[str, int]:
        return {name: s for s, state in enumerate(self.values.step.program.states) for name in state.names}

    @cached_property
    def gradients(self) -> tuple[Gradient, ...]:
        """Gradients of all parameters that have one: the parameter, its node, and where an update reads it."""
        values = self.values
        step, graph = values.step, values.split.graph
        index = {name: op for op, name in enumerate(graph.op_names)}
        named = {state.name: state for state in graph.states}
        found = []
        for parameter, node in step.program.trace.gradients:
            state = self._named[step.program.trace.states[parameter].name]
            users = named[step.program.states[state].names[0]].users
            update = next(index[user] for user in users if graph.phase[index[user]] == Phase.UPDATE)
            anchor = values.nodes.anchors[step.new[node]]
            found.append(Gradient(state, node, update, values.nodes.entry(update, anchor)))
        return tuple(found)

    @cached_property
    def gradient_of(self) -> Mapping[int, Gradient]:
        """By the state it is of."""
        return {gradient.state: gradient for gradient in self.gradients}

    @cached_property
    def state_of_gradient(self) -> Mapping[int, int]:
        """Tensor after recomputation that is a gradient -> the state it is of."""
        tensors = self.values.split.graph.inputs[1]
        return {int(tensors[gradient.entry]): gradient.state for gradient in self.gradients}

    @cached_property
    def rows(self) -> tuple[frozenset[int], ...]:
        """The stages that use each state of the program; of one that none uses the first."""
        values = self.values
        runs: dict[int, set[int]] = {}
        for op, source in enumerate(values.split.source):
            runs.setdefault(source, set()).add(values.split.rows[op])
        found = []
        for state in values.step.program.states:
            rows = {row for user in state.users for row in runs.get(user, ())}
            found.append(frozenset(rows or {0}))
        return tuple(found)

    @cached_property
    def table(self) -> StateTable:
        """Table of the states that each rank stores."""
        return tuple(tuple(self._stored(rank)) for rank in range(self.values.split.n_ranks))

    def _stored(self, rank: int) -> Iterator[StatePart]:
        row, place = divmod(rank, self.values.split.places)
        program, strategy = self.values.step.program, self.values.applied.strategy
        trained = {gradient.state for gradient in self.gradients}
        for s, state in enumerate(program.states):
            if state.kind == "constant" or row not in self.rows[s]:
                continue
            part = self.values.parts.layout(self.values.kept(s), place)
            flat = None
            if s in self.flattened:
                vector = self.flat(s, part.n_elements, place)
                flat = vector.runs(0)[0] if vector.runs(0) else (0, 0)
            has_room = flat is not None and s not in self._gathered
            on_host = strategy.offloads_optimizer and s in trained
            on_host |= strategy.offloads_parameters and self._is_frozen(s)
            dtype = program.state_infos[s].layout.dtype
            yield StatePart(state.names, part, flat, dtype, s in trained, has_room, on_host)

    # -- ZeRO -------------------------------------------------------------------------------------------------

    def flat_state(self, member: Exchanged) -> tuple[int, Form]:
        """The state of the program that a flat vector belongs to, as it is kept."""
        values = self.values
        if member.what == "gradient":
            state = self.state_of_gradient[member.number]
        else:
            state = next(s for s, number in values.split.state_number.items() if number == member.number)
        return state, values.kept(state)

    def cast_form(self, member: Exchanged) -> Form:
        """The result of a cast of a parameter, whose stored parts are cast and then gathered."""
        return self.values.written(cast_tensor(self.values.split.graph, member.cast))

    @cached_property
    def casts_of_parts(self) -> frozenset[int]:
        """Ops after recomputation that cast the stored parts of parameters, which are gathered then."""
        collectives = self.values.applied.exchanged.collectives
        return frozenset(member.cast for one in collectives for member in one.members if member.cast >= 0)

    @cached_property
    def _gathered_casts(self) -> frozenset[int]:
        """The tensors that `casts_of_parts` write."""
        return frozenset(cast_tensor(self.values.split.graph, op) for op in self.casts_of_parts)

    def is_gathered(self, form: Form) -> bool:
        """Whether a form is of a parameter that is gathered for every use, or of a cast of its parts."""
        return form.state in self._gathered or form.tensor in self._gathered_casts

    @property
    def keeps_gradients(self) -> bool:
        """Whether a rank keeps whole gradients of which it updates a part: ZeRO-1."""
        return self.values.applied.strategy.zero == 1

    @cached_property
    def zero_axes(self) -> tuple[int, ...]:
        """The axes of the mesh along which storage is split."""
        mesh = self.values.split.mesh if self.values.applied.strategy.zero else ()
        return tuple(a for a, sharding in enumerate(mesh) if sharding.axis.name in STORAGE_AXES)

    def split_along(self, state: int) -> tuple[int, ...]:
        """Those of `zero_axes` along which a state of the program is whole: weights that are cut there are not."""
        codes = self.values.state_codes(state)
        return tuple(a for a in self.zero_axes if codes[a] <= SUM)

    @cached_property
    def flattened(self) -> frozenset[int]:
        """States of the program of which each rank stores a stretch of the flat vector; weights cut there are not."""
        split = {gradient.state for gradient in self.gradients}
        if self.values.applied.strategy.zero == 3:
            split |= {s for s in self.values.split.state_number if self._is_frozen(s)}
        return frozenset(state for state in split if self.split_along(state))

    def _is_frozen(self, state: int) -> bool:
        """Whether a state of the program is a parameter that no op writes."""
        number = self.values.split.state_number.get(state)
        return number is not None and self.values.split.graph.states[number].frozen

    @cached_property
    def _gathered(self) -> frozenset[int]:
        """States of the program that are stored in parts, and gathered for every use."""
        return self.flattened if self.values.applied.strategy.zero == 3 else frozenset()

    def flat(self, state: int, n_elements: int, place: int, inner_to: int = -1) -> PartLayout:
        """The entries of a state's vector that are stored at a place.

        The innermost axis of the mesh cuts first, so that what is exchanged along it lies side by side.

        Args:
            inner_to: an axis of the mesh; the entries of all places along it, and along those outside of it, are meant.
        """
        coordinates, sizes = self.values.split.coordinates(place), self.values.split.sizes
        first, last = 0, n_elements
        for a in reversed(self.split_along(state)):
            if a > inner_to:
                ends = ends_of(last - first, sizes[a])
                first, last = first + ends[coordinates[a]], first + ends[coordinates[a] + 1]
        return PartLayout((n_elements,), (PartCut(0, 1, n_elements, first, last),) if n_elements else ())
