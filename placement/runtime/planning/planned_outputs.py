"""`PlannedOutputs`: how every rank gets the whole outputs of a step that is no training step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from graphs.transforms.splitting.sharding import SUM
from placement.runtime.exchanging.exchanges import Exchange, Member
from placement.runtime.parts.layouts import PartCut, PartLayout, whole
from placement.runtime.planning.forms import Form, info_of
from placement.runtime.program.transfers import Transfer

if TYPE_CHECKING:
    from placement.runtime.planning.planned_storage import PlannedStorage
    from placement.runtime.planning.values import Values


class OutputParts(NamedTuple):
    """A tensor that a step returns.

    Attributes:
        node: of the functional program.
        form: the form in which ranks have it, before summands are added up; None for one made on the spot.
        parts: of each rank the part that it gives; None for a rank that gives nothing.
    """

    node: torch.fx.Node
    form: Form | None
    parts: tuple[PartLayout | None, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the output, which may be the real view of a complex tensor."""
        info = info_of(self.node)
        assert info is not None
        return info.layout.dtype


@dataclass(frozen=True, eq=False)
class PlannedOutputs:
    """Outputs of a step, by their numbers.

    Attributes:
        values: the step under the strategy.
        storage: its states, which may be outputs.
        first_tag: of transfers of outputs.
        first_exchange: the first number of their exchanges, of summands and then of whole ones.
    """

    values: Values
    storage: PlannedStorage
    first_tag: int
    first_exchange: int

    @cached_property
    def each(self) -> tuple[OutputParts, ...]:
        """Outputs of a step that is no training step, each tensor with the part that every rank has."""
        if self.values.step.program.train:
            return ()
        return tuple(self._output(self.values.step.new[node]) for node in self.values.step.program.trace.results)

    def _output(self, node: torch.fx.Node) -> OutputParts:
        values, info = self.values, info_of(node)
        anchor = values.nodes.anchors.get(node)
        if anchor is None or info is None:
            part = None if info is None else whole(info.layout.shape)
            return OutputParts(node, None, (part,) * self.values.split.n_ranks)
        rows: frozenset[int] = frozenset([0])
        if anchor.state >= 0:
            form, rows = values.kept(anchor.state), self.storage.rows[anchor.state]
        else:
            op = values.producer(anchor)
            tensor = values.nodes.result(op, anchor.slot)
            assert tensor is not None
            form, rows = values.final(tensor), frozenset([values.split.rows[op]])
        root = values.parts.root(form)
        parts = [values.parts.layout(form, place).viewed(info, root) for place in range(values.split.places)]
        every = [part if row in rows else None for row in range(values.split.n_rows) for part in parts]
        return OutputParts(node, form, tuple(every))

    def sender_of(self, number: int) -> int | None:
        """The first rank that has all of an output, where every rank has all of it or nothing; else None."""
        output = self.each[number]
        held = [rank for rank, part in enumerate(output.parts) if part is not None]
        is_summed = output.form is not None and SUM in output.form.codes
        is_all = all(part is None or part.is_whole for part in output.parts)
        return held[0] if is_all and held and not is_summed else None

    def transfers(self, number: int) -> dict[int, Transfer]:
        """How an output that `sender_of` a rank has gets to those that have nothing of it: by their ranks."""
        source, output = self.sender_of(number), self.each[number]
        if source is None:
            return {}
        info = info_of(output.node)
        assert info is not None
        assert output.form is not None
        first = self.first_tag + number * self.values.split.n_ranks
        op = -1
        if output.form.tensor >= 0:
            op = self.values.split.source[int(self.values.split.graph.tensor_producer[output.form.tensor])]
        return {
            rank: Transfer(first + rank, source, rank, op, info)
            for rank, part in enumerate(output.parts)
            if part is None
        }

    def is_given_by(self, number: int, rank: int) -> bool:
        """Whether a rank is the first of those that have its part of an output."""
        parts = self.each[number].parts
        return parts[rank] is not None and parts.index(parts[rank]) == rank

    def exchange(self, number: int) -> Exchange:
        """The exchange that gives every rank a whole output: of ranks that have the same part the first gives it."""
        output = self.each[number]
        given = [part if self.is_given_by(number, rank) else None for rank, part in enumerate(output.parts)]
        shape = next(part.shape for part in output.parts if part is not None)
        dtype = output.dtype
        name = self.first_exchange + len(self.each) * self.values.split.n_ranks + number
        ranks = tuple(range(self.values.split.n_ranks))
        if not shape:  # a number: all others give 0
            return Exchange(name, ranks, (Member("all_reduce", whole(()), dtype=dtype),), "an output")
        empty = PartLayout(shape, (PartCut(0, 1, shape[0], 0, 0),))
        parts = tuple(part or empty for part in given)
        return Exchange(name, ranks, (Member("all_gather", whole(shape), before=parts, dtype=dtype),), "an output")

    def sum_exchange(self, number: int, rank: int) -> Exchange | None:
        """The exchange that adds up the summands of an output which a rank and others have; None without others."""
        output = self.each[number]
        part = output.parts[rank]
        assert output.form is not None
        assert part is not None
        ranks = self.values.split.ranks_along(rank, {a for a, code in enumerate(output.form.codes) if code == SUM})
        if len(ranks) == 1:
            return None
        number_of_sum = self.first_exchange + number * self.values.split.n_ranks + ranks[0]
        return Exchange(number_of_sum, ranks, (Member("all_reduce", part, dtype=output.dtype),), "an output")
