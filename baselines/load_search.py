"""Local search for the objective throughput: simulated annealing on the loads of devices and links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from baselines.load_state import Instance, State, instance_of, new_state
from baselines.plan import Plan
from baselines.search import Budget, Found
from baselines.units import Units
from env.loads import loads
from env.problem import Problem
from graphs.opgraph import IntArray

_CHAINS = 2  # whatever the number of cores: the answer must not depend on them
_ROUND = 50_000  # changes between two looks at the clock, at most about 0.2 s
_SHORTEST = 20_000  # changes of the first cycle; on large problems `_PER_UNIT` for each unit
_PER_UNIT = 4
_GROWTH = 2.0**0.5  # of the length from one cycle to the next
_HOT = 0.05  # highest temperature, relative to the loads; where a unit is a small part of a load, less
_HOT_UNITS = 4.0
_GENTLE = 0.1  # of the highest temperature, for cycles that start from the best placement so far
_COOLING = 2e-4  # from the highest to the lowest temperature


def load_search(problem: Problem, seed: int, starts: Sequence[Plan], budget: Budget) -> Found:
    """Simulated annealing of the largest load, for both communication models.

    Moves: a unit to another device; two units of different devices swapped; a connected cluster of up to 17 units, all
    of one device or of several, to one device; such a cluster against a unit or cluster coming back. Half of them
    start at the device or link with the largest load, half of the targets are a neighbour's device. A change costs
    O(degrees of its units) + O(D + L). What is annealed is the log of the 32-norm of all loads, plus what devices lack
    of memory, which weighs more and more as the temperature falls: the search may pass through placements that
    do not fit, but returns one only if it began with such and found no other.

    Two chains, one from the best start and one from the second best, run through cycles of growing length: in turn a
    gentle one from the best placement of both, and a hot one from the chain's own. The answer depends on the seed and
    the number of changes tried only, each of which is an evaluation. Memory O(U D + T D) for U units and T tensors.

    Source: S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, "Optimization by Simulated Annealing", Science 220 (1983),
    doi:10.1126/science.220.4598.671; the loads are those of `env.loads`.
    """
    scored = [(loads(problem, plan.device), plan) for plan in starts]
    ranked = sorted(scored, key=lambda pair: (not pair[0].feasible, pair[0].value_s))
    best_loads, best = ranked[0]
    units, began = Units(problem), budget.spent
    proven = best_loads.feasible and budget.reached(best_loads.value_s)
    if not (proven or budget.over()) and (units.allowed.sum(axis=1) > 1).any():
        placed = [plan.device[units.first_op] for _, plan in ranked]
        limit_s = best_loads.value_s if best_loads.feasible else math.inf
        for found in _anneal(units, seed, placed, limit_s, budget):
            plan = Plan(found[problem.group_of])
            now = loads(problem, plan.device)
            if (not now.feasible, now.value_s) < (not best_loads.feasible, best_loads.value_s):
                best_loads, best = now, plan
    return Found(best, evaluations=budget.spent - began)


def _anneal(units: Units, seed: int, starts: list[IntArray], best_s: float, budget: Budget) -> list[IntArray]:
    """The best placement of each chain, int64 [U]; `best_s` is the value of the first start, infinite if too large."""
    instance = instance_of(units)
    chains = [new_state(instance, int(s)) for s in np.random.SeedSequence(seed).generate_state(_CHAINS, np.uint64)]
    for k, state in enumerate(chains):
        place(state, starts[min(k, len(starts) - 1)])
        state.unit["best"] = starts[0]
        state.search["best_s"] = best_s
    n_units, n_devices = instance.unit_s.shape
    top = min(_HOT, _HOT_UNITS * n_devices / n_units)
    length = float(max(_SHORTEST, _PER_UNIT * n_units))
    with ThreadPoolExecutor(max_workers=_CHAINS) as pool:
        try:
            while not _done(chains, budget):
                _cycle(pool, instance, chains, int(length), (top * _GENTLE, top * _COOLING), budget)
                _cycle(pool, instance, chains, int(length * _GROWTH), (top, top * _COOLING), budget)
                length *= _GROWTH**2
                best = min(chains, key=_best_s).unit["best"].copy()
                for state in chains:
                    place(state, best)
        except KeyboardInterrupt:
            budget.interrupted = True
    return [state.unit["best"] for state in chains]


def _cycle(
    pool: ThreadPoolExecutor,
    instance: Instance,
    chains: list[State],
    length: int,
    temperature: tuple[float, float],
    budget: Budget,
) -> None:
    """Cool all chains from the first temperature to the second with so many changes each, looking at the clock."""
    from baselines import load_kernel as kernel

    hot, cold = temperature
    done = 0
    while done < length and not _done(chains, budget):
        tried = int(min(_ROUND, length - done, max(1.0, budget.evaluations_left() / _CHAINS)))
        since, until = (hot * (cold / hot) ** (at / length) for at in (done, done + tried))
        running = [pool.submit(kernel.anneal, instance, state, tried, since, until) for state in chains]
        for future in running:
            future.result()
        budget.spend(tried * _CHAINS)
        done += tried


def _done(chains: list[State], budget: Budget) -> bool:
    return budget.over() or any(budget.reached(_best_s(state)) for state in chains)


def _best_s(state: State) -> float:
    return float(state.search["best_s"][0])


def place(state: State, device: IntArray) -> None:
    """Go on from another placement, int64 [U]."""
    state.unit["device"] = device
    state.unit["is_changed"] = 1
    state.changed[:] = np.arange(len(device))
    state.search["changed"] = len(device)
