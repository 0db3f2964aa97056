"""Dotted paths of modules as the tree they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from graphs.opgraph import OpGraph

ValueT = TypeVar("ValueT")


def is_under(path: str, prefix: str) -> bool:
    """Whether a module is another one, or inside it; all are inside ``""``."""
    return not prefix or path == prefix or path.startswith(prefix + ".")


def runs_modules(graph: OpGraph) -> bool:
    """Whether some op of the graph says which module it is from."""
    return any(graph.modules)


def compressed(values: Mapping[str, ValueT | None]) -> dict[str, ValueT]:
    """One entry for each outermost path under which all values are equal; paths of value None are left out.

    A path with a value of its own and other values under it has no entry where they differ.
    """
    found: dict[str, ValueT] = {}

    def visit(prefix: str, paths: Sequence[str]) -> None:
        distinct = {values[path] for path in paths}
        if len(distinct) == 1:
            value = distinct.pop()
            if value is not None:
                found[prefix] = value
            return
        children: dict[str, list[str]] = {}
        for path in paths:
            if path != prefix:
                head = path[len(prefix) + 1 :] if prefix else path
                name = head.partition(".")[0]
                children.setdefault(f"{prefix}.{name}" if prefix else name, []).append(path)
        for child, below in children.items():
            visit(child, below)

    if values:
        visit("", list(values))
    return found
