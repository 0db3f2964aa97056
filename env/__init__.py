"""The worth of a placement: clusters, the score of a plan, bounds on all plans, and environments to learn in.

    problem = env.Problem(graph, env.Cluster.preset("4xV100-pcie"))
    score, schedule = env.Simulator(problem).schedule(env.Plan(device))

A `Problem` is a graph on a cluster; a `Plan` says where its ops run and, if it likes, in which order. `Simulator` and
`Scorer` compute what docs/score.md defines, `audit` and `check_schedule` do it again in plain Python, sharing no code,
and `lower_bound` says what no plan can beat. The Gymnasium environments are in `env.gym`.

Names are imported when first used: what needs the compiler loads it only then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphs.entry_points import lazy

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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "env.objectives": "LATENCY THROUGHPUT",
        "env.checking.checker": "Audit audit check_schedule",
        "env.bounds.bounds": "Bound lower_bound",
        "env.cluster": "Cluster",
        "env.device": "Device Link both_ways",
        "env.plan": "Plan Priority",
        "env.problem": "Problem",
        "env.simulation.simulator": "Schedule Score Simulator",
        "env.simulation.scoring": "Scorer",
        "env.units": "Units",
    },
)
