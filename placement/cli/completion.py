"""What the shell may complete: names of models, clusters and methods. Files it completes itself."""

from __future__ import annotations

from collections.abc import Iterable


def models(incomplete: str) -> list[str]:
    """Built-in models."""
    from graphs.zoo import MODELS

    return _beginning(incomplete, MODELS)


def clusters(incomplete: str) -> list[str]:
    """Presets and this machine; after a comma the next one."""
    from env.named import LOCAL
    from env.presets import PRESETS

    return _listed(incomplete, (*PRESETS, LOCAL))


def methods(incomplete: str) -> list[str]:
    """Values of ``--method``; after a comma the next one."""
    from placement.methods import METHODS

    return _listed(incomplete, METHODS)


def _listed(incomplete: str, names: Iterable[str]) -> list[str]:
    done, comma, last = incomplete.rpartition(",")
    return [f"{done}{comma}{name}" for name in _beginning(last, names)]


def _beginning(start: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(start)]
