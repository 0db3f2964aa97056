"""`what_helps`: which figure of a cluster a step would gain most by."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from env.cluster import Cluster
from env.device import Device, Link, host_of
from env.lanes import with_lanes_of
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Score, Simulator
from graphs.errors import InfeasibleError
from graphs.formatting import format_seconds, show
from graphs.opgraph import IntArray, OpGraph
from placement.comparing.rows import CaseGrid, Column, Row, RowTable, names_of
from placement.results.result import Result

STEP = 0.01  # by which a figure is changed either way, for the derivative
BETTER = 0.10  # by how much better it is in the sentences
_HOST, _NUMBER = re.compile(r"^.*/"), re.compile(r"\d+$")  # of the name of a device
_NOTHING = 5e-4  # gains below 0.05 % are none


@dataclass(frozen=True)
class Sensitivity:
    """Effect of a figure on the step time.

    Attributes:
        figure: in words.
        elasticity: d ln(step time) / d ln(figure): -0.5 where 1 % more of it makes the step 0.5 % faster. None of
            memory, whose size changes what fits, not how fast it is.
        better_s, worse_s: step times with 10 % more of it, or less where less is better, and the other way round; of
            memory those of the best that was found to fit then. None where nothing was.
    """

    figure: str
    more_helps: bool
    elasticity: float | None
    better_s: float | None
    worse_s: float | None

    def gain(self, step_s: float) -> float:
        """The share of the step time that 10 % better save."""
        return 0.0 if self.better_s is None else 1 - self.better_s / step_s

    def sentence(self, step_s: float) -> str:
        """``"10 % more bandwidth of links between gpu and nvswitch: 4.1 % faster"``."""
        gain = self.gain(step_s)
        change = f"{BETTER:.0%} {'more' if self.more_helps else 'less'} {show(self.figure)}"
        if abs(gain) < _NOTHING:
            return f"{change}: no gain"
        return f"{change}: {abs(gain):.1%} {'faster' if gain > 0 else 'slower'}"


@dataclass(frozen=True, kw_only=True)
class Sensitivities(CaseGrid):
    """Figures of a cluster by their effect on a step.

    Attributes:
        result: the strategy or placement that figures were changed for.
        step_s: its step time with the figures as they are.
        rows: by what 10 % better of each figure saves, most first.
    """

    result: Result
    step_s: float
    rows: tuple[Sensitivity, ...]

    def headline(self) -> str:
        first = self.rows[0] if self.rows else None
        strategy = self.result.strategy
        how = f"the placement by {self.result.chosen}" if strategy.is_none else strategy.text
        taken = f"with {how}, {format_seconds(self.step_s)} a step"
        if first is None or first.gain(self.step_s) < _NOTHING:
            return f"No single figure of {show(self.cluster.name)} helps {taken}."
        return f"Most would help {first.sentence(self.step_s)} ({taken})."

    def notes(self) -> list[str]:
        return ["elasticity: by how many percent the step time changes with 1 % more; of memory, the best that fits"]

    def table(self) -> RowTable:
        columns = (
            Column("figure", "figure"),
            Column("better_s", "10 % better", "s"),
            Column("worse_s", "10 % worse", "s"),
            Column("elasticity", "elasticity", lambda slope: f"{slope:+.3f}"),
            Column("sentence", "", is_text=True),
        )
        unfit = {"better_s": "nothing fits", "worse_s": "nothing fits"}
        rows = (
            unfit
            | {key: value for key, value in asdict(row).items() if value is not None}
            | {"sentence": row.sentence(self.step_s)}
            for row in self.rows
        )
        return RowTable(columns, tuple(map(Row, rows)))

    def to_dict(self) -> dict[str, Any]:
        return {
            **names_of(self.graph, self.cluster),
            "strategy": self.result.strategy.text,
            "chosen": self.result.chosen,
            "step_time_s": self.step_s,
            "advice": self.headline(),
            "command": self.command,
            "figures": [asdict(row) | {"gain": row.gain(self.step_s)} for row in self.rows],
        }


def what_helps(
    graph: OpGraph,
    cluster: Cluster,
    *,
    seed: int = 0,
    budget_s: float | None = None,
    evaluations: int | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Sensitivities:
    """Find the best strategy or placement, and score it with each figure of the cluster a little better and worse.

    Memory decides what fits, so the best is looked for anew with 10 % more and less of it.

    Args:
        seed, budget_s, evaluations: as in `placement.optimize`; for each of the searches.
        progress: called before each figure with its name and how many are done.

    Raises:
        InfeasibleError: nothing fits.
        ValueError, MismatchError: as `placement.optimize`.
    """
    from placement.optimization import optimize  # brings the search over strategies

    tell = progress or (lambda name, done: None)
    sizes = list(memories(cluster))
    changed = {(figure.name, sign): figure.scaled(1 + sign * BETTER) for figure in sizes for sign in (1, -1)}
    found: list[Result] = []
    for target in (cluster, *changed.values()):
        tell("the best" if target is cluster else "the best with more and less memory", len(found))
        with contextlib.suppress(InfeasibleError):  # nothing fits there
            result = optimize(graph, target, seed=seed, budget_s=budget_s, evaluations=evaluations)
            found += [result] if result.answer is not None else []
            if result.interrupted:
                break
    best = _fastest(graph, found, cluster)
    if best is None:
        raise InfeasibleError(optimize(graph, cluster, seed=seed, budget_s=0).reason or "nothing fits")
    rows: list[Sensitivity] = []
    sequence = _sequence(graph, best[1], cluster)
    for figure in rates(cluster):
        tell(figure.name, len(found) + len(rows))
        rows.append(_of_rate(graph, best[1], sequence, figure))
    for figure in sizes:
        # A placement found with another size counts wherever it fits: a difference is due to the memory, not to luck.
        times = (_fastest(graph, found, changed[figure.name, sign]) for sign in (1, -1))
        better_s, worse_s = (None if one is None else one[0] for one in times)
        rows.append(Sensitivity(figure.name, True, None, better_s, worse_s))
    rows.sort(key=lambda row: -row.gain(best[0]))
    return Sensitivities(graph=graph, cluster=cluster, result=best[1], step_s=best[0], rows=tuple(rows))


def _fastest(graph: OpGraph, found: Sequence[Result], cluster: Cluster) -> tuple[float, Result] | None:
    """Step time and result of the fastest one that fits the cluster; None if none does."""
    best = None
    for result in found:
        score, capacity = scored_on(graph, result, cluster)
        if (score.peak_bytes <= capacity).all() and (best is None or score.step_time_s < best[0]):
            best = score.step_time_s, result
    return best


def _of_rate(graph: OpGraph, best: Result, sequence: Plan | None, figure: ClusterFigure) -> Sensitivity:
    """Elasticity by central difference of logarithms, and step times with the figure 10 % better and worse."""
    sign = 1 if figure.more_helps else -1
    up_s, down_s, better_s, worse_s = (
        scored_on(graph, best, figure.scaled(1 + share), sequence)[0].step_time_s
        for share in (STEP, -STEP, sign * BETTER, -sign * BETTER)
    )
    # Faster devices may run ops in another order, too, where nothing holds the step to the old one.
    free_s = scored_on(graph, best, figure.scaled(1 + sign * BETTER))[0].step_time_s
    better_s = min(better_s, free_s)
    slope = math.log(up_s / down_s) / math.log((1 + STEP) / (1 - STEP))
    return Sensitivity(figure.name, figure.more_helps, slope, better_s, worse_s)


def _sequence(graph: OpGraph, best: Result, cluster: Cluster) -> Plan:
    """A result's schedule as a fixed sequence of ops and transfers, so that only their times change."""
    problem, plan = _carried_out(graph, best, cluster)
    _, schedule = Simulator(problem).schedule(plan)
    order = np.empty(problem.graph.n_ops)
    order[schedule.order] = np.arange(problem.graph.n_ops)
    return Plan(schedule.device, order, np.stack([schedule.transfer_tensor, schedule.transfer_target], axis=1))


