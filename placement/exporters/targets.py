"""`tool_for`: limits of the tool of a target of `export`, which a search over strategies keeps to."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from baselines.strategies.searching.records import ANY_TOOL, Refusal, ToolLimits
from env.cluster import Cluster
from graphs.entry_points import imported
from graphs.errors import InfeasibleError, MismatchError, UnknownNameError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.exporters.exporting import export
from placement.exporters.registry import ANY, EXPORTERS, SEARCHED
from placement.results.strategy_words import PLACES_PARTS
from placement.runtime.checking.runnable import runner_limits
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


def arguments(target: str, graph: OpGraph | None, model: nn.Module | None, source: str | None = None) -> dict[str, Any]:
    """Those of the arguments of `placement.export` that a target takes."""
    given = {"graph": graph, "model": model, "source": source}
    return {name: value for name, value in given.items() if name in EXPORTERS[target].takes}


def needs_model(strategy: Strategy) -> bool:
    """Whether a script of a strategy names modules."""
    return strategy.stages > 1 or any(rule.size > 1 and rule.axis().cuts_weights for rule in strategy.mesh)


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
