"""The vectorised environment of stable-baselines3: the same episodes as single ones, scored in one call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from environment_cases import FOUR, GROUP, IDS, IMPROVE, SEQUENTIAL, Counting, make, small_cluster, small_graph
from hypothesis import given
from hypothesis import strategies as st
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecCheckNan, VecMonitor
from strategies import problems

from env.cluster import Cluster
from env.gym.registration import ENTRY_POINTS
from env.gym.task import Task, make_tasks
from env.gym.vector import BATCHES, PlacementVecEnv
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.errors import InfeasibleError, MismatchError, UnknownNameError
from graphs.generators import layered, random_dag
from graphs.opgraph import Op, OpGraph


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Networks this small lose more to a second thread than they gain, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


OPTIONS: dict[str, list[dict[str, Any]]] = {
    GROUP: [{}, {"with_order": True, "reward": "normalized"}],
    SEQUENTIAL: [{}, {"shaping": "bound", "order": "upward_rank"}],
    IMPROVE: [{"max_steps": 3}, {"start": "random", "max_steps": 4}],
}
CASES = [(name, options) for name, found in OPTIONS.items() for options in found]


def test_every_id_has_a_vectorised_form() -> None:
    assert list(BATCHES) == list(ENTRY_POINTS) == list(IDS)


@given(st.data(), problems(), st.sampled_from(CASES))
def test_episodes_are_those_of_single_environments(
    data: st.DataObject, problem: Problem, case: tuple[str, dict[str, Any]]
) -> None:
    name, options = case
    graphs = [problem.graph, random_dag(data.draw(st.integers(2, 9)), data.draw(st.integers(0, 99)))]
    if not all(isinstance(task, Task) for task in make_tasks(graphs, problem.cluster)):
        return
    k, seed = 3, data.draw(st.integers(0, 2**16))
    many = PlacementVecEnv(name, k, graph=graphs, cluster=problem.cluster, **options)
    singles = [make(name, graphs, problem.cluster, **options) for _ in range(k)]
    many.seed(seed)
    seen = many.reset()
    for i, env in enumerate(singles):
        first, info = env.reset(seed=seed + i)
        assert info == many.reset_infos[i]
        assert_row_equal(seen, i, first)
    many.action_space.seed(seed)
    for _ in range(12):
        masks = get_action_masks(many)
        actions = np.array([many.action_space.sample() for _ in range(k)])
        seen, rewards, dones, infos = many.step(actions)
        for i, env in enumerate(singles):
            assert np.array_equal(masks[i], env.action_masks())
            observation, reward, terminated, truncated, info = env.step(actions[i])
            assert (np.float32(reward), terminated or truncated) == (rewards[i], dones[i])
            if dones[i]:
                last = infos[i].pop("terminal_observation")
                assert infos[i].pop("TimeLimit.truncated") is (truncated and not terminated)
                assert_row_equal({key: value[np.newaxis] for key, value in last.items()}, 0, observation)
                observation, begun = env.reset()
                assert begun == many.reset_infos[i]
            assert info == infos[i]
            assert_row_equal(seen, i, observation)


def assert_row_equal(stacked: dict[str, Any], row: int, single: dict[str, Any]) -> None:
    assert stacked.keys() == single.keys()
    for key, value in single.items():
        assert stacked[key].dtype == value.dtype
        assert np.array_equal(stacked[key][row], value), key


@pytest.mark.parametrize(("name", "steps"), [(GROUP, 1), (SEQUENTIAL, 30), (IMPROVE, 1)])
def test_what_is_complete_is_scored_in_one_call(name: str, steps: int) -> None:
    counting = Counting()
    many = PlacementVecEnv(name, 8, graph=layered(30, 0), cluster=FOUR, scorer=counting)
    many.reset()
    before = len(counting.asked)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        moves = rng.integers(0, 4, (8, 30)) if name == GROUP else rng.integers(0, 4, 8)
        many.step(moves + 4 * (np.arange(8) if name == IMPROVE else 0))
    assert len(counting.asked) == before + 1
    assert name == IMPROVE or counting.asked[-1] == 8


def test_last_scores_are_those_of_the_simulator() -> None:
    graph = layered(30, 0)
    many = PlacementVecEnv(GROUP, 5, graph=graph, cluster=FOUR, with_order=True)
    many.reset()
    rng = np.random.default_rng(0)
    actions = np.concatenate([rng.integers(0, 4, (5, 30)), rng.integers(0, 30, (5, 30))], axis=1)
    _, rewards, dones, infos = many.step(actions)
    scores = Simulator(Problem(graph, FOUR)).batch(actions[:, :30], orders=actions[:, 30:])
    assert np.array_equal(many.last_scores.step_time_s, scores.step_time_s)
    assert many.last_scores.feasible.all()
    assert [info["step_time_s"] for info in infos] == scores.step_time_s.tolist()
    assert dones.all()
    np.testing.assert_allclose(rewards, -np.sqrt(scores.step_time_s), rtol=1e-6)


def test_scores_of_one_step_are_not_changed_by_the_next() -> None:
    many = PlacementVecEnv(SEQUENTIAL, 2, graph=small_graph(), cluster=small_cluster())
    many.reset()
    for action in ([0, 0], [1, 1], [1, 1]):
        many.step(np.array(action))
    kept = many.last_scores
    before = kept.step_time_s.copy()
    many.step(np.array([0, 1]))  # the second ends: pins
    assert np.array_equal(kept.step_time_s, before)
    assert many.last_scores.step_time_s.tolist() == [before[0], np.inf]


def test_what_changes_is_new_and_what_does_not_is_handed_out_again() -> None:
    many = PlacementVecEnv(SEQUENTIAL, 2, graph=small_graph(), cluster=small_cluster())
    first = many.reset()
    kept = {key: value.copy() for key, value in first.items()}
    second, *_ = many.step(np.array([0, 0]))
    for key, value in kept.items():
        assert np.array_equal(first[key], value)
    assert first["unit_features"] is second["unit_features"]
    assert not np.shares_memory(first["placement"], second["placement"])


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_run_goes_on_from_its_state_as_if_nothing_had_happened(name: str, options: dict[str, Any]) -> None:
    def fresh() -> PlacementVecEnv:
        return PlacementVecEnv(name, 3, graph=[layered(9, 0), small_graph()], cluster=small_cluster(10**12), **options)

    first, second = fresh(), fresh()
    first.seed(5)
    first.reset()
    first.action_space.seed(0)
    actions = [np.array([first.action_space.sample() for _ in range(3)]) for _ in range(24)]
    for action in actions[:7]:
        first.step(action)
    state = first.state()
    saved = json.loads(
        json.dumps({"arrays": {k: v.tolist() for k, v in state["arrays"].items()}, "generators": state["generators"]})
    )
    seen = second.restore(saved)
    assert np.array_equal(get_action_masks(first), get_action_masks(second))
    for action in actions[7:]:
        ours, theirs = first.step(action), second.step(action)
        for key in ours[0]:
            assert np.array_equal(ours[0][key], theirs[0][key])
        assert np.array_equal(ours[1], theirs[1])
        assert np.array_equal(ours[2], theirs[2])
        assert [info.get("step_time_s") for info in ours[3]] == [info.get("step_time_s") for info in theirs[3]]
    assert seen.keys() == ours[0].keys()
    other = PlacementVecEnv(name, 4, graph=small_graph(), cluster=small_cluster(), **options)
    with pytest.raises(MismatchError, match="the state is of other environments"):
        other.restore(state)


def test_options_choose_tasks_at_the_next_reset_only() -> None:
    many = PlacementVecEnv(GROUP, 4, graph=[layered(9, 0), small_graph()], cluster=small_cluster(10**12))
    many.seed(0)
    many.set_options([{"task": i % 2} for i in range(4)])
    many.reset()
    assert [info["task"] for info in many.reset_infos] == [0, 1, 0, 1]
    drawn = set()
    for _ in range(9):
        many.reset()
        drawn |= {tuple(info["task"] for info in many.reset_infos)}
    assert len(drawn) > 1


@pytest.mark.parametrize("name", IDS)
def test_sb3_finds_what_it_looks_for(name: str) -> None:
    many = PlacementVecEnv(name, 2, graph=small_graph(), cluster=small_cluster(), render_mode="rgb_array")
    many.reset()
    assert is_masking_supported(many)
    assert many.get_attr("action_masks", indices=1)[0]()[0].shape == get_action_masks(many)[1].shape
    assert not many.has_attr("compute_reward")
    assert many.env_is_wrapped(gymnasium.Wrapper) == [False, False]
    assert many.get_attr("tasks", indices=[0]) == [many.tasks]
    image = many.render()
    assert image is not None
    assert image.ndim == 3
    with pytest.raises(AttributeError, match="action_masks and render"):
        many.env_method("step", 0)
    with pytest.raises(AttributeError, match="share their attributes"):
        many.set_attr("render_mode", "ansi")
    many.close()


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(UnknownNameError, match="unknown environment 'placement/Group-v1', did you mean"):
        PlacementVecEnv("placement/Group-v1", 2, graph=small_graph(), cluster=small_cluster())
    with pytest.raises(MismatchError, match="num_envs is 0"):
        PlacementVecEnv(GROUP, 0, graph=small_graph(), cluster=small_cluster())
    many = PlacementVecEnv(GROUP, 2, graph=small_graph(), cluster=small_cluster())
    many.reset()
    with pytest.raises(MismatchError, match="for each of 2 environments"):
        many.step(np.array([0, 1, 1]))
    with pytest.raises(MismatchError, match="ranges of action_space"):
        many.step(np.array([[0, 1, 1], [0, 1, 7]]))
    huge = OpGraph.build([Op("huge", kept_bytes=10**15)], [])
    with pytest.raises(InfeasibleError, match="'huge' needs"):
        PlacementVecEnv(GROUP, 2, graph=huge, cluster=FOUR).reset()


@pytest.mark.usefixtures("one_thread")
def test_maskable_ppo_finds_the_best_of_a_small_task() -> None:
    graph, cluster = small_graph(kept_bytes=40), small_cluster(100)  # fits only apart
    env = VecCheckNan(VecMonitor(PlacementVecEnv(SEQUENTIAL, 8, graph=graph, cluster=cluster, reward="normalized")))
    model = MaskablePPO("MultiInputPolicy", env, n_steps=24, batch_size=64, learning_rate=3e-3, seed=0)
    model.learn(3_000)
    single = make(SEQUENTIAL, graph, cluster)
    observation, _ = single.reset()
    done, info = False, {}
    while not done:
        action, _ = model.predict(observation, action_masks=single.action_masks(), deterministic=True)
        observation, _, done, _, info = single.step(action)
    # Both GPUs are alike; the pair beside c on another device is the only way that fits and spares the CPU.
    assert info["feasible"]
    assert info["step_time_s"] == pytest.approx(3.02, abs=1e-3)


@pytest.mark.usefixtures("one_thread")
def test_ppo_trains_on_group() -> None:
    env = PlacementVecEnv(GROUP, 16, graph=layered(6, 0), cluster=FOUR, reward="normalized")
    model = PPO("MultiInputPolicy", env, n_steps=4, batch_size=64, learning_rate=1e-2, seed=0)
    model.learn(64)
    before = env.last_scores.step_time_s.mean()
    model.learn(2_500)
    assert env.last_scores.step_time_s.mean() < 0.7 * before


def test_a_step_before_a_reset_and_odd_numbers_are_refused() -> None:
    graph, cluster = layered(10, seed=0), Cluster.preset("4xV100-pcie")
    env = PlacementVecEnv("placement:placement/Group-v0", 2, graph=graph, cluster=cluster)
    with pytest.raises(MismatchError, match="call reset first"):
        env.step(np.zeros((2, 10), dtype=np.int64))
    for odd in ("a", None, 1.5, True, 0):
        with pytest.raises(MismatchError, match="whole number"):
            PlacementVecEnv("placement/Group-v0", odd, graph=graph, cluster=cluster)  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="what state"):
        env.restore({})