def scored_on(graph: OpGraph, result: Result, cluster: Cluster, sequence: Plan | None = None) -> tuple[Score, IntArray]:
    """The score of a result on a cluster with the same devices, and their capacities in bytes.

    The plan stays: stages are not cut anew.
    """
    problem, plan = _carried_out(graph, result, cluster)
    if sequence is not None and len(sequence.device) == problem.graph.n_ops:
        plan = sequence
    return Simulator(problem).score(plan), problem.capacity_bytes


def _carried_out(graph: OpGraph, result: Result, cluster: Cluster) -> tuple[Problem, Plan]:
    """A result on a cluster; where figures of the cluster are part of its graph, its strategy carried out once more."""
    if not result.strategy.is_none:
        from baselines.strategies.applied import applied  # these load all transforms
        from baselines.strategies.folding import is_to_be_folded

        has_times = bool(np.isnan(graph.time_s).all() and not np.isnan(result.graph.time_s).all())
        folded = is_to_be_folded(graph, cluster, result.strategy)  # one replica stands for all
        if has_times or folded:
            what = applied(graph, cluster, result.strategy, folded=folded)
            return what.problem, what.plan
    return Problem(result.graph, with_lanes_of(cluster, result.cluster)), result.plan()


# -- figures of a cluster ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterFigure:
    """One figure of all devices of a model, or of all links of a kind.

    Attributes:
        name: in words, e.g. ``"bandwidth of links between gpu and infiniband"``.
        more_helps: a larger value is better; of latencies and overheads a smaller one.
        scaled: the cluster with the figure times a factor.
    """

    name: str
    more_helps: bool
    scaled: Callable[[float], Cluster]


