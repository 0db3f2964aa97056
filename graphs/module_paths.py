"""Dotted paths of modules, e.g. ``"encoder.layers.0"``; ``""`` is the whole model."""

from __future__ import annotations


def prefixes(path: str) -> list[str]:
    """A path and those around it, innermost first: ``"a.b"`` gives ``["a.b", "a", ""]``."""
    found = [path]
    while path:
        path = path.rpartition(".")[0]
        found.append(path)
    return found
