"""`fastest`: which of the placements and strategies that a search has found is the answer, and what stands beside it.

The plainest on few devices is taken of those that predictions cannot tell apart: strategies that most frameworks have
words for; a difference that no prediction tells is not worth more devices or an unusual strategy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from baselines.strategies.estimating.estimate import Estimate
from baselines.strategies.searching.records import ANY_TOOL, Scored, ScoreMany, ToolLimits
from env.cluster import Cluster
from env.resizing import part_of
from graphs.errors import StrategyError
from graphs.formatting import format_bytes
from graphs.kept import kept_words
from graphs.opgraph import OpGraph
from graphs.transforms.coverage import unshared
from graphs.transforms.strategy import Strategy
from placement.results.alternatives import DDP, FSDP, ONE_DEVICE, PLACEMENT, SAVING, Alternative, Rung, listed
from placement.results.result import Result
from placement.results.strategy_words import impossible
from placement.results.utilisation import uncertainty
from placement.sizing.fewest_devices import enough_devices, fastest_that_fits
from placement.solving.checked import Check, unchecked
from placement.solving.methods import AUTO
from placement.solving.one_device import as_alternative
from placement.solving.remarks import counted, faster, few_samples, kept_to, left_out_words, reason
from placement.solving.strategy_row import StrategyRow, strategy_row, unrewritten_row, without_answer

if TYPE_CHECKING:
    from baselines.strategies.searching.outcome import StrategyOutcome

_MOST_NEAR = 4  # of the fastest, whose plainer forms are scored
_MORE_DEVICES = 4  # times as many as there are, are tried where nothing fits
_ENOUGH_S = 10.0  # for that, whatever the budget: who is told that nothing fits wants to know what would
WITHIN = 0.01  # of the step time: a plainer strategy may take so much longer, or as much as predictions are off
_USUAL_ORDERS = ("1f1b", "gpipe", "interleaved")
_PLAIN = Strategy()


@dataclasses.dataclass(frozen=True)
class SearchAids:
    """Help that a search gets from others.

    Attributes:
        check: what is known of a strategy before it is the answer.
        score_many: scores strategies side by side, by workers; None: this process does, one after the other.
        tool: limits of what runs the answer; a named one runs strategies and one device, so nothing else is placed.
        first: whether to stop at the first advice.
        own: strategies of the user's own, which are scored before all others.
    """

    check: Check = unchecked
    score_many: ScoreMany | None = None
    tool: ToolLimits = ANY_TOOL
    first: bool = False
    own: tuple[Strategy, ...] = ()


NO_AIDS = SearchAids()


def has_strategies(graph: OpGraph) -> bool:
    """Whether there is anything to search: ops that can be split."""
    return any(graph.split_rows)


def fastest(
    graph: OpGraph,
    cluster: Cluster,
    seed: int,
    placed: Result | None,
    single: Result,
    outcome: StrategyOutcome,
    aids: SearchAids = NO_AIDS,
) -> Result:
    """The fastest that fits of a placement, one device, and the strategies that a search has found.

    Of the strategies within the error of predictions, or `WITHIN`, the plainest on the fewest devices is taken; the
    note tells the fastest. A strategy that fails its check is left out, and the note says why.

    Args:
        placed, single: the best placement of the graph as it is, and that on a single device; either may have no
            answer; None where none was looked for.
    """
    from baselines.strategies.searching.bound import strategy_bounds

    tool = aids.tool
    bounds = strategy_bounds(graph, cluster)
    saving = [] if single.answer is not None else _on_one_device(graph, cluster, tool)
    placements = [StrategyRow(one, None) for one in (placed, single) if one is not None and one.answer is not None]
    best = min(placements, key=_objective_s, default=None)
    # A strategy of the user's own is not to be beaten by a slower one.
    off = max(WITHIN, (not aids.own and uncertainty(graph, cluster)) or 0.0)
    least_s = min((one.step_time_s for one in outcome.fitting), default=math.inf)
    quickest_s = least_s if best is None else min(least_s, _objective_s(best))
    if single.answer is not None and single.answer.objective_s <= (1 + off) * quickest_s:
        best, least_s = StrategyRow(single, None), 0.0
    left_out: dict[str, str] = {}
    candidates = {one.strategy.text: one for one in outcome.fitting}
    for one in () if aids.first else _plainer_forms(candidates.values(), graph, cluster, tool):
        candidates.setdefault(one.strategy.text, one)
    for found in _plain_first(candidates.values(), off):
        if best is not None and (not least_s or _objective_s(best) <= found.step_time_s):
            break
        row = None if found.strategy.is_none else strategy_row(graph, cluster, found.strategy, seed, bounds)
        if row is None or row.result.answer is None:
            continue
        checked = aids.check(graph, cluster, row.result)
        if not checked.problem:
            limit_s = (1 + off) * min(one.step_time_s for one in candidates.values())
            limit_s = limit_s if best is None else min(limit_s, _objective_s(best))
            best = _plainer(row.checked(checked.words), graph, cluster, aids, bounds, limit_s)
            break
        left_out[found.strategy.text] = checked.problem
    if best is None:
        nothing = nothing_fits(graph, cluster, seed, single if placed is None else placed, outcome, tool)
        best = StrategyRow(without_answer(graph, cluster, seed, AUTO, nothing), None)
    elif not best.result.bounds:
        best = dataclasses.replace(best, result=best.result.among_strategies(bounds))
    if best.result.answer is not None and best.figures is None:
        best = unrewritten_row(best.result)
    answer = best.result
    alternatives = listed(
        one
        for one in (*_alternatives(placed, single, outcome), *saving, *_own(answer), *_usual(graph, cluster, tool))
        if one.strategy.text not in left_out and not _is_passed_over(one, answer)
    )
    said = (
        faster(answer, candidates, left_out),
        few_samples(graph, cluster, answer),
        *left_out_words(left_out),
        counted(outcome),
    )
    cannot = unshared(graph)
    rest = answer.note.replace(cannot, "", 1).strip() if cannot else answer.note  # a strategy's own note says it, too
    remarks = dict.fromkeys((cannot, rest, *said, *impossible(outcome.refused)))
    return dataclasses.replace(
        answer,
        method=AUTO,
        alternatives=alternatives,
        why="" if aids.first else reason(graph, cluster, best, alternatives, outcome.ladder.values()),
        ladder=tuple(
            Rung(name, one.strategy, one.step_time_s, one.peak_bytes, one.fits, isinstance(one, Estimate))
            for name, one in outcome.ladder.items()
        ),
        kept_to=kept_to(tool, answer, outcome),
        note=" ".join(remark for remark in remarks if remark),
    )


def _plainer_forms(found: Iterable[Scored], graph: OpGraph, cluster: Cluster, tool: ToolLimits) -> list[Scored]:
    """Plainer forms, that fit, of those within `WITHIN` of the fastest: one of them may be plainer than any found."""
    from baselines.strategies.searching.scoring import tried

    near = [one for one in _near(found, WITHIN) if oddities(one.strategy)][:_MOST_NEAR]
    forms = dict.fromkeys(plain for one in near for plain in plainer(one.strategy) if not tool.lacks(plain))
    return [made.scored for plain in forms if (made := tried(graph, cluster, plain)).scored and made.scored.fits]


def _near(found: Iterable[Scored], off: float) -> list[Scored]:
    ordered = sorted(found, key=lambda one: one.step_time_s)
    return [one for one in ordered if one.step_time_s <= (1 + off) * ordered[0].step_time_s]


def _plain_first(found: Iterable[Scored], off: float) -> list[Scored]:
    """Fastest first, but for those within a share of the fastest, of which the plainest come first."""
    ordered = sorted(found, key=lambda one: one.step_time_s)
    near = _near(ordered, off)
    return [*sorted(near, key=lambda one: plainness(one.strategy)), *ordered[len(near) :]]


def _plainer(
    row: StrategyRow, graph: OpGraph, cluster: Cluster, aids: SearchAids, bounds: Mapping[str, float], limit_s: float
) -> StrategyRow:
    """The row, or that of a plainer form of its strategy that takes no longer than a limit."""
    for plain in plainer(row.strategy):
        if aids.tool.lacks(plain):
            continue
        try:
            other = strategy_row(graph, cluster, plain, row.result.seed, bounds)
        except StrategyError:
            continue
        if other.result.answer is None or other.result.answer.objective_s > limit_s:
            continue
        checked = aids.check(graph, cluster, other.result)
        if not checked.problem:
            return other.checked(checked.words)
    return row


def _objective_s(row: StrategyRow) -> float:
    return row.result.objective_s or 0.0


def _own(best: Result) -> Iterator[Alternative]:
    """The answer among its alternatives, where it is a strategy."""
    from baselines.strategies.searching.families import family_of

    if best.answer is not None and not best.strategy.is_none:
        yield as_alternative(best, family_of(best.strategy))


def _is_passed_over(one: Alternative, best: Result) -> bool:
    """Whether a strategy is faster than the answer, which is plainer."""
    if one.step_time_s is None or best.objective_s is None or one.strategy.is_none or best.strategy.is_none:
        return False
    return one.strategy != best.strategy and one.step_time_s <= best.objective_s and one.name not in (DDP, FSDP)


def _alternatives(placed: Result | None, single: Result, outcome: StrategyOutcome) -> Iterator[Alternative]:
    from baselines.strategies.searching.families import family_of

    for name, result in ((ONE_DEVICE, single), (PLACEMENT, placed)):
        if result is not None:
            yield as_alternative(result, name)
    scored: Sequence[Scored] = [*outcome.best_of.values(), *outcome.front]
    for one in scored:
        if one.strategy.is_none:
            continue  # that is one device
        yield Alternative(family_of(one.strategy), one.strategy, one.step_time_s, one.peak_bytes)


def _on_one_device(graph: OpGraph, cluster: Cluster, tool: ToolLimits) -> list[Alternative]:
    """The fastest strategy by which a graph fits on the largest device, where one does."""
    from baselines.strategies.searching.scoring import tried

    largest = max(cluster.compute_devices.tolist(), key=lambda d: cluster.devices[d].usable_bytes)
    alone = part_of(cluster, np.array([largest]))
    found = fastest_that_fits(graph, alone, 1, tool) if has_strategies(graph) else None
    if found is None or found.strategy.is_none:
        return []
    scored = tried(graph, alone, found.strategy).scored
    if scored is None or scored.missing_bytes:
        return []
    return [Alternative(SAVING, scored.strategy, scored.step_time_s, scored.peak_bytes)]


def _usual(graph: OpGraph, cluster: Cluster, tool: ToolLimits) -> Iterator[Alternative]:
    """What a colleague would type for a training step: DDP and FSDP over all devices, whether they fit or not."""
    from baselines.strategies.searching.scoring import tried

    n = len(cluster.compute_devices)
    for name, zero in ((DDP, ""), (FSDP, " zero3")) if graph.is_training and n > 1 else ():
        strategy = Strategy.parse(f"dp{n}{zero}")
        scored = None if tool.lacks(strategy) or tool.refuses(strategy) else tried(graph, cluster, strategy).scored
        if scored is not None:
            fits = scored.fits
            yield Alternative(name, strategy, scored.step_time_s if fits else None, scored.peak_bytes if fits else None)


def nothing_fits(
    graph: OpGraph, cluster: Cluster, seed: int, placed: Result, outcome: StrategyOutcome, tool: ToolLimits = ANY_TOOL
) -> str:
    """The reason why nothing fits: bytes that the most frugal strategy lacks, and how many devices would do.

    With a tool it names what fits that the tool cannot run, instead of devices.
    """
    if outcome.frugal is None:
        return placed.reason or f"graph {graph.name!r} allows no strategy on cluster {cluster.name!r}."
    frugal = strategy_row(graph, cluster, outcome.frugal.strategy, seed, {}).result
    missing, n = outcome.frugal.missing_bytes, len(cluster.compute_devices)
    lacking = f"lacks {format_bytes(missing)} on the fullest device" if missing else "nearly fits"
    if tool.name:
        more = _fits_elsewhere(cluster, tool, outcome)
    else:
        more = enough_devices(graph, cluster, _MORE_DEVICES * n, n, _ENOUGH_S, tool).headline()
    who = f" that {tool.name} can run" if tool.name else ""
    return (
        f"the most frugal strategy{who}, {frugal.strategy.text!r}, {lacking}: {frugal.reason or 'by estimate.'} The "
        f"step keeps {kept_words(graph)}. {more}"
    )


def _fits_elsewhere(cluster: Cluster, tool: ToolLimits, outcome: StrategyOutcome) -> str:
    """Sentences about what would fit that a tool cannot run, and about the memory of hosts."""
    if outcome.beyond is not None:
        found, lacks = outcome.beyond
        said = f"The reason is {tool.name}: {found.strategy.text!r} fits, which it cannot run: {lacks.rstrip('.')}."
    else:
        said = f"Of what {tool.name} cannot run, nothing that fits was found either; more devices may do."
    has_hosts = any(device.kind == "cpu" for device in cluster.devices)
    return said if has_hosts else f"{said} With hosts in the cluster, as a preset has with +host, it may offload."


def oddities(strategy: Strategy) -> int:
    """How many things a strategy has that frameworks for training mostly lack."""
    rules = strategy.mesh
    has_tp = any(rule.name == "tp" for rule in rules)
    return sum(
        (
            strategy.bucket_bytes != _PLAIN.bucket_bytes,
            bool(strategy.reduce),
            bool(strategy.device_names),
            bool(strategy.cuts),
            strategy.stages > 1 and strategy.order not in _USUAL_ORDERS,
            any(pattern.startswith(("kind:", "!")) for pattern in strategy.recompute),
            strategy.zero == 1 and has_tp,
            *(bool(rule.shares) for rule in rules),
            *(bool(rule.modules) for rule in rules),
            *(bool(rule.tensor_modules) for rule in rules),
        )
    )


def plainness(strategy: Strategy) -> tuple[int, int]:
    """The plainest strategy has the least: devices first, then what is unusual and kinds of parallelism at once."""
    kinds = sum(rule.size > 1 for rule in strategy.mesh) + (strategy.stages > 1)
    return strategy.devices, oddities(strategy) + kinds


def plainer(strategy: Strategy) -> Iterator[Strategy]:
    """Forms of a strategy with fewer `oddities` and the same sizes, plainest first."""
    whole = tuple(replace(rule, shares=(), tensor_modules=()) for rule in strategy.mesh)
    bare = replace(strategy, bucket_bytes=_PLAIN.bucket_bytes, reduce="", device_names=())
    found = (replace(bare, mesh=whole), bare, replace(strategy, bucket_bytes=_PLAIN.bucket_bytes, reduce=""))
    seen = {strategy}
    for one in found:
        if one not in seen and oddities(one) < oddities(strategy):
            seen.add(one)
            yield one
