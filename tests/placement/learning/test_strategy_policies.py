"""Policies over strategies, and their training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parallel.every_strategy import quick_network
from training_steps import mlp

from graphs.errors import UnknownNameError
from placement.learning.strategies.actions import ACTIONS
from placement.learning.strategies.environment import StrategyEnv
from placement.learning.strategies.policies import POLICIES, KindThenMove
from placement.learning.strategies.reinforce import StrategyLearner, odds_of, proposed

CLUSTER = quick_network((1e6,) * 4, 1e-3)


def make(steps: int = 6) -> StrategyEnv:
    return StrategyEnv(mlp(layers=3), CLUSTER, steps)


def trained(env: StrategyEnv, name: str, seed: int, updates: int) -> StrategyLearner:
    learner = StrategyLearner(env, name, seed)
    for _ in range(updates):
        learner.update()
    return learner


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_that_is_gone_on_with_makes_the_same_updates(name: str) -> None:
    whole, first = trained(make(3), name, 1, 3), trained(make(3), name, 1, 2)
    second = StrategyLearner(make(3), name, 1)
    second.restore(first.state())
    second.update()
    assert second.returns == whole.returns[-len(second.returns) :]
    assert (second.best, second.samples) == (whole.best, whole.samples)
    weights = zip(second.policy.parameters(), whole.policy.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)


@pytest.mark.parametrize("name", POLICIES)
def test_odds_are_those_of_the_moves_that_are_possible(name: str) -> None:
    env = make()
    observation, _ = env.reset(seed=0)
    with torch.no_grad():
        odds = odds_of(POLICIES[name](), env, observation).exp().numpy()
    mask = env.action_masks()
    assert 1 < mask.sum() < len(ACTIONS)
    assert odds.sum() == pytest.approx(1, abs=1e-5)
    assert (odds[mask] > 0).all()
    assert (odds[~mask] == 0).all()


def test_hierarchical_draws_the_kind_of_a_move_first() -> None:
    """Where all logits are 0, kinds are as likely as each other, however many moves they have."""
    policy, env = KindThenMove(), make()
    for parameter in policy.parameters():
        torch.nn.init.zeros_(parameter)
    observation, _ = env.reset(seed=0)
    odds = odds_of(policy, env, observation).exp().detach().numpy()
    words = np.array([action.partition(":")[0] for action in ACTIONS])
    mask = env.action_masks()
    kinds = set(words[mask])
    assert len(kinds) > 2
    for kind in kinds:
        assert odds[words == kind].sum() == pytest.approx(1 / len(kinds), abs=1e-5)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_learns_to_make_the_step_faster(name: str) -> None:
    env = make()
    returns = trained(env, name, seed=1, updates=30).returns
    first, last = (float(np.mean(part)) for part in np.array_split(returns, 5)[::4])
    assert last > first + 0.1
    starts = list(proposed(env.tasks[0], 3))
    assert len(starts) == 3
    assert all(env.tasks[0].estimate(start) is not None for start in starts)


def test_a_training_depends_on_its_seed_alone() -> None:
    first, second, other = (trained(make(3), "graph", seed, 2).returns for seed in (1, 1, 2))
    assert first == second != other


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="policy 'ppo'"):
        StrategyLearner(make(), "ppo", 0)
