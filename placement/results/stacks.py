"""How ops of an answer become kernels, in words, and what torch.compile would bring for the same plan."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from env.cluster import Cluster
from env.lanes import without_lanes
from env.objectives import LATENCY
from env.problem import Problem
from graphs.errors import PlacementError
from graphs.opgraph import OpGraph
from graphs.origin import COMPILED, EAGER

if TYPE_CHECKING:
    from placement.results.result import Result

_OF_OPERATORS = ("capture", "pt2", "onnx")  # sources of graphs whose ops are operators, which a stack may fuse
_WORTH = 0.995  # of a step time: less is no gain, for a reader


def asked_for(graph: OpGraph, stack: str | None) -> OpGraph:
    """The graph on the stack that was asked for; as it is where none was.

    Raises:
        UnknownNameError, GraphError: as `graphs.transforms.on_stack`.
    """
    if stack is None:
        return graph
    from graphs.transforms.stacks import on_stack  # loads all transforms

    return on_stack(graph, stack)


def stack_word(graph: OpGraph) -> str:
    """``"eager"``, ``"compiled"`` or ``"fused"``; empty where ops are no operators, which nothing could fuse."""
    stack = graph.origin.stack or EAGER
    return stack if graph.origin.source in _OF_OPERATORS or stack != EAGER else ""


def how_words(graph: OpGraph) -> str:
    """``"eager"``, or ``"eager in mixed"`` of a graph that was captured in a precision; empty as `stack_word`."""
    precision = graph.origin.precision
    return " in ".join(filter(None, (stack_word(graph), precision)))


def beside_compiled(result: Result, graph: OpGraph, cluster: Cluster) -> Result:
    """An eager answer with the step time that the same plan would have compiled; others as they are.

    Args:
        graph, cluster: before the strategy.
    """
    is_measured = bool(graph.time_keys)
    if result.answer is None or result.objective != LATENCY or is_measured or stack_word(graph) != EAGER:
        return result
    try:
        compiled_s = _compiled_s(result, graph, cluster)
    except PlacementError:  # a strategy may cut a pipeline elsewhere then, where it does not fit
        return result
    if compiled_s >= result.answer.step_time_s * _WORTH:
        return result
    return dataclasses.replace(result, compiled_s=compiled_s)


def compiled_words(step_s: float | None, compiled_s: float | None) -> str:
    """A line about what torch.compile would bring; empty where that is not known, or nothing.

    Args:
        step_s, compiled_s: seconds of a step as it is, and `Result.compiled_s`.
    """
    from graphs.formatting import format_seconds

    if step_s is None or compiled_s is None:
        return ""
    gain = step_s / compiled_s
    return f"{format_seconds(compiled_s)}, {gain:.2f}x: the same plan under torch.compile (stack {COMPILED})"


def _compiled_s(result: Result, graph: OpGraph, cluster: Cluster) -> float:
    placed = asked_for(graph, COMPILED)
    if result.strategy.is_none:
        from env.simulation.simulator import Simulator  # loads the compiler

        return Simulator(Problem(placed, result.cluster)).score(result.plan()).step_time_s
    from baselines.strategies.searching.scoring import scored

    return scored(placed, without_lanes(cluster), result.strategy).step_time_s
