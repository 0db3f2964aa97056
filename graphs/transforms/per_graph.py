"""`per_graph`: what a function finds of a graph is kept with the graph, for all who ask again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph

Found = TypeVar("Found")

_KEPT = "_found"  # attribute of a graph, beside its cached properties


def per_graph(find: Callable[..., Found]) -> Callable[..., Found]:
    """A function of a graph, and hashable arguments beside it, that works out once for each graph what it returns.

    Callers change nothing of that; an array is read-only. It is gone with the graph, and no part of its copies.
    """

    @wraps(find)
    def known(graph: OpGraph, *others: Hashable) -> Found:
        kept: dict[tuple[Any, ...], Found] = vars(graph).setdefault(_KEPT, {})
        key = (find, *others)
        if key not in kept:
            found = kept[key] = find(graph, *others)
            if isinstance(found, np.ndarray):
                found.setflags(write=False)
        return kept[key]

    return known
