"""`auto`: everything that is quick, then local search from the best of it, then a proof where the problem is small."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from baselines import prices
from baselines.budget import Budget, Search
from baselines.fitting import all_failed, not_found
from baselines.meter import Meter, OutOfTimeError, charge
from baselines.registry import STARTS
from env.objectives import LATENCY, THROUGHPUT
from env.plan import Method, Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from graphs.errors import InfeasibleError, NotFoundError

# Run to their end whatever the budget, so that there is always an answer, one device among them.
ALWAYS = {THROUGHPUT: ("single_device", "expert"), LATENCY: ("single_device", "heft")}
_QUICK_SHARE, _QUICK_S = 0.1, 0.2  # of the time, or so many seconds if that is more, may go into `STARTS`
# Share of `auto` for the other heuristics, which take seconds: they plan pipelines, not steps.
_SLOW_SHARE = {THROUGHPUT: 0.2, LATENCY: 0.0}
_NOTHING_FITS_SHARE = 0.2  # the same where nothing quick fits
_MOST_STARTS = 6  # more would leave each too little of the budget
_LOCAL, _EXACT = "local_search", "exact"
_EXACT_SHARE = 0.5  # of what the first local search leaves
_POLL_S = 0.2  # how long Ctrl-C may wait


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that fits, who found it, and its objective in seconds."""

    method: str
    plan: Plan
    value_s: float


@dataclass(frozen=True, eq=False)
class PortfolioOutcome:
    """Findings of a portfolio.

    Attributes:
        best: the best candidate.
        lower_bound_s: the best bound that a search has proved; 0 if none.
        prover: the search that has proved it, or "".
    """

    best: Candidate
    lower_bound_s: float
    prover: str = ""


def candidates(
    problem: Problem,
    seed: int,
    methods: Mapping[str, Method],
    budget: Budget,
    always: Sequence[str] = (),
    failed: dict[str, InfeasibleError] | None = None,
) -> list[Candidate]:
    """Run constructive methods, as many at once as there are cores; best first.

    Each counts as one evaluation; it is not stopped for lack of evaluations. All have the seconds that are left, side
    by side: those that would begin later do not, and those that take longer find nothing, but for those of `always`.

    Args:
        failed: gets the errors of methods that find no placement that fits; those of earlier calls may be in it.

    Raises:
        NotFoundError: none of them fits; the reason of the one that came nearest.
    """
    scorer, allowed_s = Scorer(problem), budget.left_s()
    each_s = prices.HEURISTIC_S * problem.graph.n_ops
    found: list[Candidate] = []
    reasons: dict[str, InfeasibleError] = {} if failed is None else failed
    meters = {
        name: Meter() if name in always else Meter(allowed_s, limit=budget.limit)
        for place, name in enumerate(methods)
        if name in always or place * each_s < prices.CORES * allowed_s
    }

    def run(name: str) -> Candidate | None:
        try:
            with meters[name].kept():
                charge(each_s)
                plan = methods[name](problem, seed)
        except InfeasibleError as error:
            reasons[name] = error
            return None
        except OutOfTimeError:
            return None
        return Candidate(name, plan, scorer.value(plan))

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        waiting: set[Future[Candidate | None]] = {pool.submit(run, name) for name in meters}
        while waiting:
            try:
                ended, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            except KeyboardInterrupt:
                if budget.interrupted:
                    raise  # asked twice: leave at once
                budget.interrupted = True
                for name, meter in meters.items():
                    if name not in always:
                        meter.stop()
                continue
            found += filter(None, [future.result() for future in ended])
    budget.spend(len(meters), sum(meter.used_s for meter in meters.values()) / prices.CORES)
    if not found:
        raise all_failed(reasons) if reasons else not_found(problem)
    return _ranked(found, methods)


