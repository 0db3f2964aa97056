"""`FitRun`, the outcome of a run of replicas; `FitLog`, which keeps it; `DiversityMeter`, the largest useful batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from placement.fitting.participants import Updated


@dataclass(eq=False)
class DiversityMeter:
    """The largest useful batch, estimated from what workers compute anyway: mini-batch gradients at equal weights.

    With the mean gradient m and the variance v of one sample's, a gradient over b samples has |m|^2 + v / b as its
    mean square, and n x diversity is 1 + v / |m|^2 for large n. Two or more gradients at the same weights give both
    without bias (McCandlish et al. 2018, appendix A.1); they are summed over all updates before they are divided.
    """

    _weights: Tensor | None = None
    _gradients: list[Tensor] = field(default_factory=list)
    _samples: int = 0
    _variance: float = 0.0
    _mean_square: float = 0.0

    def add(self, weights: Tensor, gradient: Tensor, samples: int) -> None:
        """A worker's mean gradient over so many samples, float32 [entries], at these weights."""
        if self._weights is None or samples != self._samples or not torch.equal(weights, self._weights):
            self._close()
            self._weights, self._samples = weights.clone(), samples
        self._gradients.append(gradient)

    def add_together(self, gradients: Sequence[Tensor], samples: int) -> None:
        """Mean gradients of several workers at equal weights, over so many samples each."""
        self._close()
        self._weights, self._gradients, self._samples = None, list(gradients), samples
        self._close()

    def largest_batch(self) -> float | None:
        """Samples beyond which a larger batch no longer helps.

        None where it is not known: no two workers were at equal weights, or the mean gradient is lost in the noise.
        """
        self._close()
        return 1.0 + self._variance / self._mean_square if self._mean_square > 0.0 else None

    def _close(self) -> None:
        """Take the gradients at the last weights into account."""
        count = len(self._gradients)
        if count > 1:
            gradients = torch.stack(self._gradients).double()
            mean = gradients.mean(0)
            variance = float((gradients - mean).square().sum()) / (count - 1)  # of a mini-batch's gradient
            self._variance += variance * self._samples
            self._mean_square += float(mean.square().sum()) - variance / count
        self._gradients = []


MOST_POINTS = 2_000  # of a curve; of a longer one every second point is left out
_GRACE = 10  # evaluations that may be missing at the end
MOST_LINES = 100_000  # of a trace, the first ones
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

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields, without curve and trace."""
        left_out = ("points", "trace")
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}
        return {**own, "loss": self.loss if math.isfinite(self.loss) else None}


def grew_to(start: float, loss: float) -> bool:
    """Whether a loss is no number, or far above that at the start."""
    return not loss <= start + (_GREW - 1) * abs(start)


@dataclass(frozen=True)
class Stop:
    """End of a run: at a held-out loss, after so many updates, or after so many seconds.

    Attributes:
        every: updates between two evaluations.
    """

    loss: float = -math.inf
    updates: int = 10_000
    seconds: float = math.inf
    every: int = 10


class Turns:
    """Turns of versions to be evaluated."""

    def __init__(self, stop: Stop) -> None:
        self._stop, self._next = stop, stop.every

    def is_due(self, version: int) -> bool:
        """Whether this version has; it is asked once."""
        if version < min(self._next, self._stop.updates):
            return False
        self._next = (version // self._stop.every + 1) * self._stop.every
        return True


class FitLog:
    """Curve, trace and sums of a run. Their memory is bounded, however long it is.

    Attributes:
        is_over: whether the run is to end.
        note: why it has ended, where that is no success; "" else.
    """

    def __init__(self, stop: Stop, evaluate: Callable[[Tensor], float], tell: Callable[[CurvePoint], None]) -> None:
        """`evaluate` gives the held-out loss of weights; `tell` is told each point of the curve."""
        self._stop, self._evaluate, self._tell = stop, evaluate, tell
        self._points: list[CurvePoint] = []
        self._trace: list[ReadVersion] = []
        self._staleness, self._counted, self._turns = 0.0, 0, Turns(stop)
        self._diversity = DiversityMeter()
        self._lost: list[str] = []
        self.updates, self.is_over, self.note = 0, False, ""

    def read(self, worker: int, step: int, version: int) -> None:
        """A worker begins a gradient at weights of a version."""
        if len(self._trace) < MOST_LINES:
            self._trace.append(ReadVersion(worker, step, version))

    def computed(self, weights: Tensor, gradient: Tensor, samples: int) -> None:
        """A worker has the mean gradient of so many samples."""
        self._diversity.add(weights, gradient, samples)

    def computed_together(self, gradients: Sequence[Tensor], samples: int) -> None:
        """Workers have the mean gradients of so many samples each at equal weights."""
        self._diversity.add_together(gradients, samples)

    def updated(self, request: Updated, seconds: float, sent_bytes: int) -> None:
        """An update was made; its weights, if it is its turn, are evaluated."""
        self.updates = max(self.updates, request.version)
        if request.staleness is not None:
            self._staleness, self._counted = self._staleness + request.staleness, self._counted + 1
        if request.weights is not None and self._turns.is_due(request.version):
            self.evaluate(request.weights, request.version, seconds, sent_bytes)
        elif self.updates >= self._stop.updates + _GRACE * self._stop.every:
            self.end(
                f"the model was not in one piece within {self._stop.updates:,} updates and "
                f"{_GRACE * self._stop.every:,} more; take more updates or a shorter period, unless who has it was lost"
            )

    def evaluate(self, weights: Tensor, version: int, seconds: float, sent_bytes: int) -> None:
        """Add a point to the curve: weights after so many updates, which may be fewer than others have made."""
        point = CurvePoint(seconds, version, sent_bytes, self._evaluate(weights))
        self._points.append(point)
        self._tell(point)
        if len(self._points) > MOST_POINTS:
            del self._points[1:-1:2]
        if not math.isfinite(point.loss):
            self.end(
                f"diverged: the held-out loss is no number after {self.updates} updates; take a smaller lr"
                if version
                else "the held-out loss is no number before the first update; look for NaN in the data and the model"
            )
        elif point.loss <= self._stop.loss or self.updates >= self._stop.updates:
            if version >= self._stop.updates:
                self.updates = version  # what others have told before it came after it
            self.end()

    def lost(self, who: str) -> None:
        """The run goes on without a participant."""
        self._lost.append(who)

    def end(self, note: str = "") -> None:
        """The run is over; why, where that is no success."""
        if not self.is_over:
            self.is_over, self.note = True, note

    def run(self, method: str, seconds: float, sent_bytes: int) -> FitRun:
        """The run as it stands."""
        last, start = self._points[-1], self._points[0]
        if math.isfinite(last.loss) and grew_to(start.loss, last.loss):
            grown = f"diverged: the held-out loss went from {start.loss:.3g} to {last.loss:.3g}; take a smaller lr"
            self.note = "; ".join(filter(None, [self.note, grown]))
        return FitRun(
            method=method,
            seconds=seconds,
            updates=self.updates,
            bytes=sent_bytes,
            loss=last.loss,
            reached=last.loss <= self._stop.loss,
            staleness=self._staleness / max(self._counted, 1),
            points=tuple(self._points),
            trace=tuple(self._trace),
            largest_batch=self._diversity.largest_batch(),
            note="; ".join([*filter(None, [self.note]), *(f"went on without {who}" for who in self._lost)]),
        )


def tell_no_one(point: CurvePoint) -> None:
    """Tell no one, where nobody waits."""
