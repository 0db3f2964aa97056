"""`what_if`: one model as a list of cases, on several clusters, with more and more devices or with larger batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from env.cluster import Cluster
from env.objectives import LATENCY
from env.problem import scope
from graphs.errors import InfeasibleError
from graphs.formatting import show
from graphs.opgraph import OpGraph
from placement.comparing.methods import SAME, Comparison, compare
from placement.comparing.rows import CaseGrid, Column, Row, RowTable, Said, bar_up_to
from placement.results.result import Result
from placement.results.utilisation import format_rate, rate_of
from placement.sizing.sweeps import (
    BATCH,
    DEVICES,
    LEAST_POINTS,
    BatchFit,
    ScalingFit,
    check_price,
    cost_of,
    fit_batches,
    fit_devices,
)
from placement.solving.methods import AUTO, measure
from placement.solving.strategy_row import strategy_row

_HEAD = ("graph", "graph_hash", "objective", "command")  # of its JSON
HELPS = 0.01  # a device that makes a step less than 1 % faster does not help


@dataclass(frozen=True)
class Case:
    """One graph on one cluster: what came out there, or why nothing fits.

    Attributes:
        reason: why nothing fits, or None.
        found_on: the cluster that the best placement was found on: this one, or in a sweep one with fewer devices.
        price: of a device-hour, or None.
    """

    graph: OpGraph
    cluster: Cluster
    comparison: Comparison | None
    reason: str | None = None
    found_on: str = ""
    price: float | None = None

    @property
    def samples(self) -> int | None:
        """Samples of the batch; None where nobody said."""
        return self.graph.origin.batch_size

    @property
    def devices(self) -> int:
        """Devices that compute; host CPUs beside other devices do not count."""
        return len(self.cluster.compute_devices)

    @property
    def best(self) -> Result | None:
        """The fastest that fits: a strategy, where they were searched, or a placement; None where none fits."""
        return None if self.comparison is None else self.comparison.answer

    @property
    def proven_infeasible(self) -> bool:
        """Nothing can fit, whatever the method; else, without a placement, none was found."""
        return self.comparison is None

    @property
    def outcome(self) -> str:
        """Words in the place of a time, where there is none."""
        return "does not fit" if self.proven_infeasible else "none found"

    @property
    def objective_s(self) -> float | None:
        """Objective of the best in seconds; None where none fits."""
        return None if self.best is None else self.best.objective_s

    @property
    def speedup(self) -> float | None:
        """Over the best single device of the same cluster; None where either does not fit."""
        return None if self.best is None or self.comparison is None else self.comparison.speedup(self.best)

    @property
    def efficiency(self) -> float | None:
        """The speed-up for each device."""
        return None if self.speedup is None else self.speedup / self.devices

    @property
    def cost(self) -> float | None:
        """Cost of one step, all devices paid for; None without a price."""
        if self.price is None or self.objective_s is None:
            return None
        return cost_of(self.price, self.devices, self.objective_s)

    @property
    def interrupted(self) -> bool:
        """The user has asked to stop (Ctrl-C)."""
        results = () if self.comparison is None else (*self.comparison.results, self.comparison.overall)
        return any(result is not None and result.interrupted for result in results)

    @property
    def by(self) -> str:
        """The strategy of the best, or the method that found it; "" where nothing fits."""
        if self.best is None:
            return ""
        if not self.best.strategy.is_none:
            return self.best.strategy.text
        return self.best.method if self.best.chosen == self.best.method else f"{self.best.method} ({self.best.chosen})"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields without the comparison."""
        return {
            "cluster": self.cluster.name,
            "cluster_hash": self.cluster.hash,
            "devices": self.devices,
            "objective_s": self.objective_s,
            "samples": self.samples,
            "speedup_vs_single": self.speedup,
            "efficiency": self.efficiency,
            "strategy": None if self.best is None else self.best.strategy.text,
            "peak_bytes": None if self.best is None else self.best.fullest_bytes,
            "cost": self.cost,
            "reason": self.reason,
            "found_on": self.found_on,
        }


