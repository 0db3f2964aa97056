"""Environments score what the simulator scores: Group, Sequential, Improve, and many tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from cases.environment_tasks import gpus
from environment_cases import FOUR, GROUP, IDS, IMPROVE, SEQUENTIAL, Counting, make, small_cluster, small_graph
from hypothesis import given
from hypothesis import strategies as st
from strategies import problems

import placement
from baselines.paths import importance, upward_rank
from env.cluster import Cluster, both_ways
from env.gym.base import PlacementEnv
from env.gym.batch import EnvOptions
from env.gym.observations import UNIT_FEATURES
from env.gym.op_features import OpFeatures
from env.gym.rewards import REWARDS, Outcome
from env.gym.sequential import SequentialBatch
from env.gym.task import ORDERS, Task, make_tasks
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.errors import MismatchError
from graphs.generators import layered
from graphs.opgraph import Op, OpGraph

# -- Group --------------------------------------------------------------------------------------------------


def test_group_scores_what_the_simulator_scores() -> None:
    graph = layered(40, 0)
    env = make(GROUP, graph, FOUR)
    env.reset(seed=0)
    env.action_space.seed(0)
    for _ in range(3):
        action = env.action_space.sample()
        env.reset()
        observation, reward, terminated, truncated, info = env.step(action)
        score = Simulator(Problem(graph, FOUR)).score(Plan(action))
        assert (info["step_time_s"], info["feasible"]) == (score.step_time_s, True)
        assert reward == -np.sqrt(score.step_time_s)
        assert (terminated, truncated) == (True, False)
        assert observation in env.observation_space


def test_group_with_order_runs_the_ops_in_that_order() -> None:
    graph = layered(40, 0)
    env = make(GROUP, graph, FOUR, with_order=True)
    assert env.action_space == gymnasium.spaces.MultiDiscrete([4] * 40 + [40] * 40)
    env.reset(seed=0)
    env.action_space.seed(1)
    action = env.action_space.sample()
    *_, info = env.step(action)
    assert info["step_time_s"] == Simulator(Problem(graph, FOUR)).score(Plan(action[:40], action[40:])).step_time_s
    assert env.action_masks().shape == (40 * 4 + 40 * 40,)


def test_group_counts_what_pins_forbid_as_infeasible() -> None:
    env = make(GROUP, small_graph(), small_cluster())
    env.reset()
    _, reward, _, _, info = env.step(np.array([1, 1, 1]))
    assert (reward, info["feasible"], info["step_time_s"]) == (-10.0, False, np.inf)
    assert "pins" in info["reason"]
    assert env.action_masks().reshape(3, 3).tolist() == [[True, False, False], [True] * 3, [True] * 3]


def test_too_little_memory_is_infeasible_and_says_where() -> None:
    env = make(GROUP, small_graph(kept_bytes=40), small_cluster(100))
    env.reset()
    *_, info = env.step(np.array([0, 1, 1]))
    assert not info["feasible"]
    assert "gpu0" in info["reason"]
    env.reset()
    *_, info = env.step(np.array([0, 1, 2]))
    assert info["feasible"]


def play(env: PlacementEnv, devices: list[int], **reset: Any) -> tuple[list[float], dict[str, Any]]:
    env.reset(**reset)
    rewards, info, done = [], {}, False
    for device in devices:
        assert not done
        _, reward, done, truncated, info = env.step(device)
        assert not truncated
        rewards.append(float(reward))
    assert done
    return rewards, info


# -- Sequential ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [*ORDERS, [2, 0, 1]])
def test_sequential_scores_the_whole_placement_at_the_end(order: Any) -> None:
    graph, cluster = small_graph(), small_cluster()
    env = make(SEQUENTIAL, graph, cluster, order=order)
    device = {0: 0, 1: 1, 2: 2}
    (task,) = env.tasks
    assert isinstance(task, Task)
    rewards, info = play(env, [device[unit] for unit in task.sequence.tolist()])
    score = Simulator(Problem(graph, cluster)).score(Plan([0, 1, 1, 2]))
    assert rewards == [0.0, 0.0, -np.sqrt(score.step_time_s)]
    assert (info["step_time_s"], info["feasible"]) == (score.step_time_s, True)


def test_sequential_shows_what_is_placed_and_what_comes_next() -> None:
    env = make(SEQUENTIAL, small_graph(kept_bytes=40), small_cluster(200))
    observation, _ = env.reset()
    assert observation["next_unit"].tolist() == [0]
    assert observation["placement"].tolist() == [-1, -1, -1]
    assert observation["action_mask"].tolist() == [1, 0, 0]
    observation, *_ = env.step(0)
    assert observation["next_unit"].tolist() == [1]
    assert observation["placement"].tolist() == [0, -1, -1]
    np.testing.assert_array_equal(observation["next_features"], observation["unit_features"][1])
    observation, *_ = env.step(1)
    tick_s = (1.0 + (2 + 1 + 1) / 3 + (2 + 1 + 1) / 3) / 3
    # Columns: load over the reference, memory used, time to fetch the next unit's inputs, its time there.
    reference_s = 3.01 + 8e-9
    expected = [
        [1 / reference_s, 0, np.log1p((0.01 + 2e-9) / tick_s), np.log1p(2 / tick_s)],
        [1 / reference_s, 80 / 200, 0, np.log1p(1 / tick_s)],
        [0, 0, np.log1p((0.01 + 2e-9) / tick_s), np.log1p(1 / tick_s)],
    ]
    np.testing.assert_allclose(observation["device_state"], expected, rtol=1e-5)
    observation, _, terminated, _, _ = env.step(2)
    assert terminated
    assert observation["next_unit"].tolist() == [-1]
    assert not observation["action_mask"].any()


def test_the_mask_knows_memory_and_falls_back_to_pins() -> None:
    # The pair keeps 80 bytes, c 40 more: together too much for a GPU of 100.
    env = make(SEQUENTIAL, small_graph(kept_bytes=40), small_cluster(100))
    env.reset()
    env.step(0)
    observation, *_ = env.step(1)
    assert observation["action_mask"].tolist() == [1, 0, 1]
    assert env.action_masks().tolist() == [True, False, True]
    graph = OpGraph.build([Op("x", kept_bytes=45), Op("y", kept_bytes=45), Op("z", kept_bytes=60)], [])
    env = make(SEQUENTIAL, graph, gpus(100))
    env.reset()
    env.step(0)
    observation, *_ = env.step(1)
    assert observation["action_mask"].tolist() == [1, 1]
    _, reward, terminated, _, info = env.step(1)
    assert (reward, terminated, info["feasible"]) == (-10.0, True, False)


def test_an_action_that_pins_forbid_ends_the_episode() -> None:
    counting = Counting()
    env = make(SEQUENTIAL, small_graph(), small_cluster(), scorer=counting)
    rewards, info = play(env, [2])
    assert rewards == [-10.0]
    assert (info["feasible"], info["step_time_s"]) == (False, np.inf)
    assert "'load'" in info["reason"]
    assert counting.asked == []
    with pytest.raises(MismatchError, match="call reset"):
        env.step(0)


@given(problems(), st.sampled_from(sorted(REWARDS)), st.integers(0, 99))
def test_shaped_rewards_telescope(problem: Problem, reward: str, seed: int) -> None:
    (task,) = make_tasks(problem.graph, problem.cluster)
    if not isinstance(task, Task):
        return
    plain, shaped = (
        make(SEQUENTIAL, problem.graph, problem.cluster, reward=reward, shaping=shaping) for shaping in (None, "bound")
    )
    rng = np.random.default_rng(seed)
    plain.reset()
    shaped.reset()
    shaped_sum, done = 0.0, False
    while not done:
        action = rng.choice(np.flatnonzero(plain.action_masks()))
        _, last, done, _, _ = plain.step(action)
        _, gained, again, _, _ = shaped.step(action)
        assert done == again
        shaped_sum += float(gained)
        # A bound of what may still come only grows, so before the end nothing is gained.
        assert done or gained <= 1e-9
    bound_s, k = np.array([task.bound_s]), np.ones(1, dtype=bool)
    start = REWARDS[reward](Outcome(bound_s, k, np.zeros(1), np.array([task.reference_s])))[0]
    assert shaped_sum == pytest.approx(float(last) - start, rel=1e-9, abs=1e-9)


@given(problems())
def test_ranks_are_those_that_list_schedulers_use(problem: Problem) -> None:
    """Environments and networks compute them on their own, below the heuristics."""
    of_ops = OpFeatures(problem)
    assert np.array_equal(of_ops.upward_rank_s, upward_rank(problem))
    assert np.array_equal(of_ops.upward_rank_s + of_ops.downward_rank_s, importance(problem))
    producer, consumer, _ = problem.graph.edge_list
    assert (of_ops.depth[consumer] >= of_ops.depth[producer] + 1).all()


@given(problems(), st.integers(0, 99))
def test_the_bound_of_a_complete_placement_is_none_too_high(problem: Problem, seed: int) -> None:
    (task,) = make_tasks(problem.graph, problem.cluster)
    if not isinstance(task, Task):
        return
    seen = []

    def remember(outcome: Any) -> Any:
        # The bound is that of placements that fit: one that does not may be faster than all of them.
        seen.append(outcome.step_time_s[outcome.feasible])
        return -outcome.step_time_s

    rows = SequentialBatch(1, EnvOptions(problem.graph, problem.cluster, reward=remember, shaping="bound"))
    rng = np.random.default_rng(seed)
    rows.begin(np.zeros(1, dtype=np.int64), [rng])
    done = False
    while not done:
        done = bool(rows.act([rng.choice(np.flatnonzero(rows.masks()[0]))]).terminated[0])
    times = np.concatenate(seen)
    assert (np.diff(times) >= -1e-9 * times[-1]).all()


# -- Improve ------------------------------------------------------------------------------------------------


def test_improve_earns_the_difference_and_simulates_once_a_step() -> None:
    graph, counting = layered(30, 2), Counting()
    env = make(IMPROVE, graph, FOUR, scorer=counting, start="random", max_steps=25)
    env.reset(seed=3)
    assert counting.asked == [1]
    env.action_space.seed(0)
    total, done, steps, first = 0.0, False, 0, None
    device = env.reset(seed=3)[0]["placement"].copy()
    simulator = Simulator(Problem(graph, FOUR))
    first = -np.sqrt(simulator.score(Plan(device)).step_time_s)
    while not done:
        before = len(counting.asked)
        action = int(env.action_space.sample())
        observation, reward, terminated, done, info = env.step(action)
        device[action // 4] = action % 4
        steps, total = steps + 1, total + float(reward)
        assert sum(counting.asked[before:]) <= 1
        assert not terminated
        assert observation["placement"].tolist() == device.tolist()
        assert info["step_time_s"] == simulator.score(Plan(device)).step_time_s
    assert steps == 25
    assert total == pytest.approx(-np.sqrt(info["step_time_s"]) - first)


def test_an_illegal_move_changes_nothing() -> None:
    counting = Counting()
    env = make(IMPROVE, small_graph(), small_cluster(), scorer=counting)
    start, _ = env.reset()
    asked = list(counting.asked)
    assert start["placement"].tolist() == [0, 1, 1]
    assert env.action_masks().tolist() == [True, False, False, *[True] * 6]
    for action in (1, 2, 0):  # to a GPU, which pins forbid, twice; to where it is
        observation, reward, *_ = env.step(action)
        assert reward == 0.0
        assert observation["placement"].tolist() == [0, 1, 1]
    assert counting.asked == asked


def test_improve_starts_where_it_is_told_to() -> None:
    env = make(IMPROVE, small_graph(), small_cluster(), start=[0, 2, 2, 1])
    assert env.reset()[0]["placement"].tolist() == [0, 2, 1]
    with pytest.raises(MismatchError, match="'b' apart from the rest of its unit"):
        make(IMPROVE, small_graph(), small_cluster(), start=[0, 2, 1, 1])
    with pytest.raises(MismatchError, match="'load' on a device where its pins"):
        make(IMPROVE, small_graph(), small_cluster(), start=[1, 2, 2, 1])
    with pytest.raises(MismatchError, match="for each of 4 ops"):
        make(IMPROVE, small_graph(), small_cluster(), start=[0, 2, 1])
    with pytest.raises(MismatchError, match="from 0 to 2, got 0 to 3"):
        make(IMPROVE, small_graph(), small_cluster(), start=[0, 2, 2, 3])
    with pytest.raises(MismatchError, match="belongs to one task, got 2"):
        make(IMPROVE, [small_graph()] * 2, small_cluster(), start=[0, 2, 2, 1])


# -- many tasks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IDS)
def test_tasks_are_drawn_at_reset_and_padded_to_the_largest(name: str) -> None:
    graphs = [layered(20, 0), small_graph()]
    large = small_cluster(10**12)
    fourth = replace(large.devices[2], name="gpu2")
    four = Cluster("four", (*large.devices, fourth), (*large.links, *both_ways("gpu2", "cpu0", 1e9, 0.01)))
    env = make(name, graphs, [four, large])
    assert [(t.n_units, t.n_devices) for t in env.tasks if isinstance(t, Task)] == [(20, 4), (20, 3), (3, 4), (3, 3)]
    drawn = {env.reset(seed=seed)[1]["task"] for seed in range(20)}
    assert drawn == {0, 1, 2, 3}
    observation, info = env.reset(options={"task": 3})
    assert info["task"] == 3
    assert observation["unit_mask"].tolist() == [1] * 3 + [0] * 17
    assert observation["unit_features"].shape == (20, len(UNIT_FEATURES))
    assert not observation["allowed"][3:].any()
    assert not observation["allowed"][:, 3:].any()
    assert observation["edges"][2:].min() == observation["edges"][2:].max() == -1
    for bad in (4, -1, "a", True):
        with pytest.raises(MismatchError, match="tasks 0 to 3"):
            env.reset(options={"task": bad})
    with pytest.raises(MismatchError, match=r"option 'task'.*'tusk'"):
        env.reset(options={"tusk": 1})


def test_a_smaller_task_scores_as_if_it_were_alone() -> None:
    cluster = small_cluster(10**12)
    alone = make(GROUP, small_graph(), cluster, with_order=True)
    padded = make(GROUP, [layered(20, 0), small_graph()], cluster, with_order=True)
    alone.reset()
    padded.reset(options={"task": 1})
    small = np.array([0, 1, 2, 3, 2, 1, 0])  # the devices of three units, the places of four ops
    large = np.concatenate([small[:3], np.full(17, 2), small[3:], np.full(16, 19)])
    assert alone.step(small)[1:] == padded.step(large)[1:]


# -- results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [GROUP, SEQUENTIAL])
def test_a_complete_placement_is_a_result(name: str) -> None:
    env = make(name, small_graph(), small_cluster())
    env.reset()
    with pytest.raises(MismatchError, match="the placement is not complete"):
        env.result()
    if name == GROUP:
        *_, info = env.step(np.array([0, 1, 2]))
    else:
        (task,) = env.tasks
        assert isinstance(task, Task)
        _, info = play(env, [{0: 0, 1: 1, 2: 2}[unit] for unit in task.sequence.tolist()])
    found = env.result()
    assert found.step_time_s == info["step_time_s"]
    assert (found.method, placement.verify(found).holds) == ("agent", True)
    assert info["speedup"] == info["reference_s"] / info["step_time_s"]
    assert info["lower_bound_s"] <= info["step_time_s"] * (1 + 1e-9)