def rates(cluster: Cluster) -> Iterator[ClusterFigure]:
    """The figures that times depend on; those that are 0 or infinite left out."""
    compute = [cluster.devices[d] for d in cluster.compute_devices.tolist()]
    for model in dict.fromkeys(map(_model, compute)):
        yield ClusterFigure(f"FLOP rate of {model}", True, partial(_devices_scaled, cluster, model, _faster))
        yield ClusterFigure(f"memory bandwidth of {model}", True, partial(_devices_scaled, cluster, model, _wider))
        if any(device.launch_overhead_s for device in compute if _model(device) == model):
            yield ClusterFigure(f"launch overhead of {model}", False, partial(_devices_scaled, cluster, model, _later))
    kinds: dict[str, list[Link]] = {}
    for link in cluster.links:
        kinds.setdefault(link_kind(link), []).append(link)
    for kind, links in kinds.items():
        if any(link.bandwidth_bytes_per_s < float("inf") for link in links):
            yield ClusterFigure(f"bandwidth of {kind}", True, partial(_bandwidth_scaled, cluster, kind))
        if any(link.latency_s for link in links):
            yield ClusterFigure(f"latency of {kind}", False, partial(_latency_scaled, cluster, kind))


def memories(cluster: Cluster) -> Iterator[ClusterFigure]:
    """Memory sizes of the models of devices."""
    compute = [cluster.devices[d] for d in cluster.compute_devices.tolist()]
    for model in dict.fromkeys(map(_model, compute)):
        yield ClusterFigure(f"memory of {model}", True, partial(_devices_scaled, cluster, model, _larger))


def link_kind(link: Link) -> str:
    """``"links between gpu and infiniband"``: by its ends without their hosts and numbers."""
    ends = sorted({_NUMBER.sub("", _HOST.sub("", end)) for end in (link.src, link.dst)})
    return f"links between {' and '.join(ends)}" if len(ends) > 1 else f"links among {ends[0]}s"


def _model(device: Device) -> str:
    return device.model or device.kind


def _devices_scaled(cluster: Cluster, model: str, change: Callable[[Device, float], Device], factor: float) -> Cluster:
    devices = (change(device, factor) if _model(device) == model else device for device in cluster.devices)
    return replace(cluster, devices=tuple(devices))


def _faster(device: Device, factor: float) -> Device:
    peaks = {dtype: rate * factor for dtype, rate in device.peak_flops.items()}
    return replace(device, peak_flops=peaks, rates=device.rates and device.rates.scaled(compute=factor))


def _wider(device: Device, factor: float) -> Device:
    rates = device.rates and device.rates.scaled(memory=factor)
    return replace(device, memory_bytes_per_s=device.memory_bytes_per_s * factor, rates=rates)


def _later(device: Device, factor: float) -> Device:
    return replace(device, launch_overhead_s=device.launch_overhead_s * factor)


def _larger(device: Device, factor: float) -> Device:
    return replace(device, memory_bytes=device.reserved_bytes + int(device.usable_bytes * factor))


def _bandwidth_scaled(cluster: Cluster, kind: str, factor: float) -> Cluster:
    changed = _links_changed(cluster, kind, lambda link: link.wider(factor))
    if cluster.fabric is None or not _is_inside_hosts(cluster, kind):  # the fabric asks links for ports between hosts
        return changed
    return replace(changed, fabric=cluster.fabric.scaled(bandwidth=factor))


def _latency_scaled(cluster: Cluster, kind: str, factor: float) -> Cluster:
    changed = _links_changed(cluster, kind, lambda link: replace(link, latency_s=link.latency_s * factor))
    if cluster.fabric is None:
        return changed
    inside = _is_inside_hosts(cluster, kind)
    return replace(changed, fabric=cluster.fabric.scaled(**{"latency" if inside else "between_hosts": factor}))


def _is_inside_hosts(cluster: Cluster, kind: str) -> bool:
    """True if the first two devices share a host and are joined by links of this kind."""
    first, second = cluster.compute_devices[:2].tolist()
    route = [cluster.links[number] for number in cluster.routes[first, second].links]
    return any(link_kind(link) == kind and host_of(link.src) == host_of(link.dst) for link in route)


def _links_changed(cluster: Cluster, kind: str, change: Callable[[Link], Link]) -> Cluster:
    links = (change(link) if link_kind(link) == kind else link for link in cluster.links)
    return replace(cluster, links=tuple(links))
