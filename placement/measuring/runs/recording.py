"""`RecordingModule`: a share of a placed model that can say what it did when, for a timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from placement.measuring.models.op_clock import Stretch, recorded
from placement.measuring.runs.steps import RecordedStep, Span
from placement.runtime.modules.placed_ranks import PlacedRanks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from placement.measuring.runs.steps import ModelStep
    from placement.runtime.modules.placed_ranks import RankStep
    from placement.runtime.program.device_layout import DeviceLayout


class RecordingModule(PlacedRanks):
    """As `PlacedRanks`; `spans_of` runs with a look at the clock after every op and transfer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._with_clock: dict[DeviceLayout, RankStep] = {}
        self._spans: list[Span] | None = None

    def spans_of(self, run: Callable[[], object]) -> list[Span]:
        """The spans of the steps that ``run`` runs on this rank."""
        spans: list[Span] = []
        plain, self._steps, self._spans = self._steps, self._with_clock, spans
        try:
            run()
        finally:
            self._steps, self._spans = plain, None
        return spans

    def _made(self, layout: DeviceLayout) -> RankStep:
        step = super()._made(layout)
        if self._spans is not None:
            step.change(lambda routine: recorded(routine, partial(self._write, step, routine.ops)))
        return step

    def _write(self, step: RankStep, ops: Sequence[int], stretches: Sequence[Stretch]) -> None:
        assert self._spans is not None
        for each in whole(stretches, ops):
            op, peer = each.number, None
            if each.what != "op":
                transfer = step.transfers[each.number]
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


def record_steps(
    module: RecordingModule, step: ModelStep, group: ProcessGroup | None, count: int
) -> tuple[RecordedStep, ...]:
    """Record some steps of this rank after one that warms up, by the host's clock, which all its processes share."""
    found = []
    for _ in range(1 + count):
        if group is not None:
            dist.barrier(group=group)
        start_s = perf_counter()
        spans = module.spans_of(step.passes)
        if step.train:
            began_s = perf_counter()
            step.update()
            spans.append(Span("update", -1, began_s, perf_counter()))
        found.append(RecordedStep(start_s, perf_counter(), tuple(spans)))
    return tuple(found[1:])
