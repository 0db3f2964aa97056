"""`Race`: many short annealings, of the graph and of coarser ones, find out from where a long one is worth its time.

Where an annealing of thousands of ops ends is decided by its first few thousand evaluations, which differ by tens of
percent from seed to seed; more time hardly helps. On a graph of a half to a third as many ops they cost half, and each
move takes with it what belongs together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from baselines.budget import Budget
from baselines.local_search.makespan_chain import Chain, ChainPool
from baselines.local_search.makespan_state import MakespanInstance, instance_of, new_state
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.transforms.coarsen.multilevel import to_size
from graphs.transforms.derived import Derived

# Groups for each op. Below a third groups hold ops that should run side by side; which size is best differs from graph
# to graph, and the graph as it is takes part.
_RATIOS = (1.0, 0.5, 0.35, 0.42, 0.38, 0.46)
_STARTS = 3  # of the plans to begin with, best first
MOST_SIMULATED = 20_000_000  # ops and edges simulated, at most, in a first run of one chain
LEAST_EVALUATIONS = 100  # evaluations of a run: of larger graphs too few runs fit into a budget
LEAST_OPS = 2500  # an annealing of fewer ops ends where it ends wherever it begins
_KEPT = 3 / 8  # of the runs go on
_LONGER = 3  # times as long
MOST_SHARE = 0.8  # of the budget that is left may go into a race; one that would take more is none
_COARSE = 0.5  # of the time of a run of the graph itself, about, takes one of a coarse graph


class Race:
    """Races on one problem, which keep their coarse graphs.

    Source: successive halving, K. Jamieson, A. Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter
    Optimization", AISTATS 2016, section 2; coarse levels as in `graphs.transforms.coarsen.multilevel`.
    """

    def __init__(
        self, problem: Problem, instance: MakespanInstance, seed: int, starts: Sequence[Plan], threads: int
    ) -> None:
        """
        Args:
            instance: of the problem.
            starts: plans that fit, best first.
            threads: chains that run at once.
        """
        self._finest = _Level(problem, instance)
        self._seed, self._starts, self._threads = seed, starts[:_STARTS], threads
        self._length = MOST_SIMULATED // (len(instance.unit_of) + len(instance.consumer))
        self._level = functools.cache(self._made)

    def is_worth(self, number: int, budget: Budget) -> bool:
        """Whether the graph is one whose annealings end far apart, and evaluations are enough for a race."""
        evaluations = self._length * (self._runs(number) + (_LONGER + 1) * self._kept(number))
        is_short = evaluations <= MOST_SHARE * budget.evaluations_left()
        return is_short and self._length >= LEAST_EVALUATIONS and self._finest.problem.graph.n_ops >= LEAST_OPS

    def _runs(self, number: int) -> int:
        return len(_RATIOS) << number

    def _kept(self, number: int) -> int:
        return max(self._threads, math.ceil(_KEPT * self._runs(number)))

    def _waves(self, number: int) -> float:
        """How long the race takes, in times of a first run of the graph itself."""
        first, later = (math.ceil(count / self._threads) for count in (self._runs(number), self._kept(number)))
        return _COARSE * first + (_COARSE * _LONGER + 1) * later

    def run(self, number: int, budget: Budget) -> list[Plan]:
        """Plans of the graph itself to anneal from, best first; the more, the better, the later a race.

        First runs are short. The best of them are annealed for longer, still coarse, then as part of the graph itself,
        with a device for each op, and compared by its step time. Where the seconds would not do, as the pace of the
        first runs tells, there is no race: one that is cut short would make the answer a matter of chance.

        Args:
            number: of the race, from 0: each has twice as many runs as the one before.
        """
        seeds = (int(np.random.SeedSequence((self._seed, number, k)).generate_state(1)[0]) for k in range(2**31))
        found: list[_Run] = []
        with ChainPool(self._threads, budget, max(1, self._length // 20)) as pool:
            runs = sorted(self._first_runs(number, seeds, pool, budget), key=_step_s)
            for some in _in_waves(runs[: self._kept(number)], self._threads):
                coarse = [run.level.begin(next(seeds), run.plan) for run in some]
                is_over = not self._annealed(coarse, False, _LONGER * self._length, pool)
                expanded = [run.level.expanded(chain.plan()) for run, chain in zip(some, coarse, strict=True)]
                fine = [self._finest.begin(next(seeds), plan) for plan in expanded]
                fine = [chain for chain in fine if chain.step_s < math.inf]
                is_over = is_over or not self._annealed(fine, True, self._length, pool)
                found += [_Run(self._finest, chain.plan(), chain.step_s) for chain in fine]
                if is_over:
                    break
        return [run.plan for run in sorted(found, key=_step_s)]

    def _made(self, ratio: float) -> _Level:
        if ratio == 1.0:
            return self._finest
        problem = self._finest.problem
        coarse = to_size(problem.graph, max(1, math.ceil(ratio * problem.graph.n_ops)))
        rough = Problem(coarse.graph, problem.cluster, problem.objective)
        return _Level(rough, instance_of(rough), coarse)

    def _first_runs(self, number: int, seeds: Iterator[int], pool: ChainPool, budget: Budget) -> list[_Run]:
        """The short runs; none where the race would take too long."""
        done: list[_Run] = []
        left_s, first_s = budget.left_s(), 0.0
        for numbers in _in_waves(range(self._runs(number)), self._threads):
            if len(done) == self._threads and first_s * self._waves(number) > MOST_SHARE * left_s:
                return []
            levels = [self._level(_RATIOS[k % len(_RATIOS)]) for k in numbers]
            # A level meets another start each time it is its turn.
            starts = [self._starts[(k + k // len(_RATIOS)) % len(self._starts)] for k in numbers]
            chains = [level.begin(next(seeds), level.rough(plan)) for level, plan in zip(levels, starts, strict=True)]
            before_s = pool.worked_s
            is_over = not self._annealed([c for c in chains if c.step_s < math.inf], True, self._length, pool)
            # The first of all is one of the graph itself, so its wave takes as long as one of such runs.
            first_s = first_s or (0.0 if math.isinf(left_s) else pool.worked_s - before_s)
            done += [_Run(level, chain.plan(), chain.step_s) for level, chain in zip(levels, chains, strict=True)]
            if is_over:
                break
        return [run for run in done if run.step_s < math.inf]

    def _annealed(self, chains: Sequence[Chain], by_tail: bool, length: int, pool: ChainPool) -> bool:
        """Run one cycle of each; False where the budget is over before its end."""
        for chain in chains:
            chain.set_out(chain, by_tail, length)
        return not chains or pool.run(chains, length, is_exact=False)


@dataclass(frozen=True, eq=False)
class _Run:
    """State of one chain of a race: a plan of a level's graph, and its step time there."""

    level: _Level
    plan: Plan
    step_s: float


