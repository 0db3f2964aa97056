"""`Probe`: the writer of a rank's program, which also says what it calls and what is where."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from graphs.transforms.splitting.sharding import SUM
from placement.runtime.calls.local_calls import borders_needed
from placement.runtime.parts.layouts import PartLayout, whole
from placement.runtime.planning.strategy_plan import StrategyPlan
from placement.runtime.planning.values import Wanted, info_of
from placement.runtime.writing.writer import Writer


class Probe(Writer):
    """A place of a stage. Without `write` it only says what is where, and costs next to nothing."""

    def __init__(self, plan: StrategyPlan, rank: int) -> None:
        super().__init__(plan, rank)
        self.calls: list[tuple[fx.Node, int, int]] = []  # with op j and micro-batch

    def _called(self, node: fx.Node, op: int, batch: int, made: dict[fx.Node, fx.Node]) -> fx.Node:
        self.calls.append((node, op, batch))
        return super()._called(node, op, batch, made)

    @property
    def views(self) -> Iterator[tuple[fx.Node, Wanted]]:
        """The views that were written of parts, in the forms that were read."""
        return ((node, wanted) for node, wanted, _ in self._views)

    def has_statistics(self, op: int) -> bool:
        """Whether parts put the statistics of op j together."""
        return op in self._statistics or ("statistics", op) in self._pending

    def has_lists(self, node: fx.Node, op: int, batch: int) -> bool:
        """Whether a call reads lists of tokens, of which each part has sorted its own."""
        return bool(self._lists(node, op, batch))

    def made(self, node: fx.Node, op: int, batch: int) -> tuple[PartLayout | None, ...]:
        """The part of each flat result of a call that is to be made."""
        return self._outputs(node, op, batch)

    def of_view(self, node: fx.Node, wanted: Wanted) -> tuple[PartLayout | None, ...]:
        """The part that each tensor of a node's value is."""
        return self._parts_of(node, wanted)

    def read(
        self, argument: fx.Node, op: int, batch: int, outputs: tuple[PartLayout | None, ...]
    ) -> tuple[PartLayout | None, Wanted | None]:
        """The part of an argument that a call reads, and the form it is in; None for what is no tensor of the graph."""
        info, step = info_of(argument), self._step
        if info is None:
            return None, None
        anchor = self._values.anchors.get(argument)
        if anchor is None or (argument in step.random and argument not in step.made_by):
            return whole(info.layout.shape), None
        if self._reads_shape(op) and outputs and outputs[0] is not None:
            return (outputs[0] if outputs[0].shape == info.layout.shape else whole(info.layout.shape)), None
        wanted = self._values.wanted(anchor, op, batch)
        return self._parts_of(argument, wanted)[0], wanted

    def beside(self, node: fx.Node, argument: fx.Node, op: int, wanted: Wanted) -> Iterator[int]:
        """The dimensions of an argument along which a call also reads what lies beside its part."""
        anchor, info = self._values.anchors.get(argument), info_of(argument)
        if not self._plan.has_borders or anchor is None or anchor.state >= 0 or info is None:
            return
        if info.layout.shape != self._values.root(wanted.want).layout.shape:
            return
        entry = self._values.entry(op, anchor)
        for axis, sharding in enumerate(self._values.mesh):
            if sharding.halo[entry] and wanted.want.codes[axis] > SUM:
                dim = self._values.dim_cut(wanted.want, axis)
                if any(borders_needed(node, argument, dim)):
                    yield dim
