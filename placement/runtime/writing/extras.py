"""`WithExtras`: what calls on parts need beside their arguments: borders, weights of labels, statistics."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import fx

from graphs.errors import StrategyError
from graphs.op_kinds import op_kind
from graphs.transforms.splitting.sharding import SUM
from placement.runtime.calls.local_calls import Extras, LocalCall, borders_needed
from placement.runtime.calls.loss_calls import label_weight_call
from placement.runtime.calls.norm_calls import bn_sums_call
from placement.runtime.exchanging.exchanges import Exchange, Member
from placement.runtime.parts.layouts import PartCut, PartLayout, whole
from placement.runtime.planning.grouped_lists import Lists, are_ends_of_groups, lists_read
from placement.runtime.planning.strategy_plan import Border, dense
from placement.runtime.planning.values import Wanted, info_of
from placement.runtime.program.transfers import Transfer, receive, send
from placement.runtime.writing.glue import edge_of
from placement.runtime.writing.reader import Reader


class WithExtras(Reader):
    """A `Reader` that knows what neighbours and other parts add to a call."""

    def _extras(
        self,
        node: fx.Node,
        op: int,
        batch: int,
        inputs: Mapping[fx.Node, fx.Node],
        parts: Mapping[fx.Node, PartLayout],
    ) -> Extras:
        forward = int(self._graph.forward_of[op])
        source, forward_source = self._values.source[op], self._values.source[forward]
        labels = self._labels.get(source, self._labels.get(forward_source if forward >= 0 else -1))
        borders = {}
        for argument in node.all_input_nodes:
            sides = self._borders(node, argument, op, batch, inputs, parts)
            if sides != (None, None):
                borders[argument] = sides
        return Extras(label_weight=labels, sums=self._sums_of(op), borders=borders, lists=self._lists(node, op, batch))

    def _lists(self, node: fx.Node, op: int, batch: int) -> Lists:
        """Lists of tokens that a product by groups reads together."""
        if not op_kind(self._graph.kinds[op]).is_grouped:
            return ()
        for argument in node.all_input_nodes:
            anchor = self._values.anchors.get(argument)
            if anchor is not None and anchor.state < 0:
                entry = self._values.entry(op, anchor)
                if are_ends_of_groups(self._values, int(self._graph.inputs[1][entry])):
                    return lists_read(self._values, entry, op, batch, self._place)
        return ()

    def _borders(
        self,
        node: fx.Node,
        argument: fx.Node,
        op: int,
        batch: int,
        inputs: Mapping[fx.Node, fx.Node],
        parts: Mapping[fx.Node, PartLayout],
    ) -> tuple[fx.Node | None, fx.Node | None]:
        """The neighbours' entries before and after this rank's own, which gives them its own ones."""
        anchor, info = self._values.anchors.get(argument), info_of(argument)
        if not self._plan.has_borders or anchor is None or anchor.state >= 0 or argument not in parts or info is None:
            return None, None
        entry = self._values.entry(op, anchor)
        wanted = self._values.wanted_by_edge(entry, op, batch)
        if info.layout.shape != self._values.root(wanted.want).layout.shape:
            return None, None
        found: list[fx.Node | None] = [None, None]
        for axis, sharding in enumerate(self._values.mesh):
            if not sharding.halo[entry] or wanted.want.codes[axis] <= SUM:
                continue
            dim = self._values.dim_cut(wanted.want, axis)
            for side, count in enumerate(borders_needed(node, argument, dim)):
                if not count:
                    continue
                if self._values.is_own_part(entry, axis):
                    border = Border(op, entry, axis, batch, side == 0)
                    found[side] = self._exchanged_border(border, inputs[argument], parts[argument], dim, count)
                else:
                    found[side] = self._own_border(wanted, parts[argument], dim, count, side == 0)
        return found[0], found[1]

    def _own_border(self, wanted: Wanted, part: PartLayout, dim: int, count: int, is_before: bool) -> fx.Node | None:
        """The entries beside a part of a tensor that this rank has more of."""
        start, stop = part.runs(dim)[0]
        low, high = (max(start - count, 0), start) if is_before else (stop, min(stop + count, part.shape[dim]))
        if low == high:
            return None
        others = tuple(cut for cut in part.cuts if cut.dim != dim)
        border = PartLayout(part.shape, (*others, PartCut(dim, 1, part.shape[dim], low, high)))
        return self._part(self._value(wanted.have), self._values.layout(wanted.have, self._place), border)

    def _exchanged_border(self, border: Border, own: fx.Node, part: PartLayout, dim: int, count: int) -> fx.Node | None:
        """The neighbour's entries beside this rank's part, which gives its own ones to the neighbour on the other side.

        Raises:
            StrategyError: a part is smaller than what its neighbour reads.
        """
        if part.local_shape[dim] < count:
            raise StrategyError(
                f"op {self._graph.op_names[border.op]!r} reads {count} entries beside its part of an image, and a part "
                f"has {part.local_shape[dim]}; take fewer parts."
            )
        step = 1 if border.is_before else -1  # to the neighbour that reads what is here
        reader, writer = self._beside(border.axis, step), self._beside(border.axis, -step)
        shape = tuple(count if d == dim else n for d, n in enumerate(part.local_shape))
        if reader is not None:
            tag = self._border_tag(border, self._place, reader, shape)
            start = part.local_shape[dim] - count if border.is_before else 0
            edge = self._code.call_function(edge_of, (own, dim, start, count))
            self._code.call_function(send, (self._endpoint, tag, edge))
        if writer is None:
            return None
        tag = self._border_tag(border, writer, self._place, shape)
        return self._code.call_function(receive, (self._endpoint, tag))

    def _border_tag(self, border: Border, writer: int, reader: int, shape: tuple[int, ...]) -> int:
        """Tag of what one place sends to another."""
        tag = self._plan.borders[border] + reader
        ends = self._plan.rank(self._row, writer), self._plan.rank(self._row, reader)
        tensor = int(self._graph.inputs[1][border.entry])
        dtype = self._step.program.tensor_infos[self._values.captured(tensor)].layout.dtype
        self._transfers[tag] = Transfer(tag, *ends, self._values.source[border.op], dense(shape, dtype))
        return tag

    def _beside(self, axis: int, step: int) -> int | None:
        """The place beside this one along an axis of the mesh; None beyond the edge."""
        coordinates = list(self._values.coordinates(self._place))
        coordinates[axis] += step
        if not 0 <= coordinates[axis] < self._values.sizes[axis]:
            return None
        return int(np.ravel_multi_index(coordinates, self._values.sizes))

    def _parts_read(self, node: fx.Node, op: int, batch: int) -> dict[fx.Node, PartLayout]:
        """The part of each tensor argument that op j reads."""
        found = {}
        for argument in node.all_input_nodes:
            anchor = self._values.anchors.get(argument)
            parts: tuple[PartLayout | None, ...] = ()
            if anchor is not None:
                parts = self._parts_of(argument, self._values.wanted(anchor, op, batch))
            elif (info := info_of(argument)) is not None:
                parts = (whole(info.layout.shape),)
            if parts and parts[0] is not None:
                found[argument] = parts[0]
        return found

    def _count_labels(self) -> None:
        """Count the labels of all parts, by which losses are divided, before the step."""
        for number, (op, node) in enumerate(self._plan.losses):
            if self._values.rows[op] != self._row:
                continue
            total: fx.Node | None = None
            for batch in self._plan.batches(op):
                call = label_weight_call(node, self._parts_read(node, op, batch))
                if call is None:
                    break
                inputs = {n: self._argument(n, op, batch)[0] for n in _nodes_in(call)}
                weight = self._emitted(node, call, inputs)
                total = weight if total is None else self._code.call_function(torch.add, (total, weight))
            if total is None:
                continue
            ranks = self._plan.ranks_sharing_labels(op, self._rank)
            if len(ranks) > 1:
                member = Member("all_reduce", whole(()), dtype=torch.float64)
                exchange = Exchange(self._plan.first_own_exchange + 1 + number, ranks, (member,), "the labels' weight")
                self._pending["labels", number] = self._begin(exchange, [total]), 0
                total = self._arrived(("labels", number))
            self._labels[self._values.source[op]] = total

    def _sum_statistics(self, op: int) -> None:
        """Add up what a batch norm reads of all micro-batches, before the parts put their sums together."""
        node = self._nodes_of[self._values.source[op]][0]
        total: fx.Node | None = None
        for batch in self._plan.batches(op):
            call = bn_sums_call(node, self._parts_read(node, op, batch))
            if call is None:
                return
            inputs = {n: self._argument(n, op, batch)[0] for n in _nodes_in(call)}
            sums = self._emitted(node, call, inputs)
            total = sums if total is None else self._code.call_function(torch.add, (total, sums))
        assert total is not None
        self._statistics[op] = total

    def _sums_of(self, op: int) -> fx.Node | None:
        """The statistics of a batch norm, as far as parts have put them together."""
        if ("statistics", op) in self._pending:
            return self._arrived(("statistics", op))
        return self._statistics.get(op)

    def _sums_shape(self, op: int) -> tuple[int, ...]:
        """Shape of the statistics of op j: two numbers a channel, and how many entries a channel has."""
        node = self._nodes_of[self._values.source[op]][0]
        part = next(
            part for part in self._parts_read(node, op, self._plan.batches(op)[0]).values() if len(part.shape) > 1
        )
        return (2 * part.local_shape[1] + 1,)

    def _keep_running(
        self, node: fx.Node, op: int, batch: int, inputs: dict[fx.Node, fx.Node], *, is_of_all: bool
    ) -> None:
        """Let the first run alone update running statistics, and of micro-batches that share them the first alone."""
        is_again = self._values.is_again(op)
        for argument in node.args[3:5] if is_again or (is_of_all and batch > 0) else ():
            if isinstance(argument, fx.Node):
                inputs[argument] = self._code.call_function(torch.ops.aten.clone.default, (inputs[argument],))


def _nodes_in(call: LocalCall) -> list[fx.Node]:
    """The captured nodes among the arguments of a call."""
    found: list[fx.Node] = []
    fx.map_arg((call.args, call.kwargs), found.append)
    return list(dict.fromkeys(found))
