"""Remarks beside the answer of a search over strategies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from baselines.strategies.searching.records import Scored, ToolLimits
from env.cluster import Cluster
from graphs.formatting import format_seconds
from graphs.opgraph import OpGraph
from placement.results.alternatives import KeptTo
from placement.results.result import Result

if TYPE_CHECKING:
    from baselines.strategies.searching.outcome import StrategyOutcome


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
