"""Strategies scored side by side, each a task for a worker, and placements, a part of a batch each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from env.cluster import Cluster
from env.problem import Problem
from env.simulation.simulator import BatchScores, Simulator
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy

if TYPE_CHECKING:
    from baselines.strategies.searching.records import Tried
    from placement.processes.runner import Runner


@dataclass(frozen=True, eq=False)
class Shared:
    """Graph and cluster of the strategies that tasks score."""

    graph: OpGraph
    cluster: Cluster

    def prepare(self) -> None:
        """As of `Preparing`."""
        from placement.solving.compiling import compile_for_strategies

        compile_for_strategies()


def many_scored(runner: Runner, strategies: Sequence[Strategy]) -> list[Tried]:
    """The simulator's figures of each, in their order."""
    return runner.run(score_strategy, strategies)


def score_strategy(shared: Shared, strategy: Strategy) -> Tried:
    """One strategy, carried out and scored."""
    from baselines.strategies.searching.scoring import tried  # loads all transforms

    return tried(shared.graph, shared.cluster, strategy)


@dataclass(frozen=True, eq=False)
class ScoredProblems:
    """Graphs on clusters whose placements workers score."""

    pairs: tuple[tuple[OpGraph, Cluster], ...]

    @cached_property
    def simulators(self) -> list[Simulator]:
        """A simulator of each pair, made once in each process."""
        return [Simulator(Problem(*pair)) for pair in self.pairs]

    def prepare(self) -> None:
        """As of `placement.processes.runner.Preparing`."""
        from placement.solving.compiling import compile_for
        from placement.solving.methods import SINGLE

        compile_for(self.simulators[0].problem, [SINGLE], search=False)

    def __reduce__(self) -> tuple[type[ScoredProblems], tuple[tuple[tuple[OpGraph, Cluster], ...]]]:
        """The pairs alone, for a worker makes its own simulators."""
        return ScoredProblems, (self.pairs,)


@dataclass(frozen=True, eq=False)
class ScoredByWorkers:
    """A factory of scorers (`env.gym.batch.ScorerFactory`) that give what the simulator gives.

    Attributes:
        runner: does the tasks; its shared object is `shared`.
        shared: the problems.
        parts: of a batch, one for each worker.
    """

    runner: Runner
    shared: ScoredProblems
    parts: int

    def __call__(self, problem: Problem) -> _PartsScorer:
        """A scorer of one of the problems."""
        hashes = [(graph.hash, cluster.hash) for graph, cluster in self.shared.pairs]
        return _PartsScorer(self.runner, hashes.index((problem.graph.hash, problem.cluster.hash)), self.parts)


@dataclass(frozen=True, eq=False)
class _PartsScorer:
    runner: Runner
    pair: int
    parts: int

    def batch(self, devices: ArrayLike, *, orders: ArrayLike | None = None) -> BatchScores:
        """As `Simulator.batch`."""
        placed, ranks = np.asarray(devices), None if orders is None else np.asarray(orders)
        bounds = np.linspace(0, len(placed), min(self.parts, len(placed)) + 1).astype(int).tolist()
        tasks = [
            (self.pair, placed[begin:end], None if ranks is None else ranks[begin:end])
            for begin, end in itertools.pairwise(bounds)
        ]
        found = self.runner.run(score_placements, tasks)
        names = [field.name for field in fields(BatchScores)]
        return BatchScores(*(np.concatenate([getattr(part, name) for part in found]) for name in names))


def score_placements(shared: ScoredProblems, task: tuple[int, Any, Any]) -> BatchScores:
    """Scores of placements of a pair, by its number."""
    pair, devices, orders = task
    return shared.simulators[pair].batch(devices, orders=orders)
