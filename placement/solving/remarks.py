"""Remarks beside the answer of a search over strategies: why it is the best, what was left out and looked at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from baselines.strategies.estimating.estimate import Figures
from baselines.strategies.searching.records import Scored, ToolLimits
from env.cluster import Cluster
from graphs.errors import PlacementError
from graphs.formatting import format_seconds
from graphs.opgraph import OpGraph
from graphs.transforms.axes import GROUPS
from graphs.transforms.strategy import Strategy
from placement.results.alternatives import Alternative, KeptTo, best_of_each
from placement.results.result import Result
from placement.results.strategy_words import in_brief
from placement.results.why import why_not
from placement.solving.strategy_row import StrategyRow, figures_of

if TYPE_CHECKING:
    from baselines.strategies.searching.outcome import StrategyOutcome

_TIED = 0.01  # of the step time: nearer ones differ in nothing that is worth a word


def reason(
    graph: OpGraph,
    cluster: Cluster,
    best: StrategyRow,
    alternatives: Sequence[Alternative],
    estimated: Iterable[Figures] = (),
) -> str:
    """Why the next best family is not the answer, and what the answer would take without what saves memory.

    Args:
        graph, cluster: before the strategy.
        best: the answer.
        alternatives: the ways that were scored, fastest first.
        estimated: others, for a search that had no time to score any of another family.

    Returns:
        "" where the answer is no strategy, or nothing can be compared.
    """
    if best.figures is None or best.result.answer is None:
        return ""
    found: list[str] = []
    for name, other in (*_next_best(best.result, alternatives, estimated), *_without(best.strategy)):
        try:
            found.append(why_not(name, best.figures, figures_of(graph, cluster, other)))
        except PlacementError:  # it cannot be carried out, which is no matter of time or memory
            continue
    return "; ".join(found)


def _next_best(
    result: Result, alternatives: Sequence[Alternative], estimated: Iterable[Figures]
) -> Iterator[tuple[str, Strategy]]:
    """The fastest of another family that uses several devices, beyond the error of predictions if there is one."""
    from baselines.strategies.searching.families import family_of

    own, step_s = family_of(result.strategy), result.answered().step_time_s
    others = [
        (one.step_time_s, one.strategy)
        for one in best_of_each(alternatives)
        if one.step_time_s is not None and one.name != own and one.strategy.devices > 1
    ]
    if not others:
        found = [one for one in estimated if one.fits and one.strategy.devices > 1 and family_of(one.strategy) != own]
        others = sorted(((one.step_time_s, one.strategy) for one in found), key=lambda each: each[0])
    apart = [(took_s, one) for took_s, one in others if took_s > (1 + max(result.uncertainty or 0.0, _TIED)) * step_s]
    for _, one in (apart or others)[:1]:
        yield in_brief(one), one


def _without(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """The strategy without recomputation and offload, or else without ZeRO; nothing where it has none of them."""
    if strategy.recompute or strategy.offload:
        names = [name for name, has in (("recompute", strategy.recompute), ("offload", strategy.offload)) if has]
        yield f"without {' and '.join(names)} it", replace(strategy, recompute=(), offload=())
    elif strategy.zero and all(rule.name != GROUPS for rule in strategy.mesh):
        yield "without ZeRO it", replace(strategy, zero=0)


def faster(best: Result, candidates: Mapping[str, Scored], left_out: Mapping[str, str]) -> str:
    """A remark where a strategy that is less plain than the answer is a little faster; else empty."""
    fits = [one for text, one in candidates.items() if text not in left_out]
    first = min(fits, key=lambda one: one.step_time_s, default=None)
    if first is None or best.objective_s is None or best.strategy.is_none or best.strategy == first.strategy:
        return ""
    gain = 1 - first.step_time_s / best.objective_s
    return f"{first.strategy.text!r} is {gain:.1%} faster, and less plain." if gain > 0 else ""


def few_samples(graph: OpGraph, cluster: Cluster, best: Result) -> str:
    """A remark where the batch has fewer samples than the cluster has devices, or the answer uses fewer; else empty."""
    samples, n = graph.origin.batch_size, len(cluster.compute_devices)
    used = n if best.answer is None else best.n_used
    if samples is None or (samples >= n and used == n) or not any(graph.split_rows):
        return ""
    if samples >= n:
        batch = f"For a batch of {samples} samples {used} of {n} devices are enough"
    elif samples == 1:
        batch = "The batch has one sample, so there are no replicas"
    else:
        batch = f"The batch has {samples} samples, so there are at most {samples} replicas"
    sizes = ",".join(str(samples * k) for k in (1, 2, 4))
    return f"{batch}; --sweep batch={sizes} says what a larger one brings."


def left_out_words(left_out: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each reason why strategies were left out."""
    for problem in dict.fromkeys(left_out.values()):
        texts = [text for text, why in left_out.items() if why == problem]
        others = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
        yield f"Left out: {texts[0]!r}{others}, {problem}."


def counted(outcome: StrategyOutcome) -> str:
    """How many strategies were looked at."""
    estimated = f"{outcome.estimated:,} {'strategy' if outcome.estimated == 1 else 'strategies'} estimated"
    if outcome.scored or outcome.nearest is None:
        return f"{estimated}, {outcome.scored:,} scored by the simulator."
    nearest, time_s = outcome.nearest.strategy.text, format_seconds(outcome.nearest.step_time_s)
    return f"{estimated}, none scored by the simulator: the fastest, {nearest!r}, is estimated at {time_s}."


def kept_to(tool: ToolLimits, best: Result, outcome: StrategyOutcome) -> KeptTo | None:
    """The tool that is to run the answer, with what it costs; None where any does."""
    if not tool.name:
        return None
    if outcome.beyond is None or (best.objective_s or math.inf) <= outcome.beyond[0].step_time_s:
        return KeptTo(tool.name)
    faster, lacks = outcome.beyond
    return KeptTo(tool.name, faster.strategy.text, faster.step_time_s, lacks)
