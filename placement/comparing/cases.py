"""`WhatIf`, what came of one graph on several clusters, and `Case`, a row of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from env.cluster import Cluster
from graphs.formatting import show
from graphs.opgraph import OpGraph
from placement.comparing.methods import Comparison
from placement.comparing.rows import AsJson, Column, Row, RowTable, bar_up_to
from placement.results.result import Result
from placement.results.utilisation import format_rate, rate_of
from placement.sizing.scaling import LEAST_POINTS, BatchFit, ScalingFit, fit_batches, fit_devices
from placement.sizing.sweeps import BATCH, DEVICES, cost_of
from placement.solving.methods import measure

HELPS = 0.01  # a device that makes a step less than 1 % faster does not help


@dataclass(frozen=True)
class Case:
    """One cluster and one batch: what came out there, or why nothing fits.

    Attributes:
        devices: devices that compute, host CPUs beside other devices not counted.
        reason: why nothing fits, or None.
        found_on: the cluster that the best placement was found on: this one, or in a sweep one with fewer devices.
        samples: of the batch; None where nobody said.
        price: of a device-hour, or None.
    """

    cluster: Cluster
    devices: int
    comparison: Comparison | None
    reason: str | None
    found_on: str = ""
    samples: int | None = None
    price: float | None = None

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
        return None if self.best is None or self.best.answer is None else self.best.answer.objective_s

    @property
    def speedup(self) -> float | None:
        """Over the best single device of the same cluster; None where either does not fit."""
        return None if self.best is None or self.comparison is None else self.comparison.speedup(self.best)

    @property
    def efficiency(self) -> float | None:
        """The speed-up for each device."""
        return None if self.speedup is None else self.speedup / self.devices

    @property
    def peak_bytes(self) -> int | None:
        """Memory of the fullest device."""
        return None if self.best is None else self.best.fullest_bytes

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
            "peak_bytes": self.peak_bytes,
            "cost": self.cost,
            "reason": self.reason,
            "found_on": self.found_on,
        }


@dataclass(frozen=True)
class WhatIf(AsJson):
    """One graph on several clusters, or one model with several batches, in the order asked for.

    Attributes:
        objective: as in `placement.optimize`.
        sweep: what is varied in steps, a name of `placement.sizing.sweeps.KINDS`; "" for different clusters.
        interrupted: it was ended by Ctrl-C, and cases are missing or not searched to their end.
        command: the command line that made it, or "".
    """

    graph: OpGraph
    objective: str
    cases: tuple[Case, ...]
    sweep: str = ""
    interrupted: bool = False
    command: str = field(default="", compare=False)

    @property
    def scaling(self) -> tuple[ScalingFit, ScalingFit] | None:
        """Amdahl's and Gunther's law of a sweep of devices; None of fewer than three that fit."""
        fitting = [(case.devices, case.objective_s) for case in self.cases if case.objective_s]
        if self.sweep != DEVICES or len(fitting) < LEAST_POINTS:
            return None
        return fit_devices([n for n, _ in fitting], [time_s for _, time_s in fitting])

    @property
    def batching(self) -> BatchFit | None:
        """Hockney's law of a sweep of batches; None of fewer than three that fit."""
        fitting = [(case.samples, case.objective_s) for case in self.cases if case.samples and case.objective_s]
        if self.sweep != BATCH or len(fitting) < LEAST_POINTS:
            return None
        return fit_batches([b for b, _ in fitting], [time_s for _, time_s in fitting])

    def verdict(self) -> str:
        """How many devices it takes and where adding one stops helping, or which cluster is fastest."""
        fitting = [(case, case.objective_s) for case in self.cases if case.objective_s is not None]
        if self.sweep == BATCH:
            return self._throughput()
        if not self.sweep:
            fastest, _ = min(fitting, key=lambda pair: pair[1], default=(None, None))
            if fastest is None:
                if all(case.proven_infeasible for case in self.cases):
                    return f"{show(self.graph.name)} fits on none of these."
                return f"No placement of {show(self.graph.name)} that fits was found on any of these."
            return f"Fastest: {show(fastest.cluster.name)}."
        return " ".join(part for part in (self._needed(fitting), self._helping(fitting)) if part)

    @property
    def fastest(self) -> Case | None:
        """The case that the advice names: with the fastest step, or most samples a second; None where nothing fits."""
        fitting = [(case, case.objective_s) for case in self.cases if case.objective_s is not None]
        if self.sweep == BATCH:
            fitting = [(case, time_s / case.samples) for case, time_s in fitting if case.samples]
        return min(fitting, key=lambda pair: pair[1], default=(None, 0.0))[0]

    def advice(self) -> str:
        """The fastest way that was found, what it costs, and `verdict`."""
        fastest = self.fastest
        said = [self.verdict()]
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
        """A sentence about the number of devices at which a further one stops helping."""
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
        """The batch with most samples a second, and the batches that do not fit."""
        fitting = [(case.samples / case.objective_s, case) for case in self.cases if case.samples and case.objective_s]
        if not fitting:
            return f"None of these batches of {show(self.graph.name)} fits."
        rate, best = max(fitting, key=lambda pair: pair[0])
        enough = next(case for r, case in fitting if r >= rate * (1 - HELPS))
        said = f"Most samples a second: {rate:.4g} at batch {best.samples}, with {best.by}."
        if enough is not best:
            said = f"{said} Batch {enough.samples} is within {HELPS:.0%} of that."
        unfit = [str(case.samples) for case in self.cases if case.objective_s is None]
        return f"{said} Nothing was found that fits at batch {', '.join(unfit)}." if unfit else said

    def laws(self) -> tuple[str, ...]:
        """The laws of scaling that were fitted, a sentence each."""
        fits = (*(self.scaling or ()), *([] if self.batching is None else [self.batching]))
        return tuple(fit.sentence() for fit in fits)

    def bases(self) -> list[str]:
        """The sources of the step times, each once."""
        return list(dict.fromkeys(case.best.basis for case in self.cases if case.best is not None and case.best.basis))

    def label(self, case: Case) -> str:
        """The name of a case among the others."""
        return f"batch {case.samples}" if self.sweep == BATCH else case.cluster.name

    def table(self) -> RowTable:
        """A row for each case, with the speed-up over one device of its cluster as a bar."""
        is_batch, what = self.sweep == BATCH, measure(self.objective)
        rate, per_s = rate_of(self.graph)
        longest = max((case.speedup or 1.0 for case in self.cases), default=1.0)
        columns = [
            *(
                [Column("samples", "batch"), Column("rate", "samples/s", format_rate)]
                if is_batch
                else [Column("cluster", "cluster"), Column("devices", "devices")]
            ),
            Column("single_s", "one device", "s"),
            Column("time", what, "s"),
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
        if case.comparison is None or best is None or best.answer is None:
            return Row(fields | {"time": case.outcome, "by": "", "bar": ""}, "unfit", case.reason or "")
        single_s, elsewhere = case.comparison.single_device_s, f", found on {case.found_on}"
        shown = {
            "rate": best.utilisation.samples_per_s,
            "single_s": "does not fit" if single_s is None else single_s,
            "time": case.objective_s,
            "mfu": best.utilisation.mfu,
            "bound_s": best.lower_bound_s,
            "gap": best.answer.gap,
            "by": case.by if case.found_on == case.cluster.name else case.by + elsewhere,
            "bar": case.speedup or 0.0,
        }
        return Row(fields | shown, "best" if case is self.fastest else "")

    @property
    def is_priced(self) -> bool:
        """Whether the cost of a step is known."""
        return any(case.price is not None for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {
            "graph": self.graph.name,
            "graph_hash": self.graph.hash,
            "objective": self.objective,
            "command": self.command,
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
