"""`auto`: everything that is quick, then local search from the best of it, then a proof where the problem is small."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from baselines.no_fit import none_fits
from baselines.plan import Method, Plan
from baselines.search import Budget, Search
from env.problem import LATENCY, THROUGHPUT, Problem
from env.scoring import Scorer
from graphs.errors import InfeasibleError

# Quick at any size, and run whatever the budget: the best of these is near what any other heuristic finds.
STARTS = {
    THROUGHPUT: ("single_device", "expert", "min_cut", "dp_linear"),
    LATENCY: ("single_device", "expert", "heft", "m_etf"),
}
_MOST_STARTS = 6  # more would leave each too little of the budget
_LOCAL, _EXACT = "local_search", "exact"
_POLL_S = 0.2


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that fits, who found it, and its objective in seconds."""

    method: str
    plan: Plan
    value_s: float


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a portfolio found.

    Attributes:
        best: the best candidate.
        lower_bound_s: the best bound that a search has proved; 0 if none.
    """

    best: Candidate
    lower_bound_s: float


def candidates(problem: Problem, seed: int, methods: Mapping[str, Method], budget: Budget) -> list[Candidate]:
    """Run constructive methods, as many at once as there are cores; best first.

    Each counts as one evaluation. Once the time is over no further method starts, but for those of `STARTS`, so that
    there is always a good answer.

    Raises:
        InfeasibleError: none of them fits; the reason of the one that came nearest.
    """
    scorer = Scorer(problem)
    quick_first = sorted(methods, key=lambda name: name not in STARTS[problem.objective])
    found: list[Candidate] = []
    reasons: dict[str, InfeasibleError] = {}

    def run(name: str) -> Candidate | None:
        if name not in STARTS[problem.objective] and (budget.interrupted or budget.left_s() <= 0):
            return None
        try:
            plan = methods[name](problem, seed)
        except InfeasibleError as error:
            reasons[name] = error
            return None
        return Candidate(name, plan, scorer.value(plan.device, plan.order, plan.transfer_order))

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        waiting: set[Future[Candidate | None]] = {pool.submit(run, name) for name in quick_first}
        while waiting:
            try:
                ended, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            except KeyboardInterrupt:
                if budget.interrupted:
                    raise  # asked twice: leave at once
                budget.interrupted = True
                continue
            found += [candidate for future in ended if (candidate := future.result()) is not None]
            budget.spend(len(ended))
    if not found:
        raise none_fits({name: reasons[name] for name in methods if name in reasons})
    rank = {name: k for k, name in enumerate(methods)}
    return sorted(found, key=lambda candidate: (candidate.value_s, rank[candidate.method]))


def improve(
    problem: Problem, seed: int, found: Sequence[Candidate], stages: Sequence[tuple[str, Search, float]], budget: Budget
) -> Outcome:
    """Let searches improve on candidates (best first, at least one), until the budget is over or a proof is found.

    Args:
        stages: name of a search, the search, and the fraction it may use of the budget that is left.
    """
    scorer = Scorer(problem)
    ranked, bound_s = list(found), 0.0
    for number, (name, search, fraction) in enumerate(stages):
        if budget.over() or budget.reached(ranked[0].value_s):
            break
        part = budget.part(fraction)
        starts = [candidate.plan for candidate in ranked[:_MOST_STARTS]]
        answer = search(problem, seed + number, starts, part)
        budget.absorb(part)
        bound_s = max(bound_s, answer.lower_bound_s)
        budget.target_s = max(budget.target_s, bound_s)
        plan = answer.plan
        value_s = scorer.value(plan.device, plan.order, plan.transfer_order)
        if value_s < ranked[0].value_s:
            ranked.insert(0, Candidate(name, plan, value_s))
    return Outcome(ranked[0], bound_s)


def stages(
    problem: Problem, searches: Mapping[str, Search], exact_is_tractable: bool
) -> list[tuple[str, Search, float]]:
    """What `auto` does with its budget: the searches of `improve`.

    Where the whole problem is small enough for an exact solver, local search gets a short run first, since a solver
    that starts from a good answer proves faster, and whatever time the solver leaves.
    """
    local = (_LOCAL, searches[_LOCAL])
    if not exact_is_tractable:
        return [(*local, 1.0)]
    first = 0.4 if problem.objective == THROUGHPUT else 0.2
    return [(*local, first), (_EXACT, searches[_EXACT], 1.0), (*local, 1.0)]
