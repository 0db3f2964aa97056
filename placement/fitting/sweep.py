"""`FitSweep`: the time to a loss over numbers of workers or sizes of the batch, and the laws that it follows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from graphs.errors import FitError, PlacementError
from graphs.formatting import counted, format_seconds
from placement.comparing.rows import AsJson, Column, Row, RowTable
from placement.fitting.comparison import FIGURES, METHOD, FitComparison
from placement.sizing.sweeps import LEAST_POINTS, WORKERS, ScalingFit, Sweep, fit_devices

if TYPE_CHECKING:
    from placement.fitting.log import FitRun


@dataclass(frozen=True)
class FitSweep(AsJson):
    """The same methods, with more and more workers or larger and larger mini-batches.

    Attributes:
        sweep: what is varied.
        cases: one for each size, in their order.
        interrupted: whether Ctrl-C or an error ended it, so that sizes are missing.
        command: the command line that made it, or "".
    """

    sweep: Sweep
    cases: tuple[FitComparison, ...]
    interrupted: bool = False
    command: str = field(default="", compare=False)

    @property
    def methods(self) -> tuple[str, ...]:
        """Their texts, in the order asked for."""
        return tuple(run.method for run in self.cases[0].runs)

    def runs(self, method: str) -> list[tuple[int, FitRun]]:
        """A method's run at each size."""
        place = self.methods.index(method)
        return [(size, case.runs[place]) for size, case in zip(self.sweep.sizes, self.cases, strict=True)]

    def reached(self, method: str) -> list[tuple[int, float]]:
        """The sizes at which a method reaches the loss, and after how many seconds."""
        return [(size, run.seconds) for size, run in self.runs(method) if run.reached and run.seconds > 0]

    def laws(self, method: str) -> tuple[ScalingFit, ScalingFit] | None:
        """Amdahl's and Gunther's of the time to the loss over workers; None where fewer than three sizes reach it."""
        points = self.reached(method)
        if self.sweep.kind != WORKERS or len(points) < LEAST_POINTS:
            return None
        return fit_devices([size for size, _ in points], [seconds for _, seconds in points])

    def largest_batch(self, method: str) -> float | None:
        """Samples of an update beyond which more no longer help, by gradient diversity; the median over sizes."""
        known = sorted(run.largest_batch for _, run in self.runs(method) if run.largest_batch is not None)
        return known[len(known) // 2] if known else None

    def advice(self) -> str:
        """The advice in a sentence."""
        points = [(seconds, size, method) for method in self.methods for size, seconds in self.reached(method)]
        if not points:
            return f"None of these reaches loss {self.cases[0].until:g} with any of these {_many(self.sweep.kind)}."
        seconds, size, method = min(points)
        what = counted(size, "worker") if self.sweep.kind == WORKERS else f"mini-batches of {size}"
        return f"{method} with {what} reaches loss {self.cases[0].until:g} first, in {format_seconds(seconds)}."

    def sentences(self) -> list[str]:
        """Sentences of laws and diversity about each method."""
        said = []
        for method in self.methods:
            diverged = [str(size) for size, run in self.runs(method) if run.has_diverged]
            if diverged:
                said.append(f"{method}: diverged with {self.sweep.kind} {', '.join(diverged)}; take a smaller lr.")
            said += [f"{method}: {law.sentence()}" for law in self.laws(method) or ()]
            largest = self.largest_batch(method)
            if largest is not None:
                beyond = f"updates of more than {largest:.3g} samples no longer help"
                said.append(f"{method}: by the diversity of gradients, {beyond}.")
        return said

    def table(self) -> RowTable:
        """A row for each method and size."""
        pairs = zip(self.sweep.sizes, self.cases, strict=True)
        rows = (
            Row({**case.cells(case.runs[number]), "size": str(size)})
            for number, (size, case) in itertools.product(range(len(self.methods)), pairs)
        )
        return RowTable((METHOD, Column("size", self.sweep.kind), *FIGURES), tuple(rows))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields; a result for each size and method."""
        first = self.cases[0].to_dict()
        left_out = {"advice", "command", "results", self.sweep.kind}
        return {
            **{key: value for key, value in first.items() if key not in left_out},
            "advice": self.advice(),
            "interrupted": self.interrupted,
            "command": self.command,
            "sweep": self.sweep.kind,
            "scaling": [
                {"method": method, "largest_batch": self.largest_batch(method), "laws": self._laws_json(method)}
                for method in self.methods
            ],
            "results": [
                {"size": size, **row}
                for size, case in zip(self.sweep.sizes, self.cases, strict=True)
                for row in case.to_dict()["results"]
            ],
        }

    def _laws_json(self, method: str) -> list[dict[str, Any]] | None:
        laws = self.laws(method)
        return None if laws is None else [law.to_dict() for law in laws]


def sweep_fit(sweep: Sweep, fit_one: Callable[[int], FitComparison]) -> FitSweep:
    """Fit at each size. Ctrl-C ends it with the sizes that are done, if any is. An error has them as its ``finished``.

    Args:
        fit_one: the methods with so many workers, or mini-batches of that size, until a loss.

    Raises:
        FitError: no loss is asked for.
        PlacementError: of `fit_one`.
    """
    cases: list[FitComparison] = []

    def found() -> FitSweep:
        done = replace(sweep, sizes=sweep.sizes[: len(cases)])
        return FitSweep(done, tuple(cases), interrupted=len(cases) < len(sweep.sizes))

    try:
        for size in sweep.sizes:
            case = fit_one(size)
            if case.interrupted:
                break
            if case.until is None:
                raise FitError("a sweep compares the times to a loss; say which, until=0.5 for example.")
            cases.append(case)
    except KeyboardInterrupt:
        pass
    except PlacementError as error:
        error.finished = found() if cases else None
        raise
    if not cases:
        raise KeyboardInterrupt
    return found()


def _many(kind: str) -> str:
    return "numbers of workers" if kind == WORKERS else "mini-batches"
