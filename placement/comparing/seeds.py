"""`compare_seeds`: methods on one problem under several seeds, by mean and spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from env.cluster import Cluster
from env.plan import Method
from graphs.opgraph import OpGraph
from placement.comparing.methods import compare
from placement.comparing.rows import AsJson, Column, Row, RowTable, names_of
from placement.results.result import versions
from placement.results.utilisation import basis
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
    mean_s: float | None
    spread_s: float | None
    interval_s: float | None
    least_s: float | None
    most_s: float | None
    speedup: float | None


@dataclass(frozen=True)
class SeedRun:
    """One method under one seed; its objective in seconds, None where it found nothing that fits."""

    method: str
    seed: int
    objective_s: float | None


@dataclass(frozen=True)
class SeedComparison(AsJson):
    """Methods under several seeds, least mean first.

    Attributes:
        seeds: in the order given.
        runs: every method under every seed.
        single_device_s: objective of the best single device; None if the graph fits on none.
        lower_bound_s: no placement can have a smaller objective.
        command: the command line that made it, or "".
    """

    graph: OpGraph
    cluster: Cluster
    objective: str
    seeds: tuple[int, ...]
    rows: tuple[SeedRow, ...]
    runs: tuple[SeedRun, ...]
    single_device_s: float | None
    lower_bound_s: float
    versions: Mapping[str, str]
    command: str = field(default="", compare=False)

    def table(self) -> RowTable:
        """A row for each method, with spread and extremes of its times."""
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

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {
            **names_of(self.graph, self.cluster),
            "objective": self.objective,
            "seeds": list(self.seeds),
            "single_device_s": self.single_device_s,
            "lower_bound_s": self.lower_bound_s,
            "versions": dict(self.versions),
            "command": self.command,
            "basis": basis(self.graph, self.cluster),
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
        objective=found[0].objective,
        seeds=tuple(seeds),
        rows=tuple(sorted(rows, key=lambda row: (row.mean_s is None, row.mean_s or 0.0, row.method))),
        runs=tuple(runs),
        single_device_s=single_s,
        lower_bound_s=max(one.lower_bound_s for one in found),
        versions=versions(),
    )


def _row(method: str, times: Sequence[float], single_s: float | None) -> SeedRow:
    if not times:
        return SeedRow(method, 0, None, None, None, None, None, None)
    mean = statistics.fmean(times)
    spread = statistics.stdev(times) if len(times) > 1 else 0.0
    speedup = None if single_s is None or mean <= 0 else single_s / mean
    free = len(times) - 1
    interval = (_T[free - 1] if free <= len(_T) else 1.96) * spread / math.sqrt(len(times)) if free else None
    return SeedRow(method, len(times), mean, spread, interval, min(times), max(times), speedup)
