"""`train_on_strategies`: a policy that searches strategies, with checkpoints and the best strategies on disk."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from baselines.strategies.searching.bound import ALL, strategy_bounds
from env.cluster import Cluster
from env.plan import Priority
from env.problem import LATENCY, Problem
from graphs.errors import UnknownNameError
from graphs.opgraph import OpGraph
from placement.learning.checkpoint import load_checkpoint
from placement.learning.islands import Learning, on_islands
from placement.learning.session import Session
from placement.learning.strategies.environment import StrategyEnv
from placement.learning.strategies.policies import POLICIES
from placement.learning.strategies.reinforce import MASKS, BestStrategy, StrategyLearner
from placement.learning.strategies.saved import ENVIRONMENT, save_strategy_policy
from placement.learning.training import (
    CHECKPOINT_EVERY_S,
    Begin,
    Progress,
    Training,
    check_training,
    files_of,
    finished,
    islands_of,
    limits,
    pairs_of,
)
from placement.solving.methods import SINGLE
from placement.solving.result import Result
from placement.solving.solver import Attempt, Solver
from placement.solving.strategies.row import strategy_row

STEPS = 12  # moves of an episode


@dataclass(frozen=True, eq=False)
class SearchTarget:
    """A problem whose strategies are searched.

    Attributes:
        graph, cluster: which.
        seed: of the run.
    """

    graph: OpGraph
    cluster: Cluster
    seed: int

    @cached_property
    def lower_bound_s(self) -> float:
        """No strategy can have a smaller step time."""
        return strategy_bounds(self.graph, self.cluster)[ALL]

    def result(self, best: BestStrategy, attempt: Attempt) -> Result:
        """The best strategy by estimate, carried out and scored; where that is none, one device."""
        if best.strategy.is_none:
            result = Solver(self.graph, self.cluster, self.seed, LATENCY, Priority.LONGEST_PATH.value).solve(SINGLE)
        else:
            result = strategy_row(self.graph, self.cluster, best.strategy, self.seed).result
        return dataclasses.replace(result, interrupted=attempt.interrupted)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How long a run goes on and what it writes; each as of `placement.train`, but that `evaluations` counts moves."""

    output: str | os.PathLike[str]
    seed: int = 0
    evaluations: int | None = None
    budget_s: float | None = None
    checkpoint_every_s: float = CHECKPOINT_EVERY_S
    restart: bool = False
    workers: int | None = None
    address: str | None = None
    command: str = ""


def train_on_strategies(
    graphs: OpGraph | Sequence[OpGraph],
    clusters: Cluster | Sequence[Cluster],
    policy: str,
    how: RunOptions,
    begin: Begin | None = None,
    progress: Progress | None = None,
) -> Training:
    """Train a policy on ``placement/Strategy-v0``, by estimates (docs/training.md).

    Files and resuming are as of `placement.train`, `begin` and `progress` too. `Training.results` has the best strategy
    of each problem by estimate, carried out and scored; None where none was found that fits.

    Args:
        policy: a name of `placement.learning.strategies.policies.POLICIES`.

    Raises:
        UnknownNameError: another policy than those of `POLICIES`.
        PolicyFileError, ValueError, OSError: as `placement.train`.
    """
    if policy not in POLICIES:
        raise UnknownNameError("policy", str(policy), POLICIES)
    check_training(policy, "default", how.seed, how.evaluations, how.budget_s, how.checkpoint_every_s)
    pairs = pairs_of(graphs, clusters)
    files = files_of(how.output, len(pairs), None)
    run: dict[str, Any] = {
        "policy": policy,
        "environment": ENVIRONMENT,
        "preset": "default",
        "warm start": False,
        "seed": how.seed,
        "graphs": [f"{graph.name} ({graph.hash[:12]})" for graph, _ in pairs],
        "clusters": [f"{cluster.name} ({cluster.hash[:12]})" for _, cluster in pairs],
    } | islands_of(how.workers)
    checkpoint = load_checkpoint(files.checkpoint, run) if files.checkpoint.exists() and not how.restart else None
    most_samples, most_s = limits(how.evaluations, how.budget_s)
    make = partial(_learner, graphs, clusters, policy, how.seed)
    learning = Learning(make, Problem(*pairs[0]))
    with on_islands(make(), learning, how.seed, how.workers, how.address) as trainee:
        session = Session(
            run=run,
            learner=trainee,
            targets=[SearchTarget(*pair, how.seed) for pair in pairs],
            files=files,
            most_samples=most_samples,
            most_s=most_s,
            command=how.command,
            samples_are="moves",
            proves=False,
        )
        if checkpoint is not None:
            session.resume(checkpoint)
        if begin is not None:
            begin(session)
        session.train(how.checkpoint_every_s, None, progress)
    return finished(session, save_strategy_policy)


def _learner(
    graphs: OpGraph | Sequence[OpGraph], clusters: Cluster | Sequence[Cluster], policy: str, seed: int
) -> StrategyLearner:
    return StrategyLearner(StrategyEnv(graphs, clusters, STEPS, masks=MASKS), policy, seed)
