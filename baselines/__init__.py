"""Methods that place a graph, one file each: `Problem` in, `Plan` out.

`METHODS` are plain functions from a problem and a seed to a plan: published heuristics and dynamic programmes.
`SEARCHES` improve on plans for as long as a budget lasts, some of them up to a proof of optimality. Both are written
down in `baselines.registry`, whose `ENTRIES` say what each is for; what is here is imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphs.entry_points import lazy

if TYPE_CHECKING:
    from baselines.budget import Budget, Found, Search
    from baselines.exact.exact import exact_is_tractable
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
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "baselines.registry": "ENTRIES METHODS SEARCHES STARTS",
        "baselines.budget": "Budget Found Search",
        "env.plan": "Method Plan",
        "baselines.exact.exact": "exact_is_tractable",
    },
)
