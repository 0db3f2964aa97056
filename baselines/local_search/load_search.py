"""Local search for the objective throughput: simulated annealing on the loads of devices and links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from baselines import prices
from baselines.budget import Budget, Found
from baselines.local_search.load_state import LoadInstance, LoadState, charge, instance_of, new_state
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Loads, loads
from env.units import Units
from graphs.opgraph import IntArray

_CHAINS = 2  # whatever the number of cores: the answer must not depend on them
ROUND = 50_000  # changes between two looks at the budget, at most about 0.2 s
_SHORTEST = 20_000  # changes of the first cycle; on large problems `_PER_UNIT` for each unit
_PER_UNIT = 4
_GROWTH = 2.0**0.5  # of the length from one cycle to the next
_HOT = 0.05  # highest temperature, relative to the loads; where a unit is a small part of a load, less
_HOT_UNITS = 4.0
_GENTLE = 0.1  # of the highest temperature, for cycles that start from the best placement so far
_DEARER, _LEAST_SHARE = 1.05, 0.001  # by how much the share of tensors rises at least, and from where
_COOLING = 2e-4  # from the highest to the lowest temperature


def load_search(problem: Problem, seed: int, starts: Sequence[Plan], budget: Budget) -> Found:
    """Simulated annealing of the largest load, for both communication models.

    Moves: a unit to another device; two units of different devices swapped; a connected cluster of up to 17 units, all
    of one device or of several, to one device; such a cluster against a unit or cluster coming back. Half of them
    start at the device or link with the largest load, half of the targets are a neighbour's device. A change costs
    O(degrees of its units) + O(D + L). The annealed quantity is the log of the 32-norm of all loads, plus what devices
    lack of memory, which weighs more and more as the temperature falls: the search may pass through placements that do
    not fit, but returns one only if it began with such and found no other. A tensor's need of memory depends on how
    long it lasts, so a share of its bytes is charged wherever it is: the share that is right for the best start and,
    whenever the best placement of a chain turns out not to fit, for that placement.

    Two chains, one from the best start and the other from the next one, run through cycles of growing length: in
    turn a gentle one from the best placement of any chain, and a hot one from the chain's own. The answer depends on
    the seed and the number of changes tried only, each of which is an evaluation. Memory O(U D + T D) for U units and T
    tensors.

    Source: S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, "Optimization by Simulated Annealing", Science 220 (1983),
    doi:10.1126/science.220.4598.671; the loads are those of `env.simulation.scoring`.
    """
    scored = [(loads(problem, Plan(plan.device)), plan) for plan in starts]
    ranked = sorted(scored, key=lambda pair: (not pair[0].feasible, pair[0].value_s))
    best_loads, best = ranked[0]
    units, began = Units.of(problem), budget.spent
    proven = best_loads.feasible and budget.reached(best_loads.value_s)
    if not (proven or budget.over()) and (units.allowed.sum(axis=1) > 1).any():
        placed = [plan.device[units.first_op] for _, plan in ranked]
        known = Known(units, placed[0], best_loads.value_s if best_loads.feasible else math.inf, _share(best_loads))
        found = _anneal(units, seed, placed, known, budget)
        if found.value_s < (best_loads.value_s if best_loads.feasible else math.inf):
            best = Plan(found.unit_device[problem.unit_of])
    return Found(best, evaluations=budget.spent - began)


@dataclass
class Known:
    """The best placement that really fits, and the share of their bytes that tensors are charged with.

    Attributes:
        unit_device: int64 [U]; the first start as long as none fits.
        value_s: its largest load; infinite as long as none fits.
    """

    units: Units
    unit_device: IntArray
    value_s: float
    share: float

    def look_at(self, instance: LoadInstance, states: Sequence[LoadState]) -> None:
        """Note the best placements of the chains; what does not fit is forgotten, and the share raised for it."""
        for state in states:
            if _best_s(state) >= self.value_s:
                continue
            device = state.unit["best"].copy()
            found = loads(self.units.problem, Plan(device[self.units.problem.unit_of]))
            if found.feasible:
                self.unit_device, self.value_s = device, found.value_s
            else:
                self.share = max(_share(found), self.share * _DEARER, _LEAST_SHARE)
                charge(instance, self.units, self.share)
        for state in states:
            if _best_s(state) < self.value_s:  # of those that do not fit
                state.unit["best"] = self.unit_device
                state.search["best_s"] = self.value_s
                _start_anew(state)


def _share(found: Loads) -> float:
    """The least share of all tensors' bytes that, beside kept bytes and workspace, covers what each memory holds."""
    problem, device, owner = found.problem, found.plan.device, found.problem.memory_owner
    graph, n_devices = problem.graph, problem.cluster.n_devices
    producer, consumer, tensor = graph.edge_list
    within = owner[device[producer]] == owner[device[consumer]]  # where nothing is copied
    at = np.unique(
        np.concatenate([device[graph.tensor_producer], device[np.where(within, producer, consumer)]])
        + n_devices * np.concatenate([np.arange(graph.n_tensors), tensor])
    )
    place, number = at % n_devices, at // n_devices
    is_made = place == device[graph.tensor_producer[number]]
    there = np.bincount(
        owner[place], np.where(is_made, graph.tensor_memory_bytes[number], graph.tensor_bytes[number]), n_devices
    )
    workspace = np.zeros(n_devices, dtype=np.int64)
    np.maximum.at(workspace, device, graph.workspace_bytes)
    lasting = found.held_bytes - np.bincount(owner, workspace, n_devices)
    lasting -= np.bincount(owner[device], graph.kept_bytes, n_devices)
    return float(np.max(lasting / np.maximum(there, 1.0), where=there > 0, initial=0.0))


