"""Bad input of environments is one sentence; drawings of theirs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from cases.environment_tasks import gpus
from environment_cases import FOUR, GROUP, IDS, IMPROVE, SEQUENTIAL, make, small_cluster, small_graph

from env.cluster import Cluster
from env.gym.task import Task
from env.gym.vector import PlacementVecEnv
from graphs.errors import GraphFileError, InfeasibleError, MismatchError, UnknownNameError
from graphs.files import save_graph
from graphs.generators import layered
from graphs.opgraph import Op, OpGraph

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
