"""The graph policy that comes with the package: trained over many graphs and clusters by `benchmarks/pretrain.py`."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

import numpy as np
import torch

import baselines
from baselines import prices
from baselines.budget import Budget
from baselines.portfolio import Candidate, candidates
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from env.simulation.simulator import Simulator
from graphs.errors import InfeasibleError, PolicyFileError
from placement.learning.policies.graph_policy import GraphPolicy
from placement.learning.policies.policy import Proposals
from placement.learning.policies.policy_file import load_policy

PRETRAINED = Path(__file__).with_name("pretrained.zip")
_NAME = "pretrained"
# Some milliseconds per thousand ops each; now and then one of them is better than all that the policy proposes.
_HEURISTICS = ("single_device", "heft", "m_etf", "min_cut", "mite", "dfs", "peft", "expert", "cpop")

_FEWEST, _MOST = 4, 64  # samples of a zero-shot placement
_WORK = 500_000  # ops times devices that are decoded for it: about 0.3 s on one core


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

    The best of the greedy placement, of earliest finish, of as many samples as take about 0.3 s, and of the heuristics
    that take milliseconds, one device among them. The plan depends on the seed only.

    Args:
        budget: has that work counted.

    Raises:
        InfeasibleError: nothing fits.
        PolicyFileError: as `load_pretrained`.
    """
    found = _zero_shot(problem, seed, load_pretrained(), budget)
    if not found:
        raise InfeasibleError(
            f"no placement of graph {problem.graph.name!r} that the policy proposes fits cluster "
            f"{problem.cluster.name!r}; try method auto, or devices with more memory."
        )
    return found[0].plan


def _zero_shot(problem: Problem, seed: int, policy: GraphPolicy, budget: Budget) -> list[Candidate]:
    """The best of the policy's placements, if one fits, and those of quick heuristics, best first.

    Only one of the policy's, since they are alike, and local search from plans that are not ends at better ones.
    """
    generator = torch.Generator().manual_seed(seed)
    count = max(_FEWEST, min(_MOST, _WORK // max(1, problem.op_s.size)))
    own = min(
        (
            _best_of(problem, policy.propose(problem, 1, generator, greedy=True)),
            _best_of(problem, policy.propose_by(problem, torch.zeros_like(policy.taste.bias).unsqueeze(0))),
            _best_of(problem, policy.propose(problem, count, generator)),
        ),
        key=lambda candidate: candidate.value_s,
    )
    found = [own] if math.isfinite(own.value_s) else []
    quick, spent, scorer = {name: baselines.METHODS[name] for name in _HEURISTICS}, Budget(), Scorer(problem)
    with contextlib.suppress(InfeasibleError):
        for candidate in candidates(problem, seed, quick, spent):
            plan = Plan(candidate.plan.device)  # the default priority may be faster than its own order
            found += [candidate, Candidate(candidate.method, plan, scorer.value(plan))]
    budget.spend(count + 2, (count + 2) * prices.sample_s(problem))
    budget.absorb(spent)
    return sorted((one for one in found if math.isfinite(one.value_s)), key=lambda one: one.value_s)


def _best_of(problem: Problem, proposals: Proposals) -> Candidate:
    """The fastest placement, in the proposed order or by default priority; of infinite step time where none fits."""
    simulator = Simulator(problem)
    scores = (simulator.batch(proposals.device, orders=proposals.order), simulator.batch(proposals.device))
    times = np.stack([np.where(score.feasible, score.step_time_s, np.inf) for score in scores])
    k = int(times.min(axis=0).argmin())
    plan = proposals.plan(k) if times[0, k] <= times[1, k] else Plan(proposals.device[k])
    return Candidate(_NAME, plan, float(times[:, k].min()))
