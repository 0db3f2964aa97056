"""The graph policy that comes with the package: trained over many graphs and clusters by `benchmarks/pretrain.py`."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

import baselines
from baselines import prices
from baselines.budget import Budget
from baselines.portfolio import Candidate, candidates, improve, starts
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.errors import InfeasibleError, NotFoundError, PolicyFileError
from graphs.opgraph import FloatArray
from placement.learning.policies.graph_policy import GraphPolicy
from placement.learning.policies.policy import Proposals
from placement.learning.policies.policy_file import load_policy
from placement.solving.methods import heuristics_for, searches_of_auto

PRETRAINED = Path(__file__).with_name("pretrained.zip")
_NAME = "pretrained"
# Some milliseconds per thousand ops each; now and then one of them is better than all that the policy proposes.
_HEURISTICS = ("single_device", "heft", "m_etf", "min_cut", "mite", "dfs", "peft", "expert", "cpop")

_FEWEST, _MOST = 4, 64  # samples of a zero-shot placement
_WORK = 500_000  # ops times devices that are decoded for it: about 0.3 s on one core
_BATCH = 16  # samples between two looks at the clock
_SAMPLING, _TUNING = 0.03, 0.07  # of the budget; the rest is local search
_TUNING_RATE = 0.03
_LEAST_SPREAD = 1e-3  # of the logarithm of step times: less is no difference to learn from
_KEPT = 4  # plans that local search gets to start from


def load_pretrained(path: str | os.PathLike[str] = PRETRAINED) -> GraphPolicy:
    """The policy that comes with the package, or one of its kind in another policy file.

    Raises:
        PolicyFileError: the file cannot be read, or holds another kind of policy.
    """
    again = "install the package again, or run benchmarks/pretrain.py"
    try:
        policy = load_policy(path).policy
    except PolicyFileError as error:
        raise PolicyFileError(f"no pretrained policy can be read ({str(error).rstrip('.')}); {again}.") from None
    if not isinstance(policy, GraphPolicy):
        raise PolicyFileError(f"{os.fspath(path)} holds a policy {policy.name!r}, expected 'graph'; {again}.")
    return policy


def propose_pretrained(problem: Problem, seed: int, budget: Budget) -> Plan:
    """Place a problem by the policy that comes with the package.

    Without a budget (0 seconds, or 0 evaluations) that is the best of the greedy placement, of earliest finish, of as
    many samples as take about 0.3 s, and of the heuristics that take milliseconds, one device among them. With one, a
    small part of it goes to the other heuristics; where the policy is ahead of them all, another to more samples, and a
    part to fine-tuning a copy of the policy on this problem; the rest to local search from the best of these. With
    the time unlimited, the plan depends on the seed and the number of evaluations only. Ctrl-C ends it with the best so
    far.

    Raises:
        InfeasibleError: nothing fits.
        PolicyFileError: as `load_pretrained`.
    """
    policy = load_pretrained()
    search = _Sampling(problem, seed)
    search.zero_shot(policy, budget)
    others: list[Candidate] = []
    if not search.done(budget):
        with contextlib.suppress(NotFoundError):
            others = starts(problem, seed, heuristics_for(problem), budget, every=True)
    try:
        if not search.done(budget) and search.is_ahead_of(others):
            part = budget.part(_SAMPLING)
            search.sample(policy, part)
            budget.absorb(part)
        if not search.done(budget) and search.is_ahead_of(others):
            part = budget.part(_TUNING)
            search.tune(copy.deepcopy(policy), part)
            budget.absorb(part)
    except KeyboardInterrupt:
        budget.interrupted = True
    if search.done(budget):
        return search.best().plan
    return improve(problem, seed, search.with_others(others), searches_of_auto(problem), budget).best.plan


class _Sampling:
    """Samples of one problem, and the best of them."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self._problem, self._simulator = problem, Simulator(problem)
        self._generator = torch.Generator().manual_seed(seed)
        self._seed = seed
        self.kept: list[Candidate] = []  # best first

    def best(self) -> Candidate:
        """The best so far.

        Raises:
            InfeasibleError: nothing fits.
        """
        if not self.kept:
            raise InfeasibleError(
                f"no placement of graph {self._problem.graph.name!r} that the policy proposes fits cluster "
                f"{self._problem.cluster.name!r}; try method auto, or devices with more memory."
            )
        return self.kept[0]

    def is_ahead_of(self, others: Sequence[Candidate]) -> bool:
        """Whether a plan of the policy is the best there is, those of others and of heuristics included."""
        found = self.with_others(others)
        return bool(found) and found[0].method == _NAME

    def with_others(self, others: Sequence[Candidate]) -> list[Candidate]:
        """The policy's best plan and those of others, best first; of equally good ones one.

        Only one, since the policy's plans are alike, and local search from plans that are not ends at better ones.
        """
        best: dict[float, Candidate] = {}
        own = [candidate for candidate in self.kept if candidate.method == _NAME]
        for candidate in (*own[:1], *(each for each in self.kept if each.method != _NAME), *others):
            best.setdefault(candidate.value_s, candidate)
        return [best[value_s] for value_s in sorted(best)]

    def done(self, budget: Budget) -> bool:
        """Whether there is nothing left to do, or no budget."""
        return budget.over() or (bool(self.kept) and budget.reached(self.kept[0].value_s))

    def zero_shot(self, policy: GraphPolicy, budget: Budget) -> None:
        """The greedy placement, earliest finish, as many samples as are quick, and quick heuristics."""
        n, n_devices = self._problem.op_s.shape
        self._score(policy.propose(self._problem, 1, self._generator, greedy=True))
        self._score(policy.propose_by(self._problem, torch.zeros_like(policy.taste.bias).unsqueeze(0)))
        count = max(_FEWEST, min(_MOST, _WORK // max(1, n * n_devices)))
        self._score(policy.propose(self._problem, count, self._generator))
        quick, spent = {name: baselines.METHODS[name] for name in _HEURISTICS}, Budget()
        with contextlib.suppress(InfeasibleError):
            for candidate in candidates(self._problem, self._seed, quick, spent):
                self._keep(candidate)
                plan = Plan(candidate.plan.device)  # the default priority may be faster than its own order
                score = self._simulator.score(plan)
                if score.feasible:
                    self._keep(Candidate(candidate.method, plan, score.step_time_s))
        budget.spend(count + 2, (count + 2) * prices.sample_s(self._problem))
        budget.absorb(spent)

    def sample(self, policy: GraphPolicy, budget: Budget) -> None:
        """Draw until the budget is over."""
        for count in self._batches(budget):
            self._score(policy.propose(self._problem, count, self._generator))

    def tune(self, policy: GraphPolicy, budget: Budget) -> None:
        """Move the policy's mean taste towards the tastes that are best here, until the budget is over."""
        adam = torch.optim.Adam([policy.taste.bias, policy.log_taste_noise], lr=_TUNING_RATE)
        for count in self._batches(budget):
            proposals = policy.propose_by_taste(self._problem, count, self._generator)
            logs = np.log(np.maximum(self._score(proposals), 1e-30))
            logs = np.where(np.isfinite(logs), logs, np.nan)
            if np.isnan(logs).all() or np.nanstd(logs) < _LEAST_SPREAD:
                continue
            gain = np.nanmean(logs) - np.where(np.isnan(logs), np.nanmax(logs), logs)
            advantage = torch.from_numpy(np.clip(gain / np.nanstd(logs), -1.0, 3.0)).float()
            log_density = policy.log_taste(self._problem, proposals.actions["taste"])
            adam.zero_grad()
            (-((advantage - advantage.mean()) * log_density).mean()).backward()  # type: ignore[no-untyped-call]
            adam.step()

    def _batches(self, budget: Budget) -> Iterator[int]:
        """Numbers of samples to draw, while there is budget for them."""
        while not self.done(budget):
            count = int(min(_BATCH, budget.evaluations_left()))
            yield count
            budget.spend(count, count * prices.sample_s(self._problem))

    def _score(self, proposals: Proposals) -> FloatArray:
        """Step times in seconds, float64 [k], infinite where a device overflows; keeps the best plans."""
        own = self._simulator.batch(proposals.device, orders=proposals.order)
        default = self._simulator.batch(proposals.device)
        times = np.stack([np.where(s.feasible, s.step_time_s, np.inf) for s in (own, default)])
        for k in np.argsort(times.min(axis=0), kind="stable")[:_KEPT].tolist():
            plan = proposals.plan(k) if times[0, k] <= times[1, k] else Plan(proposals.device[k])
            self._keep(Candidate(_NAME, plan, float(times[:, k].min())))
        return np.asarray(times.min(axis=0))

    def _keep(self, candidate: Candidate) -> None:
        if np.isfinite(candidate.value_s) and all(candidate.value_s != known.value_s for known in self.kept):
            self.kept = sorted([*self.kept, candidate], key=lambda known: known.value_s)[:_KEPT]
