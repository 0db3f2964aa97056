"""Local search for the makespan: simulated annealing of placement and order, guided by the critical path."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from baselines.budget import Budget, Found
from baselines.local_search.makespan_chain import ROUND, Chain, ChainPool
from baselines.local_search.makespan_race import Race
from baselines.local_search.makespan_state import instance_of, new_state
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator

_CHAINS = 2  # whatever the number of cores: the answer must not depend on them
FIRST_CYCLE = 20  # rounds
_GROWTH = 1.5  # of the length from one cycle to the next
_AFTER_RACE = 1  # times as many evaluations as a race took follow it, before the next one
_SHARED = 3  # every third cycle all chains go on from the best
_BEHIND = 1.02  # a chain this much slower than the best goes on from the best


def makespan_search(problem: Problem, seed: int, starts: Sequence[Plan], budget: Budget) -> Found:
    """Anneal placement and order in two chains, on a thread each, from the best plans on.

    A state is a device for every unit and a key for every op: a device starts the ready op with the highest key. Half
    of the cycles keep the keys at the longest remaining paths of the current placement, half search for them too.
    Moves come from what held the current schedule up (`baselines.local_search.makespan_moves`): a critical op with a
    group around it, or a stretch of the critical path, goes elsewhere; a transfer is cut; an op overtakes the one it
    waited for. On a large graph the chains begin where a race of short annealings of groups of ops has ended
    (`baselines.local_search.makespan_race`). Chains heat up and cool down in cycles of growing length and exchange what
    they found between cycles. Every accepted state respects pins, colocation and memory. The answer depends on the
    seed, the starts and the number of evaluations only. An evaluation takes O(n + e) for n ops and e edges at worst, as
    a rule a small part of that.

    Sources: annealing, S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, "Optimization by Simulated Annealing", Science 220,
    1983 (doi:10.1126/science.220.4598.671); moves on the critical path, P. van Laarhoven, E. Aarts, J. Lenstra, "Job
    Shop Scheduling by Simulated Annealing", Operations Research 40(1), 1992, section 3 (doi:10.1287/opre.40.1.113).

    Args:
        starts: feasible plans, at least one.

    Returns:
        the best plan found, with its order, or the best start where nothing is better.
    """
    simulator, began = Simulator(problem), budget.spent
    best_s, best = min((_scored(simulator, plan) for plan in starts), key=lambda pair: pair[0])
    # The links of a search serve first come, first served, whatever a start says.
    ranked = sorted((_scored(simulator, Plan(plan.device, plan.order)) for plan in starts), key=lambda pair: pair[0])
    ranked = [pair for pair in ranked if pair[0] < math.inf]
    if not ranked or problem.cluster.n_devices == 1 or budget.over() or budget.reached(best_s):
        return Found(best)
    instance = instance_of(problem)
    begins = [plan for _, plan in ranked]
    race = Race(problem, instance, seed, begins, _CHAINS)
    states = [
        new_state(instance, len(problem.cluster.links), int(own))
        for own in np.random.SeedSequence(seed).generate_state(_CHAINS, np.uint64)
    ]
    annealing = [Chain(instance, state, begins[min(k, len(begins) - 1)]) for k, state in enumerate(states)]
    try:
        _anneal(annealing, budget, race)
    except KeyboardInterrupt:
        budget.interrupted = True
    plans = [best, *(chain.plan() for chain in annealing)]
    found_s, found = min((_scored(simulator, plan) for plan in plans), key=lambda pair: pair[0])
    return Found(_as_run(simulator, found) if found_s < best_s else best, evaluations=budget.spent - began)


def load(problem: Problem) -> None:
    """Compile or load the annealing, on a problem with a placement that fits on one device."""
    instance = instance_of(problem)
    device = np.zeros(problem.graph.n_ops, dtype=np.int64)
    Chain(instance, new_state(instance, len(problem.cluster.links), 0), Plan(device)).run(0)


def _scored(simulator: Simulator, plan: Plan) -> tuple[float, Plan]:
    """Step time in seconds (infinite where it does not fit) of a plan as it is or under the default priority."""
    runs = []
    for tried in (plan, Plan(plan.device, note=plan.note)):
        score = simulator.score(tried)
        runs.append((score.step_time_s if score.feasible else math.inf, tried))
    return min(runs, key=lambda pair: pair[0])


def _as_run(simulator: Simulator, plan: Plan) -> Plan:
    """The plan with the order in which its ops start, which repeats the step exactly."""
    started = simulator.schedule(Plan(plan.device, plan.order))[1].order
    order = np.empty(len(started))
    order[started] = np.arange(len(started))
    return Plan(plan.device, order)


def _anneal(chains: list[Chain], budget: Budget, race: Race) -> None:
    """Cycle after cycle until the budget is over, between races that begin anew; looks at the budget between rounds.

    The next cycle depends on the last ones, not on the budget, so that a larger budget finds nothing worse.
    """
    in_round = max(1, ROUND // chains[0].instance.simulated)
    length, races, next_race = FIRST_CYCLE * in_round, itertools.count(), 0.0
    with ChainPool(len(chains), budget, in_round) as pool:
        for cycle in itertools.count():
            if budget.spent >= next_race:
                next_race = _raced(race, next(races), chains, budget)
            best = min(chains, key=lambda chain: chain.step_s)
            for k, chain in enumerate(chains):
                behind = cycle % _SHARED == _SHARED - 1 or chain.step_s > _BEHIND * best.step_s
                chain.set_out(best if behind else chain, (cycle + k) % 2 == 0, length)
            if not pool.run(chains, length):
                return
            length = int(length * _GROWTH)


def _raced(race: Race, number: int, chains: Sequence[Chain], budget: Budget) -> float:
    """Let chains begin where a race has ended, where that is better; returns how much is spent when the next is due."""
    if not race.is_worth(number, budget):
        return math.inf
    began = budget.spent
    slowest_first = sorted(chains, key=lambda chain: -chain.step_s)
    plans = race.run(number, slowest_first[-1].plan(), budget)
    for chain, plan in zip(slowest_first, plans, strict=False):
        chain.begin_at(plan)
    return budget.spent + _AFTER_RACE * (budget.spent - began) if plans else math.inf
