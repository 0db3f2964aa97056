"""`tool_for`: what a search over strategies keeps to: `placement.apply`, or the tool of a target of `export`."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING, Any

from baselines.strategies.searching.records import ANY_TOOL, Refusal, ToolLimits
from env.cluster import Cluster
from graphs.entry_points import imported
from graphs.errors import InfeasibleError, MismatchError, UnknownNameError
from graphs.opgraph import OpGraph
from graphs.origin import step_of
from graphs.transforms.strategy import Strategy
from placement.exporters.exporting import export
from placement.exporters.registry import ANY, EXPORTERS, PLACES_PARTS, SEARCHED
from placement.runtime.setups.limits import plainer, runner_lacks
from placement.solving.checked import Check, Checked
from placement.solving.methods import STRATEGY
from placement.solving.strategy_row import without_answer

if TYPE_CHECKING:
    from torch import nn

    from placement.results.result import Result


def tool_for(target: str | None, graph: OpGraph, cluster: Cluster, model: nn.Module | None = None) -> ToolLimits:
    """Limits of a target, for a search that is to find what it can run.

    Args:
        target: None of what `placement.apply` runs.
        model: of the graph; without it a strategy that cuts weights or the model itself is not written, to see whether
            it can be, before it is scored.

    Raises:
        UnknownNameError: no such target.
        MismatchError: a target of training steps, and a graph that is none.
    """
    if target is None:
        return runner_limits(graph, cluster, model)
    if target not in SEARCHED:
        raise UnknownNameError("target", target, SEARCHED)
    if target == ANY:
        return ANY_TOOL
    exporter = EXPORTERS[target]
    if graph.origin.train is not True:
        raise MismatchError(
            f"target {target!r} trains, and graph {graph.name!r} is no training step; capture it with train=True."
        ).but_on_command_line(f"--for {target} is for training, and {graph.name!r} is no training step; add --train.")
    lacks = imported(exporter.lacks)
    draft = without_answer(graph, cluster, 0, STRATEGY, "not carried out")

    patterns_of = imported("placement.configurations.strategies:patterns_of")
    words = tuple(patterns_of(graph, word) for word in exporter.recomputed)
    nearest = imported(exporter.nearest) if exporter.nearest else lambda graph, strategy: strategy

    def lacking(strategy: Strategy) -> str:
        if strategy.is_placed:
            return PLACES_PARTS
        return next(lacks(dataclasses.replace(draft, strategy=nearest(graph, strategy))), "")

    def cut(strategy: Strategy) -> Strategy:
        if not exporter.cuts or strategy.stages == 1 or strategy.cuts:
            return strategy
        return dataclasses.replace(strategy, cuts=imported(exporter.cuts)(target, graph, strategy.virtual_stages))

    def refuses(strategy: Strategy) -> Refusal | None:
        near = cut(nearest(graph, strategy))
        if near != strategy:
            return Refusal(f"what it runs is {near.text!r}", near)
        if model is None and needs_model(strategy):
            return None
        try:
            drafted = dataclasses.replace(draft, strategy=strategy)
            imported(exporter.function)(drafted, **arguments(target, graph, model))
        except MismatchError as error:
            return Refusal(str(error), error.instead if isinstance(error.instead, Strategy) else None)
        except InfeasibleError:
            return None  # no order of its pipeline fits: its score says so
        return None

    return ToolLimits(target, lacking, tuple(filter(None, words)), refuses, cut)


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


def arguments(target: str, graph: OpGraph | None, model: nn.Module | None, source: str | None = None) -> dict[str, Any]:
    """Those of the arguments of `placement.export` that a target takes."""
    given = {"graph": graph, "model": model, "source": source}
    return {name: value for name, value in given.items() if name in EXPORTERS[target].takes}


def needs_model(strategy: Strategy) -> bool:
    """Whether a script of a strategy names modules."""
    return strategy.stages > 1 or any(rule.size > 1 and rule.axis().cuts_weights for rule in strategy.mesh)


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


def written_check(target: str, model: nn.Module | None, check: Check) -> Check:
    """A check of a strategy, which has to be one that a target writes, too."""

    def both(graph: OpGraph, cluster: Cluster, result: Result) -> Checked:
        found = check(graph, cluster, result)
        if found.problem or (model is None and needs_model(result.strategy)):
            return found
        try:
            export(result, target, **arguments(target, graph, model))
        except MismatchError as error:
            return dataclasses.replace(found, problem=str(error).rstrip("."))
        return found

    return both
