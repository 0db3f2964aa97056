"""Words of tools for recomputation, as patterns of a strategy on a graph, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from baselines.strategies.searching.patterns import first_layers, layers_of
from graphs.module_paths import KIND, pattern_of
from graphs.op_kinds import FUSED, op_kind
from graphs.opgraph import OpGraph
from graphs.records import Phase
from graphs.transforms.recomputing.selecting import IN
from graphs.transforms.strategy import Strategy
from placement.configurations.configuration import ATTENTION, EVERY, FIRST, FULL, NONE, OPS

_MOST_STEPS = 8  # every so many layers
_PRODUCTS = ("mm", "linear")


def patterns_of(graph: OpGraph, recompute: str, virtual_stages: int = 1) -> tuple[str, ...]:
    """Patterns, as of `Strategy.recompute`, of what a configuration says in the words of `Configuration.recompute`.

    Args:
        virtual_stages: of which each has the ``"first 4"`` layers.
    """
    if recompute == NONE:
        return ()
    if recompute == ATTENTION:
        return _attention(graph)
    lists = _lists(graph)
    if recompute == FULL:
        return tuple(f"{pattern_of(name)}.*" for name in lists) or ("*",)
    if recompute == OPS:
        return tuple(each for name in lists for each in _all_but_every_other_product(graph, name)) or ("*",)
    if recompute.startswith(EVERY):
        step = int(recompute.removeprefix(EVERY))
        return tuple(f"{pattern_of(name)}.{k}" for name, n in lists.items() for k in range(step - 1, n, step))
    if recompute.startswith(FIRST):
        count = int(recompute.removeprefix(FIRST))
        return tuple(each for name, n in lists.items() for each in _first(name, n, count, virtual_stages))
    return tuple(recompute.split("+"))


def recompute_of(graph: OpGraph, strategy: Strategy) -> str:
    """A strategy's patterns in the words of `Configuration.recompute`; patterns where no tool has a word for them.

    A word stands for exactly what `patterns_of` makes of it, so that what is written is read as it was scored.

    Args:
        graph: as it was captured, or as the strategy rewrote it.
    """
    patterns = strategy.recompute
    if not patterns:
        return NONE
    lists = _lists(graph)
    most = max(lists.values(), default=0)
    words = [FULL, ATTENTION, OPS, *(f"{EVERY}{step}" for step in range(2, _MOST_STEPS + 1))]
    words += [f"{FIRST}{count}" for count in range(1, most // strategy.virtual_stages + 1)]
    found = next((w for w in words if patterns_of(graph, w, strategy.virtual_stages) == patterns), None)
    return found or "+".join(patterns)


def layers_alone(graph: OpGraph, strategy: Strategy) -> Strategy:
    """A strategy with all layers made again where everything is, for tools that make again layers alone."""
    return replace(strategy, recompute=patterns_of(graph, FULL)) if strategy.recompute == ("*",) else strategy


def layers(graph: OpGraph) -> int:
    """Layers of the longest list of modules; 0 where there is none."""
    return max(layers_of(graph).values(), default=0)


def _lists(graph: OpGraph) -> dict[str, int]:
    """Lists of modules that are layers, and how many they have; short ones beside a long one are none."""
    found = layers_of(graph)
    most = max(found.values(), default=0)
    return {name: count for name, count in found.items() if 4 * count >= most}


def _first(name: str, layers: int, count: int, virtual_stages: int) -> Iterator[str]:
    """The first layers of each stage, where stages have equally many."""
    if virtual_stages == 1:
        yield from first_layers(name, count)
        return
    each = max(layers // virtual_stages, 1)
    for first in range(0, layers, each):
        yield from (f"{pattern_of(name)}.{k}" for k in range(first, min(first + count, first + each, layers)))


def _attention(graph: OpGraph) -> tuple[str, ...]:
    """The cores of attentions."""
    cores = {op_kind(kind).attention_core for kind in set(graph.kinds)} - {""}
    return (f"{KIND}*{FUSED if FUSED in cores else min(cores)}*",) if cores else ()


def _all_but_every_other_product(graph: OpGraph, name: str) -> Iterator[str]:
    """Each layer, but of its products the first, third ..., and the cores of attentions, which are kept."""
    yield f"{pattern_of(name)}.*"
    begin = f"{name}.0."
    products: dict[tuple[str, str], None] = {}
    for op in np.flatnonzero(graph.phase == Phase.FORWARD).tolist():
        kind, module = graph.kinds[op], graph.modules[op]
        if module.startswith(begin) and any(word in kind for word in _PRODUCTS) and not op_kind(kind).attention_core:
            products.setdefault((kind, module.removeprefix(begin)))
    for kind, inside in list(products)[::2]:
        yield f"!{KIND}{pattern_of(kind)}{IN}{pattern_of(name)}.*.{pattern_of(inside)}"
    yield from (f"!{core}" for core in _attention(graph))
