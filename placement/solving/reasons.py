"""`reason`: why an answer is the best, beside the way that comes next and the same without what saves memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from baselines.strategies.estimating.estimate import Figures
from env.cluster import Cluster
from graphs.errors import PlacementError
from graphs.opgraph import OpGraph
from graphs.transforms.axes import GROUPS
from graphs.transforms.strategy import Strategy
from placement.results.alternatives import Alternative, best_of_each
from placement.results.result import Result
from placement.results.strategy_words import in_brief
from placement.results.why import why_not
from placement.solving.strategy_row import StrategyRow, figures_of

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