def starts(
    problem: Problem, seed: int, methods: Mapping[str, Method], budget: Budget, every: bool = False
) -> list[Candidate]:
    """Plans that a search begins with: those of `STARTS` and, with `every`, the others; best first.

    The quick ones take a tenth of limited seconds and the slow ones, for a steady state or where nothing fits, a fifth
    of what is left. Without a limit of seconds all run to their end.

    Raises:
        NotFoundError: none of them fits; the reason of the one that came nearest.
    """
    names = STARTS[problem.objective]
    quick = {name: methods[name] for name in names if name in methods}
    slow = {name: method for name, method in methods.items() if every and name not in quick}
    found: list[Candidate] = []
    part = budget.part_s(max(_QUICK_S, _QUICK_SHARE * budget.left_s()))
    failed: dict[str, InfeasibleError] = {}
    with contextlib.suppress(NotFoundError):
        found = candidates(problem, seed, quick, part, ALWAYS[problem.objective], failed)
    budget.absorb(part)
    share = _SLOW_SHARE[problem.objective] if found else _NOTHING_FITS_SHARE
    if slow and not budget.interrupted and (share or math.isinf(budget.seconds)):
        part = budget.part_s(share * budget.left_s() if share else math.inf)
        with contextlib.suppress(NotFoundError):
            found += candidates(problem, seed, slow, part, failed=failed)
        budget.absorb(part)
    if failed and not found:
        raise all_failed(failed)
    return _ranked(found, methods)


def searched(
    problem: Problem,
    seed: int,
    methods: Mapping[str, Method],
    stages: Sequence[tuple[str, Search, float]],
    budget: Budget,
    every: bool = True,
) -> PortfolioOutcome:
    """`improve` on the `starts`, of equally good ones on one.

    Raises:
        NotFoundError: nothing was found; with the reason of the heuristic that came nearest.
        InfeasibleError: a search has proved that nothing fits.
    """
    found, reason = list[Candidate](), ""
    try:
        found = starts(problem, seed, methods, budget, every)
    except InfeasibleError as error:
        reason = f" {error}"
    distinct: dict[float, Candidate] = {}
    for candidate in found:
        distinct.setdefault(candidate.value_s, candidate)
    try:
        return improve(problem, seed, [distinct[value_s] for value_s in sorted(distinct)], stages, budget)
    except NotFoundError as error:
        raise NotFoundError(f"{error}{reason}") from None


def _ranked(found: Sequence[Candidate], methods: Iterable[str]) -> list[Candidate]:
    rank = {name: k for k, name in enumerate(methods)}
    return sorted(found, key=lambda candidate: (candidate.value_s, rank[candidate.method]))


def improve(
    problem: Problem, seed: int, found: Sequence[Candidate], stages: Sequence[tuple[str, Search, float]], budget: Budget
) -> PortfolioOutcome:
    """Let searches improve on candidates (best first, possibly none), until the budget is over or a proof is found.

    Args:
        stages: name of a search, the search, and the fraction it may use of the budget that is left.

    Raises:
        NotFoundError: there were no candidates, and no search found one.
        InfeasibleError: a search has proved that there are none.
    """
    scorer = Scorer(problem)
    ranked, bound_s, prover = list(found), 0.0, ""
    for number, (name, search, fraction) in enumerate(stages):
        if budget.over() or (ranked and budget.reached(ranked[0].value_s)):
            break
        part = budget.part(fraction)
        try:
            answer = search(problem, seed + number, [candidate.plan for candidate in ranked[:_MOST_STARTS]], part)
        except NotFoundError:
            continue
        finally:
            budget.absorb(part)
        if answer.lower_bound_s > bound_s:
            bound_s, prover = answer.lower_bound_s, name
        budget.target_s = max(budget.target_s, bound_s)
        value_s = scorer.value(answer.plan)
        if not ranked or value_s < ranked[0].value_s:
            ranked.insert(0, Candidate(name, answer.plan, value_s))
    if not ranked:
        raise not_found(problem)
    return PortfolioOutcome(ranked[0], bound_s, prover)


def stages(
    problem: Problem, searches: Mapping[str, Search], exact_is_tractable: bool
) -> list[tuple[str, Search, float]]:
    """Stages of `auto` within its budget: the searches of `improve`.

    Where the whole problem is small enough for an exact solver, local search gets a short run first, since a solver
    that starts from a good answer proves faster, and in all at least half of the budget.
    """
    local = (_LOCAL, searches[_LOCAL])
    if not exact_is_tractable:
        return [(*local, 1.0)]
    first = 0.4 if problem.objective == THROUGHPUT else 0.1
    return [(*local, first), (_EXACT, searches[_EXACT], _EXACT_SHARE), (*local, 1.0)]
