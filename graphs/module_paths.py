"""Dotted paths of modules, e.g. ``"encoder.layers.0"``; ``""`` is the whole model."""

from __future__ import annotations

import re

KIND = "kind:"  # what a pattern begins with that is one of kinds of ops


def prefixes(path: str) -> list[str]:
    """A path and those around it, innermost first: ``"a.b"`` gives ``["a.b", "a", ""]``."""
    found = [path]
    while path:
        path = path.rpartition(".")[0]
        found.append(path)
    return found


def pattern_of(path: str) -> str:
    """The pattern, as of `fnmatch`, that matches this path and no other."""
    escaped = re.sub(r"[*?[]", r"[\g<0>]", path)
    if path.startswith("!"):  # which takes out, and fnmatch's "[!]" is no set; no path begins with a dot
        return f"[.!]{escaped[1:]}"
    return f"[{path[0]}]{escaped[1:]}" if path.startswith(KIND) else escaped
