"""Whom an update waits for: all workers, the first N of them, or none that is not too far behind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WaitForAll:
    """An update waits for every worker (exchanges that never wait do not read this)."""


@dataclass(frozen=True)
class FirstOf:
    """An update takes the first gradients; those of the slowest `extra` workers are dropped (Chen et al. 2016)."""

    extra: int = 1


@dataclass(frozen=True)
class BoundedStaleness:
    """No worker begins a step while another is more than `bound` steps behind (Ho et al. 2013)."""

    bound: int = 4
