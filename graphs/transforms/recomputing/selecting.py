"""Patterns of modules and kinds of op, the one vocabulary of what runs again, what is kept and what goes to hosts.

A pattern is one of module paths, with the wildcards of `fnmatch`, or ``"kind:"`` and one of kinds of op, which ``"@"``
and a pattern of modules may follow; ``"!"`` before either takes out what it matches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import translate

import numpy as np

from graphs.arrays import BoolArray, IntArray
from graphs.module_paths import KIND, prefixes
from graphs.opgraph import OpGraph
from graphs.transforms.per_graph import per_graph

EXCEPT, IN = "!", "@"


def parted(patterns: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The patterns of what is taken, and those, without their mark, of what is taken out."""
    taken = tuple(pattern for pattern in patterns if not pattern.startswith(EXCEPT))
    return taken, tuple(pattern.removeprefix(EXCEPT) for pattern in patterns if pattern.startswith(EXCEPT))


def matching(graph: OpGraph, patterns: Sequence[str]) -> BoolArray:
    """bool [n]: ops of a kind, or in a module, that some pattern (without ``"!"``) matches."""
    result = np.zeros(graph.n_ops, dtype=np.bool_)
    for pattern in patterns:
        result |= _matching(graph, pattern)
    return result


def selected(graph: OpGraph, patterns: Sequence[str]) -> BoolArray:
    """bool [n]: what `matching` finds of the patterns that take, less what it finds of those that take out."""
    taken, out = parted(patterns)
    result: BoolArray = matching(graph, taken) & ~matching(graph, out)
    return result


def unmatched(graph: OpGraph, patterns: Sequence[str]) -> list[str]:
    """The patterns that no module and no kind of the graph matches; a typing error, most likely."""
    return [pattern for pattern in patterns if not _matches_any(graph, pattern.removeprefix(EXCEPT))]


@per_graph
def _matching(graph: OpGraph, pattern: str) -> BoolArray:
    """bool [n]: what one pattern matches."""
    pairs, which = _kinds_in_modules(graph)
    test = _test(pattern)
    return np.array([test(kind, module) for kind, module in pairs], dtype=np.bool_)[which]


@per_graph
def _kinds_in_modules(graph: OpGraph) -> tuple[tuple[tuple[str, str], ...], IntArray]:
    """Pairs of an op's kind and its module, and int64 [n], the pair of each op."""
    number: dict[tuple[str, str], int] = {}
    which = [number.setdefault(pair, len(number)) for pair in zip(graph.kinds, graph.modules, strict=True)]
    return tuple(number), np.array(which, dtype=np.int64)


def matcher(pattern: str) -> Callable[[str], object]:
    """A test of names by a pattern as of `fnmatch`."""
    return re.compile(translate(pattern)).match


@per_graph
def _matches_any(graph: OpGraph, pattern: str) -> bool:
    if pattern.startswith(KIND) and IN in pattern:
        return bool(_matching(graph, pattern).any())
    names = frozenset(graph.kinds) if pattern.startswith(KIND) else _paths(graph)
    match = matcher(pattern.removeprefix(KIND))
    return any(match(name) for name in names)


def _test(pattern: str) -> Callable[[str, str], bool]:
    """A test of a kind and a module."""
    if not pattern.startswith(KIND):
        is_there = _inside(pattern)
        return lambda kind, module: is_there(module)
    kinds, _, modules = pattern.removeprefix(KIND).partition(IN)
    is_kind, is_inside = matcher(kinds), _inside(modules) if modules else None
    return lambda kind, module: bool(is_kind(kind)) and (is_inside is None or is_inside(module))


def _inside(pattern: str) -> Callable[[str], bool]:
    """Whether a module, or one around it but for the whole model, matches."""
    match = matcher(pattern)
    return lambda module: any(match(path) for path in prefixes(module)[:-1])


@per_graph
def _paths(graph: OpGraph) -> frozenset[str]:
    """Modules, and those around them but for the whole model."""
    return frozenset(path for module in set(graph.modules) for path in prefixes(module)[:-1])
