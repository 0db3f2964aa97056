"""`RecordingModule`: a rank's share of a model that can say what it did when, for a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from graphs.opgraph import Phase
from placement.measuring.op_clock import Stretch, recorded
from placement.runtime.modules.strategy_module import StrategyModule

if TYPE_CHECKING:
    from placement.runtime.modules.rank_program import RankProgram
    from placement.runtime.program.routines import Routine
    from placement.runtime.ranks.process_group import ProcessGroup

# A span as JSON can hold it: what, number of the op, start_s, end_s, rank at the other end (-1: none).
Row = tuple[str, int, float, float, int]


class RecordingModule(StrategyModule):
    """As `StrategyModule`; `rows_of` runs with a look at the clock after every op and transfer."""

    _recorded: RankProgram | None = None
    _rows: list[Row]

    def rows_of(self, run: Callable[[], object]) -> list[Row]:
        """The spans of the planned steps that ``run`` runs on this rank, by the host's clock."""
        plain = self._program
        rows: list[Row] = []
        if self._recorded is None:
            self._recorded = plain.changed(self._with_clock)
        self._program, self._rows = self._recorded, rows
        try:
            run()
        finally:
            self._program = plain
        return rows

    def _with_clock(self, routine: Routine) -> Routine:
        graph, exchanged = self._plan.values.graph, self._plan.values.applied.exchanged
        origins = exchanged.origin[self._plan.ops(self.rank)].tolist()
        own = [self._plan.values.source[op] for op in origins if graph.phase[op] != Phase.UPDATE]
        return recorded(routine, partial(self._write, own))

    def _write(self, ops: Sequence[int], spans: Sequence[Stretch]) -> None:
        for span in whole(spans, ops):
            op, peer = span.number, -1
            if span.what != "op":
                transfer = self._program.transfers[span.number]
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
