"""`RecordingModule`: a rank's share of a model that can say what it did when, for a trace."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from placement.measuring.op_clock import Stretch, recorded
from placement.runtime.ranks.ranks import RankModule

if TYPE_CHECKING:
    from placement.runtime.program.layout import DeviceLayout
    from placement.runtime.ranks.passes import CompiledPass, Pass
    from placement.runtime.ranks.process_group import ProcessGroup

# What JSON can hold of a span: what, number of the op, start_s, end_s, rank at the other end (-1: none).
Row = tuple[str, int, float, float, int]


class RecordingModule(RankModule):
    """As `RankModule`; `rows_of` runs with a look at the clock after every op and transfer."""

    _rows: list[Row] | None = None  # None: run as always

    def rows_of(self, run: Callable[[], object]) -> list[Row]:
        """The spans of the passes that ``run`` runs on this rank, by the host's clock."""
        rows = self._rows = []
        try:
            run()
        finally:
            self._rows = None
        return rows

    def _pass(self, layout: DeviceLayout, kind: str, inputs: Mapping[str, torch.Tensor]) -> Pass:
        made = super()._pass(layout, kind, inputs)
        if self._rows is not None:
            made.compiled = self._recorded(made.compiled)
        return made

    def _recorded(self, compiled: CompiledPass) -> CompiledPass:
        """A pass with clock readings in the code of this rank."""
        known: dict[CompiledPass, CompiledPass] = self.__dict__.setdefault("_recorded_passes", {})
        if compiled not in known:
            known[compiled] = found = copy.copy(compiled)
            sections = [list(section) for section in compiled.routines.sections]
            for section in sections:
                own = section[self.rank]
                section[self.rank] = recorded(own, partial(self._write, compiled, own.ops))
            found.routines = dataclasses.replace(compiled.routines, sections=tuple(map(tuple, sections)))
        return known[compiled]

    def _write(self, compiled: CompiledPass, ops: Sequence[int], spans: Sequence[Stretch]) -> None:
        assert self._rows is not None
        for span in whole(spans, ops):
            op, peer = span.number, -1
            if span.what != "op":
                transfer = compiled.routines.transfers[span.number]
                op, peer = transfer.op, transfer.target if span.what == "send" else transfer.source
            self._rows.append((span.what, op, span.start_s, span.end_s, peer))


def whole(spans: Sequence[Stretch], ops: Sequence[int]) -> list[Stretch]:
    """One span for each op, in the order that the ops began.

    An op of several calls, between which something may be sent, lasts from the first to the last; one without code (an
    input, a copy that nobody would notice) has no length and comes when the op before it has ended.
    """
    first: dict[int, Stretch] = {}
    last: dict[int, Stretch] = {}
    for span in spans:
        if span.what == "op":
            first.setdefault(span.number, span)
            last[span.number] = span
    now = spans[0].start_s if spans else perf_counter()
    found = [span for span in spans if span.what != "op"]
    for op in ops:
        begun = first[op].start_s if op in first else now
        now = last[op].end_s if op in last else now
        found.append(Stretch("op", op, begun, now))
    return sorted(found, key=lambda span: span.start_s)


def record_steps(
    module: RecordingModule,
    run: Callable[[], object],
    update: Callable[[], object] | None,
    group: ProcessGroup,
    steps: int,
) -> list[dict[str, Any]]:
    """Record some steps of this rank after one that warms up: ``start_s``, ``end_s`` and ``rows`` of each.

    By the host's clock, which is one for all of its processes.
    """
    found = []
    for _ in range(1 + steps):
        group.barrier()
        start_s = perf_counter()
        rows = module.rows_of(run)
        if update is not None:
            began_s = perf_counter()
            update()
            rows.append(("update", -1, began_s, perf_counter(), -1))
        found.append({"start_s": start_s, "end_s": perf_counter(), "rows": rows})
    return found[1:]
