"""What a run of replicas comes to: a curve of the loss over time, updates and bytes, and a trace of versions."""

from __future__ import annotations

from dataclasses import dataclass


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
