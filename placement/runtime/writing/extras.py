"""Values that a call on parts needs beside its arguments: neighbours' entries, sums over all samples of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import fx

from graphs.errors import StrategyError
from placement.runtime.calls.class_calls import class_sums_call
from placement.runtime.calls.local_calls import LocalCall
from placement.runtime.calls.loss_calls import label_weight_call
from placement.runtime.calls.norm_calls import bn_sums_call
from placement.runtime.exchanging.exchanges import Exchange, Member
from placement.runtime.parts.layouts import PartCut, PartLayout, whole
from placement.runtime.planning.forms import Wanted, dense, info_of
from placement.runtime.planning.strategy_plan import Border
from placement.runtime.program.transfers import Transfer
from placement.runtime.writing.glue import edge_of

if TYPE_CHECKING:
    from placement.runtime.writing.arguments import Arguments
    from placement.runtime.writing.code import Code
    from placement.runtime.writing.rank_forms import RankForms
    from placement.runtime.writing.rank_parts import RankParts


class BatchSums:
    """Sums over all samples: of labels' weights, before the step; of what batch norms read, as they run.

    Each part adds up its own micro-batches, and an exchange adds up the parts. And sums over all classes, of which each
    part gives those of its own to all others, micro-batch by micro-batch.
    """

    def __init__(self, code: Code, parts: RankParts, arguments: Arguments) -> None:
        self._code, self._parts, self._arguments = code, parts, arguments
        self._labels: dict[int, fx.Node] = {}  # by captured op
        self._statistics: dict[int, fx.Node] = {}  # by op j, of this rank's samples
        self._of_classes: dict[tuple[int, int], fx.Node] = {}  # by op j and micro-batch, of this rank's classes

    def count_labels(self) -> None:
        """Count the labels of all parts, by which losses are divided, before the step."""
        plan, values = self._parts.plan, self._parts.values
        for number, (op, node) in enumerate(plan.losses):
            if values.split.rows[op] != self._parts.row:
                continue
            total: fx.Node | None = None
            for batch in plan.batches(op):
                call = label_weight_call(node, self._parts.read(node, op, batch))
                if call is None:
                    break
                total, labels = self._added(total, node, call, op, batch), call.args[0]
            if total is None:
                continue
            ranks = plan.ranks_sharing_labels(op, labels, self._parts.rank)
            if len(ranks) > 1:
                member = Member("all_reduce", whole(()), dtype=torch.float64)
                exchange = Exchange(plan.first_own_exchange + 1 + number, ranks, (member,), "the labels' weight")
                total = self._code.exchanged(exchange, total)
            self._labels[values.split.source[op]] = total

    def sum_statistics(self, op: int) -> None:
        """Add up what a batch norm reads of all micro-batches, before the parts put their sums together."""
        node = self._parts.nodes_of[self._parts.values.split.source[op]][0]
        total: fx.Node | None = None
        for batch in self._parts.plan.batches(op):
            call = bn_sums_call(node, self._parts.read(node, op, batch))
            if call is None:
                return
            total = self._added(total, node, call, op, batch)
        assert total is not None
        self._statistics[op] = total

    def _added(self, total: fx.Node | None, node: fx.Node, call: LocalCall, op: int, batch: int) -> fx.Node:
        inputs = {n: self._arguments.get(n, op, batch)[0] for n in _nodes_in(call)}
        one = self._code.local_call(node, call, inputs)
        return one if total is None else self._code.call(torch.add, total, one)

    def label_weight(self, op: int) -> fx.Node | None:
        """Weight of all labels of a loss, for op j of its forward or backward pass."""
        source, forward = self._parts.values.split.source, int(self._parts.graph.forward_of[op])
        return self._labels.get(source[op], self._labels.get(source[forward] if forward >= 0 else -1))

    def statistics(self, op: int) -> fx.Node | None:
        """The sums of a batch norm, op j, as far as parts have put them together."""
        if ("statistics", op) in self._code.pending:
            return self._code.arrived(("statistics", op))
        return self._statistics.get(op)

    def has_statistics(self, op: int) -> bool:
        """Whether parts put the statistics of op j together."""
        return op in self._statistics or ("statistics", op) in self._code.pending

    def sum_classes(self, op: int, batch: int) -> None:
        """Add up the classes that are here of what op j reads."""
        node = self._parts.nodes_of[self._parts.values.split.source[op]][0]
        call = class_sums_call(node, self._parts.read(node, op, batch))
        assert call is not None
        self._of_classes[op, batch] = self._added(None, node, call, op, batch)

    def own_classes(self, op: int, batch: int) -> fx.Node:
        """Sums of the classes of op j that are here."""
        return self._of_classes[op, batch]

    def classes(self, op: int, batch: int) -> fx.Node | None:
        """Sums of the classes of all parts, a row for each, where op j has but some."""
        key = "sums", op, batch
        return self._code.arrived(key) if key in self._code.pending else None

    def form(self, op: int, batch: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and format of the sums of op j.

        Two numbers a channel for a batch norm, with the entries that a channel has; one number a sample for classes.
        """
        node = self._parts.nodes_of[self._parts.values.split.source[op]][0]
        read = self._parts.read(node, op, self._parts.plan.batches(op)[0] if batch < 0 else batch)
        call = class_sums_call(node, read)
        if call is None:
            part = next(part for part in read.values() if len(part.shape) > 1)
            return (2 * part.local_shape[1] + 1,), torch.float64
        source, dim = call.args
        info = info_of(source)
        assert info is not None
        shape = read[source].local_shape
        return (*shape[:dim], *shape[dim + 1 :]), torch.promote_types(info.layout.dtype, torch.float32)


