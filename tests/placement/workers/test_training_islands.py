"""Policies trained on islands: alone like the learner itself, together the mean, and the same whoever does the work."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from training_steps import mlp

import placement
from env.problem import Problem
from graphs.errors import MismatchError, WorkersError
from graphs.files import save_graph
from graphs.generators import layered
from placement.cli import run
from placement.learning import islands
from placement.learning.islands import Islands, Learning
from placement.learning.learners.registry import make_learner
from placement.workers import ray_runner
from placement.workers.runner import LocalRunner

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
CLUSTER = placement.Cluster.preset("4xV100-pcie")
PROBLEMS = [(layered(20, seed), CLUSTER) for seed in (0, 1)]
KINDS = ["hierarchical", "ppo"]  # one for each class of learners


def made(kind: str) -> Any:
    """A learner of placements before its first update."""
    return make_learner(kind, [Problem(*pair) for pair in PROBLEMS], 0)


def on_islands(kind: str, count: int) -> Islands:
    """Islands in this process."""
    learning = Learning(partial(made, kind), Problem(*PROBLEMS[0]))
    return Islands(LocalRunner(learning), made(kind), count, 0)


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(islands, "_UPDATES", 2)


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal to the last bit."""
    names = one.tensors.keys() == other.tensors.keys() and one.values == other.values
    return names and all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


@pytest.mark.parametrize("kind", KINDS)
def test_one_island_learns_what_its_learner_learns(kind: str) -> None:
    alone, island = made(kind), on_islands(kind, 1)
    for _ in range(4):
        last = alone.update()
    told = [island.update(), island.update()]
    assert same(alone.state(), island._states[0])
    assert told[-1].samples == alone.samples == last.samples == island.samples
    values = [None if best is None else best.value_s for best in alone.best]
    assert [None if best is None else best.value_s for best in island.best] == values


@pytest.mark.parametrize("kind", KINDS)
def test_islands_differ_in_what_they_draw_and_agree_in_what_they_learn(kind: str) -> None:
    found = on_islands(kind, 2)
    first = found._runner.run(islands.learn_on_island, [islands.IslandUpdates(s, found.best, 2) for s in found._states])
    found.update()
    names = first[0].averaged
    assert any(name.startswith("adam.") for name in names)
    parameters = [name for name in names if name.startswith(("policy.", "network."))]
    assert len(parameters) > 2
    assert any(not torch.equal(first[0].state.tensors[name], first[1].state.tensors[name]) for name in parameters)
    for name in names:
        mean = torch.stack([each.state.tensors[name] for each in first]).mean(dim=0)
        assert all(torch.equal(state.tensors[name], mean) for state in found._states), name
    best = [min((b.value_s for b in two if b is not None), default=None) for two in zip(*(f.best for f in first))]  # noqa: B905
    assert [None if one is None else one.value_s for one in found.best] == best


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_run_goes_on_as_if_nothing_had_happened(kind: str) -> None:
    whole = on_islands(kind, 2)
    whole.update()
    state = whole.state()
    json.dumps(state.values)
    expected = [whole.update(), whole.update()]
    again = on_islands(kind, 2)
    again.restore(state)
    assert [again.update(), again.update()] == expected
    assert same(whole.state(), again.state())


def test_a_report_is_of_another_problem_in_each_round() -> None:
    found = on_islands("hierarchical", 2)
    assert [found.update().problem for _ in range(4)] == [0, 1, 0, 1]


def test_a_policy_is_the_same_whoever_makes_it_though_a_worker_is_killed(
    ray_of_two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = [graph for graph, _ in PROBLEMS]
    run, rounds = ray_runner.RayRunner.run, []

    def killing(self: Any, work: Any, tasks: Any, told: Any = None) -> Any:
        rounds.append(len(tasks))
        if len(rounds) == 2:
            os.kill(self.processes()[0], signal.SIGKILL)
            time.sleep(0.1)
        return run(self, work, tasks, told)

    def trained(name: str) -> Any:
        found = placement.train(graphs, CLUSTER, output=tmp_path / name, evaluations=250, workers=2)
        assert (found.samples, found.resumed_from) == (256, 0)  # two rounds of two islands, two updates each
        return found

    with monkeypatch.context() as patched:
        patched.setattr(islands, "opened", lambda shared, workers, address: nullcontext(LocalRunner(shared)))
        one = trained("one.zip")
    monkeypatch.setattr(ray_runner.RayRunner, "run", killing)
    two = trained("two.zip")
    assert rounds == [2, 2]
    assert one.curve == two.curve
    assert [result.placement for result in one.results] == [result.placement for result in two.results]
    method = f"policy:{tmp_path / 'one.zip'}"
    assert placement.optimize(graphs[0], CLUSTER, method, evaluations=8).feasible


def test_the_command_line_takes_workers(ray_of_two: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_graph(mlp(layers=3), tmp_path / "g.json")
    words = ["train", str(tmp_path / "g.json"), "--cluster", "4xV100-pcie", "-o", str(tmp_path / "p.zip")]
    assert run([*words, "--evaluations", "64", "--workers", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["samples"] >= 64
    saved = json.loads((tmp_path / "p.best.json").read_text())
    assert "--workers 2" in saved["command"]


def test_bad_workers_are_one_sentence(tmp_path: Path) -> None:
    graph = PROBLEMS[0][0]
    with pytest.raises(WorkersError, match="workers is 0; expected a whole number, 1 or more"):
        placement.train(graph, CLUSTER, output=tmp_path / "p.zip", evaluations=8, workers=0)
    with pytest.raises(MismatchError, match="workers score by the simulator; leave out workers, or scorer"):
        placement.train(
            graph, CLUSTER, output=tmp_path / "p.zip", evaluations=8, workers=2, scorer=lambda problem: None
        )  # type: ignore[arg-type, return-value]
