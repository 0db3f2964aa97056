"""What the shell may complete: names and values of options. Files it completes itself."""

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


def objectives(incomplete: str) -> list[str]:
    """Values of ``--objective``."""
    from env.problem import OBJECTIVES

    return _beginning(incomplete, OBJECTIVES)


def communications(incomplete: str) -> list[str]:
    """Values of ``--communication``."""
    from env.cluster import COMMUNICATIONS

    return _beginning(incomplete, COMMUNICATIONS)


def priorities(incomplete: str) -> list[str]:
    """Values of ``--priority``."""
    from env.reference import PRIORITIES

    return _beginning(incomplete, PRIORITIES)


def scorers(incomplete: str) -> list[str]:
    """Values of ``--scorer``."""
    from env.rows import EXECUTE, SCORERS

    return _beginning(incomplete, (*SCORERS, EXECUTE))


def granularities(incomplete: str) -> list[str]:
    """Values of ``--granularity``."""
    from graphs.capture.api import GRANULARITIES

    return _beginning(incomplete, GRANULARITIES)


def targets(incomplete: str) -> list[str]:
    """Values of ``export --to``."""
    from placement.exporting import TARGETS

    return _beginning(incomplete, TARGETS)


def policies(incomplete: str) -> list[str]:
    """Values of ``train --policy``."""
    from placement.learning.registry import TRAINABLE

    return _beginning(incomplete, TRAINABLE)


def training_presets(incomplete: str) -> list[str]:
    """Values of ``train --preset``."""
    from placement.learning.registry import PRESETS

    return _beginning(incomplete, PRESETS)


def _listed(incomplete: str, names: Iterable[str]) -> list[str]:
    done, comma, last = incomplete.rpartition(",")
    return [f"{done}{comma}{name}" for name in _beginning(last, names)]


def _beginning(start: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(start)]
