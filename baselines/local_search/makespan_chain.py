"""Chains of the makespan search: one annealing each, run side by side by the threads of a pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import numpy as np

from baselines import prices
from baselines.budget import Budget
from baselines.local_search.makespan_moves import anneal
from baselines.local_search.makespan_state import (
    BEST,
    BY_TAIL,
    DECAY,
    INSTANTS,
    NOW,
    TEMPERATURE,
    MakespanInstance,
    MakespanState,
)
from env.plan import Plan
from graphs.opgraph import FloatArray, IntArray

ROUND = 2_000_000  # ops and edges simulated, at most, between two looks at the budget: about 0.1 s
_FIRST_ROUND_S = 1.0  # of work in a round at worst, until the first is done
HOT = 0.005  # highest temperature, relative to the step time
_HOT_OPS = 1000  # above this many ops, of which each is a smaller part of the step, less
COOLING = 1e-3  # from the highest to the lowest temperature of a cycle


class Chain:
    """One annealing chain, and the best it knows: a placement, keys (None: the longest paths) and the step time."""

    def __init__(self, instance: MakespanInstance, state: MakespanState, start: Plan) -> None:
        self.instance, self._state = instance, state
        self.step_s = math.inf
        self.device: IntArray = start.device
        self.key: FloatArray | None = None
        self.begin_at(start)

    def _begin(self, device: IntArray, key: FloatArray | None) -> float:
        self._state.device[:] = device
        self._state.counts[BY_TAIL] = key is None
        self._state.key[:] = 0.0 if key is None else key
        self._state.values[BEST] = math.inf
        return float(self._state.values[NOW]) if anneal(self.instance, self._state, 0, begin=True) else math.inf

    def begin_at(self, plan: Plan) -> None:
        """Forget what is known for a plan, if that is faster."""
        key = None if plan.order is None else -plan.order
        step_s = self._begin(plan.device, key)
        if step_s < self.step_s:
            self.device, self.key, self.step_s = plan.device, key, step_s

    def set_out(self, elite: Chain, by_tail: bool, length: int, hot: float | None = None) -> None:
        """Begin a cycle of so many evaluations from the best of a chain.

        Args:
            hot: the highest temperature, relative to the step time; None: as suits the number of ops.
        """
        if by_tail and elite.key is not None:
            by_tail = self._begin(elite.device, None) < math.inf
        if elite.key is None:
            self._begin(elite.device, None)
        if not by_tail:
            self._begin(elite.device, self._state.tail.copy() if elite.key is None else elite.key)
        hot = HOT * min(1.0, _HOT_OPS / len(self.device)) if hot is None else hot
        self._state.values[TEMPERATURE] = hot * self._state.values[NOW]
        self._state.values[DECAY] = COOLING ** (1.0 / length)

    def run(self, evaluations: int) -> float:
        """Go on; needs no Python lock. Returns the seconds of work that it was (`baselines.prices`)."""
        before = int(self._state.counts[INSTANTS])
        anneal(self.instance, self._state, evaluations)
        return prices.INSTANT_S * max(evaluations, int(self._state.counts[INSTANTS]) - before)

    def take_stock(self) -> None:
        """Remember the best of the cycle so far."""
        if self._state.values[BEST] < self.step_s:
            self.step_s = float(self._state.values[BEST])
            self.device, self.key = self._state.best_device.astype(np.int64), self._state.best_key.copy()

    def plan(self) -> Plan:
        """The best known."""
        return Plan(self.device, None if self.key is None else -self.key)


class ChainPool:
    """Threads, one for each of so many chains that run at once."""

    def __init__(self, threads: int, budget: Budget, in_round: int) -> None:
        """
        Args:
            in_round: evaluations of a chain between two looks at the budget, at most.
        """
        self._budget, self._in_round = budget, in_round
        self._per_s = in_round / _FIRST_ROUND_S  # evaluations of a chain, at the pace of the last round
        self._pool = ThreadPoolExecutor(max_workers=threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def run(self, chains: Sequence[Chain], evaluations: int) -> bool:
        """Let each of at most `threads` chains go on; False where the budget is over before they have."""
        left, budget = evaluations, self._budget
        while left:
            if budget.over() or budget.reached(min(chain.step_s for chain in chains)):
                return False
            affordable = max(1, int(min(self._in_round, left, self._per_s * budget.left_s())))
            allowed = min(budget.evaluations_left(), len(chains) * affordable)
            most, odd = divmod(allowed, len(chains))
            tried = [int(most + (k < odd)) for k in range(len(chains))]
            running = [self._pool.submit(chain.run, own) for chain, own in zip(chains, tried, strict=True)]
            works_s = [future.result() for future in running]
            # Chains run side by side, and the round ends with the slowest; a lone one is half of what two cores do.
            round_s = max(*works_s, sum(works_s) / prices.CORES)
            self._per_s = max(tried) / max(round_s, 1e-9)
            for chain in chains:
                chain.take_stock()
            budget.spend(sum(tried), round_s)
            left -= max(tried)
        return True
