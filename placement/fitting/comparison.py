"""`FitComparison`: methods of distributed optimisation on one model and one cluster, and which reaches a loss first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphs.formatting import format_seconds
from graphs.origin import EAGER
from placement.comparing.rows import AsJson, Column, Row, RowTable, names_of

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.opgraph import OpGraph
    from placement.fitting.log import FitRun

METHOD = Column("method", "method")
FIGURES = (
    Column("seconds", "seconds", "s"),
    Column("updates", "updates", "{:,}".format),
    Column("rate", "updates/s", "{:.3g}".format),
    Column("bytes", "bytes", "bytes"),
    Column("loss", "loss", "{:.4g}".format),
    Column("reached", "reached", lambda reached: "yes" if reached else "no"),
    Column("staleness", "staleness", "{:.3g}".format),
)


@dataclass(frozen=True)
class FitComparison(AsJson):
    """Methods on one model and one cluster.

    Attributes:
        graph: of a worker's step, captured.
        runs: in the order of the methods.
        until: the held-out loss asked for; None: none.
        workers: that compute gradients.
        batch: samples of a worker's mini-batch.
        learning_rate: of methods that name none.
        strategy: how a worker's step lies on its own devices.
        stragglers: the distribution of delays.
        seed: of everything random.
        is_real: it ran in processes, and seconds are those of the wall; else in virtual time.
        versions: of Python and the packages that made it.
        interrupted: whether Ctrl-C or an error ended it, so that methods are missing.
        command: the command line that made it, or "".
        one_worker: a single worker on the same data with the same learning rate and limits; None of a real run, of a
            sweep, and where there are no others.
    """

    graph: OpGraph
    cluster: Cluster
    runs: tuple[FitRun, ...]
    until: float | None
    workers: int
    batch: int
    learning_rate: float
    strategy: str
    stragglers: str
    seed: int
    is_real: bool
    versions: Mapping[str, str]
    interrupted: bool = False
    command: str = field(default="", compare=False)
    one_worker: FitRun | None = None

    @property
    def best(self) -> FitRun:
        """That which reaches the loss first; where none does, or none was asked for, that with the lowest loss."""
        return min(self.runs, key=_rank)

    def advice(self) -> str:
        """The advice in a sentence or two."""
        best, others = self.best, [run for run in self.runs if run is not self.best]
        if not best.reached:
            lowest = f"{best.method} has the lowest loss, {best.loss:.4g} after {format_seconds(best.seconds)}"
            if best.has_diverged:
                if not any(run.updates for run in self.runs):
                    return "The loss is no number before the first update; look for NaN in the data and the model."
                return "Every method diverged; take a smaller learning rate."
            return f"{lowest}." if self.until is None else f"None of these reaches loss {self.until:g}; {lowest}."
        behind = sorted((run for run in others if run.reached), key=_rank)
        said = [f"{best.method} reaches loss {self.until:g} first, in {format_seconds(best.seconds)}"]
        if behind:
            times = f"{behind[0].seconds / best.seconds:.2f}x as soon as " if best.seconds else "before "
            said.append(f"{times}{behind[0].method} ({format_seconds(behind[0].seconds)})")
        if self.one_worker is not None and self.one_worker.reached:
            said.append(f"one worker alone takes {format_seconds(self.one_worker.seconds)}")
        missing = [run.method for run in others if not run.reached]
        if missing:
            said.append(f"{', '.join(missing)} {'does' if len(missing) == 1 else 'do'} not reach it")
        return "; ".join(said) + "."

    def sentences(self) -> list[str]:
        """Sentences to be said of methods."""
        return [f"{run.method}: {run.note}" for run in self.runs if run.note]

    def table(self) -> RowTable:
        """A row for each method, in the order asked for; one worker alone is the last."""
        rows = [Row(self.cells(run), "best" if run is self.best else "") for run in self.runs]
        if self.one_worker is not None:
            rows.append(Row(self.cells(self.one_worker), "base"))
        return RowTable((METHOD, *FIGURES), tuple(rows))

    def cells(self, run: FitRun) -> dict[str, Any]:
        """Fields of a run's row, by the keys of `METHOD` and `FIGURES`."""
        rate = run.updates / run.seconds if run.seconds else None
        return {**run.to_dict(), "loss": run.loss, "rate": rate, "reached": None if self.until is None else run.reached}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {
            **names_of(self.graph, self.cluster),
            "advice": self.advice(),
            "until": self.until,
            "workers": self.workers,
            "batch": self.batch,
            "learning_rate": self.learning_rate,
            "strategy": self.strategy,
            "stragglers": self.stragglers,
            "stack": self.graph.origin.stack or EAGER,
            "precision": self.graph.origin.precision,
            "seed": self.seed,
            "real": self.is_real,
            "versions": dict(self.versions),
            "interrupted": self.interrupted,
            "command": self.command,
            "results": [run.to_dict() for run in self.runs],
            "one_worker": None if self.one_worker is None else self.one_worker.to_dict(),
        }


def _rank(run: FitRun) -> tuple[bool, float]:
    """Key of order: runs that reach the loss, soonest first; then the others, lowest loss first, diverged ones last."""
    if run.reached:
        return False, run.seconds
    return True, run.loss if math.isfinite(run.loss) else math.inf
