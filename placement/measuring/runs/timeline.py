"""`Timeline`: what each process did when in a measured step, to be drawn beside the predicted one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Span:
    """A stretch of a measured step.

    Attributes:
        what: ``"op"``; ``"receive"``, ``"send"`` or ``"expect"`` (getting ready to receive); ``"update"``, that of the
            optimizer.
        op: its number; of a transfer that of the op which made the tensor; -1 for none.
        start_s, end_s: since the first process began the step; of one process, by the host's clock.
        peer: rank at the other end of a transfer; None of all else.
    """

    what: str
    op: int
    start_s: float
    end_s: float
    peer: int | None = None


@dataclass(frozen=True)
class RecordedStep:
    """One process's part of a measured step.

    Attributes:
        start_s, end_s: when it began, and when it was done.
        spans: in the order that they began; what an op sends in its midst lies within the op.
    """

    start_s: float
    end_s: float
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """A measured step, to be drawn beside the predicted one.

    Attributes:
        step_s: median over the steps that were timed.
        tracks: by name of a device, its process's part of one more step, which looking at the clock after every op
            makes a little longer; where none was recorded, the median step as a whole.
    """

    step_s: float
    tracks: tuple[tuple[str, RecordedStep], ...]


def timeline(names: Sequence[str], step_s: float, ranks: Sequence[Sequence[RecordedStep]]) -> Timeline:
    """The recorded step of median length.

    Args:
        names: devices in the order of ranks.
        ranks: the same steps as each rank has recorded them; none where nothing was recorded.
    """
    steps = list(zip(*ranks, strict=True))
    if not steps:
        return Timeline(step_s, ((", ".join(names), RecordedStep(0.0, step_s)),))
    lengths = [max(own.end_s - own.start_s for own in step) for step in steps]
    chosen = steps[lengths.index(statistics.median_low(lengths))]
    zero_s = min(own.start_s for own in chosen)  # they leave the barrier almost at once

    def moved(own: RecordedStep) -> RecordedStep:
        spans = (replace(span, start_s=span.start_s - zero_s, end_s=span.end_s - zero_s) for span in own.spans)
        return RecordedStep(own.start_s - zero_s, own.end_s - zero_s, tuple(spans))

    return Timeline(step_s, tuple(zip(names, map(moved, chosen), strict=True)))
