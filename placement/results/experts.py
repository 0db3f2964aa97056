"""How the experts of an answer take tokens, in words, and the load that it takes them to have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphs.origin import CAPACITY, Origin

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph
    from placement.results.result import Result


def experts_words(origin: Origin) -> str:
    """How experts take tokens, and how many of them each device is taken to have; empty where there are none."""
    if origin.experts is None:
        return ""
    if origin.experts == CAPACITY:
        return "with capacity: every seat is computed, whatever the load"
    if origin.expert_load is None:
        return "dropless, an even load assumed where they are spread (--expert-load says otherwise)"
    return f"dropless, {origin.expert_load:g} times an even load assumed on the fullest device where they are spread"


def with_load_of(result: Result, graph: OpGraph) -> OpGraph:
    """The graph of a model with the expert load that a result of it assumes; as it is where it says one itself.

    Raises:
        GraphError: as `graphs.transforms.expert_load.with_expert_load`.
    """
    load = result.graph.origin.expert_load
    if load is None or graph.origin.expert_load is not None:
        return graph
    from graphs.transforms.expert_load import with_expert_load  # loads all transforms

    return with_expert_load(graph, load)
