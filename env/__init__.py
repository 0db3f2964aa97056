"""The worth of a placement: clusters, the score of a plan, bounds on all plans, and environments to learn in.

    problem = env.Problem(graph, env.Cluster.preset("4xV100-pcie"))
    score, schedule = env.Simulator(problem).schedule(env.Plan(device))

A `Problem` is a graph on a cluster; a `Plan` says where its ops run and, if it likes, in which order. `Simulator` and
`Scorer` compute what docs/score.md defines, `audit` and `check_schedule` do it again in plain Python, sharing no code,
and `lower_bound` says what no plan can beat. The Gymnasium environments are in `env.gym`.

Names are imported when first used: what needs the compiler loads it only then.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from env.bounds.bounds import Bound, lower_bound
    from env.checking.checker import Audit, audit, check_schedule
    from env.cluster import Cluster, Device, Link, both_ways
    from env.objectives import LATENCY, THROUGHPUT
    from env.plan import Plan, Priority
    from env.problem import Problem
    from env.simulation.scoring import Scorer
    from env.simulation.simulator import Schedule, Score, Simulator
    from env.units import Units

__all__ = [
    "LATENCY",
    "THROUGHPUT",
    "Audit",
    "Bound",
    "Cluster",
    "Device",
    "Link",
    "Plan",
    "Priority",
    "Problem",
    "Schedule",
    "Score",
    "Scorer",
    "Simulator",
    "Units",
    "audit",
    "both_ways",
    "check_schedule",
    "lower_bound",
]

_HOME = {
    "LATENCY": "env.objectives",
    "THROUGHPUT": "env.objectives",
    "Audit": "env.checking.checker",
    "Bound": "env.bounds.bounds",
    "Cluster": "env.cluster",
    "Device": "env.device",
    "Link": "env.device",
    "Plan": "env.plan",
    "Priority": "env.plan",
    "Problem": "env.problem",
    "Schedule": "env.simulation.simulator",
    "Score": "env.simulation.simulator",
    "Scorer": "env.simulation.scoring",
    "Simulator": "env.simulation.simulator",
    "Units": "env.units",
    "audit": "env.checking.checker",
    "both_ways": "env.device",
    "check_schedule": "env.checking.checker",
    "lower_bound": "env.bounds.bounds",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'env' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
