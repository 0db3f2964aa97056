"""Placements that fit, where memory is tight or they are few enough to try all; errors where nothing was found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from baselines import prices
from baselines.budget import Budget
from env.objectives import THROUGHPUT
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer, loads
from env.units import Units
from graphs.errors import InfeasibleError, NotFoundError
from graphs.formatting import format_bytes
from graphs.opgraph import IntArray

if TYPE_CHECKING:
    from env.simulation.simulator import Simulator


def all_failed(reasons: Mapping[str, InfeasibleError]) -> NotFoundError:
    """The error of methods (at least one) that all failed: it is no proof, and does not read like one.

    Args:
        reasons: by method, in the order in which a sentence is preferred where several were equally near.
    """
    near = {name: error.missing_bytes for name, error in reasons.items() if error.missing_bytes is not None}
    name = min(near, key=lambda method: near[method]) if near else next(iter(reasons))
    short = f" by {format_bytes(near[name])}" if near else ""
    if len(reasons) == 1:
        return NotFoundError(f"The heuristic {name} failed{short}: {reasons[name]}", near.get(name))
    return NotFoundError(
        f"All {len(reasons)} heuristics tried failed, the nearest, {name},{short}: {reasons[name]}",
        near.get(name),
    )


def not_found(problem: Problem) -> NotFoundError:
    """The error for a search that has ended without a placement."""
    return NotFoundError(
        f"no placement of graph {problem.graph.name!r} that fits cluster {problem.cluster.name!r} was found, which "
        "does not prove that there is none."
    )


def none_fits(problem: Problem) -> InfeasibleError:
    """The error for what an exact solver has proved."""
    return InfeasibleError(
        f"no placement of graph {problem.graph.name!r} fits the memory and the pins of cluster "
        f"{problem.cluster.name!r}: an exact search has proved it."
    )


MOST_PLACEMENTS = 4096  # so many take a fraction of a second


def best_of_few(problem: Problem, budget: Budget) -> Plan | None:
    """Score every placement under the default priority; an evaluation each.

    Returns:
        the best that fits; None if none does, or if there are more than `MOST_PLACEMENTS` or than the budget allows.
    """
    choices = [np.flatnonzero(row).tolist() for row in Units.of(problem).allowed]
    if math.prod(map(len, choices)) > min(MOST_PLACEMENTS, budget.evaluations_left()):
        return None
    scorer, best, best_s = Scorer(problem), None, math.inf
    for placed in itertools.product(*choices):
        if budget.over():
            break
        plan = Plan(np.array(placed, dtype=np.int64)[problem.unit_of])
        value_s = scorer.value(plan)
        budget.spend(1, prices.placement_s(problem))
        if value_s < best_s:
            best, best_s = plan, value_s
    return best


_AT_ONCE = 256
_BATCH = 32  # neighbours scored at once
_PATIENCE = 100  # batches without a better placement, before the search begins anew
_TENURE = 10  # batches for which a unit that was moved stays where it is
_SWAPS = 0.4  # of the neighbours


@dataclass(frozen=True, eq=False)
class Nearest:
    """The placement that exceeds memory least, int64 [n], and by how many bytes in all."""

    device: IntArray
    excess_bytes: float


def fitting(problem: Problem, seed: int, budget: Budget) -> Plan:
    """A placement that fits under the default priority, by `nearest_to_fitting`.

    Raises:
        NotFoundError: the budget is over, or no placement fits in that order.
    """
    found = nearest_to_fitting(problem, seed, budget)
    if found.excess_bytes > 0:
        raise not_found(problem)
    return Plan(found.device)


def nearest_to_fitting(problem: Problem, seed: int, budget: Budget) -> Nearest:
    """Minimise the bytes by which devices are exceeded, until they are 0 or the budget is over.

    Few placements are looked at one by one. Where there are more, a tabu search looks at random neighbours, a unit on a
    full device moved elsewhere or swapped for another, and goes to the best of each batch, but for units that moved
    lately; where it gets no further it begins anew from units packed in another order. An evaluation is a placement
    scored.

    Source: F. Glover, "Tabu Search, Part I", ORSA Journal on Computing 1(3), 1989, doi:10.1287/ijoc.1.3.190.
    """
    search = _Search(problem, np.random.default_rng(seed), budget)
    number = math.prod(search.units.allowed.sum(axis=1).tolist())
    if number <= min(MOST_PLACEMENTS, max(_AT_ONCE, budget.evaluations_left())):
        search.look_at_all()
        return search.nearest()
    while search.least > 0 and not (budget.over() and search.looked):
        search.descend()
    return search.nearest()


class _Search:
    """The search for one problem: scores placements of units, int64 [k, U], and keeps the best one."""

    def __init__(self, problem: Problem, generator: np.random.Generator, budget: Budget) -> None:
        self.problem, self.units, self._generator, self._budget = problem, Units.of(problem), generator, budget
        self._best = self.units.allowed.argmax(axis=1)
        self.least: float = math.inf
        self.looked = False

    @cached_property
    def _simulator(self) -> Simulator:
        from env.simulation.simulator import Simulator  # loads the compiler: only when something is placed

        return Simulator(self.problem)

    def nearest(self) -> Nearest:
        """The best so far."""
        if not self.looked:
            self._excess(self._best[None])
        return Nearest(self._best[self.problem.unit_of], self.least)

    def look_at_all(self) -> None:
        """Score every placement, some at a time."""
        choices = [np.flatnonzero(row).tolist() for row in self.units.allowed]
        for some in _batched(itertools.product(*choices), _AT_ONCE):
            if self.looked and (self.least == 0 or self._budget.over()):
                return
            self._excess(np.array(some, dtype=np.int64))

    def descend(self) -> None:
        """Search from units packed in a random order, until nothing better is found for some time."""
        now = self._packed()
        excess, least, since = self._excess(now[None])[0], math.inf, 0
        free_at = np.zeros(self.units.n_units, dtype=np.int64)
        for step in itertools.count():
            if self.least == 0 or since > _PATIENCE or self._budget.over():
                return
            tried, moved = self._neighbours(now, excess)
            scored = self._excess(tried)
            total = scored.sum(axis=1, dtype=np.float64)
            tabu = (free_at[moved] > step).any(axis=1) & (total >= least)
            best = int(np.where(tabu, np.inf, total).argmin())
            now, excess = tried[best], scored[best]
            free_at[moved[best]] = step + _TENURE
            least, since = (total[best], 0) if total[best] < least else (least, since + 1)

    def _packed(self) -> IntArray:
        """int64 [U]: large units first, but for chance, each to the allowed device that has most room left."""
        kept = self.units.kept_bytes + self.units.working_bytes
        room, memory = self.problem.capacity_bytes.astype(np.float64), self.problem.memory_owner
        device = np.empty(self.units.n_units, dtype=np.int64)
        for u in np.argsort(-kept * self._generator.uniform(0.5, 1.5, len(kept))).tolist():
            device[u] = np.where(self.units.allowed[u], room[memory], -np.inf).argmax()
            room[memory[device[u]]] -= kept[u]
        return device

    def _neighbours(self, now: IntArray, excess: IntArray) -> tuple[IntArray, IntArray]:
        """Placements next to one, int64 [k, U], and the units that move, int64 [k, 2], one of them twice or two."""
        generator, units = self._generator, self.units
        tried = np.repeat(now[None], _BATCH, axis=0)
        moved = np.zeros((_BATCH, 2), dtype=np.int64)
        over = np.flatnonzero(excess[self.problem.memory_owner[now]] > 0)
        over = over if len(over) else np.arange(units.n_units)
        for k in range(_BATCH):
            u = int(generator.choice(over))
            v = int(generator.integers(units.n_units))
            if generator.random() < _SWAPS and units.allowed[u, now[v]] and units.allowed[v, now[u]]:
                tried[k, u], tried[k, v] = now[v], now[u]
                moved[k] = u, v
            else:
                tried[k, u] = generator.choice(np.flatnonzero(units.allowed[u]))
                moved[k] = u, u
        return tried, moved

    def _excess(self, placed: IntArray) -> IntArray:
        """int64 [k, D]: bytes beyond each device's memory; remembers the best."""
        device = placed[:, self.problem.unit_of]
        if self.problem.objective == THROUGHPUT:
            held = np.stack([loads(self.problem, Plan(row)).held_bytes for row in device])
        else:
            held = self._simulator.batch(device).peak_bytes
        excess: IntArray = np.maximum(held - self.problem.capacity_bytes, 0)
        self._budget.spend(len(placed), len(placed) * prices.placement_s(self.problem))
        total = excess.sum(axis=1, dtype=np.float64)
        self.looked = True
        if total.min() < self.least:
            self.least, self._best = float(total.min()), placed[int(total.argmin())]
        return excess


def _batched(values: Iterator[tuple[int, ...]], size: int) -> Iterator[list[tuple[int, ...]]]:
    while some := list(itertools.islice(values, size)):
        yield some
