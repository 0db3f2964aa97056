"""`what_helps`: which figure of a cluster a step would gain most by."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from env.cluster import Cluster
from env.lanes import with_lanes_of
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Score, Simulator
from graphs.errors import InfeasibleError
from graphs.formatting import format_seconds, show
from graphs.opgraph import IntArray, OpGraph
from placement.comparing.rows import AsJson, Column, Row, RowTable, names_of
from placement.optimization import optimize
from placement.results.result import Result
from placement.sizing.figures import ClusterFigure, memories, rates

STEP = 0.01  # by which a figure is changed either way, for the derivative
BETTER = 0.10  # by how much better it is in the sentences
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


@dataclass(frozen=True)
class Sensitivities(AsJson):
    """Figures of a cluster by their effect on a step.

    Attributes:
        result: the strategy or placement that figures were changed for.
        step_s: its step time with the figures as they are.
        rows: by what 10 % better of each figure saves, most first.
        command: the command line that made it, or "".
    """

    graph: OpGraph
    cluster: Cluster
    result: Result
    step_s: float
    rows: tuple[Sensitivity, ...]
    command: str = field(default="", compare=False)

    def advice(self) -> str:
        """The figure that helps most, in a sentence or two."""
        first = self.rows[0] if self.rows else None
        strategy = self.result.strategy
        how = f"the placement by {self.result.chosen}" if strategy.is_none else strategy.text
        taken = f"with {how}, {format_seconds(self.step_s)} a step"
        if first is None or first.gain(self.step_s) < _NOTHING:
            return f"No single figure of {show(self.cluster.name)} helps {taken}."
        return f"Most would help {first.sentence(self.step_s)} ({taken})."

    def table(self) -> RowTable:
        """A row for each figure."""
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
        """JSON-ready fields."""
        return {
            **names_of(self.graph, self.cluster),
            "strategy": self.result.strategy.text,
            "chosen": self.result.chosen,
            "step_time_s": self.step_s,
            "advice": self.advice(),
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
    return Sensitivities(graph, cluster, best[1], best[0], tuple(rows))


def _fastest(graph: OpGraph, found: Sequence[Result], cluster: Cluster) -> tuple[float, Result] | None:
    """The result that is fastest among those that fit a cluster, with its step time there; None if none does."""
    best = None
    for result in found:
        score, capacity = scored_on(graph, result, cluster)
        if (score.peak_bytes <= capacity).all() and (best is None or score.step_time_s < best[0]):
            best = score.step_time_s, result
    return best


def _of_rate(graph: OpGraph, best: Result, sequence: Plan | None, figure: ClusterFigure) -> Sensitivity:
    """The central difference of the logarithms, and the times with 10 % better and worse."""
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
    """A result's schedule as a fixed sequence, which nothing but the figures changes."""
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
    if not _is_made_anew(graph, result, cluster):
        return _problem(result, cluster), result.plan()
    from baselines.strategies.applied import applied  # these load all transforms
    from baselines.strategies.folding import is_to_be_folded

    folded = is_to_be_folded(graph, cluster, result.strategy)
    what = applied(graph, cluster, result.strategy, folded=folded)
    return what.problem, what.plan


def _problem(result: Result, cluster: Cluster) -> Problem:
    """The graph of a result on a cluster, with lanes if the result has them."""
    return Problem(result.graph, with_lanes_of(cluster, result.cluster))


def _is_made_anew(graph: OpGraph, result: Result, cluster: Cluster) -> bool:
    """Whether figures of the cluster are part of a rewritten graph: times, or a replica for all."""
    from baselines.strategies.folding import is_to_be_folded  # loads all transforms

    if result.strategy.is_none:
        return False
    has_times = bool(np.isnan(graph.time_s).all() and not np.isnan(result.graph.time_s).all())
    return has_times or is_to_be_folded(graph, cluster, result.strategy)
