"""Environments keep the contracts of Gymnasium and stable-baselines3, and units and orders are those of their tasks."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from cases.environment_tasks import gpus
from environment_cases import FOUR, GROUP, IDS, IMPROVE, SEQUENTIAL, make, small_cluster, small_graph
from gymnasium.utils.env_checker import check_env, data_equivalence
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3
from strategies import problems
from zoo_models import LIKE_OTHERS

import placement
from env.cluster import Cluster
from env.gym.batch import SHARED
from env.gym.group import GroupBatch
from env.gym.improve import ImproveBatch
from env.gym.registration import ENTRY_POINTS
from env.gym.rewards import REWARDS
from env.gym.sequential import SequentialBatch
from env.gym.task import ORDERS, Task, make_tasks
from env.problem import Problem
from graphs.errors import InfeasibleError
from graphs.generators import fork_join, layered, random_dag
from graphs.opgraph import Op, OpGraph, Phase, Tensor
from graphs.zoo import MODELS, build

ROOT = Path(__file__).resolve().parents[3]


@cache
def zoo_graph(name: str) -> OpGraph:
    net = build(name, small=True)
    return placement.capture(net.model, net.args)


def only_task(graph: OpGraph, cluster: Cluster, **options: Any) -> Task:
    (task,) = make_tasks(graph, cluster, **options)
    assert isinstance(task, Task)
    return task


# -- the contract -------------------------------------------------------------------------------------------


# Each environment with every third model, and all of them with one; the other pairs when there is time.
@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param(name, model, marks=() if model == "two_tower" or (k + n) % 3 == 0 else pytest.mark.slow)
        for n, model in enumerate(sorted(set(MODELS) - LIKE_OTHERS))
        for k, name in enumerate(ENTRY_POINTS)
    ],
)
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


def test_so_does_that_of_a_graph_whose_ops_share_devices_across_phases() -> None:
    forward = [Op(f"f{k}", flops=1e9, colocation=f"{k}") for k in range(60)]
    backward = [Op(f"b{k}", flops=2e9, colocation=f"{k}", phase=Phase.BACKWARD) for k in reversed(range(60))]
    ops = [*forward, *backward]
    along = [Tensor(one.name, 1000, (other.name,)) for one, other in itertools.pairwise(ops)]
    graph = OpGraph.build(ops, along, "step")
    assert only_task(graph, FOUR).n_units == 60
    assert [only_task(graph, FOUR, units=n).n_units for n in (5, 20, 40, 80)] == [5, 20, 40, 60]


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
