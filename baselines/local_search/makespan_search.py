"""Local search for the makespan: simulated annealing of placement and order, guided by the critical path."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from baselines.budget import Budget, Found
from baselines.local_search.makespan_moves import anneal
from baselines.local_search.makespan_state import (
    BEST,
    BY_TAIL,
    DECAY,
    NOW,
    TEMPERATURE,
    MakespanInstance,
    MakespanState,
    instance_of,
    new_state,
)
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.opgraph import FloatArray, IntArray

_CHAINS = 2  # whatever the number of cores: the answer must not depend on them
ROUND = 2_000_000  # ops and edges simulated, at most, between two looks at the clock: about 0.1 s
_FIRST_ROUND_S = 1.0  # how long a round takes at worst, until the first has been timed
FIRST_CYCLE = 20  # rounds
_GROWTH = 1.5  # of the length from one cycle to the next
HOT = 0.005  # highest temperature, relative to the step time
_HOT_OPS = 1000  # above this many ops, of which each is a smaller part of the step, less
COOLING = 1e-3  # from the highest to the lowest temperature of a cycle
_SHARED = 3  # every third cycle all chains go on from the best
_BEHIND = 1.02  # a chain this much slower than the best goes on from the best


def makespan_search(
    problem: Problem,
    seed: int,
    starts: Sequence[Plan],
    budget: Budget,
    chains: int = _CHAINS,
    cycle: int | None = None,
) -> Found:
    """Anneal placement and order in chains, by default two on two threads, from the best plans on.

    A state is a device for every unit and a key for every op: a device starts the ready op with the highest key. Half
    of the cycles keep the keys at the longest remaining paths of the current placement, half search for them too.
    Moves come from what held the current schedule up (`baselines.local_search.makespan_moves`): a critical op with a
    group around it, or a stretch of the critical path, goes elsewhere; a transfer is cut; an op overtakes the one it
    waited for. Chains heat up and cool down in cycles of growing length and exchange what they found between cycles.
    Every accepted state respects pins, colocation and memory. The answer depends on the seed, the starts and the number
    of evaluations only. An evaluation takes O(n + e) for n ops and e edges at worst, as a rule a small part of that.

    Sources: annealing, S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, "Optimization by Simulated Annealing", Science 220,
    1983 (doi:10.1126/science.220.4598.671); moves on the critical path, P. van Laarhoven, E. Aarts, J. Lenstra, "Job
    Shop Scheduling by Simulated Annealing", Operations Research 40(1), 1992, section 3 (doi:10.1287/opre.40.1.113).

    Args:
        starts: feasible plans, at least one.
        chains: how many, a thread for each.
        cycle: evaluations of the first cycle of a chain; None: as suits the size of the problem.

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
    seeds = np.random.SeedSequence(seed).generate_state(chains, np.uint64)
    annealing = [
        _Chain(instance, new_state(instance, len(problem.cluster.links), int(own)), ranked[min(k, len(ranked) - 1)][1])
        for k, own in enumerate(seeds)
    ]
    try:
        _anneal(annealing, budget, cycle)
    except KeyboardInterrupt:
        budget.interrupted = True
    found_s, found = min((_scored(simulator, chain.plan()) for chain in annealing), key=lambda pair: pair[0])
    return Found(_as_run(simulator, found) if found_s < best_s else best, evaluations=budget.spent - began)


def load(problem: Problem) -> None:
    """Compile or load the annealing, on a problem with a placement that fits on one device."""
    instance = instance_of(problem)
    device = np.zeros(problem.graph.n_ops, dtype=np.int64)
    _Chain(instance, new_state(instance, len(problem.cluster.links), 0), Plan(device)).run(0)


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


class _Chain:
    """One annealing chain, and the best it knows: a placement, keys (None: the longest paths) and the step time."""

    def __init__(self, instance: MakespanInstance, state: MakespanState, start: Plan) -> None:
        self.instance, self._state = instance, state
        self.device: IntArray = start.device
        self.key: FloatArray | None = None if start.order is None else -start.order
        self.step_s = self._begin(self.device, self.key)

    def _begin(self, device: IntArray, key: FloatArray | None) -> float:
        self._state.device[:] = device
        self._state.counts[BY_TAIL] = key is None
        self._state.key[:] = 0.0 if key is None else key
        self._state.values[BEST] = math.inf
        return float(self._state.values[NOW]) if anneal(self.instance, self._state, 0, begin=True) else math.inf

    def set_out(self, elite: _Chain, by_tail: bool, length: int) -> None:
        """Begin a cycle of so many evaluations from the best of a chain."""
        if by_tail and elite.key is not None:
            by_tail = self._begin(elite.device, None) < math.inf
        if elite.key is None:
            self._begin(elite.device, None)
        if not by_tail:
            self._begin(elite.device, self._state.tail.copy() if elite.key is None else elite.key)
        hot = HOT * min(1.0, _HOT_OPS / len(self.device))
        self._state.values[TEMPERATURE] = hot * self._state.values[NOW]
        self._state.values[DECAY] = COOLING ** (1.0 / length)

    def run(self, evaluations: int) -> None:
        """Go on; needs no Python lock."""
        anneal(self.instance, self._state, evaluations)

    def take_stock(self) -> None:
        """Remember the best of the cycle so far."""
        if self._state.values[BEST] < self.step_s:
            self.step_s = float(self._state.values[BEST])
            self.device, self.key = self._state.best_device.astype(np.int64), self._state.best_key.copy()

    def plan(self) -> Plan:
        """The best known."""
        return Plan(self.device, None if self.key is None else -self.key)


def _anneal(chains: list[_Chain], budget: Budget, cycle_length: int | None) -> None:
    """Cycle after cycle until the budget is over; looks at the clock between rounds."""
    in_round = max(1, ROUND // (len(chains[0].instance.unit_of) + len(chains[0].instance.consumer)))
    length = FIRST_CYCLE * in_round if cycle_length is None else cycle_length
    per_s = in_round / _FIRST_ROUND_S

    def affordable(budget: Budget) -> int:
        """Evaluations of a chain in the time that is left, at the pace of the last round."""
        return max(1, int(min(in_round, per_s * budget.left_s())))

    with ThreadPoolExecutor(max_workers=len(chains)) as pool:
        for cycle in itertools.count():
            best = min(chains, key=lambda chain: chain.step_s)
            for k, chain in enumerate(chains):
                behind = cycle % _SHARED == _SHARED - 1 or chain.step_s > _BEHIND * best.step_s
                chain.set_out(best if behind else chain, (cycle + k) % 2 == 0, length)
            left = length
            while left:
                if budget.over() or budget.reached(min(chain.step_s for chain in chains)):
                    return
                allowed = min(budget.evaluations_left(), len(chains) * min(in_round, left, affordable(budget)))
                most, odd = divmod(allowed, len(chains))
                tried = [int(most + (k < odd)) for k in range(len(chains))]
                began_s = time.monotonic()
                for future in [pool.submit(chain.run, own) for chain, own in zip(chains, tried, strict=True)]:
                    future.result()
                per_s = max(tried) / max(time.monotonic() - began_s, 1e-9)
                for chain in chains:
                    chain.take_stock()
                budget.spend(sum(tried))
                left -= max(tried)
            length = int(length * _GROWTH)
