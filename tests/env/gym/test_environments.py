"""The Gymnasium environments: the contract that the checkers test, and what each of them promises."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from environment_cases import FOUR, GROUP, IDS, IMPROVE, SEQUENTIAL, Counting, make, small_cluster, small_graph
from gymnasium.utils.env_checker import check_env, data_equivalence
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3
from strategies import problems
from zoo_models import each_model

import placement
from baselines.paths import importance, upward_rank
from env.cluster import Cluster, both_ways
from env.gym.base import PlacementEnv
from env.gym.group import GroupBatch
from env.gym.improve import ImproveBatch
from env.gym.observations import UNIT_FEATURES
from env.gym.op_features import OpFeatures
from env.gym.options import SHARED, EnvOptions
from env.gym.registration import ENTRY_POINTS
from env.gym.rewards import REWARDS, Outcome
from env.gym.sequential import SequentialBatch
from env.gym.task import ORDERS, Task, make_tasks
from env.gym.vector import PlacementVecEnv
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.errors import GraphFileError, InfeasibleError, MismatchError, UnknownNameError
from graphs.files import save_graph
from graphs.generators import fork_join, layered, random_dag
from graphs.opgraph import Op, OpGraph
from graphs.zoo import build

ROOT = Path(__file__).resolve().parents[3]


@cache
def zoo_graph(name: str) -> OpGraph:
    net = build(name, small=True)
    return placement.capture(net.model, net.args)


def gpus(memory_bytes: int) -> Cluster:
    """The two GPUs of the small cluster alone."""
    cluster = small_cluster(memory_bytes)
    return Cluster("gpus", cluster.devices[1:], cluster.links[-2:])


def only_task(graph: OpGraph, cluster: Cluster, **options: Any) -> Task:
    (task,) = make_tasks(graph, cluster, **options)
    assert isinstance(task, Task)
    return task


# -- the contract -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", each_model())
@pytest.mark.parametrize("name", ENTRY_POINTS)
# An agent that looks at matrices is not one for images: stable-baselines3 recommends vectors, which it makes itself.
@pytest.mark.filterwarnings("ignore:Your observation .* has an unconventional shape:UserWarning")
def test_both_checkers_pass_with_every_zoo_graph(name: str, model: str) -> None:
    env = gymnasium.make(name, graph=zoo_graph(model), cluster=FOUR, render_mode="ansi")
    check_env(env.unwrapped)
    check_env_for_sb3(env.unwrapped, skip_render_check=False)


@pytest.mark.parametrize("options", [{"with_order": True}, {"units": 5}, {"reward": "normalized"}])
@pytest.mark.filterwarnings("ignore:Your observation .* has an unconventional shape:UserWarning")
def test_checkers_pass_with_several_tasks_and_options(options: dict[str, Any]) -> None:
    graphs = [layered(20, 0), fork_join(9, 1)]
    env = make(GROUP, graphs, [FOUR, Cluster.preset("8xV100-nvlink")], **options)
    check_env(env)
    check_env_for_sb3(env)


@pytest.mark.parametrize(
    "order",
    ["import gymnasium, placement", "import placement, gymnasium", "import env.gym.vector, placement, gymnasium"],
)
def test_ids_are_registered_whichever_is_imported_first(order: str) -> None:
    found = run(f"{order}\nprint(*(name for name in gymnasium.registry if name.startswith('placement/')))")
    assert found.split() == [*ENTRY_POINTS]


def test_gymnasium_finds_the_package_by_itself_and_loads_no_torch() -> None:
    code = (
        "import sys, gymnasium\nfrom env.cluster import Cluster\nfrom graphs.generators import layered\n"
        "options = dict(graph=layered(8, 0), cluster=Cluster.preset('4xV100-pcie'))\n"
        "env = gymnasium.make('placement:placement/Group-v0', **options)\n"
        "env.reset(seed=0)\nenv.step(env.action_space.sample())\n"
        "print(*(name for name in ('torch', 'stable_baselines3') if name in sys.modules))"
    )
    assert run(code).split() == []


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@given(st.data(), problems(), st.sampled_from(IDS), st.sampled_from(sorted(REWARDS)))
@settings(max_examples=40)
def test_two_copies_with_one_seed_stay_equal(data: st.DataObject, problem: Problem, name: str, reward: str) -> None:
    graphs = [problem.graph, random_dag(data.draw(st.integers(2, 12)), data.draw(st.integers(0, 99)))]
    tasks = make_tasks(graphs, problem.cluster)
    seed = data.draw(st.integers(0, 2**16))
    options = {"start": "random"} if name == IMPROVE else {}
    if name == SEQUENTIAL:
        options["shaping"] = data.draw(st.sampled_from([None, "bound"]))
    copies = [make(name, graphs, problem.cluster, reward=reward, **options) for _ in range(2)]
    if not all(isinstance(task, Task) for task in tasks):
        with pytest.raises(InfeasibleError):
            copies[0].reset(seed=seed)
        return
    for _ in range(2):
        first, second = (env.reset(seed=seed) for env in copies)
        assert data_equivalence(first, second, exact=True)
        copies[0].action_space.seed(seed)
        done = False
        while not done:
            assert np.array_equal(copies[0].action_masks(), copies[1].action_masks())
            action = copies[0].action_space.sample(copies[0].action_masks()) if name == SEQUENTIAL else None
            action = copies[0].action_space.sample() if action is None else action
            first, second = (env.step(action) for env in copies)
            assert data_equivalence(first, second, exact=True)
            assert first[0] in copies[0].observation_space
            done = first[2] or first[3]


def test_the_documentation_lists_every_observation_and_keyword() -> None:
    text = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    table = text.partition("## Observations")[2].partition("The columns of")[0]
    documented = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert documented == {key for name in IDS for key in make(name, small_graph()).observation_space.spaces}
    keywords = {key for kind in (GroupBatch, SequentialBatch, ImproveBatch) for key in (*SHARED, *kind.own_keywords)}
    table = text.partition("## Keywords")[2].partition("Units never")[0]
    assert keywords | {"render_mode"} == set(
        re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| ([^|]*) \|", table, re.M)))
    )


# -- tasks --------------------------------------------------------------------------------------------------


def test_units_are_colocation_groups_unless_told_otherwise() -> None:
    graph, cluster = small_graph(), small_cluster()
    assert only_task(graph, cluster).unit_of.tolist() == [0, 1, 1, 2]
    assert only_task(graph, cluster, units=[7, 3, 3, 3]).unit_of.tolist() == [0, 1, 1, 1]
    assert only_task(graph, cluster).allowed.tolist() == [[True, False, False], [True] * 3, [True] * 3]


@given(problems(max_ops=9), st.integers(1, 4))
@settings(max_examples=60)
def test_coarse_units_divide_no_group_and_mix_no_pins(problem: Problem, units: int) -> None:
    (found,) = make_tasks(problem.graph, problem.cluster, units)
    if not isinstance(found, Task):
        return
    for members in problem.units:
        assert len(set(found.unit_of[members].tolist())) == 1
    for op in range(problem.graph.n_ops):
        assert np.array_equal(found.allowed[found.unit_of[op]], problem.allowed[op])


def test_coarsening_comes_near_the_number_asked_for() -> None:
    task = only_task(layered(300, 0), FOUR, units=24)
    assert 20 <= task.n_units <= 24
    assert task.n_ops == 300


@pytest.mark.parametrize("order", ORDERS)
def test_a_sequence_holds_every_unit_once_after_what_it_waits_for(order: str) -> None:
    task = only_task(layered(60, 1), FOUR, order=order)
    place = np.argsort(task.sequence)
    assert sorted(task.sequence.tolist()) == list(range(60))
    assert (place[task.edges.source] < place[task.edges.target]).all()


def test_upward_rank_goes_first_to_the_longest_path() -> None:
    task = only_task(layered(60, 1), FOUR, order="upward_rank")
    of_ops = task.of_ops
    rank_s = of_ops.upward_rank_s[task.sequence]
    assert (np.diff(rank_s) <= 0).all()
    assert rank_s[0] == pytest.approx((of_ops.upward_rank_s + of_ops.downward_rank_s).max())


def test_the_reference_is_the_best_single_device() -> None:
    task = only_task(small_graph(), small_cluster())
    # load on the CPU, 1 s; a transfer of 10 ms; 2 s on a GPU. All on the CPU takes 5 s.
    assert task.reference_s == pytest.approx(3.01 + 8e-9)
    assert task.single_device[0].tolist() == [0, 1, 1]
    assert task.bound_s <= task.reference_s


def test_where_no_single_device_fits_the_reference_ignores_memory() -> None:
    graph = OpGraph.build([Op(f"op{i}", flops=1e9, kept_bytes=40) for i in range(4)], [])
    assert only_task(graph, gpus(100)).single_device[1:] == (2.0, False)


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
        assert info == {"step_time_s": score.step_time_s, "feasible": True}
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


# -- Sequential ---------------------------------------------------------------------------------------------


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
    assert info == {"step_time_s": score.step_time_s, "feasible": True}


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
@settings(max_examples=60)
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
@settings(max_examples=60)
def test_ranks_are_those_that_list_schedulers_use(problem: Problem) -> None:
    """Environments and networks compute them on their own, below the heuristics."""
    of_ops = OpFeatures(problem)
    assert np.array_equal(of_ops.upward_rank_s, upward_rank(problem))
    assert np.array_equal(of_ops.upward_rank_s + of_ops.downward_rank_s, importance(problem))
    producer, consumer, _ = problem.graph.edge_list
    assert (of_ops.depth[consumer] >= of_ops.depth[producer] + 1).all()


@given(problems(), st.integers(0, 99))
@settings(max_examples=60)
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


# -- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("cluster", ["no CPU", "no memory"])
def test_what_can_be_placed_nowhere_is_refused_at_reset(name: str, cluster: str) -> None:
    found = FOUR if cluster == "no memory" else gpus(10**12)
    graph = small_graph() if cluster == "no CPU" else OpGraph.build([Op("huge", kept_bytes=10**15)], [])
    env = make(name, [layered(5, 0), graph], found)
    with pytest.raises(InfeasibleError, match="'load' may only run on cpu" if cluster == "no CPU" else "'huge' needs"):
        env.reset(seed=0)
    env.reset(options={"task": 0})  # which has nothing to do with it
    with pytest.raises(InfeasibleError):
        env.reset(options={"task": 1})
    for options in (None, {"task": 0}):
        with pytest.raises(InfeasibleError):
            make(name, graph, found).reset(options=options)


@pytest.mark.parametrize(
    ("name", "actions"),
    [
        (GROUP, [[0, 1], [0, 1, 3], [0, -1, 1], [0.0, 1.0, 1.0], 0, None]),
        (SEQUENTIAL, [3, -1, 0.5, [0], "gpu0", None]),
        (IMPROVE, [9, -1, 1.0, [0], None]),
    ],
)
def test_an_action_outside_the_space_is_refused(name: str, actions: list[Any]) -> None:
    env = make(name, small_graph(), small_cluster())
    env.reset()
    for action in actions:
        with pytest.raises(MismatchError, match=r"^actions are whole numbers in .*\.$"):
            env.step(action)
    env.step(np.array([0, 1, 1]) if name == GROUP else 0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (GROUP, {"reward": "speed"}, "unknown reward 'speed'"),
        (GROUP, {"scorer": "guess"}, "unknown scorer 'guess'"),
        (GROUP, {"units": 0}, "units is a number of units"),
        (GROUP, {"units": [0, 1, 2, 3]}, "'b' is in another unit"),
        (GROUP, {"units": [0, 1, 1]}, "each of its 4 ops"),
        (SEQUENTIAL, {"order": "random"}, "unknown order 'random'"),
        (SEQUENTIAL, {"order": [0, 1, 1]}, "each of the 3 units"),
        (SEQUENTIAL, {"shaping": "rank"}, "unknown shaping 'rank'"),
        (IMPROVE, {"start": "heft"}, "unknown start 'heft'"),
        (IMPROVE, {"max_steps": 0}, "max_steps is a whole number"),
    ],
)
def test_bad_options_are_one_sentence(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((MismatchError, UnknownNameError), match=message):
        make(name, small_graph(), small_cluster(), **options)


def test_names_and_files_stand_for_graphs_and_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "cache"))
    save_graph(small_graph(), tmp_path / "g.json")
    (tmp_path / "c.toml").write_text(small_cluster().to_toml(), encoding="utf-8")
    by_name: dict[str, Any] = {"graph": str(tmp_path / "g.json"), "cluster": tmp_path / "c.toml"}
    for name in IDS:
        found, same = gymnasium.make(name, **by_name), make(name, small_graph(), small_cluster())
        first, second = found.reset(seed=0)[0], same.reset(seed=0)[0]
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[key], second[key]) for key in first)
    four = Cluster.preset("4xK40-pcie")
    several = PlacementVecEnv(GROUP, 2, graph=["alexnet", by_name["graph"]], cluster=["2xK40-pcie", four])
    tasks = [(task.problem.graph.name, task.problem.cluster.name) for task in several.tasks if isinstance(task, Task)]
    assert tasks == list(itertools.product(("alexnet", "small"), ("2xK40-pcie", "4xK40-pcie")))


def test_what_a_configuration_file_holds_makes_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "cache"))
    kwargs = json.loads('{"graph": "alexnet", "cluster": "2xK40-pcie", "units": 4}')
    env = gymnasium.make(SEQUENTIAL, **kwargs)
    env.reset(seed=0)
    assert env.spec is not None
    assert json.loads(env.spec.to_json())["kwargs"] == kwargs


def test_a_users_code_is_never_run_for_a_name(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\ndef net(): pass\n", encoding="utf-8")
    for name in (f"{tmp_path / 'trap.py'}:net", str(tmp_path / "trap.py")):
        with pytest.raises(MismatchError, match="is code, which is not run from here; run `placement capture"):
            make(GROUP, name, FOUR)
    assert not (tmp_path / "sprung").exists()


def test_what_is_no_graph_or_cluster_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown model 'nmt5', did you mean 'nmt"):
        make(GROUP, "nmt5", FOUR)
    with pytest.raises(UnknownNameError, match="unknown cluster '4xV100', did you mean '4xV100-pcie'"):
        make(GROUP, small_graph(), "4xV100")
    with pytest.raises(GraphFileError, match=r"none\.json"):
        make(GROUP, tmp_path / "none.json", FOUR)
    with pytest.raises(MismatchError, match="graph is one OpGraph, its name, or a sequence of them, got 3"):
        make(GROUP, 3, FOUR)
    with pytest.raises(MismatchError, match="cluster is one Cluster, its name, or a sequence of them, got none"):
        make(GROUP, small_graph(), [])


def test_units_that_no_device_suits_are_refused() -> None:
    two = OpGraph.build([Op("a", pins=("cpu",)), Op("b", pins=("gpu",))], [])
    with pytest.raises(MismatchError, match="suits all its ops"):
        make(GROUP, two, small_cluster(), units=[0, 0])


# -- rendering ----------------------------------------------------------------------------------------------


def test_the_chart_shows_who_works_when() -> None:
    env = make(SEQUENTIAL, small_graph(), small_cluster(), render_mode="ansi")
    env.reset()
    assert str(env.render()).splitlines()[0] == "0 of 4 ops placed, 0 s"
    env.step(0)
    env.step(1)
    assert str(env.render()).startswith("3 of 4 ops placed")
    env.step(2)
    lines = str(env.render()).splitlines()
    assert lines[0] == "4 of 4 ops placed, 3.02 s"
    assert [line.split("|")[0].strip() for line in lines[1:]] == ["cpu0", "gpu0", "gpu1"]
    marks = [line.split("|")[1] for line in lines[1:]]
    assert [mark.count("#") for mark in marks] == [24, 24, 24]
    assert [mark.index("#") for mark in marks] == sorted(mark.index("#") for mark in marks)


@pytest.mark.parametrize("name", IDS)
def test_pixels(name: str) -> None:
    env = make(name, small_graph(), small_cluster(), render_mode="rgb_array")
    env.reset()
    env.step(np.array([0, 1, 1]) if name == GROUP else 0)
    image = env.render()
    assert isinstance(image, np.ndarray)
    assert image.dtype == np.uint8
    assert image.ndim == 3
    assert len(np.unique(image.reshape(-1, 3), axis=0)) >= 3  # background, empty lane, at least one op
    with pytest.raises(UnknownNameError, match="render mode 'human'"):
        type(env)(small_graph(), small_cluster(), render_mode="human")


@pytest.mark.parametrize(
    ("options", "name"), [({"foo": 1}, "foo"), ({"shaping": "bound"}, "shaping"), ({"order": "topological"}, "order")]
)
def test_a_keyword_that_it_does_not_have_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(UnknownNameError, match=f"keyword '{name}'.*with_order"):
        gymnasium.make(
            "placement/Group-v0", graph=layered(10, seed=0), cluster=Cluster.preset("4xV100-pcie"), **options
        )


@pytest.mark.parametrize("reward", [lambda outcome: "a", lambda outcome: outcome.step_time_s * 1j])
def test_a_reward_that_is_no_number_is_refused(reward: Any) -> None:
    graph, cluster = layered(10, seed=0), Cluster.preset("4xV100-pcie")
    env = gymnasium.make("placement/Group-v0", graph=graph, cluster=cluster, reward=reward)
    env.reset(seed=0)
    with pytest.raises(MismatchError, match="one finite number"):
        env.step(env.action_space.sample())
