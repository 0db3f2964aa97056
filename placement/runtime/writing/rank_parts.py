"""`RankParts`: the part of each tensor that a rank has, reads and makes, as the plan of all ranks says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import fx

from graphs.capture.trace import TensorInfo, flat, value_of
from graphs.op_kinds import op_kind
from graphs.transforms.splitting.sharding import SUM
from placement.runtime.calls.local_calls import borders_needed
from placement.runtime.parts.layouts import PartLayout, whole
from placement.runtime.planning.forms import Form, Wanted, info_of
from placement.runtime.planning.grouped_lists import Lists, are_ends_of_groups, lists_read
from placement.runtime.program.functional import after

if TYPE_CHECKING:
    from placement.runtime.planning.strategy_plan import StrategyPlan

Parts = tuple[PartLayout | None, ...]
"""The part of each tensor of a node's value; None for what is no tensor, or is not made."""


class Beside(NamedTuple):
    """Entries beside a part, along one axis of the mesh, that a call reads as well.

    Attributes:
        wanted: the tensor as the op reads it.
        entry: of ``graph.inputs``, by which it does.
        axis: of the mesh.
        dim: dimension of the tensor that the axis cuts.
        counts: how many entries before the part, and how many after it.
    """

    wanted: Wanted
    entry: int
    axis: int
    dim: int
    counts: tuple[int, int]


class RankParts:
    """Questions about the parts at one rank; nothing is written.

    Attributes:
        row, place: the stage of the rank, and its place in the mesh.
    """

    def __init__(self, plan: StrategyPlan, rank: int) -> None:
        self.plan, self.values, self.step, self.graph = plan, plan.values, plan.values.step, plan.values.split.graph
        self.rank = rank
        self.row, self.place = divmod(rank, plan.places)

    def layout(self, form: Form) -> PartLayout:
        """The part of a tensor or state that a form is."""
        return self.values.parts.layout(form, self.place)

    def of_node(self, node: fx.Node, wanted: Wanted) -> Parts:
        """The parts that a node's value is, of a root or a view of it."""
        layout, root = self.layout(wanted.want), self.values.parts.root(wanted.want)
        infos = flat(value_of(node))
        return tuple(layout.viewed(info, root) if isinstance(info, TensorInfo) else None for info in infos)

    def made(self, node: fx.Node, op: int, batch: int) -> Parts:
        """The part of each flat result of a call of op j that is to be made."""
        found: list[PartLayout | None] = []
        infos = [info if isinstance(info, TensorInfo) else None for info in flat(value_of(node))]
        first = self.values.nodes.anchors[node]
        for slot, info in enumerate(infos):
            if info is None:
                found.append(None)
                continue
            if first.state >= 0:
                form = Form(-1, first.state, self.values.state_codes(first.state))
            else:
                tensor = self.values.nodes.result(op, first.slot if len(infos) == 1 else slot)
                if tensor is None:
                    found.append(None)
                    continue
                form = self.values.written(tensor, batch)
            found.append(self.layout(form).viewed(info, self.values.parts.root(form)))
        return tuple(found)

    def read(self, node: fx.Node, op: int, batch: int) -> dict[fx.Node, PartLayout]:
        """The part of each tensor argument that a call of op j reads."""
        found = {}
        for argument in node.all_input_nodes:
            anchor = self.values.nodes.anchors.get(argument)
            parts: Parts = ()
            if anchor is not None:
                parts = self.of_node(argument, self.values.wanted(anchor, op, batch))
            elif (info := info_of(argument)) is not None:
                parts = (whole(info.layout.shape),)
            if parts and parts[0] is not None:
                found[argument] = parts[0]
        return found

    def shape_read(self, node: fx.Node, op: int, outputs: Parts) -> PartLayout | None:
        """The part whose shape op j looks at, where it looks at nothing else; else None."""
        info = info_of(node)
        if info is None or not op_kind(self.graph.kinds[op]).reads_shape_only or not outputs or outputs[0] is None:
            return None
        return outputs[0] if outputs[0].shape == info.layout.shape else whole(info.layout.shape)

    def is_drawn(self, node: fx.Node) -> bool:
        """Whether a node is of random numbers that no op draws."""
        return node in self.step.random and node not in self.step.made_by

    def lists(self, node: fx.Node, op: int, batch: int) -> Lists:
        """Lists of tokens that a product by groups reads together."""
        if not op_kind(self.graph.kinds[op]).is_grouped:
            return ()
        for argument in node.all_input_nodes:
            anchor = self.values.nodes.anchors.get(argument)
            if anchor is not None and anchor.state < 0:
                entry = self.values.nodes.entry(op, anchor)
                if are_ends_of_groups(self.values, int(self.graph.inputs[1][entry])):
                    return lists_read(self.values, entry, op, batch, self.place)
        return ()

    def is_by_groups(self, op: int) -> bool:
        """Whether op j works on the tokens of its experts alone."""
        return any(row is not None and row.is_by_groups for row in (s.row[op] for s in self.values.split.mesh))

    def borders(self, node: fx.Node, argument: fx.Node, op: int, batch: int) -> Iterator[Beside]:
        """Axes along which a call of op j also reads entries beside its part of an argument."""
        anchor, info = self.values.nodes.anchors.get(argument), info_of(argument)
        if not self.plan.has_borders or anchor is None or anchor.state >= 0 or info is None:
            return
        entry = self.values.nodes.entry(op, anchor)
        wanted = self.values.wanted_by_edge(entry, op, batch)
        if info.layout.shape != self.values.parts.root(wanted.want).layout.shape:
            return
        for axis, sharding in enumerate(self.values.split.mesh):
            if sharding.halo[entry] and wanted.want.codes[axis] > SUM:
                dim = self.values.parts.dim_cut(wanted.want, axis)
                yield Beside(wanted, entry, axis, dim, borders_needed(node, argument, dim))

    def neighbour(self, axis: int, step: int) -> int | None:
        """The place beside this one along an axis of the mesh; None beyond the edge."""
        coordinates = list(self.values.split.coordinates(self.place))
        coordinates[axis] += step
        if not 0 <= coordinates[axis] < self.values.split.sizes[axis]:
            return None
        return int(np.ravel_multi_index(coordinates, self.values.split.sizes))

    @cached_property
    def nodes_of(self) -> dict[int, list[fx.Node]]:
        """The nodes of each captured op whose values somebody reads, in program order."""
        step = self.step
        trace = step.program.trace
        wanted: set[fx.Node] = set()
        stack = [step.new[node] for node in trace.results] + [step.new[node] for _, node in trace.gradients]
        stack += list(step.state_writes)
        while stack:
            node = stack.pop()
            if node not in wanted:
                wanted.add(node)
                stack += node.all_input_nodes
                # A write through a view is seen through that view of all of the memory.
                stack += [user for user in node.users if user.target is after and step.is_view(node)]
        found: dict[int, list[fx.Node]] = {}
        for node in step.graph.nodes:
            if node in step.made_by and node in wanted:
                found.setdefault(step.made_by[node], []).append(node)
        return found
