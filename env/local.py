"""How `env.cluster.Cluster.local` finds what measures this machine, which a package further up knows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_home: list[str] = []


def register_measurer(home: str) -> None:
    """Have ``"module:function"`` measure this machine; the module is imported only when that is wanted."""
    _home[:] = [home]


def measurer() -> Callable[..., Any]:
    """The registered function.

    Raises:
        ClusterError: there is none.
    """
    if not _home:
        from graphs.errors import ClusterError  # graphs takes a while to import

        raise ClusterError("nothing has been registered to measure this machine; import placement first.")
    module, function = _home[0].split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found