def _step_s(run: _Run) -> float:
    return run.step_s


@dataclass(frozen=True, eq=False)
class _Level:
    """A graph of a race; `coarse` is None for the graph itself."""

    problem: Problem
    instance: MakespanInstance
    coarse: Derived | None = None

    def begin(self, seed: int, plan: Plan) -> Chain:
        """A chain from a plan of this graph; of infinite step time where it does not fit."""
        return Chain(self.instance, new_state(self.instance, len(self.problem.cluster.links), seed), plan)

    def expanded(self, plan: Plan) -> Plan:
        """A plan of this graph as one of the graph itself; the order of groups is none of ops."""
        return plan if self.coarse is None else Plan(self.coarse.expand(plan.device))

    def rough(self, plan: Plan) -> Plan:
        """A plan of the graph itself as one of this graph: each group where most of the work of its unit is."""
        if self.coarse is None:
            return plan
        units, n_devices = Units.of(self.problem), self.problem.cluster.n_devices
        unit = self.problem.unit_of[self.coarse.group_of]
        graph = self.coarse.source
        work = graph.flops / max(1.0, graph.flops.sum()) + graph.bytes_moved / max(1.0, graph.bytes_moved.sum())
        votes = np.bincount(unit * n_devices + plan.device, work + 1e-12, units.n_units * n_devices)
        votes = np.where(units.allowed, votes.reshape(units.n_units, n_devices), -1.0)
        return Plan(votes.argmax(axis=1)[self.problem.unit_of].astype(np.int64))


Item = TypeVar("Item")


def _in_waves(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
