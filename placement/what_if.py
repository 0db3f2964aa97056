"""One graph on several clusters: which machine, and how many devices of it, are worth having?"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from env.cluster import Cluster
from env.problem import LATENCY
from graphs.errors import ClusterError, InfeasibleError
from graphs.opgraph import OpGraph
from graphs.show import show
from placement.comparison import Comparison, compare
from placement.methods import AUTO

HELPS = 0.01  # a device that makes a step less than 1 % faster does not help


@dataclass(frozen=True)
class Case:
    """One cluster: what came out there, or why nothing fits.

    Attributes:
        devices: devices that compute, host CPUs beside other devices not counted.
    """

    cluster: Cluster
    devices: int
    comparison: Comparison | None
    reason: str | None

    @property
    def objective_s(self) -> float | None:
        """Of the best placement; None where none fits."""
        best = None if self.comparison is None else self.comparison.best
        return None if best is None else best.objective_s

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
        """One sentence: where adding a device stops helping, or which cluster is fastest."""
        fitting = [case for case in self.cases if case.objective_s is not None]
        if not fitting:
            return f"{show(self.graph.name)} fits on none of these."
        fastest = min(fitting, key=lambda case: case.objective_s or 0.0)
        if not self.is_sweep:
            return f"Fastest: {show(fastest.cluster.name)}."
        enough = next(
            case for case in fitting if (case.objective_s or 0.0) <= (fastest.objective_s or 0.0) * (1 + HELPS)
        )
        if enough.devices == max(case.devices for case in self.cases):
            return f"The last device, number {enough.devices}, still helps."
        return f"Adding devices stops helping at {enough.devices}: no larger number is {HELPS:.0%} faster."

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
        methods, seed, objective, budget_s, evaluations: as in `placement.compare`; the budget is for each cluster.
        settings: further arguments of `placement.compare`.
        progress: called before each cluster with its name and how many are done.

    Raises:
        UnknownNameError, MismatchError, ValueError: as `placement.compare`.
    """
    cases = []
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
                **settings,
            )
            reason = None if found.best is not None else found.results[0].reason
        except InfeasibleError as error:
            reason = str(error)
        cases.append(Case(cluster, len(computing(cluster)), found, reason))
        if found is not None and any(result.interrupted for result in found.results):
            break
    return WhatIf(graph, objective, tuple(cases), is_sweep)


def computing(cluster: Cluster) -> list[str]:
    """Names of the devices that are no CPUs, or of all where there are only CPUs."""
    return [d.name for d in cluster.devices if d.kind != "cpu"] or [d.name for d in cluster.devices]


def first_devices(cluster: Cluster, count: int) -> Cluster:
    """The cluster with only the first `count` of its `computing` devices, host CPUs kept.

    Raises:
        ClusterError: it has fewer, or the rest has no route without those left out.
    """
    names = computing(cluster)
    if not 1 <= count <= len(names):
        raise ClusterError(f"cluster {cluster.name!r} has {len(names)} devices to sweep over, got {count}.")
    gone = set(names[count:])
    return dataclasses.replace(
        cluster,
        name=f"{cluster.name} with {count}",
        devices=tuple(device for device in cluster.devices if device.name not in gone),
        links=tuple(link for link in cluster.links if not {link.src, link.dst} & gone),
    )


def parse_sweep(text: str) -> range:
    """``"devices=1..8"`` as ``range(1, 9)``.

    Raises:
        ValueError: not of that form.
    """
    match = re.fullmatch(r"devices=(\d+)\.\.(\d+)", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--sweep takes devices=FIRST..LAST, for example devices=1..8, got {text!r}.")
    return range(int(match[1]), int(match[2]) + 1)