class Borders:
    """Entries of neighbours beside a rank's part of an image: sent and received, or its own where it has more."""

    def __init__(self, code: Code, parts: RankParts, forms: RankForms) -> None:
        self._code, self._parts, self._forms = code, parts, forms

    def of_call(
        self,
        node: fx.Node,
        op: int,
        batch: int,
        inputs: Mapping[fx.Node, fx.Node],
        parts: Mapping[fx.Node, PartLayout],
    ) -> dict[fx.Node, tuple[fx.Node | None, fx.Node | None]]:
        """The entries before and after this rank's part of each argument that has such; None beyond the edge."""
        borders = {}
        for argument in node.all_input_nodes:
            found: list[fx.Node | None] = [None, None]
            for beside in self._parts.borders(node, argument, op, batch) if argument in parts else ():
                part, (axis, dim) = parts[argument], (beside.axis, beside.dim)
                for side, count in enumerate(beside.counts):
                    if not count:
                        continue
                    if self._parts.values.is_own_part(beside.entry, axis):
                        border = Border(op, beside.entry, axis, batch, side == 0)
                        found[side] = self._exchanged(border, inputs[argument], part, dim, count)
                    else:
                        found[side] = self._own(beside.wanted, part, dim, count, side == 0)
            if found != [None, None]:
                borders[argument] = found[0], found[1]
        return borders

    def _own(self, wanted: Wanted, part: PartLayout, dim: int, count: int, is_before: bool) -> fx.Node | None:
        """The entries beside a part of a tensor that this rank has more of."""
        start, stop = part.runs(dim)[0]
        low, high = (max(start - count, 0), start) if is_before else (stop, min(stop + count, part.shape[dim]))
        if low == high:
            return None
        others = tuple(cut for cut in part.cuts if cut.dim != dim)
        border = PartLayout(part.shape, (*others, PartCut(dim, 1, part.shape[dim], low, high)))
        return self._code.part(self._forms.get(wanted.have), self._parts.layout(wanted.have), border)

    def _exchanged(self, border: Border, own: fx.Node, part: PartLayout, dim: int, count: int) -> fx.Node | None:
        """The neighbour's entries beside this rank's part, which gives its own ones to the neighbour on the other side.

        Raises:
            StrategyError: a part is smaller than what its neighbour reads.
        """
        if part.local_shape[dim] < count:
            raise StrategyError(
                f"op {self._parts.graph.op_names[border.op]!r} reads {count} entries beside its part of an image, and "
                f"a part has {part.local_shape[dim]}; take fewer parts."
            )
        step = 1 if border.is_before else -1  # to the neighbour that reads what is here
        reader, writer = self._parts.neighbour(border.axis, step), self._parts.neighbour(border.axis, -step)
        shape = tuple(count if d == dim else n for d, n in enumerate(part.local_shape))
        if reader is not None:
            start = part.local_shape[dim] - count if border.is_before else 0
            edge = self._code.call(edge_of, own, dim, start, count)
            self._code.send(self._transfer(border, self._parts.place, reader, shape), edge)
        return None if writer is None else self._code.receive(self._transfer(border, writer, self._parts.place, shape))

    def _transfer(self, border: Border, writer: int, reader: int, shape: tuple[int, ...]) -> Transfer:
        """Transfer of a border from one place to another."""
        plan, values = self._parts.plan, self._parts.values
        ends = plan.values.split.rank(self._parts.row, writer), plan.values.split.rank(self._parts.row, reader)
        tensor = values.nodes.captured(int(self._parts.graph.inputs[1][border.entry]))
        dtype = self._parts.step.program.tensor_infos[tensor].layout.dtype
        return Transfer(plan.borders[border] + reader, *ends, values.split.source[border.op], dense(shape, dtype))


def _nodes_in(call: LocalCall) -> list[fx.Node]:
    """The captured nodes among the arguments of a call."""
    found: list[fx.Node] = []
    fx.map_arg((call.args, call.kwargs), found.append)
    return list(dict.fromkeys(found))
