"""Clusters of real machines, by name: those of papers at data-sheet rates, and those of now as they are used.

Figures are in ``gpus.toml`` and ``machines.toml``, each with where it comes from.
"""

from __future__ import annotations

from collections.abc import Callable

from env.presets.gpus import COMPARED, compared
from env.presets.machines import PAPERS, PATTERNS, SHOWN, maker_of
from env.presets.parts import Preset
from graphs.errors import UnknownNameError

__all__ = ["COMPARED", "PRESETS", "Preset", "compared", "is_preset", "preset", "unknown_cluster"]


def _shown(name: str) -> Callable[[], Preset]:
    made = maker_of(name)
    assert made is not None, name
    return made


# Those that lists show: `preset` knows more (`PATTERNS`).
PRESETS: dict[str, Callable[[], Preset]] = {**PAPERS, **{name: _shown(name) for name in SHOWN}}


def is_preset(name: str) -> bool:
    """Whether a name is one of `PRESETS`, or of their patterns."""
    return name in PRESETS or maker_of(name) is not None


def preset(name: str) -> Preset:
    """A real machine by name.

    Raises:
        UnknownNameError: no such machine; says which names are near.
        ClusterError: more hosts than there may be.
    """
    made = PRESETS.get(name) or maker_of(name)
    if made is None:
        raise unknown_cluster(name)
    return made()


def unknown_cluster(name: str, *others: str) -> UnknownNameError:
    """The error for a name that is none; `others` would be names, too."""
    patterns = f"{', '.join(PATTERNS)} and the like are names, too"
    where = f"`placement clusters` lists them; {patterns}, and a file of your own ends in .toml"
    return UnknownNameError("cluster", name, (*PRESETS, *others), listed=where)
