"""`EnvOptions`: the keywords of the environments as one record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphs.opgraph import IntArray

if TYPE_CHECKING:
    from env.gym.batch import ScorerFactory
    from env.gym.named import Clusters, Graphs
    from env.gym.rewards import Reward
    from env.gym.task import Order, UnitSpec

SHARED = ("graph", "cluster", "reward", "scorer", "units")  # every environment takes these


@dataclass(frozen=True, eq=False)
class EnvOptions:
    """The keywords of ``gymnasium.make``, but for ``render_mode``; docs/environments.md explains them.

    Attributes:
        graph, cluster: one or several, each an object, a name or a file; every pair is a task.
        reward: a name, or a function of `env.gym.rewards.Outcome`.
        scorer: a name, or a function that makes a `env.gym.batch.BatchScorer` for a problem.
        units: as in `env.gym.task.make_tasks`.
        with_order: Group only; the action holds an order of the ops, too.
        order: Sequential only; as in `env.gym.task.make_tasks`.
        shaping: Sequential only; None or ``"bound"``.
        start: Improve only; ``"single_device"``, ``"random"``, or int [n], device numbers of the ops.
        max_steps: Improve only; of an episode, None for two a unit.
    """

    graph: Graphs
    cluster: Clusters
    reward: str | Reward = "sqrt_time"
    scorer: str | ScorerFactory = "simulate"
    units: UnitSpec = None
    with_order: bool = False
    order: Order = "topological"
    shaping: str | None = None
    start: str | Sequence[int] | IntArray = "single_device"
    max_steps: int | None = None
