"""`RecordingModule`: a share of a model that can say what it did when, for a timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from graphs.opgraph import Phase
from placement.measuring.models.op_clock import Stretch, recorded
from placement.measuring.runs.timeline import RecordedStep, Span
from placement.runtime.modules.strategy_module import StrategyModule

if TYPE_CHECKING:
    from placement.measuring.runs.steps import ModelStep
    from placement.runtime.modules.rank_program import RankProgram
    from placement.runtime.program.routines import Routine
    from placement.runtime.ranks.process_group import ProcessGroup


class RecordingModule(StrategyModule):
    """As `StrategyModule`; `spans_of` runs with a look at the clock after every op and transfer."""

    _recorded: RankProgram | None = None
    _spans: list[Span]

    @property
    def is_placement(self) -> bool:
        """Whether ops are the model's own, which a trace can name."""
        return self._plan.is_placement

    def spans_of(self, run: Callable[[], object]) -> list[Span]:
        """The spans of the planned steps that ``run`` runs on this rank."""
        plain = self._program
        spans: list[Span] = []
        if self._recorded is None:
            self._recorded = plain.changed(self._with_clock)
        self._program, self._spans = self._recorded, spans
        try:
            run()
        finally:
            self._program = plain
        return spans

    def _with_clock(self, routine: Routine) -> Routine:
        graph, exchanged = self._plan.values.split.graph, self._plan.values.applied.exchanged
        origins = exchanged.origin[self._plan.ops(self.rank)].tolist()
        own = [self._plan.values.split.source[op] for op in origins if graph.phase[op] != Phase.UPDATE]
        return recorded(routine, partial(self._write, own))

    def _write(self, ops: Sequence[int], stretches: Sequence[Stretch]) -> None:
        for each in whole(stretches, ops):
            op, peer = each.number, None
            if each.what != "op":
                transfer = self._program.transfers[each.number]
                op, peer = transfer.op, transfer.target if each.what == "send" else transfer.source
            self._spans.append(Span(each.what, op, each.start_s, each.end_s, peer))


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


def record_steps(module: RecordingModule, step: ModelStep, group: ProcessGroup, count: int) -> tuple[RecordedStep, ...]:
    """Record some steps of this rank after one that warms up, by the host's clock, which all its processes share."""
    found = []
    for _ in range(1 + count):
        group.barrier()
        start_s = perf_counter()
        spans = module.spans_of(step.passes)
        if step.train:
            began_s = perf_counter()
            step.update()
            spans.append(Span("update", -1, began_s, perf_counter()))
        found.append(RecordedStep(start_s, perf_counter(), tuple(spans)))
    return tuple(found[1:])