def _anneal(units: Units, seed: int, starts: list[IntArray], known: Known, budget: Budget) -> Known:
    """The best placement of all chains, and that of the best start if none is better."""
    instance = instance_of(units)
    charge(instance, units, known.share)
    chains = [new_state(instance, int(s)) for s in np.random.SeedSequence(seed).generate_state(_CHAINS, np.uint64)]
    for k, state in enumerate(chains):
        place(state, starts[min(k, len(starts) - 1)])
        state.unit["best"] = starts[0]
        state.search["best_s"] = known.value_s
    n_units, n_devices = instance.unit_s.shape
    top = min(_HOT, _HOT_UNITS * n_devices / n_units)
    length = float(max(_SHORTEST, _PER_UNIT * n_units))
    with ThreadPoolExecutor(max_workers=_CHAINS) as pool:
        try:
            while not _done(chains, budget):
                _cycle(pool, instance, chains, int(length), (top * _GENTLE, top * _COOLING), known, budget)
                _cycle(pool, instance, chains, int(length * _GROWTH), (top, top * _COOLING), known, budget)
                length *= _GROWTH**2
                for state in chains:
                    place(state, known.unit_device)
        except KeyboardInterrupt:
            budget.interrupted = True
    return known


def _cycle(
    pool: ThreadPoolExecutor,
    instance: LoadInstance,
    chains: list[LoadState],
    length: int,
    temperature: tuple[float, float],
    known: Known,
    budget: Budget,
) -> None:
    """Cool all chains from the first temperature to the second with so many changes each, looking at the budget."""
    from baselines.local_search import load_kernel as kernel

    hot, cold = temperature
    change_s = prices.LOAD_S + prices.LOAD_DEVICE_S * (instance.unit_s.shape[1] + len(instance.link_ptr) - 1)
    done = 0
    while done < length and not _done(chains, budget):
        most = min(budget.evaluations_left() / len(chains), budget.left_s() / change_s)
        tried = int(min(ROUND, length - done, max(1.0, most)))
        since, until = (hot * (cold / hot) ** (at / length) for at in (done, done + tried))
        running = [pool.submit(kernel.anneal, instance, state, tried, since, until) for state in chains]
        for future in running:
            future.result()
        known.look_at(instance, chains)
        budget.spend(tried * len(chains), tried * change_s * max(1.0, len(chains) / prices.CORES))
        done += tried


def _done(chains: list[LoadState], budget: Budget) -> bool:
    return budget.over() or any(budget.reached(_best_s(state)) for state in chains)


def _best_s(state: LoadState) -> float:
    return float(state.search["best_s"][0])


def place(state: LoadState, device: IntArray) -> None:
    """Go on from another placement, int64 [U]."""
    state.unit["device"] = device
    _start_anew(state)


def _start_anew(state: LoadState) -> None:
    """Any unit may not be where it was in the best placement."""
    state.unit["is_changed"] = 1
    state.changed[:] = np.arange(len(state.unit))
    state.search["changed"] = len(state.unit)
