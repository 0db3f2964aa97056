"""Learned methods: what they do with one problem and a budget."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

import baselines
from baselines import prices
from baselines.budget import Budget
from baselines.portfolio import Candidate, improve
from env.problem import Problem
from env.simulation.scoring import Scorer
from env.simulation.simulator import Simulator
from graphs.errors import InfeasibleError
from placement.learning.learners.registry import make_learner, within_63_bits
from placement.learning.policies.policy import PlacementPolicy
from placement.learning.policies.policy_file import load_policy
from placement.processes.threads import one_thread, single_threaded
from placement.solving.compiling import two_ops
from placement.solving.interruption import on_interrupt
from placement.solving.methods import LOCAL_SEARCH, POLICY_FILE, PRETRAINED, REFINED, Place, is_method

_BATCH = 32  # placements a saved policy draws at once
_LEARNING = 1 / 3  # of the budget, where local search has the rest


def prepared(problem: Problem, method: str) -> Place:
    """A learned method, loaded, compiled, and ready to place a problem.

    The returned function raises InfeasibleError where nothing that it tried fits.

    Raises:
        PolicyFileError: a policy file that cannot be read.
        MismatchError: a policy that cannot place this problem.
    """
    if method.startswith(POLICY_FILE):
        policy = load_policy(method.removeprefix(POLICY_FILE)).policy
        policy.check(problem)
        return functools.partial(_sampled, problem, policy, method)
    name = method.removesuffix(REFINED)
    if name == PRETRAINED:
        place: Place = functools.partial(_pretrained, problem)
    else:
        place = functools.partial(_trained, problem, name)
    with single_threaded():
        _compile(name)
    return place if name == method else functools.partial(_refined, problem, place)


def _trained(problem: Problem, name: str, seed: int, budget: Budget) -> Candidate:
    """Train on the problem until the budget is over; at least one update, unless something is known without."""
    with _between_updates(budget):
        learner, each_s = make_learner(name, [problem], seed), prices.learned_s(problem, name)
        budget.spend(learner.samples, prices.LEARNING[name].begin_s + learner.samples * each_s)
        for updates in itertools.count():
            best = learner.best[0]
            if best is not None and (budget.over() or budget.reached(best.value_s)):
                return Candidate(best.source if is_method(best.source) else name, best.plan, best.value_s)
            if updates > 0 and budget.over():
                break
            before = learner.samples
            learner.update()
            budget.spend(learner.samples - before, (learner.samples - before) * each_s)
    raise _nothing_fits(problem, name, budget)


def _pretrained(problem: Problem, seed: int, budget: Budget) -> Candidate:
    from placement.learning.learners.pretrained import propose_pretrained

    with single_threaded():  # it minds Ctrl-C itself
        plan = propose_pretrained(problem, within_63_bits(seed), budget)
    return Candidate(PRETRAINED, plan, Scorer(problem).value(plan))


def _sampled(problem: Problem, policy: PlacementPolicy, method: str, seed: int, budget: Budget) -> Candidate:
    """The best of the likeliest placement and of samples, as many as the budget allows."""
    simulator = Simulator(problem)
    generator = torch.Generator().manual_seed(within_63_bits(seed))
    best: Candidate | None = None
    with _between_updates(budget):
        for batch in itertools.count():
            if batch > 0 and (budget.over() or (best is not None and budget.reached(best.value_s))):
                break
            count = int(min(_BATCH, budget.evaluations_left())) if batch > 0 else 1
            one_thread()
            proposed = policy.propose(problem, count, generator, greedy=batch == 0)
            scores = simulator.batch(proposed.device, orders=proposed.order)
            value_s = np.where(scores.feasible, scores.step_time_s, math.inf)
            k = int(value_s.argmin())
            if value_s[k] < (math.inf if best is None else best.value_s):
                best = Candidate(method, proposed.plan(k), float(value_s[k]))
            budget.spend(count, count * prices.sample_s(problem))
    if best is None:
        raise _nothing_fits(problem, method, budget)
    return best


@contextmanager
def _between_updates(budget: Budget) -> Iterator[None]:
    """How policies run: on one thread, and with Ctrl-C noted in the budget."""
    with on_interrupt(functools.partial(setattr, budget, "interrupted", True)), single_threaded():
        yield


def _refined(problem: Problem, place: Place, seed: int, budget: Budget) -> Candidate:
    """A third of the budget for the policy, what is left for local search from its plan."""
    part = budget.part(_LEARNING)
    learned = place(seed, part)
    budget.absorb(part)
    return improve(problem, seed, [learned], [(LOCAL_SEARCH, baselines.SEARCHES[LOCAL_SEARCH], 1.0)], budget).best


def _nothing_fits(problem: Problem, method: str, budget: Budget) -> InfeasibleError:
    return InfeasibleError(
        f"{method} tried {budget.spent:,} placements of {problem.graph.name!r} and none fits cluster "
        f"{problem.cluster.name!r}; give it a larger budget, or use method auto."
    )


@functools.cache
def _compile(name: str) -> None:
    """Let torch and numba load what the policy needs, on a problem of two ops: that is no part of anyone's budget."""
    problem = two_ops()
    if name == PRETRAINED:
        _pretrained(problem, 0, Budget(evaluations=0))
    else:
        make_learner(name, [problem], 0).update()
