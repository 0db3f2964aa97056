"""What `placement.apply` runs, as limits of a search over strategies, and checks of a strategy within them."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING

from baselines.strategies.searching.records import Refusal, ToolLimits
from env.cluster import Cluster
from graphs.errors import InfeasibleError, MismatchError
from graphs.opgraph import OpGraph
from graphs.origin import step_of
from graphs.transforms.strategy import Strategy
from placement.results.strategy_words import PLACES_PARTS
from placement.runtime.setups.limits import plainer, runner_lacks
from placement.solving.checked import Check, Checked
from placement.solving.methods import STRATEGY
from placement.solving.strategy_row import without_answer

if TYPE_CHECKING:
    from torch import nn

    from placement.results.result import Result


def runner_limits(graph: OpGraph, cluster: Cluster, model: nn.Module | None = None) -> ToolLimits:
    """Limits of `placement.apply`, which runs placements and, by torch's engine, strategies.

    Args:
        model: of the graph; by default the one that the graph was captured from, while it is there. Without one a
            strategy is known by its words alone.
    """
    draft = without_answer(graph, cluster, 0, STRATEGY, "not carried out")
    known: list[nn.Module | None] = [] if model is None else [model]

    def lacking(strategy: Strategy) -> str:
        if strategy.is_placed:
            return PLACES_PARTS
        return next(runner_lacks(dataclasses.replace(draft, strategy=strategy)), "")

    @cache
    def refuses(strategy: Strategy) -> Refusal | None:
        if strategy.is_none or strategy.is_placed:
            return None
        if not known:
            step = step_of(graph)
            known.append(None if step is None else step.model())
        return _refused(dataclasses.replace(draft, strategy=strategy), graph, known[0])

    return ToolLimits(lacks=lacking, refuses=refuses)


def _refused(draft: Result, graph: OpGraph, model: nn.Module | None) -> Refusal | None:
    """Why the torch runner has no constants for a strategy; None where it has, or where there is no model to ask."""
    if model is None:
        return None
    from placement.runtime.setups.facts_of import facts_of  # loads torch

    try:
        facts_of(draft, graph, model)
    except MismatchError as error:
        said = str(error)
        why = said.partition(": ")[2] if said.startswith("strategy ") else said  # which strategy, its asker knows
        return Refusal(why or said, error.instead if isinstance(error.instead, Strategy) else None)
    except InfeasibleError:
        return None  # no order of its pipeline fits: its score says so
    return None


def why_not_run(limits: ToolLimits, strategy: Strategy) -> str:
    """Why limits keep a strategy from running, without a full stop; empty where they do not."""
    lacks = limits.lacks(strategy)
    refusal = None if lacks else limits.refuses(strategy)
    return (lacks if refusal is None else refusal.reason).rstrip(".")


def nearest_run(limits: ToolLimits, strategy: Strategy) -> Strategy | None:
    """The nearest strategy of as many devices within limits; None where none is known."""
    refusal = None if limits.lacks(strategy) else limits.refuses(strategy)
    ways = () if refusal is None or refusal.instead is None else (refusal.instead,)
    return next((one for one in (*ways, *plainer(strategy)) if not why_not_run(limits, one)), None)


def run_check(limits: ToolLimits, check: Check) -> Check:
    """A check of a strategy, which has to be within limits, too."""

    def both(graph: OpGraph, cluster: Cluster, result: Result) -> Checked:
        found = check(graph, cluster, result)
        problem = found.problem or why_not_run(limits, result.strategy)
        return dataclasses.replace(found, problem=problem) if problem else found

    return both


def check_of_run(limits: ToolLimits, check: Check) -> Check:
    """A check of the strategies within limits, where others are answers, too."""

    def either(graph: OpGraph, cluster: Cluster, result: Result) -> Checked:
        is_run = not why_not_run(limits, result.strategy)
        return check(graph, cluster, result) if is_run else Checked(reason="nothing runs it")

    return either
