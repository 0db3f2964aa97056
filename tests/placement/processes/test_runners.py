"""Tasks done here, in processes and by Ray's actors: the same answers in the same order, whoever dies meanwhile."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import placement
from graphs.errors import MismatchError, PlacementError, UnknownNameError, WorkersError
from graphs.files import save_graph
from graphs.generators import layered
from graphs.opgraph import OpGraph
from placement.cli import run
from placement.processes import ray_runner
from placement.processes.processes import usable_cores
from placement.processes.runner import LocalRunner, ProcessRunner, opened
from placement.results.result_json import result_to_json

# Ray leaves files and processes to Python to close.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
CLUSTER, SLOW = (placement.Cluster.preset(name) for name in ("4xV100-pcie", "2xK40-pcie"))
EVALUATIONS = 2_000  # 20 strategies


@pytest.fixture(scope="module")
def step() -> OpGraph:
    """A training step with strategies."""
    from fitted_models import classifier  # workers, which import this file for its tasks, do not find it

    model, data = classifier()
    return placement.capture(model, tuple(each[:16] for each in data), train=True)


@dataclass(frozen=True)
class Nothing:
    """Shared by tasks that need nothing."""

    def prepare(self) -> None:
        """Nothing to compile."""


def squared(shared: object, task: int) -> tuple[int, int]:
    time.sleep(0.1)  # so that all workers have begun
    return task * task, os.getpid()


def fatal_once(shared: object, task: tuple[str, int]) -> int:
    """Ends its worker the first time that this task is done."""
    mark = Path(task[0]) / str(task[1])
    if task[1] % 3 == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return task[1]


def always_fatal(shared: object, task: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return task


def failing(shared: object, task: int) -> int:
    raise MismatchError(f"task {task} is of no use.")


def unknown(shared: object, task: int) -> None:
    raise UnknownNameError("method", "hefty", ["heft"])


@pytest.fixture(params=["processes", "ray"])
def address(request: pytest.FixtureRequest) -> str | None:
    """Where workers are: None for processes of this machine."""
    return None if request.param == "processes" else request.getfixturevalue("ray_address")


def test_what_is_found_comes_in_the_order_of_the_tasks(address: str | None) -> None:
    told: dict[int, tuple[int, int]] = {}
    with opened(Nothing(), 2, address) as runner:
        found = runner.run(squared, range(20), told.__setitem__)
    assert [value for value, _ in found] == [task * task for task in range(20)]
    assert told == dict(enumerate(found))
    assert len({process for _, process in found} - {os.getpid()}) == min(2, len(usable_cores()))


def test_one_worker_is_this_process() -> None:
    with opened(Nothing(), 1) as runner:
        assert isinstance(runner, LocalRunner)
        assert runner.run(squared, [3]) == [(9, os.getpid())]


def test_a_worker_that_dies_is_replaced_and_its_task_done_again(address: str | None, tmp_path: Path) -> None:
    tasks = [(str(tmp_path), number) for number in range(8)]
    with opened(Nothing(), 2, address) as runner:
        assert runner.run(fatal_once, tasks) == list(range(8))
        assert len(list(tmp_path.iterdir())) == 3
        with pytest.raises(WorkersError, match="a task has ended 3 workers"):
            runner.run(always_fatal, [0])


def test_an_error_of_a_task_is_that_of_the_run(address: str | None) -> None:
    with opened(Nothing(), 2, address) as runner:
        with pytest.raises(MismatchError, match=r"^task 1 is of no use\.$"):
            runner.run(failing, [1])
        assert runner.run(squared, [3])[0][0] == 9  # it goes on


def test_an_error_that_cannot_be_sent_is_its_sentence() -> None:
    with opened(Nothing(), 2) as runner, pytest.raises(WorkersError, match="unknown method 'hefty', did you mean"):
        runner.run(unknown, [1])


@pytest.mark.parametrize("address", ["processes", pytest.param("ray", marks=pytest.mark.slow)], indirect=True)
def test_answers_are_the_same_with_any_number_of_workers_and_without(step: OpGraph, address: str | None) -> None:
    def found(workers: int | None, where: str | None = None) -> str:
        result = placement.optimize(step, SLOW, budget_s=0.5, workers=workers, address=where)
        return result_to_json(replace(result, solve_time_s=0.0))

    alone = found(None)
    assert found(1) == alone
    assert found(2, address) == alone


def test_a_search_whose_worker_is_killed_has_the_same_answer(step: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = placement.optimize(step, SLOW, evaluations=EVALUATIONS)
    run, rounds = ProcessRunner.run, list[int]()

    def killing(self: Any, work: Any, tasks: Any, told: Any = None) -> Any:
        rounds.append(len(tasks))
        if len(rounds) == 2:
            os.kill(self.processes[0], signal.SIGKILL)
        return run(self, work, tasks, told)

    monkeypatch.setattr(ProcessRunner, "run", killing)
    found = placement.optimize(step, SLOW, evaluations=EVALUATIONS, workers=2)
    assert len(rounds) >= 2
    assert found == alone


def test_policies_are_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    graphs = [layered(20, seed) for seed in (0, 1)]

    def trained(name: str, workers: int | None) -> Any:
        output = tmp_path / name
        found = placement.train(graphs, CLUSTER, output=output, evaluations=128, workers=workers)
        return found.curve, output.read_bytes(), [result.placement for result in found.results]

    assert trained("alone.zip", None) == trained("two.zip", 2)


def test_the_command_line_takes_workers(
    step: OpGraph, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "cache"))
    save_graph(step, tmp_path / "g.json")
    words = ["optimize", str(tmp_path / "g.json"), "--cluster", SLOW.name, "--json", "--evaluations", "100"]
    answers = []
    for more in ([], ["--workers", "2"]):
        assert run([*words, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out) | {"solve_time_s": 0.0})
    assert answers[0] == answers[1]  # the command, too: workers do not change the answer
    assert run([*words, "--workers", "0"]) == 2
    assert "workers is 0; expected a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": 0}, "workers is 0; expected a whole number, 1 or more."),
        ({"workers": True}, "workers is True; expected a whole number, 1 or more."),
        ({"workers": 2, "method": "local_search"}, "workers score strategies by the simulator, and none are searched"),
        ({"workers": 2, "strategy": "dp2"}, "workers score strategies by the simulator, and none are searched"),
        ({"workers": 2, "address": "here"}, "address here is none; expected auto or HOST:PORT"),
        ({"workers": 2, "address": "127.0.0.1:1"}, "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_bad_workers_are_one_sentence(step: OpGraph, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlacementError) as caught:
        placement.optimize(step, SLOW, **options)
    assert sentence in str(caught.value)


def test_bad_workers_of_training_are_one_sentence(tmp_path: Path) -> None:
    how: dict[str, Any] = {"output": tmp_path / "p.zip", "evaluations": 8}
    with pytest.raises(WorkersError, match="workers is 0; expected a whole number, 1 or more"):
        placement.train(layered(12, 0), CLUSTER, workers=0, **how)
    with pytest.raises(MismatchError, match="workers score by the simulator; leave out workers, or scorer"):
        placement.train(layered(12, 0), CLUSTER, workers=2, scorer=lambda problem: None, **how)  # type: ignore[arg-type, return-value]


def test_too_few_cores_are_one_sentence(ray_address: str) -> None:
    with (
        pytest.raises(WorkersError, match="3 workers take a core each, and the Ray cluster has 2"),
        opened(Nothing(), 3, ray_address),
    ):
        pass


def test_workers_of_another_version_are_one_sentence(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runner, "own_versions", lambda: {**ORIGINAL(), "placement": "9.9"})
    with pytest.raises(WorkersError, match=r"the workers are of another version: placement \S+ there, 9\.9 here"):  # noqa: SIM117
        with opened(Nothing(), 2, ray_address):
            pass


ORIGINAL = ray_runner.own_versions


def test_without_ray_this_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(WorkersError, match=r"pip install 'placement\[ray\]', or leave out the address"),
        opened(Nothing(), 2, "auto"),
    ):
        pass