@dataclass(frozen=True, kw_only=True)
class WhatIf(CaseGrid):
    """One graph on several clusters, or one model with several batches, in the order asked for.

    Attributes:
        sweep: what is varied in steps, a name of `placement.sizing.sweeps.KINDS`; "" for different clusters.
        interrupted: it was ended by Ctrl-C, and cases are missing or not searched to their end.
    """

    kind = "what if"

    cases: tuple[Case, ...]
    sweep: str = ""
    interrupted: bool = False

    def size(self, case: Case) -> int:
        """Value of the swept quantity: samples of the batch, or devices."""
        return (case.samples or 0) if self.sweep == BATCH else case.devices

    def fitting(self) -> list[tuple[Case, float]]:
        """Cases where something fits, with their objectives."""
        pairs = [(case, case.objective_s) for case in self.cases if self.size(case)]
        return [(case, value) for case, value in pairs if value is not None]

    def _fit(self, kind: str, law: Callable[[list[int], list[float]], Any]) -> Any:
        points = [(self.size(case), time_s) for case, time_s in self.fitting() if time_s]
        if self.sweep != kind or len(points) < LEAST_POINTS:
            return None
        return law([n for n, _ in points], [time_s for _, time_s in points])

    @property
    def scaling(self) -> tuple[ScalingFit, ScalingFit] | None:
        """Amdahl's and Gunther's law of a sweep of devices; None of fewer than three that fit."""
        found: tuple[ScalingFit, ScalingFit] | None = self._fit(DEVICES, fit_devices)
        return found

    @property
    def batching(self) -> BatchFit | None:
        """Hockney's law of a sweep of batches; None of fewer than three that fit."""
        found: BatchFit | None = self._fit(BATCH, fit_batches)
        return found

    @property
    def fastest(self) -> Case | None:
        """The case that the advice names: with the fastest step, or most samples a second; None where nothing fits."""
        is_batch = self.sweep == BATCH
        times = [(case, time_s / self.size(case) if is_batch else time_s) for case, time_s in self.fitting()]
        return min(times, key=lambda pair: pair[1], default=(None, 0.0))[0]

    @property
    def answer(self) -> Result | None:
        return None if self.fastest is None else self.fastest.best

    def compiled_words(self) -> str:
        found = None if self.fastest is None else self.fastest.comparison
        return "" if found is None else found.compiled_words()

    def verdict(self) -> str:
        """How many devices it takes and where adding one stops helping, or which cluster is fastest."""
        if self.sweep == BATCH:
            return self._throughput()
        if self.sweep:
            return " ".join(part for part in (self._needed(), self._helping()) if part)
        if self.fastest is not None:
            return f"Fastest: {show(self.fastest.cluster.name)}."
        if all(case.proven_infeasible for case in self.cases):
            return f"{show(self.graph.name)} fits on none of these."
        return f"No placement of {show(self.graph.name)} that fits was found on any of these."

    def headline(self) -> str:
        fastest, said = self.fastest, [self.verdict()]
        if fastest is not None and self.sweep != BATCH:
            gain = "" if fastest.speedup is None else f", {fastest.speedup:.2f}x one device"
            if self.sweep == DEVICES:
                said.insert(0, f"Fastest: {show(fastest.by)} on {fastest.devices}{gain}.")
            else:
                said = [f"Fastest: {show(fastest.cluster.name)}, with {show(fastest.by)}{gain}."]
        if fastest is not None and fastest.cost is not None and self.sweep == DEVICES:
            cheapest = min((case for case in self.cases if case.cost is not None), key=lambda case: case.cost or 0.0)
            said.append(f"A step costs least on {cheapest.devices}: {cheapest.cost:.3g}, in the currency of the price.")
        if self.interrupted:
            rows = f"{len(self.cases)} row{'s' if len(self.cases) > 1 else ''}"
            said.append(f"Interrupted: {rows} so far, the last one perhaps not searched to its end.")
        return " ".join(said)

    def _needed(self) -> str:
        """Sentence on the devices needed; "" if the smallest number fits. Only what is proven is called needed."""
        smallest = min((case.devices for case, _ in self.fitting()), default=math.inf)
        too_few = [case for case in self.cases if case.devices < smallest]
        proven = max((case.devices for case in too_few if case.proven_infeasible), default=0)
        parts = [f"At least {proven + 1} devices are needed."] if proven else []
        if len(too_few) > 0 and proven < too_few[-1].devices:
            parts.append(f"With {too_few[-1].devices} no placement that fits was found.")
        return " ".join(parts)

    def _helping(self) -> str:
        """Sentence on the number of devices from which more stop helping."""
        fitting = self.fitting()
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

    def _throughput(self) -> str:
        """Sentence on the batch with most samples a second, and on batches that do not fit."""
        rates = [(self.size(case) / time_s, case) for case, time_s in self.fitting() if time_s]
        if not rates:
            return f"None of these batches of {show(self.graph.name)} fits."
        rate, best = max(rates, key=lambda pair: pair[0])
        enough = next(case for r, case in rates if r >= rate * (1 - HELPS))
        said = f"Most samples a second: {rate:.4g} at batch {best.samples}, with {best.by}."
        if enough is not best:
            said = f"{said} Batch {enough.samples} is within {HELPS:.0%} of that."
        unfit = [str(case.samples) for case in self.cases if case.objective_s is None]
        return f"{said} Nothing was found that fits at batch {', '.join(unfit)}." if unfit else said

    def laws(self) -> tuple[str, ...]:
        """The laws of scaling that were fitted, a sentence each."""
        fits = (*(self.scaling or ()), *([] if self.batching is None else [self.batching]))
        return tuple(fit.sentence() for fit in fits)

    def label(self, case: Case) -> str:
        """The name of a case among the others."""
        return f"batch {case.samples}" if self.sweep == BATCH else case.cluster.name

    def heading(self) -> str:
        return {DEVICES: "Numbers of devices", BATCH: "Batches"}.get(self.sweep, "Clusters")

    def among(self) -> str:
        name = self.cluster.name
        if not self.sweep:
            return f"{len(self.cases)} clusters"
        if self.sweep == BATCH:
            return f"{name}, {len(self.cases)} batches"
        return f"more and more devices of {name.rpartition(' with ')[0] or name}"

    def title(self) -> str:
        return f"{show(self.graph.name)}: {self.graph.n_ops:,} ops, {self.graph.n_edges:,} edges"

    def table(self) -> RowTable:
        is_batch, (rate, per_s) = self.sweep == BATCH, rate_of(self.graph)
        longest = max((case.speedup or 1.0 for case in self.cases), default=1.0)
        columns = [
            *(
                [Column("samples", "batch"), Column("rate", "samples/s", format_rate)]
                if is_batch
                else [Column("cluster", "cluster"), Column("devices", "devices")]
            ),
            Column("single_s", "one device", "s"),
            Column("time", measure(self.objective), "s"),
            *([] if is_batch else [Column("objective_s", rate, per_s)]),
            Column("mfu", "MFU", "share"),
            Column("speedup_vs_single", "speed-up", "x"),
            Column("efficiency", "efficiency", "share"),
            Column("bound_s", "lower bound", "s", only="page"),
            Column("gap", "gap", "gap"),
            Column("peak_bytes", "peak", "bytes"),
            *([Column("cost", "a step costs", lambda cost: f"{cost:.3g}")] if self.is_priced else []),
            Column("by", "by", is_text=True),
            Column("bar", "", bar_up_to(longest), is_text=True, only="terminal"),
        ]
        return RowTable(tuple(columns), tuple(map(self._shown, self.cases)))

    def _shown(self, case: Case) -> Row:
        best, fields = case.best, case.to_dict()
        if case.comparison is None or best is None:
            return Row(fields | {"time": case.outcome, "by": "", "bar": ""}, "unfit", case.reason or "")
        single_s, elsewhere = case.comparison.single_device_s, f", found on {case.found_on}"
        shown = {
            "rate": best.utilisation.samples_per_s,
            "single_s": "does not fit" if single_s is None else single_s,
            "time": case.objective_s,
            "mfu": best.utilisation.mfu,
            "bound_s": best.lower_bound_s,
            "gap": best.gap,
            "by": case.by if case.found_on == case.cluster.name else case.by + elsewhere,
            "bar": case.speedup or 0.0,
        }
        return Row(fields | shown, "best" if case is self.fastest else "")

    def said(self) -> list[Said]:
        unfit = [case for case in self.cases if case.objective_s is None]
        return [Said(self.label(case), f"{case.outcome}: {case.reason or ''}", True) for case in unfit]

    def notes(self) -> list[str]:
        are_searched = any(case.best and case.best.alternatives for case in self.cases)
        among = "among all strategies" if are_searched else scope(self.objective)
        bases = dict.fromkeys(case.best.basis for case in self.cases if case.best is not None and case.best.basis)
        priced = ["a step costs: in the currency of the price."] * self.is_priced
        return [f"gap: at most so far from optimal {among}.", *priced, *bases]

    def facts(self) -> dict[str, str]:
        found = super().facts()
        return found if self.sweep == BATCH else {name: found[name] for name in found if name.startswith("graph")}

    @property
    def is_priced(self) -> bool:
        """True if the cost of a step is known."""
        return any(case.price is not None for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        return {
            **{name: value for name, value in self.head().items() if name in _HEAD},
            "verdict": self.verdict(),
            "sweep": self.sweep,
            "interrupted": self.interrupted,
            "scaling": [fit.to_dict() for fit in self.scaling or ()],
            "batching": None if self.batching is None else self.batching.to_dict(),
            "cases": [
                case.to_dict() | {"comparison": None if case.comparison is None else case.comparison.to_dict()}
                for case in self.cases
            ],
        }


def what_if(
    graphs: OpGraph | Iterable[OpGraph],
    clusters: Sequence[Cluster],
    methods: Sequence[str] | None = None,
    *,
    sweep: str = "",
    price: float | None = None,
    progress: Callable[[str, int], None] | None = None,
    objective: str = LATENCY,
    **search: Any,
) -> WhatIf:
    """Compare methods in each case. One that does not fit is a row that says so.

    Args:
        graphs: one, or for a sweep of batches graphs of one model that say theirs, read one after the other.
        clusters: one for each case; for a sweep of devices one cluster with more and more of them, as `resized` gives
            them, and one for a sweep of batches.
        methods: as in `placement.compare`; None for ``"auto"`` and, where `placement.optimize` would search them,
            strategies.
        sweep: a name of `placement.sizing.sweeps.KINDS`, or "" for different clusters. In a sweep of devices what was
            found for fewer is a candidate for more, where the rest stays idle: a device more never makes a step
            slower, unless it changes the routes between the others.
        price: of one device-hour.
        progress: called before each case with its name and how many are done.
        search: further arguments of `placement.compare`, for each case.

    Raises:
        UnknownNameError, MismatchError, ValueError: as `placement.compare`; a price that is none, no case, or a graph
            that does not say its batch where batches are compared.
    """
    if price is not None:
        check_price(price)
    several = ((graphs, one) for one in clusters) if isinstance(graphs, OpGraph) else ((g, clusters[0]) for g in graphs)
    cases, is_stopped, tell = list[Case](), False, progress or (lambda *_: None)
    try:
        for case in _each(several, methods, sweep, tell, {"objective": objective, **search}):
            cases.append(replace(case, price=price))
            if case.interrupted:
                is_stopped = True
                break
    except KeyboardInterrupt:
        if not cases:  # there is nothing to show
            raise
        is_stopped = True
    if not cases:
        raise ValueError("a sweep of batches needs a batch; got none.")
    last, found = cases[-1], [case.comparison for case in cases if case.comparison is not None]
    table = WhatIf(
        graph=last.graph,
        cluster=last.cluster,
        versions=found[0].versions if found else {},
        objective=objective,
        cases=tuple(cases),
        sweep=sweep,
        interrupted=is_stopped,
    )
    best = None if table.fastest is None else table.fastest.comparison
    return table if best is None else replace(table, single_device_s=best.single_device_s)


def _each(
    problems: Iterable[tuple[OpGraph, Cluster]],
    methods: Sequence[str] | None,
    sweep: str,
    tell: Callable[[str, int], None],
    search: dict[str, Any],
) -> Iterator[Case]:
    """The cases one after the other; in a sweep of devices each with what was found for fewer."""
    known: dict[str, Result] = {}
    before: Case | None = None
    for done, (graph, cluster) in enumerate(problems):
        if sweep == BATCH and graph.origin.batch_size is None:
            raise ValueError(
                f"graph {graph.name!r} does not say how many samples it has, which a sweep of batches compares; "
                "give it inputs that share their first dimension."
            )
        tell(f"batch {graph.origin.batch_size}" if sweep == BATCH else cluster.name, done)
        case = case_of(graph, cluster, methods, known=known, **search)
        if sweep == DEVICES:
            found = {} if case.comparison is None else _origins(case.comparison, known)
            if case.best is not None and case.best.strategy.is_none and case.best.method in found:
                case = replace(case, found_on=found[case.best.method].cluster.name)
            known |= found
            case = _carried(case, before, search.get("seed", 0))
            before = before if case.best is None else case
        yield case


def case_of(graph: OpGraph, cluster: Cluster, methods: Sequence[str] | None, **search: Any) -> Case:
    """Outcome for one graph on one cluster, also where it does not fit.

    Args:
        methods, search: as of `what_if`.
    """
    search.setdefault("strategies", methods is None)
    try:
        found = compare(graph, cluster, methods or (AUTO,), **search)
    except InfeasibleError as error:
        return Case(graph, cluster, None, str(error))
    if found.answer is None:
        worst = found.results[0] if found.overall is None else found.overall
        return Case(graph, cluster, found, worst.reason)
    return Case(graph, cluster, found, found_on=cluster.name)


def _carried(case: Case, before: Case | None, seed: int) -> Case:
    """The case, or the strategy found on a smaller cluster if that is faster here; the other devices stay idle."""
    best = None if before is None else before.best
    found = case.comparison
    if before is None or best is None or found is None or found.overall is None or best.strategy.is_none:
        return case
    if case.objective_s is not None and case.objective_s <= (before.objective_s or 0.0) * (1 + SAME):
        return case
    again = strategy_row(found.graph, case.cluster, best.strategy, seed).result
    if again.answer is None or again.answer.objective_s >= (case.objective_s or math.inf):
        return case
    again = replace(again.against(found.overall.lower_bound_s, "the bound over all strategies"), method=AUTO)
    again = replace(again, alternatives=found.overall.alternatives, note=found.overall.note)
    return replace(case, comparison=replace(found, overall=again), reason=None, found_on=before.found_on)


def _origins(found: Comparison, known: Mapping[str, Result]) -> dict[str, Result]:
    """Feasible results by method; one that repeats a known result is replaced by that one."""
    origins = {}
    for result in found.results:
        if result.answer is not None:
            before = known.get(result.method)
            origins[result.method] = before if before is not None and _is_again(result, before) else result
    return origins


def _is_again(result: Result, before: Result) -> bool:
    """True if two results place and order all ops alike; devices without ops do not count."""
    one, other = result.answered(), before.answered()
    orders = [{device: ops for device, ops in answer.order.items() if ops} for answer in (one, other)]
    return one.placement == other.placement and orders[0] == orders[1]
