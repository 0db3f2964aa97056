"""One graph on several clusters: which machine, and how many devices of it, are worth having?"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from env.cluster import Cluster
from env.problem import LATENCY
from graphs.errors import InfeasibleError
from graphs.formatting import show
from graphs.opgraph import OpGraph
from placement.comparison import Comparison, compare
from placement.solving.methods import AUTO
from placement.solving.result import Result

HELPS = 0.01  # a device that makes a step less than 1 % faster does not help


@dataclass(frozen=True)
class Case:
    """One cluster: what came out there, or why nothing fits.

    Attributes:
        devices: devices that compute, host CPUs beside other devices not counted.
        reason: why nothing fits, or None.
        found_on: the cluster that the best placement was found on: this one, or in a sweep one with fewer devices.
    """

    cluster: Cluster
    devices: int
    comparison: Comparison | None
    reason: str | None
    found_on: str = ""

    @property
    def proven_infeasible(self) -> bool:
        """Nothing can fit, whatever the method; else, without a placement, none was found."""
        return self.comparison is None

    @property
    def objective_s(self) -> float | None:
        """Of the best placement; None where none fits."""
        best = None if self.comparison is None else self.comparison.best
        return None if best is None or best.answer is None else best.answer.objective_s

    @property
    def speedup(self) -> float | None:
        """Over the best single device of the same cluster; None where either does not fit."""
        best = None if self.comparison is None else self.comparison.best
        return None if best is None or self.comparison is None else self.comparison.speedup(best)


@dataclass(frozen=True)
class WhatIf:
    """One graph on several clusters, in the order asked for.

    Attributes:
        objective: as in `placement.optimize`.
        is_sweep: the clusters are one cluster with more and more of its devices.
        command: the command line that made it, or "".
    """

    graph: OpGraph
    objective: str
    cases: tuple[Case, ...]
    is_sweep: bool
    command: str = field(default="", compare=False)

    def verdict(self) -> str:
        """How many devices it takes and where adding one stops helping, or which cluster is fastest."""
        fitting = [(case, case.objective_s) for case in self.cases if case.objective_s is not None]
        if not self.is_sweep:
            fastest, _ = min(fitting, key=lambda pair: pair[1], default=(None, None))
            if fastest is None:
                if all(case.proven_infeasible for case in self.cases):
                    return f"{show(self.graph.name)} fits on none of these."
                return f"No placement of {show(self.graph.name)} that fits was found on any of these."
            return f"Fastest: {show(fastest.cluster.name)}."
        return " ".join(part for part in (self._needed(fitting), self._helping(fitting)) if part)

    def _needed(self, fitting: Sequence[tuple[Case, float]]) -> str:
        """How many devices it takes to fit; "" where the smallest number does. Only what is proven is called needed."""
        smallest = min((case.devices for case, _ in fitting), default=math.inf)
        too_few = [case for case in self.cases if case.devices < smallest]
        proven = max((case.devices for case in too_few if case.proven_infeasible), default=0)
        parts = [f"At least {proven + 1} devices are needed."] if proven else []
        if len(too_few) > 0 and proven < too_few[-1].devices:
            parts.append(f"With {too_few[-1].devices} no placement that fits was found.")
        return " ".join(parts)

    def _helping(self, fitting: Sequence[tuple[Case, float]]) -> str:
        """Where a further device stops helping."""
        if not fitting:
            return ""
        fastest_s = min(objective_s for _, objective_s in fitting)
        enough = next(case for case, objective_s in fitting if objective_s <= fastest_s * (1 + HELPS))
        if enough.devices < max(case.devices for case in self.cases):
            return f"Adding devices stops helping at {enough.devices}: no larger number is {HELPS:.0%} faster."
        if enough is fitting[0][0]:
            return f"It fits on {enough.devices}, the largest number tried."
        before = fitting[-2][0].devices
        if enough.devices == before + 1:
            return f"The last device, number {enough.devices}, still helps."
        return f"Going from {before} to {enough.devices} devices still helps."

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {
            "graph": self.graph.name,
            "graph_hash": self.graph.hash,
            "objective": self.objective,
            "command": self.command,
            "verdict": self.verdict(),
            "cases": [
                {
                    "cluster": case.cluster.name,
                    "cluster_hash": case.cluster.hash,
                    "devices": case.devices,
                    "objective_s": case.objective_s,
                    "speedup_vs_single": case.speedup,
                    "reason": case.reason,
                    "found_on": case.found_on,
                    "comparison": None if case.comparison is None else case.comparison.to_dict(),
                }
                for case in self.cases
            ],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"


def what_if(
    graph: OpGraph,
    clusters: Sequence[Cluster],
    methods: Sequence[str] = (AUTO,),
    *,
    seed: int = 0,
    objective: str = LATENCY,
    budget_s: float | None = None,
    evaluations: int | None = None,
    is_sweep: bool = False,
    progress: Callable[[str, int], None] | None = None,
    **settings: Any,
) -> WhatIf:
    """Compare methods on each cluster. A cluster that the graph does not fit on is a row that says so.

    Args:
        clusters: for a sweep one cluster with more and more of its devices, as `env.resizing.resized` gives them.
        methods, seed, objective, budget_s, evaluations: as in `placement.compare`; the budget is for each cluster.
        is_sweep: what a method found for fewer devices is a candidate for more, where the rest stays idle: a device
            more never makes a step slower, unless it changes the routes between the others.
        settings: further arguments of `placement.compare`.
        progress: called before each cluster with its name and how many are done.

    Raises:
        UnknownNameError, MismatchError, ValueError: as `placement.compare`.
    """
    cases = []
    known: dict[str, Result] = {}  # by method, as found where it was found
    for done, cluster in enumerate(clusters):
        if progress is not None:
            progress(cluster.name, done)
        found, reason = None, None
        try:
            found = compare(
                graph,
                cluster,
                methods,
                seed=seed,
                objective=objective,
                budget_s=budget_s,
                evaluations=evaluations,
                known={m: r for m, r in known.items() if r.cluster.device_index.keys() <= cluster.device_index.keys()},
                **settings,
            )
            reason = None if found.best is not None else found.results[0].reason
        except InfeasibleError as error:
            reason = str(error)
        origin = {} if found is None else _origins(found, known)
        if is_sweep:
            known |= origin
        best = None if found is None else found.best
        found_on = "" if best is None else origin[best.method].cluster.name
        cases.append(Case(cluster, len(computing(cluster)), found, reason, found_on))
        if found is not None and any(result.interrupted for result in found.results):
            break
    return WhatIf(graph, objective, tuple(cases), is_sweep)


def _origins(found: Comparison, known: Mapping[str, Result]) -> dict[str, Result]:
    """The feasible results by method; those that are known ones, scored again, as they were found elsewhere."""
    origins = {}
    for result in found.results:
        if result.answer is not None:
            before = known.get(result.method)
            origins[result.method] = before if before is not None and _is_again(result, before) else result
    return origins


def _is_again(result: Result, before: Result) -> bool:
    """Whether two results on different clusters place and order all ops alike; devices without ops do not matter."""
    one, other = result.answered(), before.answered()
    orders = [{device: ops for device, ops in answer.order.items() if ops} for answer in (one, other)]
    return one.placement == other.placement and orders[0] == orders[1]


def computing(cluster: Cluster) -> list[str]:
    """Names of the devices that are no CPUs, or of all where there are only CPUs."""
    return [cluster.devices[d].name for d in cluster.compute_devices.tolist()]


def parse_sweep(text: str) -> tuple[int, ...]:
    """Numbers of devices, ascending, of ``"devices=1..8"``, ``"devices=1,2,4"`` or, by twos, ``"devices=2..8..2"``.

    Raises:
        ValueError: not of that form.
    """
    counts: set[int] = set()
    name, _, parts = text.strip().partition("=")
    for part in parts.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4})(?:\.\.(\d{1,4}))?)?", part.strip(), re.ASCII)
        first, last, step = (
            (0, 0, 0) if match is None else (int(match[1]), int(match[2] or match[1]), int(match[3] or 1))
        )
        if name.strip() != "devices" or not 1 <= first <= last or step < 1:
            raise ValueError(
                "--sweep takes numbers of devices, devices=FIRST..LAST or devices=A,B,..., for example devices=1..8 or "
                f"devices=1,2,4, got {text[:80]!r}."
            )
        counts |= set(range(first, last + 1, step))
    return tuple(sorted(counts))
