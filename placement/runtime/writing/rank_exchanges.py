"""`RankExchanges`: a rank's share of the strategy's exchanges, each begun in its turn, its results taken when read."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import fx

from graphs.opgraph import Phase
from graphs.transforms.derived import Exchanged
from graphs.transforms.splitting.sharding import is_by_groups
from placement.runtime.calls.group_calls import FromExperts, ToExperts
from placement.runtime.parts.layouts import PartLayout, whole
from placement.runtime.planning.forms import ONCE, SUMMED, Form, Wanted
from placement.runtime.planning.grouped_lists import trip
from placement.runtime.writing.glue import flattened

if TYPE_CHECKING:
    from placement.runtime.planning.planned_storage import Gradient
    from placement.runtime.writing.arguments import Arguments
    from placement.runtime.writing.code import Code
    from placement.runtime.writing.extras import BatchSums
    from placement.runtime.writing.hosted import CopiedParameters
    from placement.runtime.writing.rank_forms import RankForms
    from placement.runtime.writing.rank_parts import RankParts


class RankExchanges:
    """Exchanges that the strategy's graph has: of tensors, gradients, parameters and statistics.

    Parameters that others have updated since the last step (ZeRO below level 3) are gathered bucket by bucket, one
    bucket ahead of the first that is read. One exchange of gradients is on its way at a time: it holds its input, and
    as much again.
    """

    def __init__(
        self,
        code: Code,
        parts: RankParts,
        forms: RankForms,
        arguments: Arguments,
        sums: BatchSums,
        copied: CopiedParameters,
    ) -> None:
        self._code, self._parts, self._forms = code, parts, forms
        self._arguments, self._sums, self._copied = arguments, sums, copied
        self._plan, self._values, self._graph = parts.plan, parts.values, parts.graph
        self._exchanged = parts.values.applied.exchanged
        self._gathers: list[int] = []  # exchanges of updated parameters, in order
        self._n_gathered = 0  # how many of these have begun
        self._gathered_by: dict[Form, int] = {}
        self._reduced: dict[int, PartLayout] = {}  # of each state's gradient, the stretch that exchanges have left
        self._casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self._open: fx.Node | None = None  # the exchange of gradients that is on its way

    def begin(self, number: int, batch: int) -> None:
        """Begin an exchange of the strategy, unless it has begun or nothing is to be exchanged."""
        members = self._exchanged.collectives[number].members
        if number in self._code.exchanges or all(map(self._is_needless, members)):
            return
        axis = self._values.split.axis_number(self._exchanged.collectives[number].axis)
        values, keys = zip(*(self._given(member, batch, axis) for member in members), strict=True)
        sums = {m.number: self._sums.form(m.number, batch) for m in members if m.what in ("statistics", "sums")}
        is_for_update = all(
            m.what == "gradient" or (m.what == "tensor" and m.number in self._plan.results) for m in members
        )
        if is_for_update and self._open is not None:
            self._code.finish(self._open)
        handle = self._code.begin(self._plan.exchanges.of(number, sums), values, keys)
        if is_for_update:
            self._open = handle
        for key in keys:
            if isinstance(key, Form):
                self._forms.send(key)

    def _given(self, member: Exchanged, batch: int, axis: int) -> tuple[fx.Node, Hashable]:
        """This rank's input to an exchange along an axis, and the key of its result."""
        if member.what == "statistics":
            sums = self._sums.statistics(member.number)
            assert sums is not None
            return sums, ("statistics", member.number)
        if member.what == "sums":
            return self._sums.own_classes(member.number, batch), ("sums", member.number, batch)
        if member.what == "gradient":
            state, _ = self._plan.storage.flat_state(member)
            return self._stretch(state, member, axis), ("gradient", state)
        if member.what == "parameter":
            state, form = self._plan.storage.flat_state(member)
            form = self._plan.storage.cast_form(member) if member.cast >= 0 else form
            key = form._replace(phase=member.phase, batch=batch)
            if key in self._code.pending:  # what was gathered along an axis before
                return self._code.arrived(key), key
            stored = self._copied.stored(state)
            if member.cast >= 0:
                stored = self._cast(stored, self._values.parts.root(form).layout.dtype)
            return stored, key
        turn = max(member.turn, 0)
        before = Form(member.number, -1, member.before, SUMMED if member.is_summed else batch, turn=turn)
        again = before._replace(is_again=True)
        if member.is_again and (again in self._code.pending or again in self._forms.made):
            before = again
        value, after = self._forms.get(before), _form_after(member, batch)
        if any(map(is_by_groups, before.codes)):  # its size, and those of others, the data says
            value = self._on_trip(FromExperts, before, value)
        return value, after

    def _stretch(self, state: int, member: Exchanged, axis: int) -> fx.Node:
        """The stretch of a gradient's vector that is reduced along an axis, the inner axes of storage being done."""
        storage, key = self._plan.storage, ("gradient", state)
        if key in self._code.pending:
            value = self._code.arrived(key)
        else:
            value = self._code.call(flattened, self.gradient(storage.gradient_of[state], member.after))
        value = self._cut_to(state, value, axis)
        self._reduced[state] = storage.flat(state, self._n_elements(state), self._parts.place, inner_to=axis - 1)
        return value

    def as_stored(self, state: int, value: fx.Node) -> fx.Node:
        """The part of a gradient that this rank stores, of what exchanges have left of it."""
        return self._cut_to(state, value, -1)

    def _cut_to(self, state: int, value: fx.Node, axis: int) -> fx.Node:
        n = self._n_elements(state)
        have, want = self._reduced.get(state, whole((n,))), self._plan.storage.flat(state, n, self._parts.place, axis)
        return value if have.coarse_cuts == want.coarse_cuts else self._code.part(value, have, want)

    def _n_elements(self, state: int) -> int:
        return self._parts.layout(self._values.kept(state)).n_elements

    def _on_trip(self, way: type[FromExperts | ToExperts], form: Form, value: fx.Node) -> fx.Node:
        """Tokens that are taken out for their experts, or put back in their places."""
        found = trip(self._values, form.tensor, form.batch, self._parts.place)
        ends = self._forms.read(self._values.wanted_by_edge(found.entry, found.op, form.batch))
        return self._code.call(way(found.lists, found.low, found.high), value, ends)

    def _cast(self, stored: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A stored part of a parameter in another format; cast once."""
        if (stored, dtype) not in self._casts:
            self._casts[stored, dtype] = self._code.cast(stored, dtype)
        return self._casts[stored, dtype]

    def _is_needless(self, member: Exchanged) -> bool:
        """Whether an exchange is of a table of numbers, which every rank has, or of statistics that nobody reads."""
        if member.what == "statistics":
            return self._sums.statistics(member.number) is None
        return member.what == "tensor" and self._values.nodes.table(member.number) is not None

    def gradient(self, gradient: Gradient, codes: tuple[int, ...] | None = None) -> fx.Node:
        """A gradient as its update reads it, or before it is reduced along the axis of ZeRO."""
        wanted = self._values.wanted_by_edge(gradient.entry, gradient.update, ONCE)
        if codes is not None:
            have = wanted.have._replace(codes=codes)
            wanted = Wanted(have, have)
        return self._arguments.view(self._parts.step.new[gradient.node], wanted)

    # -- sources of forms -------------------------------------------------------------------------------------

    def arriving(self, form: Form) -> fx.Node | None:
        """A result of an exchange that has begun."""
        if form in self._gathered_by:
            self._begin_gathers(self._gathered_by[form] + 2)
        if form not in self._code.pending:
            return None
        value = self._code.arrived(form)
        if any(map(is_by_groups, form.codes)):
            return self._on_trip(ToExperts, form, value)
        shape = self._parts.layout(form).local_shape
        is_flat = form.state >= 0 or self._plan.storage.is_gathered(form)
        return self._code.call(torch.ops.aten.view.default, value, list(shape)) if is_flat else value

    def counted(self, form: Form) -> fx.Node | None:
        """A result of an exchange of integers that come from arguments alone; begins it.

        Divisors of losses are counted before the step, and all ranks count in the same order.
        """
        if form not in self._of_integers:
            return None
        self.begin(*self._of_integers[form])
        return self._code.arrived(form)

    @cached_property
    def _of_integers(self) -> dict[Form, tuple[int, int]]:
        """Results of such exchanges -> number and micro-batch."""
        found = {}
        for op in self._plan.ops(self._parts.rank):
            number = self._plan.exchanges.collective_of.get(op)
            members = () if number is None else self._exchanged.collectives[number].members
            for member in members:
                if number is not None and member.what == "tensor":
                    producer = int(self._graph.tensor_producer[member.number])
                    if producer in self._values.from_inputs or self._values.of_integers[producer]:
                        batch = int(self._exchanged.micro_batch[op])
                        found[_form_after(member, batch)] = number, batch
        return found

    # -- parameters that others have updated ------------------------------------------------------------------

    def is_update(self, number: int) -> bool:
        """Whether an exchange gathers what the update before this step has written."""
        return all(
            m.what == "parameter" and m.phase == Phase.UPDATE for m in self._exchanged.collectives[number].members
        )

    def gather_updated(self) -> None:
        """Begin with the first bucket of updated parameters; `arriving` goes on."""
        numbers = {self._plan.exchanges.collective_of.get(op) for op in self._plan.ops(self._parts.rank)}
        of_updates = {
            number: self._exchanged.collectives[number].members
            for number in numbers
            if number is not None and self.is_update(number)
        }
        # The model's first parameters are read first; the same order on all ranks. Along several axes of storage a
        # parameter is gathered by several exchanges, of which the outermost comes first.
        axis = {n: self._values.split.axis_number(self._exchanged.collectives[n].axis) for n in of_updates}
        self._gathers = sorted(of_updates, key=lambda n: (min(m.number for m in of_updates[n]), axis[n]))
        for index, number in enumerate(self._gathers):
            for member in of_updates[number]:
                self._gathered_by[self._plan.storage.flat_state(member)[1]] = index
        self._begin_gathers(1)

    def _begin_gathers(self, n: int) -> None:
        """Have the first n buckets on their way."""
        for index in range(self._n_gathered, min(n, len(self._gathers))):
            members = self._exchanged.collectives[self._gathers[index]].members
            states, forms = zip(*map(self._plan.storage.flat_state, members), strict=True)
            exchange = self._plan.exchanges.of(self._gathers[index], {})
            given = [
                self._code.arrived(form) if form in self._code.pending else self._forms.state(state)
                for state, form in zip(states, forms, strict=True)
            ]
            self._code.begin(exchange, given, forms)
            self._n_gathered = index + 1


def _form_after(member: Exchanged, batch: int) -> Form:
    number = SUMMED if member.is_summed else batch
    return Form(member.number, -1, member.after, number, member.is_again, turn=member.turn + 1)
