"""The measurer of this machine for `env.cluster.Cluster.local`: a function of a package further up, by its name."""

from __future__ import annotations

import pkgutil
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
    found: Callable[..., Any] = pkgutil.resolve_name(_home[0])
    return found
