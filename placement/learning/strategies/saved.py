"""Policies over strategies in policy files, and as what begins a search over strategies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from baselines.budget import Budget
from env.cluster import Cluster
from graphs.errors import PolicyFileError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import NONE, Strategy
from placement.learning.policies.policy_file import (
    OF_STRATEGIES,
    PolicyOrigin,
    misfit,
    read_policy,
    write_policy,
)
from placement.learning.strategies.environment import RANDOM, StrategyEnv
from placement.learning.strategies.policies import POLICIES, Policy
from placement.learning.strategies.reinforce import MASKS, odds_of, proposed
from placement.processes.threads import single_threaded

ENVIRONMENT = "placement/Strategy-v0"
_EPISODES, _STEPS, _PROPOSED = 16, 12, 8
_SHARE = 0.2  # of a search's time goes into proposing


def save_strategy_policy(path: Path, policy: Policy, origin: PolicyOrigin) -> None:
    """Write a policy file, atomically.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    write_policy(path, policy.state_dict(), {"policy": policy.name, OF_STRATEGIES: ENVIRONMENT}, origin)


def load_strategy_policy(path: str | os.PathLike[str]) -> Policy | None:
    """The policy of a file; None where that places ops.

    Raises:
        PolicyFileError: no policy file, damaged, or of a policy that this version does not have.
    """
    where = os.fspath(path)
    record, weights = read_policy(path)
    if OF_STRATEGIES not in record:
        return None
    name = str(record.get("policy"))
    if record[OF_STRATEGIES] != ENVIRONMENT or name not in POLICIES:
        raise PolicyFileError(
            f"{where} holds a policy {name!r} of {record[OF_STRATEGIES]!r}, which this version does not have; it has "
            f"{', '.join(POLICIES)} of {ENVIRONMENT}."
        )
    with torch.random.fork_rng(devices=[]):
        policy = POLICIES[name]()
    try:
        policy.load_state_dict(weights)
    except (RuntimeError, KeyError, ValueError):
        raise misfit(where) from None
    return policy.eval()


@dataclass(frozen=True, eq=False)
class Proposer:
    """A trained policy that says where a search over strategies begins.

    Attributes:
        policy: which.
    """

    policy: Policy

    def __call__(self, graph: OpGraph, cluster: Cluster, seed: int, budget: Budget) -> tuple[Strategy, ...]:
        """The best by estimate of what some episodes come to, from one device and from strategies drawn at random.

        Args:
            budget: of the search; a fifth of its time is spent at most.
        """
        env = StrategyEnv(graph, cluster, _STEPS, masks=MASKS)
        env.reset(seed=seed)
        generator = torch.Generator().manual_seed(seed % 2**63)
        part = budget.part(_SHARE)
        with single_threaded(), torch.no_grad():
            for episode in range(_EPISODES):
                observation, _ = env.reset(options={"start": RANDOM if episode % 2 else NONE})
                for _ in range(_STEPS):
                    if part.over():
                        return tuple(proposed(env.task, _PROPOSED))
                    odds = odds_of(self.policy, env, observation).exp()
                    observation = env.step(int(torch.multinomial(odds, 1, generator=generator)))[0]
        return tuple(proposed(env.task, _PROPOSED))
