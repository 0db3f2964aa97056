"""`compare_seeds`: methods on one problem under several seeds, by mean and spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from env.cluster import Cluster
from env.plan import Method
from graphs.formatting import format_seconds, show
from graphs.opgraph import OpGraph
from placement.comparing.methods import NOT_SEARCHED, compare
from placement.comparing.rows import CaseGrid, Column, Row, RowTable, Tile
from placement.results.result import versions
from placement.solving.methods import default_methods, measure

# Of Student's t at 97.5 %, by degrees of freedom from 1; beyond, the normal distribution's 1.96 is 4 % off at most.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class SeedRow:
    """One method under every seed.

    Attributes:
        found: seeds under which it found a placement that fits.
        mean_s, least_s, most_s: objectives of these, in seconds; None where there are none.
        spread_s: their standard deviation, of a sample; 0 of a single one.
        interval_s: half of the 95 % interval of their mean, by the t distribution; None of a single one.
        speedup: one device over the mean; None where either is unknown.
    """

    method: str
    found: int
    mean_s: float | None = None
    spread_s: float | None = None
    interval_s: float | None = None
    least_s: float | None = None
    most_s: float | None = None
    speedup: float | None = None


@dataclass(frozen=True)
class SeedRun:
    """One method under one seed; its objective in seconds, None where it found nothing that fits."""

    method: str
    seed: int
    objective_s: float | None


@dataclass(frozen=True, kw_only=True)
class SeedComparison(CaseGrid):
    """Methods under several seeds, least mean first.

    Attributes:
        seeds: in the order given.
        runs: every method under every seed.
        lower_bound_s: no placement can have a smaller objective.
    """

    kind = "seeds"

    seeds: tuple[int, ...]
    rows: tuple[SeedRow, ...]
    runs: tuple[SeedRun, ...]
    lower_bound_s: float

    def headline(self) -> str:
        best = self.rows[0]
        if best.mean_s is None:
            return ""
        gain = "" if best.speedup is None else f", {best.speedup:.2f}x one device"
        least = f"{show(best.method)} has the least mean {measure(self.objective)}: {format_seconds(best.mean_s)}{gain}"
        return f"{least}; {NOT_SEARCHED}"

    def among(self) -> str:
        return f"{self.cluster.name}, {len(self.seeds)} seeds"

    def tiles(self) -> list[Tile]:
        best = self.rows[0]
        if best.mean_s is None:
            return []
        spread = "" if best.interval_s is None else f" ± {format_seconds(best.interval_s)}"
        shown = [Tile(f"mean {measure(self.objective)}", format_seconds(best.mean_s), f"{best.method}{spread}")]
        if best.speedup is not None:
            under = f"one device: {format_seconds(self.single_device_s or 0.0)}"
            shown.append(Tile("speed-up", f"{best.speedup:.2f}×", under))
        return [*shown, Tile("lower bound", format_seconds(self.lower_bound_s), "no placement can be faster")]

    def table(self) -> RowTable:
        columns = (
            Column("method", "method"),
            Column("mean_s", f"mean {measure(self.objective)}", "s"),
            Column("spread_s", "spread", "s"),
            Column("interval_s", "95 % ±", "s"),
            Column("least_s", "least", "s"),
            Column("most_s", "most", "s"),
            Column("speedup", "speed-up", "x"),
            Column("found", "fits", lambda found: f"{found} of {len(self.seeds)}"),
        )
        rows = (Row(asdict(row), "best" if row is self.rows[0] else "") for row in self.rows)
        return RowTable(columns, tuple(rows))

    def notes(self) -> list[str]:
        spread = "spread: standard deviation over the seeds; 95 %: half of the interval of the mean"
        return [spread, *super().notes()]

    def facts(self) -> dict[str, str]:
        return {**super().facts(), "seed": ", ".join(map(str, self.seeds))}

    def to_dict(self) -> dict[str, Any]:
        head = self.head()
        del head["seed"]
        return head | {
            "seeds": list(self.seeds),
            "single_device_s": self.single_device_s,
            "lower_bound_s": self.lower_bound_s,
            "results": [asdict(row) for row in self.rows],
            "runs": [asdict(run) for run in self.runs],
        }


def compare_seeds(
    graph: OpGraph,
    cluster: Cluster,
    methods: Sequence[str] | Mapping[str, Method | str] | None = None,
    *,
    seeds: Sequence[int],
    progress: Callable[[str, int, int], None] | None = None,
    **search: Any,
) -> SeedComparison:
    """Run `placement.compare` under each seed; strategies are not searched.

    Args:
        methods, search: as of `placement.compare`.
        seeds: at least one, each once.
        progress: called before each seed with its number, how many are done and how many there are.

    Raises:
        ValueError: no seed, or one twice; and as `placement.compare`.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"expected at least one seed, each once; got {', '.join(map(str, seeds)) or 'none'}.")
    asked = default_methods(search.get("objective", "latency")) if methods is None else methods
    found = []
    for done, seed in enumerate(seeds):
        if progress is not None:
            progress(f"seed {seed}", done, len(seeds))
        found.append(compare(graph, cluster, asked, seed=seed, strategies=False, **search))
    single_s = found[0].single_device_s
    runs = [SeedRun(r.method, one.seed, r.objective_s) for one in found for r in one.results]
    times: dict[str, list[float]] = {run.method: [] for run in runs}
    for run in runs:
        if run.objective_s is not None:
            times[run.method].append(run.objective_s)
    rows = [_row(method, values, single_s) for method, values in times.items()]
    return SeedComparison(
        graph=graph,
        cluster=cluster,
        versions=versions(),
        objective=found[0].objective,
        seeds=tuple(seeds),
        rows=tuple(sorted(rows, key=lambda row: (row.mean_s is None, row.mean_s or 0.0, row.method))),
        runs=tuple(runs),
        single_device_s=single_s,
        lower_bound_s=max(one.lower_bound_s for one in found),
    )


def _row(method: str, times: Sequence[float], single_s: float | None) -> SeedRow:
    if not times:
        return SeedRow(method, 0)
    mean = statistics.fmean(times)
    spread = statistics.stdev(times) if len(times) > 1 else 0.0
    speedup = None if single_s is None or mean <= 0 else single_s / mean
    free = len(times) - 1
    interval = (_T[free - 1] if free <= len(_T) else 1.96) * spread / math.sqrt(len(times)) if free else None
    return SeedRow(method, len(times), mean, spread, interval, min(times), max(times), speedup)
