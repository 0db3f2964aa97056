"""`Race`: many short annealings of groups of ops find out from where a long annealing of every op is worth its time.

Where an annealing of thousands of ops ends is decided by its first few thousand evaluations: it moves one op or one
group at a time, each of which has to pay at once. A module's backward pass, or a stretch of a recurrent layer, is worth
moving only as a whole. An annealing that has some twenty to a few hundred groups in the place of ops finds such
placements in a few hundred evaluations, exactly scored: ops run one by one, only devices are chosen by group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from baselines import prices
from baselines.budget import Budget
from baselines.local_search.groups import groupings
from baselines.local_search.makespan_chain import Chain, ChainPool
from baselines.local_search.makespan_state import MakespanInstance, grouped, new_state
from env.plan import Plan
from env.problem import Problem
from env.units import Units

FEWEST_GROUPS = 12  # fewer are as good as chosen by hand, and heuristics do that
_MOST_GROUPS = 0.5  # of the units; more of them are units, nearly
_STARTS = 3  # of the plans to begin with, best first
_HOT = 0.02  # highest temperature of groups, relative to the step time: moving one changes it by percents
MOST_SIMULATED = 2_000_000  # ops and edges simulated, at most, in a first run of one chain
LEAST_EVALUATIONS = 20  # of a first run: of larger graphs too few runs fit into a budget
LEAST_OPS = 2500  # an annealing of fewer ops ends where it ends wherever it begins
_KEPT = 3 / 8  # of the runs go on, as annealings of every op
_LONGER = 2  # times as long
_FEWEST_GROUPINGS = 4  # that take part in any race
MOST_SHARE = 0.8  # of the budget that is left may go into a race; one that would take more is none


class Race:
    """Races on one problem: the groupings that have done best in one run more often, and longer, in the next.

    Source: successive halving, K. Jamieson, A. Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter
    Optimization", AISTATS 2016, section 2.
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
        self._problem, self._threads = problem, threads
        self._seed, self._starts = seed, starts[:_STARTS]
        self._simulated = instance.simulated
        self._length = MOST_SIMULATED // self._simulated
        units = Units.of(problem)
        self._whole = _Level(units, instance)
        self._levels: list[_Level] = []  # those that have done best first
        if self._length >= LEAST_EVALUATIONS and problem.graph.n_ops >= LEAST_OPS:
            found = [units.grouped(labels) for labels in groupings(units)]
            most = _MOST_GROUPS * units.n_units
            some = [each for each in found if FEWEST_GROUPS <= each.n_units <= most]
            self._levels = [_Level(each, instance) for each in some]
        self._runs = len(self._levels)
        self._kept = max(threads, math.ceil(_KEPT * self._runs))

    def is_worth(self, number: int, budget: Budget) -> bool:
        """True if the graph is one whose annealings end far apart, and the budget is enough for a race."""
        evaluations = (self._length << number) * (self._runs + _LONGER * self._kept)
        seconds = evaluations * self._simulated * prices.EVALUATION_S / self._threads
        is_short = evaluations <= MOST_SHARE * budget.evaluations_left() and seconds <= MOST_SHARE * budget.left_s()
        return is_short and self._runs > 0

    def run(self, number: int, best: Plan, budget: Budget) -> list[Plan]:
        """Plans to anneal from, best first.

        There are as many runs as groupings, in the first race one of each, in a later one several of the better half,
        quarter, and so on. The best runs go on op by op.

        Args:
            number: of the race, from 0: each takes twice as long as the one before.
            best: plan so far, from which runs of all races but the first begin, too.
        """
        seeds = (int(np.random.SeedSequence((self._seed, number, k)).generate_state(1)[0]) for k in range(2**31))
        length = self._length << number
        starts = (best, *self._starts[: _STARTS - 1]) if number else self._starts
        some = self._levels[: max(_FEWEST_GROUPINGS, self._runs >> number)]
        first = []
        for k in range(self._runs):
            # A grouping meets another start each time it is its turn.
            level, start = some[k % len(some)], starts[(number + k // len(some)) % len(starts)]
            first.append(_Run(level, level, level.rough(start)))
        with ChainPool(self._threads, budget, max(1, length // 8)) as pool:
            rough = self._annealed(first, pool, seeds, length, _HOT)
            whole = [replace(run, level=self._whole) for run in rough[: self._kept]]
            fine = self._annealed(whole, pool, seeds, _LONGER * length, None)
        self._levels = list(dict.fromkeys([*(run.grouping for run in (*fine, *rough)), *self._levels]))
        return [run.plan for run in fine]

    def _annealed(
        self, runs: Sequence[_Run], pool: ChainPool, seeds: Iterator[int], length: int, hot: float | None
    ) -> list[_Run]:
        """The runs after one cycle of each that fits, best first; those before the budget is over."""
        n_links, done = len(self._problem.cluster.links), list[_Run]()
        for first in range(0, len(runs), self._threads):
            wave = runs[first : first + self._threads]
            instances = [run.level.instance for run in wave]
            chains = [
                Chain(each, new_state(each, n_links, next(seeds)), run.plan)
                for each, run in zip(instances, wave, strict=True)
            ]
            fitting = [chain for chain in chains if chain.step_s < math.inf]
            for chain in fitting:
                chain.set_out(chain, True, length, hot)
            is_over = bool(fitting) and not pool.run(fitting, length)
            done += [replace(run, plan=c.plan(), step_s=c.step_s) for run, c in zip(wave, chains, strict=True)]
            if is_over:
                break
        return sorted((run for run in done if run.step_s < math.inf), key=lambda run: run.step_s)


@dataclass(frozen=True, eq=False)
class _Level:
    """A problem whose units are those of the problem itself, or groups of them."""

    units: Units
    whole: MakespanInstance  # of the problem

    @cached_property
    def instance(self) -> MakespanInstance:
        """Made where a race begins: it takes as long as the groupings of the problem."""
        return (
            self.whole
            if self.units.n_units == len(self.whole.movable.unit_ptr) - 1
            else grouped(self.whole, self.units)
        )

    def rough(self, plan: Plan) -> Plan:
        """Each group where most of the work of its ops is."""
        units, n_devices = self.units, self.units.problem.cluster.n_devices
        work = units.problem.mean_op_s + 1e-12  # of ops that take no time the number counts
        votes = np.bincount(units.unit_of * n_devices + plan.device, work, units.n_units * n_devices)
        votes = np.where(units.allowed, votes.reshape(units.n_units, n_devices), -1.0)
        return Plan(votes.argmax(axis=1)[units.unit_of].astype(np.int64))


@dataclass(frozen=True, eq=False)
class _Run:
    """One chain of a race: the groups it began with, the units it moves, the best plan so far and its step time."""

    grouping: _Level
    level: _Level
    plan: Plan
    step_s: float = math.inf
