"""`compare`: one problem, many methods, one `Comparison`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from env.cluster import Cluster
from env.simulator import Priority
from graphs.opgraph import OpGraph
from placement.optimization import HEURISTICS, Solver, check_options, check_problem
from placement.ranking import SINGLE, ranked, ties
from placement.result import Result, versions

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Comparison:
    """What every method made of one problem.

    Attributes:
        graph, cluster: the problem.
        objective: what was minimised: ``"latency"``, the makespan of one step.
        lower_bound_s: no placement can have a smaller objective.
        seed: of everything random.
        results: best first: feasible ones by objective, ties by fewer devices, then by name; infeasible ones last.
        single_device_s: step time of the best single device, what speed-ups refer to; None if the graph fits on none.
        versions: of Python and the packages that made it.
        command: the command line that made it, or "".
    """

    graph: OpGraph
    cluster: Cluster
    objective: str
    lower_bound_s: float
    seed: int
    results: tuple[Result, ...]
    single_device_s: float | None
    versions: Mapping[str, str]
    command: str = field(default="", compare=False)

    @property
    def best(self) -> Result | None:
        """The best feasible result, None if no method found one."""
        return self.results[0] if self.results and self.results[0].feasible else None

    @cached_property
    def ties(self) -> dict[str, str]:
        """For each method that only equals a better ranked one, the name of that one."""
        return ties(self.results)

    def speedup(self, result: Result) -> float | None:
        """How many times faster than the best single device; None where either is infeasible."""
        if result.step_time_s is None or self.single_device_s is None:
            return None
        return self.single_device_s / result.step_time_s if result.step_time_s > 0 else 1.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {
            "graph": self.graph.name,
            "cluster": self.cluster.name,
            "objective": self.objective,
            "lower_bound_s": self.lower_bound_s,
            "seed": self.seed,
            "graph_hash": self.graph.hash,
            "cluster_hash": self.cluster.hash,
            "versions": dict(self.versions),
            "command": self.command,
            "results": [self._row(result) for result in self.results],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    def _row(self, result: Result) -> dict[str, Any]:
        return {
            "method": result.method,
            "objective_s": result.objective_s,
            "step_time_s": result.step_time_s,
            "feasible": result.feasible,
            "reason": result.reason,
            "speedup_vs_single": self.speedup(result),
            "gap": result.gap,
            "peak_bytes": None if result.peak_bytes is None else dict(result.peak_bytes),
            "bytes_moved": result.bytes_moved,
            "solve_time_s": result.solve_time_s,
            "placement": None if result.placement is None else dict(result.placement),
        }


def compare(
    graph: OpGraph,
    cluster: Cluster,
    methods: Sequence[str] | None = None,
    *,
    seed: int = 0,
    objective: str = "latency",
    priority: str = Priority.LONGEST_PATH.value,
    progress: Progress | None = None,
) -> Comparison:
    """Run several methods on one problem.

    Args:
        methods: names in `placement.METHODS`, each run once; every heuristic when None.
        seed, objective, priority: as in `placement.optimize`.
        progress: called before each method with its name, how many are done and how many there are, and once at the
            end with an empty name.

    Raises:
        UnknownNameError, ValueError, InfeasibleError: as `placement.optimize`.
    """
    chosen = HEURISTICS if methods is None else methods
    check_options(chosen, seed, objective, priority)
    check_problem(graph, cluster)
    names = list(dict.fromkeys(chosen))
    solver = Solver(graph, cluster, seed, objective, priority)
    results: dict[str, Result] = {}
    for done, name in enumerate(names):
        if progress is not None:
            progress(name, done, len(names))
        results[name] = solver.solve(name)
    single = results.get(SINGLE) or solver.solve(SINGLE)
    if progress is not None:
        progress("", len(names), len(names))
    return Comparison(
        graph=graph,
        cluster=cluster,
        objective=objective,
        lower_bound_s=solver.lower_bound_s,
        seed=seed,
        results=ranked(results.values()),
        single_device_s=single.step_time_s,
        versions=versions(),
    )
