"""`FitComparison`: methods of distributed optimisation beside each other, sweeps of them, and their report."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Any

from graphs.disk import write_atomically
from graphs.errors import FitError, PlacementError
from graphs.formatting import counted, format_bytes, format_seconds
from graphs.origin import EAGER
from placement.comparing.rows import AsJson, Column, Row, RowTable, names_of
from placement.report.charts import Across, Curve, evenly, plot
from placement.report.page import card, page, repeating
from placement.sizing.sweeps import LEAST_POINTS, WORKERS, ScalingFit, Sweep, fit_devices

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.opgraph import OpGraph
    from placement.fitting.log import CurvePoint, FitRun

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
            many = "numbers of workers" if self.sweep.kind == WORKERS else "mini-batches"
            return f"None of these reaches loss {self.cases[0].until:g} with any of these {many}."
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
                {
                    "method": method,
                    "largest_batch": self.largest_batch(method),
                    "laws": laws and [law.to_dict() for law in laws],
                }
                for method, laws in ((method, self.laws(method)) for method in self.methods)
            ],
            "results": [
                {"size": size, **row}
                for size, case in zip(self.sweep.sizes, self.cases, strict=True)
                for row in case.to_dict()["results"]
            ],
        }


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


COLOURS = 8  # of the style sheet
_MOST_POINTS = 200  # of a curve: more are closer than a point is wide
_NOTE = (
    "Loss: over the held-out samples; staleness: updates between the reading of weights and the update by their "
    "gradient, in the mean."
)


def write_fits(found: FitComparison | FitSweep, path: str | PathLike[str]) -> None:
    """Write the report of a comparison of methods, or of a sweep of them.

    Raises:
        OSError: the file cannot be written; an older file of that name is left as it was.
    """
    write_atomically(path, render_fits(found))


def render_fits(found: FitComparison | FitSweep) -> str:
    """The page as text."""
    sweep = found.sweep if isinstance(found, FitSweep) else None
    one = replace(found.cases[0], command=found.command) if isinstance(found, FitSweep) else found
    charts = _charts(found)
    parts = {
        "kind": f"fit{'' if sweep is None else f' over {sweep.kind}'}",
        "headline": escape(found.advice()),
        "picture": charts[0],
        "rows": "Methods",
        "table": found.table().html(),
        "notes": _NOTE,
        "said": "".join(f'<p class="note">{escape(sentence)}</p>' for sentence in found.sentences()),
        "after": "".join(charts[1:]),
        "facts": _facts(one, sweep),
    }
    return page(one.graph.name, one.cluster.name, parts)


def _charts(found: FitComparison | FitSweep) -> tuple[str, str]:
    if isinstance(found, FitSweep):
        times = _over_sizes(found, "Time to the loss", lambda run: run.seconds, format_seconds)
        return times, _over_sizes(found, "Updates to the loss", lambda run: run.updates, lambda count: f"{count:.3g}")
    over_time = _chart(found, "Loss over time", "time", lambda point: point.seconds, format_seconds)
    return over_time, _chart(found, "Loss over bytes sent", "bytes sent", lambda point: point.bytes, format_bytes)


def _over_sizes(found: FitSweep, title: str, value: Callable[[FitRun], float], show: Callable[[float], str]) -> str:
    """A curve for each method, of the sizes at which it reaches the loss."""
    curves = [
        Curve(method, f"c{k % COLOURS}", [(float(n), value(run)) for n, run in found.runs(method) if run.reached])
        for k, method in enumerate(found.methods)
    ]
    drawn = plot(curves, Across(found.sweep.kind, [float(size) for size in found.sweep.sizes]), show)
    note = f"Over {found.sweep.kind}; sizes at which a method does not reach it are left out."
    return card(title, drawn, note)


def _chart(
    found: FitComparison, title: str, name: str, at: Callable[[CurvePoint], float], show: Callable[[float], str]
) -> str:
    last = max((at(point) for run in found.runs for point in run.points), default=0.0) or 1.0
    curves = [
        Curve(run.method, f"c{number % COLOURS}", [(at(point), point.loss) for point in _thinned(run)])
        for number, run in enumerate(found.runs)
    ]
    if found.until is not None:
        curves.append(Curve(f"loss {found.until:g}", "single", [(0.0, found.until), (last, found.until)]))
    drawn = plot(curves, evenly(last, name, show), lambda loss: f"{loss:.3g}")
    note = (
        "Every worker's bytes together."
        if name != "time"
        else f"Seconds of {counted(found.workers, 'worker')} together."
    )
    return card(title, drawn, note)


def _thinned(run: FitRun) -> list[CurvePoint]:
    """Points that can be told apart, the first and the last among them; none whose loss is no number."""
    points = [point for point in run.points if math.isfinite(point.loss)]
    every = -(-len(points) // _MOST_POINTS)
    return [point for k, point in enumerate(points) if k % every == 0 or k == len(points) - 1]


def _facts(found: FitComparison, sweep: Sweep | None = None) -> str:
    """Settings, versions, hashes and the command that repeat it; of a sweep, its sizes in the place of one."""
    sizes = {"workers": str(found.workers), "batch": counted(found.batch, "sample")}
    if sweep is not None:
        sizes[sweep.kind] = f"{', '.join(map(str, sweep.sizes))}{' samples' if sweep.kind == 'batch' else ''}"
    facts = {
        "graph": f"{found.graph.name}: {found.graph.n_ops:,} ops, the step of one worker",
        "graph hash": found.graph.hash,
        "cluster": found.cluster.name,
        "about it": found.cluster.summary,
        "cluster hash": found.cluster.hash,
        "workers": sizes["workers"],
        "batch of each": sizes["batch"],
        "learning rate": f"{found.learning_rate:g}, of methods that name none",
        "strategy": found.strategy,
        "stragglers": found.stragglers,
        "seed": str(found.seed),
        "time": "of the wall, in real processes" if found.is_real else "simulated",
    }
    return repeating(found.command, facts, found.versions)
