"""`PlannedExchanges`: the collectives of a strategy's graph, as ranks carry them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from graphs.errors import StrategyError
from graphs.op_kinds import op_kind
from graphs.opgraph import Phase
from graphs.rows import Shard
from graphs.transforms.derived import Collective, Exchanged
from graphs.transforms.splitting.rings import SHIFT
from graphs.transforms.splitting.sharding import SUM, WHOLE, is_by_groups
from placement.runtime.exchanging.exchanges import Exchange, Member, common
from placement.runtime.parts.layouts import PartLayout, whole
from placement.runtime.planning.forms import SUMMED, Form
from placement.runtime.planning.grouped_lists import are_ends_of_groups

if TYPE_CHECKING:
    from placement.runtime.planning.planned_storage import PlannedStorage
    from placement.runtime.planning.values import Values


@dataclass(frozen=True, eq=False)
class PlannedExchanges:
    """Exchanges by the number of their collective; each rank makes those in which it takes part."""

    values: Values
    storage: PlannedStorage

    @cached_property
    def collective_of(self) -> Mapping[int, int]:
        """Op of ``applied.exchanged`` -> number of its collective."""
        return {op: c for c, one in enumerate(self.values.applied.exchanged.collectives) for op in one.ops}

    def of(self, number: int, sums: Mapping[int, tuple[tuple[int, ...], torch.dtype]]) -> Exchange:
        """A collective as ranks carry it out.

        Args:
            sums: shape and format of the statistics, or of the sums of classes, of each op that has some.
        """
        exchanged = self.values.applied.exchanged
        collective = exchanged.collectives[number]
        first = collective.ops[0]
        row = self.values.split.rows[int(exchanged.origin[first])]
        places = [int(exchanged.part[op]) for op in collective.ops]
        batch = int(exchanged.micro_batch[first])
        members = tuple(self._member(collective, member, places, batch, sums) for member in collective.members)
        ranks = tuple(self.values.split.rank(row, place) for place in places)
        return Exchange(number, ranks, members, exchanged.graph.op_names[first])

    def _member(
        self,
        collective: Collective,
        member: Exchanged,
        places: list[int],
        batch: int,
        sums: Mapping[int, tuple[tuple[int, ...], torch.dtype]],
    ) -> Member:
        kind, values = collective.kind, self.values
        if member.what == "statistics":
            shape, dtype = sums[member.number]
            return Member(kind, whole(shape), dtype=dtype)
        if member.what == "sums":  # a row of each part
            shape, dtype = sums[member.number]
            table, rows = whole((len(places), *shape)), Shard(0, len(places))
            each = tuple(table.cut_by(rows, len(places), place) for place in range(len(places)))
            return Member(kind, table, before=each, dtype=dtype)
        if member.what in ("gradient", "parameter"):
            state, form = self.storage.flat_state(member)
            n, axis = values.parts.layout(form, places[0]).n_elements, values.split.axis_number(collective.axis)
            # Axes of storage are exchanged along one after the other: those inside of this one hold stretches by now.
            together = self.storage.flat(state, n, places[0], inner_to=axis)
            parts = tuple(self.storage.flat(state, n, place, inner_to=axis - 1) for place in places)
            if kind == "all_gather":
                info = values.step.program.state_infos[state]
                dtype = (info if member.cast < 0 else values.parts.root(self.storage.cast_form(member))).layout.dtype
                # Below level 3 a rank has the memory of the whole for good, and its own entries lie in it.
                has_room = member.phase == Phase.UPDATE
                return Member(kind, together, before=parts, dtype=dtype, is_flat=True, in_place=has_room)
            # Level 1 keeps gradients whole: the sum of a part goes where it was, and nothing is copied.
            dtype = values.parts.root(values.written(member.number)).layout.dtype
            if kind == "all_reduce":  # of the parts of a gradient, which are a reduce-scatter's results
                return Member(kind, whole(parts[0].local_shape), dtype=dtype, is_flat=True)
            keeps = self.storage.keeps_gradients
            return Member(kind, together, after=parts, dtype=dtype, is_flat=True, in_place=keeps)
        if any(b > SUM and a == SUM for b, a in zip(member.before, member.after, strict=True)):
            name = values.split.graph.op_names[int(values.split.graph.tensor_producer[member.number])]
            raise StrategyError(
                f"what op {name!r} makes is cut, and is to be added to a sum of all of it; take another strategy."
            )
        kind = _as_carried_out(kind, member)
        number = SUMMED if member.is_summed else batch
        before = Form(member.number, -1, member.before, number)
        after = before._replace(codes=member.after)
        dtype = values.parts.root(before).layout.dtype
        if kind == SHIFT:
            return self._shifted(before._replace(turn=member.turn), places, dtype)
        of_before, of_after = ([values.parts.layout(one, place) for place in places] for one in (before, after))
        if kind == "all_reduce":
            if are_ends_of_groups(values, member.number):
                return self._ends_of_lists(member.number, len(places), dtype)
            return Member(kind, of_before[0], dtype=dtype)
        if kind == "all_gather":
            self._check_held(before, of_after[0], of_before)
            return Member(kind, of_after[0], before=tuple(of_before), dtype=dtype)
        if kind == "reduce_scatter":
            self._check_held(before, of_before[0], of_after)
            return Member(kind, of_before[0], after=tuple(of_after), dtype=dtype)
        codes = tuple(b if b == a else WHOLE for b, a in zip(member.before, member.after, strict=True))
        together = values.parts.layout(before._replace(codes=codes), places[0])
        for wanted in of_after:
            if sum(piece.n_elements for part in of_before if (piece := common(part, wanted))) < wanted.n_elements:
                raise self._apart(before)
        return Member(kind, together, tuple(of_before), tuple(of_after), dtype)

    def _shifted(self, before: Form, places: list[int], dtype: torch.dtype) -> Member:
        """A shift from each rank to the next one: an all-to-all in which all others get nothing."""
        layout, mesh = self.values.parts.layout, self.values.split.mesh
        codes = (WHOLE if one.axis.is_ring else code for one, code in zip(mesh, before.codes, strict=True))
        together = layout(before._replace(codes=tuple(codes)), places[0])
        of_before, of_after = (
            tuple(layout(before._replace(turn=turn), place) for place in places)
            for turn in (before.turn, before.turn + 1)
        )
        return Member("all_to_all", together, of_before, of_after, dtype)

    def _ends_of_lists(self, tensor: int, n_parts: int, dtype: torch.dtype) -> Member:
        """Where the groups of tokens end in the list of each part, one list after the other.

        Where they would end in one list of all parts, which the strategy's graph has, no rank needs: there is none.

        Raises:
            StrategyError: an op that is no product by groups reads the numbers.
        """
        graph = self.values.split.graph
        readers = graph.consumers_of(tensor).tolist()
        for op in readers:
            if not op_kind(graph.kinds[op]).is_grouped:
                raise StrategyError(
                    f"op {graph.op_names[op]!r} reads where groups of tokens end in a list of all parts, but each part "
                    "has sorted its own; leave out ep, or sp."
                )
        together = whole((n_parts * self.values.parts.root(self.values.written(tensor)).layout.shape[0],))
        shard = Shard(0, n_parts)
        before = tuple(together.cut_by(shard, n_parts, number) for number in range(n_parts))
        return Member("all_gather", together, before=before, dtype=dtype)

    def _check_held(self, form: Form, together: PartLayout, parts: list[PartLayout]) -> None:
        """Refuse what ranks would gather of a micro-batch that is no stretch of all samples.

        Raises:
            StrategyError: a part is no part of the whole.
        """
        if not all(map(together.holds, parts)):
            raise self._apart(form)

    def _apart(self, form: Form) -> StrategyError:
        name = self.values.split.graph.op_names[int(self.values.split.graph.tensor_producer[form.tensor])]
        return StrategyError(
            f"what op {name!r} makes of a micro-batch does not lie side by side in the parts of dp, and is needed "
            "whole; leave out the micro-batches, or dp."
        )


def _as_carried_out(kind: str, member: Exchanged) -> str:
    """The exchange that ranks make for one of tokens that go to their experts or come back.

    How many go where, the data says: all ranks gather all tokens, and take their own out (`RankExchanges`).
    """
    before = [b for b, a in zip(member.before, member.after, strict=True) if a != b and is_by_groups(b)]
    after = [b for b, a in zip(member.before, member.after, strict=True) if a != b and is_by_groups(a)]
    if before:
        is_whole = any(b != a == WHOLE for b, a in zip(member.before, member.after, strict=True))
        return "all_reduce" if is_whole else "reduce_scatter"
    if after:
        return "all_reduce" if after[0] == SUM else "all_gather"
    return kind
