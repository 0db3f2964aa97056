"""Methods that place a graph, one file each: `Problem` in, `Plan` out.

`METHODS` are plain functions from a problem and a seed to a plan: published heuristics and dynamic programmes.
`SEARCHES` improve on plans for as long as a budget lasts, some of them up to a proof of optimality. Both are written
down in `baselines.registry`, whose `ENTRIES` say what each is for; what is here is imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baselines.budget import Budget, Found, Search
    from baselines.exact.exact import exact_is_tractable, milp_contiguous
    from baselines.registry import ENTRIES, METHODS, SEARCHES, STARTS
    from env.plan import Method, Plan

__all__ = [
    "ENTRIES",
    "METHODS",
    "SEARCHES",
    "STARTS",
    "Budget",
    "Found",
    "Method",
    "Plan",
    "Search",
    "exact_is_tractable",
    "milp_contiguous",
]

_HOME = {
    "ENTRIES": "baselines.registry",
    "METHODS": "baselines.registry",
    "SEARCHES": "baselines.registry",
    "STARTS": "baselines.registry",
    "Budget": "baselines.budget",
    "Found": "baselines.budget",
    "Method": "env.plan",
    "Plan": "env.plan",
    "Search": "baselines.budget",
    "exact_is_tractable": "baselines.exact.exact",
    "milp_contiguous": "baselines.exact.exact",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'baselines' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
