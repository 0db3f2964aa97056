"""``placement/Strategy-v0``: the moves of the local search as actions of an agent."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from numpy.typing import ArrayLike
from parallel.every_strategy import quick_network
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3
from training_steps import mlp

import placement  # noqa: F401  (registers the environment)
from baselines.strategies.estimating.estimator import Estimator
from baselines.strategies.searching.bound import ALL, strategy_bounds
from baselines.strategies.searching.moves import KINDS, neighbours
from baselines.strategies.searching.scoring import scored
from env.cluster import Cluster
from env.problem import Problem
from env.simulation.simulator import BatchScores, Simulator
from graphs import OpGraph
from graphs.capture import capture
from graphs.errors import MismatchError, StrategyError, UnknownNameError
from graphs.transforms.strategy import Strategy
from graphs.zoo import build
from placement.learning.strategies.actions import ACTIONS, moves
from placement.learning.strategies.environment import StrategyEnv
from placement.learning.strategies.observation import FEATURES

CLUSTER = quick_network((1e6,) * 4, 1e-3)


@cache
def step(name: str, batch_size: int = 8) -> OpGraph:
    made = build(name, small=True, batch_size=batch_size)
    return capture(made.model, made.train_args, train=True)


def make(graph: Any = None, cluster: Cluster = CLUSTER, **options: Any) -> StrategyEnv:
    env = gymnasium.make("placement/Strategy-v0", graph=graph or mlp(layers=3), cluster=cluster, **options).unwrapped
    assert isinstance(env, StrategyEnv)
    return env


@pytest.mark.parametrize("options", [{}, {"start": "random", "scorer": "simulate"}, {"max_steps": 3}])
def test_both_checkers_pass(options: dict[str, Any]) -> None:
    env = make([mlp(), step("gpt2")], render_mode="ansi", **options)
    check_env(env)
    check_env_for_sb3(env, skip_render_check=False)


def test_every_move_is_an_action_of_its_own() -> None:
    """Walks through the strategies of several models come to moves of all kinds, and each has its own number."""
    rng, seen = np.random.default_rng(0), set[str]()
    uneven = quick_network((1e6, 1e6, 5e5, 1e5), 1e-3)
    for graph, cluster in itertools.product((step("gpt2"), step("resnet50"), mlp()), (CLUSTER, uneven)):
        for start in ("none", "dp2 zero1", "tp2 sp | pp2 interleaved mb4", "dp4"):
            strategy = Strategy.parse(start)
            for _ in range(3):
                found = moves(graph, cluster, strategy)
                seen |= {ACTIONS[number].partition(":")[0] for number in found}
                listed = {after for _, after in neighbours(graph, cluster, strategy)}
                assert len(set(found.values())) == len(found) <= len(listed) + 1
                strategy = found[int(rng.choice(list(found)))]
    assert seen == {*KINDS, "stay"}
    assert len(set(ACTIONS)) == len(ACTIONS)


def test_rewards_add_up_to_how_many_times_faster_the_step_became() -> None:
    env, rng = make(max_steps=8), np.random.default_rng(3)
    _, first = env.reset(seed=0)
    total = 0.0
    for number in range(8):
        allowed = np.flatnonzero(env.action_masks())
        _, reward, terminated, truncated, info = env.step(rng.choice(allowed))
        total += reward
        assert (terminated, truncated) == (False, number == 7)
        assert info["best_step_time_s"] <= info["step_time_s"] or not info["feasible"]
    assert total == pytest.approx(math.log(first["step_time_s"] / info["step_time_s"]))
    with pytest.raises(MismatchError, match="the episode is over"):
        env.step(0)


def test_a_move_does_what_its_name_says() -> None:
    env = make(mlp(batch=32, layers=3))
    env.reset(seed=0)
    for action, text in (
        ("mesh: dp x2", "dp2"),
        ("mesh: pp x2", "dp2 | pp2 1f1b mb4"),
        ("order: zb-h1", "dp2 | pp2 zb-h1 mb4"),
        ("micro-batches: x2", "dp2 | pp2 zb-h1 mb8"),
        ("mesh: pp to tp x2", "dp2 | mb8 | tp2"),
        ("stay", "dp2 | mb8 | tp2"),
    ):
        assert env.action_masks()[ACTIONS.index(action)], action
        assert env.step(ACTIONS.index(action))[-1]["strategy"] == text


def test_what_is_not_allowed_is_masked_and_changes_nothing() -> None:
    env = make(mlp(batch=2))
    observation, info = env.reset(seed=0, options={"start": "dp2"})
    mask = env.action_masks()
    impossible, refused = ACTIONS.index("order: gpipe"), ACTIONS.index("mesh: dp x2")
    assert not mask[impossible]
    assert not mask[refused]
    for action in (impossible, refused):
        after, reward, _, _, told = env.step(action)
        assert (reward, told["strategy"]) == (0.0, info["strategy"])
        assert (np.flatnonzero(after != observation) == FEATURES.index("share of steps left")).all()


def test_masks_without_estimates_say_which_moves_there_are() -> None:
    (quick, _), (exact, _) = ((env, env.reset(seed=0)) for env in (make(masks="possible"), make()))
    possible = set(np.flatnonzero(quick.action_masks()).tolist())
    assert possible == set(moves(quick.task.graph, CLUSTER, Strategy()))
    assert len(quick.task.estimates) == 1
    assert set(np.flatnonzero(exact.action_masks()).tolist()) <= possible


def test_masks_lead_to_what_fits() -> None:
    """One device lacks memory: moves may lack less, and from what fits none leads to what does not."""
    graph = step("bert_base")
    kept = int(graph.kept_bytes.sum())
    env = make(graph, quick_network((1e9,) * 4, memory_bytes=int(0.6 * kept)))
    rng = np.random.default_rng(0)
    _, info = env.reset(seed=0)
    assert not info["feasible"]
    estimator, lacking = Estimator(graph, env.task.cluster), math.inf
    for _ in range(12):
        *_, info = env.step(rng.choice(np.flatnonzero(env.action_masks())[1:]))
        found = estimator.estimate(Strategy.parse(info["strategy"]))
        assert found.fits or found.missing_bytes < lacking
        lacking = found.missing_bytes
    assert info["feasible"]


def test_times_are_those_of_the_estimator_or_of_the_simulator() -> None:
    graph = mlp(layers=3)
    times = {}
    for scorer in ("estimate", "simulate"):
        env = make(graph, scorer=scorer)
        env.reset(seed=0, options={"start": "dp2 | tp2"})
        times[scorer] = env.step(0)[-1]["step_time_s"]
    strategy = Strategy.parse("dp2 | tp2")
    assert times["estimate"] == Estimator(graph, CLUSTER).estimate(strategy).step_time_s
    assert times["simulate"] == scored(graph, CLUSTER, strategy).step_time_s
    assert strategy_bounds(graph, CLUSTER)[ALL] <= times["simulate"]


def test_batch_statistics_stay_those_of_the_whole_batch() -> None:
    env = make(step("resnet50"))
    env.reset(seed=0)
    assert env.step(ACTIONS.index("mesh: dp x2"))[-1]["strategy"] == "dp2 | statistics=sync"
    assert env.step(ACTIONS.index("mesh: dp /2"))[-1]["strategy"] == "none"


def test_one_seed_is_one_episode() -> None:
    first, second = (make([mlp(), mlp(layers=3)], start="random") for _ in range(2))
    for _ in range(3):
        ((a, told), (b, said)) = (env.reset(seed=5) for env in (first, second))
        assert (a == b).all()
        assert told == said
        action = first.action_space.sample()
        assert first.step(action)[1:] == second.step(action)[1:]


def test_what_makes_no_sense_is_refused_in_a_sentence() -> None:
    with pytest.raises(UnknownNameError, match="scorer"):
        make(scorer="guess")
    with pytest.raises(UnknownNameError, match="masks"):
        make(masks="some")
    with pytest.raises(MismatchError, match="max_steps is 0; expected 1 or more"):
        make(max_steps=0)
    with pytest.raises(StrategyError):
        make(start="dp")
    env = make()
    with pytest.raises(MismatchError, match="no option 'tasks'; known: task, start"):
        env.reset(options={"tasks": 1})
    with pytest.raises(MismatchError, match="task 3 does not exist"):
        env.reset(options={"task": 3})
    with pytest.raises(StrategyError, match="needs 64 devices"):
        env.reset(options={"start": "dp64"})


@pytest.mark.filterwarnings("ignore:Your observation:UserWarning")
def test_an_agent_learns_to_use_all_devices() -> None:
    """From one device: after some hundred episodes of two moves it does better than by chance."""
    from sb3_contrib import MaskablePPO

    env = make(mlp(batch=16, layers=3), max_steps=2)
    agent = MaskablePPO("MlpPolicy", env, n_steps=64, batch_size=64, n_epochs=4, learning_rate=3e-3, seed=0)
    rng = np.random.default_rng(0)

    def mean_return(choose: Any) -> float:
        total = 0.0
        for _ in range(40):
            observation, _ = env.reset()
            for _ in range(2):
                observation, reward, *_ = env.step(choose(observation, env.action_masks()))
                total += reward
        return total / 40

    by_chance = mean_return(lambda observation, mask: rng.choice(np.flatnonzero(mask)))
    agent.learn(256)
    learned = mean_return(lambda observation, mask: agent.predict(observation, action_masks=mask)[0])
    assert learned > by_chance + 0.15


class Clocked:
    """Says that every strategy takes as many seconds as its text has letters; those with ``tp`` cannot be run."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def strategy_s(self, strategy: str) -> float:
        return math.inf if "tp" in strategy else float(len(strategy))

    def batch(self, devices: ArrayLike, *, orders: ArrayLike | None = None) -> BatchScores:
        raise NotImplementedError


def test_strategies_may_really_be_run() -> None:
    env = StrategyEnv(step("gpt2"), CLUSTER, scorer=Clocked)
    _, info = env.reset(seed=0, options={"start": "dp2"})
    assert info["step_time_s"] == len("dp2")
    assert env.task.score(Strategy.parse("tp2")) is None


def test_a_scorer_of_placements_alone_is_refused() -> None:
    env = StrategyEnv(step("gpt2"), CLUSTER, scorer=Simulator)
    with pytest.raises(MismatchError, match="placements alone"):
        env.reset(seed=0)
