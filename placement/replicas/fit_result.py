"""Outcome of a run of replicas: a curve of the loss over time, updates and bytes, and a trace of versions."""

from __future__ import annotations

from dataclasses import dataclass

_GREW = 10.0  # times the loss at the start, beyond which nobody calls it noise


@dataclass(frozen=True)
class CurvePoint:
    """The held-out loss at one moment of a run."""

    seconds: float
    updates: int
    bytes: int
    loss: float


@dataclass(frozen=True)
class ReadVersion:
    """A line of the trace: a worker began a gradient at weights of a version."""

    worker: int
    step: int
    version: int


@dataclass(frozen=True)
class FitRun:
    """One method on one cluster, run until a loss was reached or the run was ended.

    Attributes:
        method: its text.
        seconds: when the run ended, virtual or real.
        updates: made to the model by then.
        bytes: sent by all participants together.
        loss: held out, the last one evaluated.
        reached: whether that is the loss asked for, or less.
        staleness: mean over updates, in updates.
        points: the curve, in order of time.
        trace: who read which version, in order of time.
        largest_batch: samples of an update beyond which more no longer help, by the diversity of gradients; None where
            no two workers' gradients were taken at equal weights, or their mean is lost in the noise.
        note: what else is to be said, one sentence; "" for nothing.
    """

    method: str
    seconds: float
    updates: int
    bytes: int
    loss: float
    reached: bool
    staleness: float
    points: tuple[CurvePoint, ...]
    trace: tuple[ReadVersion, ...]
    largest_batch: float | None = None
    note: str = ""

    @property
    def has_diverged(self) -> bool:
        """Whether the loss at the end is no number, or has grown far beyond that at the start."""
        return grew_to(self.points[0].loss, self.loss)


def grew_to(start: float, loss: float) -> bool:
    """Whether a loss is no number, or far above that at the start."""
    return not loss <= start + (_GREW - 1) * abs(start)
