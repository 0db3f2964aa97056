"""`train_strategies`: REINFORCE on ``placement/Strategy-v0``, for the policies of `policies`.

Source: R. Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning", 1992,
with the mean return of the other episodes of a batch, which begin alike, for a baseline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baselines.strategies.searching.records import Estimate
from graphs.errors import UnknownNameError
from graphs.transforms.strategy import Strategy
from placement.learning.learners.threads import single_threaded
from placement.learning.strategies.environment import StrategyEnv, StrategyTask
from placement.learning.strategies.policies import POLICIES, Policy, entropy

_BATCH = 8  # episodes of one task, from one start, for an update
_RATE, _ENTROPY, _LARGEST = 3e-3, 0.01, 1.0  # of learning, what entropy counts, norm of a gradient


@dataclass(frozen=True)
class StrategyTraining:
    """A policy over strategies, trained.

    Attributes:
        returns: of every episode, the logarithm of how many times faster the step became.
    """

    policy: Policy
    returns: tuple[float, ...]


def train_strategies(
    env: StrategyEnv, policy: str, *, seed: int = 0, updates: int | None = None, budget_s: float = math.inf
) -> StrategyTraining:
    """Train a policy on the tasks of an environment, each drawn as often as any other.

    Args:
        policy: ``"hierarchical"`` or ``"graph"``.
        updates: with these alone the outcome depends on the seed only; None for as many as the time allows.
        budget_s: seconds.

    Raises:
        UnknownNameError: another policy.
        ValueError: neither updates nor a budget.
    """
    if policy not in POLICIES:
        raise UnknownNameError("policy", policy, POLICIES)
    if updates is None and math.isinf(budget_s):
        raise ValueError("training ends after a number of updates or after some seconds; give one of them.")
    end_s, returns, done = time.monotonic() + budget_s, list[float](), 0
    with single_threaded(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = POLICIES[policy]()
        optimizer = torch.optim.Adam(network.parameters(), _RATE)
        env.reset(seed=seed)
        while (updates is None or done < updates) and time.monotonic() < end_s:
            env.reset()
            options = {"task": env.tasks.index(env.task), "start": env.here.text}
            episodes = [_episode(env, network, options) for _ in range(_BATCH)]
            returns += [float(rewards.sum()) for _, _, rewards in episodes]
            _learn(network, optimizer, episodes)
            done += 1
    return StrategyTraining(network, tuple(returns))


def _episode(env: StrategyEnv, policy: Policy, options: dict[str, object]) -> tuple[Tensor, Tensor, Tensor]:
    """``(log-probabilities of the moves, entropies, rewards)``, float32 [steps] each."""
    log_p, entropies, rewards = [], [], []
    observation, _ = env.reset(options=options)
    is_over = False
    while not is_over:
        odds = odds_of(policy, env, observation)
        action = int(torch.multinomial(odds.detach().exp(), 1))
        observation, reward, _, is_over, _ = env.step(action)
        log_p.append(odds[action])
        entropies.append(entropy(odds.unsqueeze(0))[0])
        rewards.append(reward)
    return torch.stack(log_p), torch.stack(entropies), torch.tensor(rewards)


def odds_of(policy: Policy, env: StrategyEnv, observation: np.ndarray) -> Tensor:
    """float32 [A]: log-probabilities of the moves where the environment stands."""
    mask = torch.from_numpy(env.action_masks()).unsqueeze(0)
    result: Tensor = policy(torch.from_numpy(observation).unsqueeze(0), mask, env.task.graph)[0]
    return result


def _learn(policy: Policy, optimizer: torch.optim.Optimizer, episodes: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """One update: each move counts by what was gained from it on, against the other episodes."""
    # [episodes, steps]: rewards from each step to the end.
    gained = torch.stack([rewards.flip(0).cumsum(0).flip(0) for _, _, rewards in episodes])
    others = (gained.sum(dim=0) - gained) / (len(episodes) - 1)
    advantage = (gained - others) / (gained - others).std().clamp(min=1e-3)
    log_p = torch.stack([each for each, _, _ in episodes])
    entropies = torch.stack([each for _, each, _ in episodes])
    loss = -(advantage * log_p).mean() - _ENTROPY * entropies.mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(policy.parameters(), _LARGEST)
    optimizer.step()


def proposed(task: StrategyTask, count: int) -> Iterator[Strategy]:
    """The best by estimate of those that episodes of a task came to, to begin a search with; what fits alone."""
    known: list[Estimate] = [found for found in task.estimates.values() if found is not None and found.fits]
    for found in sorted(known, key=lambda found: found.step_time_s)[:count]:
        yield found.strategy
