"""The `execute` scorer: placements really run, remembered, given up on, and learned from. On two CPU cores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import softmax_policy
import torch
from torch import nn

import placement
from env.cluster import Cluster, Device, both_ways
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.errors import ClusterError, MismatchError, PolicyFileError, UnknownNameError
from placement.cli import run as run_command
from placement.learning.training import train
from placement.measuring.runs import pool
from placement.measuring.runs.executor import Execution, Executor
from placement.measuring.runs.pool import Arrangement
from placement.measuring.runs.steps import TimedRun
from placement.results.result import Result

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores to pin to"
)
STEPS: dict[str, Any] = {"steps": 3, "dropped": 1}

TOWERS = """
import torch
from torch import nn


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2))

    def forward(self, x, y):
        return (self.left(x) * self.right(y)).mean(1)


def make():
    return Towers(), (torch.randn(4, 16), torch.randn(4, 16))
"""


def towers() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    scope: dict[str, Any] = {}
    exec(TOWERS, scope)
    made: tuple[nn.Module, tuple[torch.Tensor, ...]] = scope["make"]()
    return made


def cpus(count: int = 2, memory_bytes: int = 2**34, kind: str = "cpu") -> Cluster:
    devices = tuple(Device(f"{kind}{i}", kind, memory_bytes, {"float32": 1e10}, 1e10, 5e-6) for i in range(count))
    pairs = [(a.name, b.name) for i, a in enumerate(devices) for b in devices[i + 1 :]]
    return Cluster("cpus", devices, tuple(link for pair in pairs for link in both_ways(*pair, 1e9, 1e-5)))


TWO = cpus()


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(*towers(), cluster=TWO, train=True, loss=torch.mean, **STEPS) as made:
        yield made


def spread_out(executor: Executor, seed: int = 0) -> np.ndarray:
    """int64 [n]: units on both devices at random."""
    problem = Problem(executor.graph, executor.cluster)
    of_group = np.random.default_rng(seed).integers(0, 2, problem.n_units)
    of_group[:2] = 0, 1
    found: np.ndarray = of_group[problem.unit_of]
    return found


def pids_of(executor: Executor) -> list[int]:
    return executor._pool.pids


def are_gone(pids: list[int], within_s: float = 120.0) -> bool:
    end = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


# -- running ----------------------------------------------------------------------------------------------------


def test_a_placement_is_run_once(executor: Executor) -> None:
    before, device = executor.n_runs, spread_out(executor)
    found = executor.run(device)
    assert found.reason is None
    assert len(found.samples_s) == 2
    assert 0 < found.step_time_s == sum(found.samples_s) / 2
    assert executor.n_runs == before + 1
    assert executor.run(device) is found
    assert executor.run(device.tolist()) is found
    assert executor.n_runs == before + 1


def test_one_device_is_as_good_as_the_other(executor: Executor) -> None:
    before, n_ops = executor.n_runs, executor.graph.n_ops
    found = executor.run(np.zeros(n_ops, dtype=np.int64))
    assert executor.run(np.ones(n_ops, dtype=np.int64)) is found
    assert executor.n_runs <= before + 1


def test_the_callers_model_stays_as_it_is() -> None:
    model, args = towers()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Executor(model, args, cluster=TWO, train=True, **STEPS) as executor:
        assert executor.run(spread_out(executor)).reason is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_each_order_is_run() -> None:
    with Executor(*towers(), cluster=TWO, **STEPS) as executor:
        device = np.zeros(executor.graph.n_ops, dtype=np.int64)
        device[-1] = 1  # both towers on one device: either may come first
        for order in (np.arange(executor.graph.n_ops), -np.arange(executor.graph.n_ops)):
            assert executor.run(device, order).reason is None
        assert executor.n_runs == 2


def test_ops_that_stay_together_are_not_divided(executor: Executor) -> None:
    problem = Problem(executor.graph, TWO)
    group = next(members for members in problem.units if len(members) > 1)
    device = np.zeros(executor.graph.n_ops, dtype=np.int64)
    device[group[-1]] = 1
    with pytest.raises(MismatchError, match=r"ops '.*' and '.*' must stay together"):
        executor.run(device)


# -- what goes wrong --------------------------------------------------------------------------------------------


def misbehaving(
    monkeypatch: pytest.MonkeyPatch, misbehave: Callable[[int], None], **settings: Any
) -> tuple[Executor, np.ndarray]:
    """An executor of which the processes misbehave, given their rank, when both devices are used."""
    real = pool.timed

    def timed(subject: Any, arrangement: Arrangement, group: Any) -> TimedRun | None:
        if arrangement.n_ranks == 2:
            misbehave(group.rank)
        return real(subject, arrangement, group)

    monkeypatch.setattr(pool, "timed", timed)
    executor = Executor(*towers(), cluster=TWO, **STEPS, **settings)
    return executor, spread_out(executor)


def goes_on(executor: Executor, failed: np.ndarray, found: Execution, reason: str) -> None:
    """It failed for that reason, is not tried again, and the next placement runs on new processes."""
    assert found.step_time_s == np.inf
    assert reason in (found.reason or "")
    runs = executor.n_runs
    assert executor.run(failed) is found
    assert executor.n_runs == runs
    assert executor.run(np.zeros_like(failed)).reason is None


def test_a_placement_that_takes_too_long_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, device = misbehaving(monkeypatch, lambda rank: time.sleep(600 * rank), limit_s=1.0)
    with executor:
        executor.run(np.zeros_like(device))
        first = pids_of(executor)
        found = executor.run(device)
        assert are_gone(first)
        goes_on(executor, device, found, "not done after 1 s")
        (score,) = executor.scorer(Problem(executor.graph, TWO)).batch(device[None]).step_time_s
        assert score == 1.0  # what it was given


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_dies_is_a_placement_that_fails(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    def die(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), number)

    executor, device = misbehaving(monkeypatch, die)
    with executor:
        found = executor.run(device)
        assert "rank 1" in (found.reason or "")
        goes_on(executor, device, found, "died" if "died" in (found.reason or "") else number.name)


def test_a_fork_may_neither_run_nor_end_them(executor: Executor) -> None:
    executor.run(spread_out(executor))
    pid = os.fork()
    if pid == 0:  # this is the fork: no test framework must see its end
        try:
            executor.close()
            executor.run(spread_out(executor, 6))
        except MismatchError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert executor._pool._workers.all_alive


def test_what_a_process_raises_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rank: int) -> None:
        raise RuntimeError("no such kernel")

    executor, device = misbehaving(monkeypatch, fail)
    with executor:
        goes_on(executor, device, executor.run(device), "failed with RuntimeError: no such kernel")


def test_a_process_that_died_between_runs_is_no_placements_fault(executor: Executor) -> None:
    assert executor.run(spread_out(executor, 1)).reason is None
    os.kill(pids_of(executor)[1], signal.SIGKILL)
    time.sleep(0.2)
    assert executor.run(spread_out(executor, 2)).reason is None


def test_ctrl_c_ends_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, device = misbehaving(monkeypatch, lambda rank: time.sleep(30))
    with executor:
        executor.run(np.zeros_like(device))
        pids = pids_of(executor)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            executor.run(device)
        assert are_gone(pids)


def test_the_end_of_the_block_ends_the_processes() -> None:
    with Executor(*towers(), cluster=TWO, **STEPS) as executor:
        executor.run(spread_out(executor))
        pids = pids_of(executor)
        assert len(pids) == 2
    assert are_gone(pids)


def test_no_process_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, signal\nimport test_executing as t\n"
        "executor = t.Executor(*t.towers(), cluster=t.TWO, **t.STEPS)\nexecutor.run(t.spread_out(executor))\n"
        "print(*t.pids_of(executor), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, timeout=60, check=False
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    assert are_gone(pids)


# -- as a scorer ------------------------------------------------------------------------------------------------


def test_an_episode_is_scored_by_running(executor: Executor) -> None:
    env = gymnasium.make("placement/Group-v0", graph=executor.graph, cluster=TWO, scorer=executor.scorer)
    env.reset(seed=0)
    units = Problem(executor.graph, TWO).units
    device = spread_out(executor, 3)
    before = executor.n_runs
    _, reward, terminated, _, info = env.step([int(device[members[0]]) for members in units])
    assert executor.n_runs == before + 1
    assert terminated
    assert info["feasible"]
    assert info["step_time_s"] == executor.run(device).step_time_s
    assert reward == pytest.approx(-(info["step_time_s"] ** 0.5), rel=1e-12)


def test_a_batch_has_orders_and_what_is_known_is_not_run_again(executor: Executor) -> None:
    device = np.stack([spread_out(executor, 4), spread_out(executor, 4), spread_out(executor, 5)])
    orders = np.stack([np.arange(executor.graph.n_ops)] * 3).astype(float)
    scorer = executor.scorer(Problem(executor.graph, TWO))
    before = executor.n_runs
    scores = scorer.batch(device, orders=orders)
    assert executor.n_runs == before + 2
    assert scores.step_time_s[0] == scores.step_time_s[1] == executor.run(device[0], orders[0]).step_time_s
    assert scores.feasible.all()
    simulated = Simulator(Problem(executor.graph, TWO)).batch(device, orders=orders)
    assert (scores.peak_bytes == simulated.peak_bytes).all()


def test_what_does_not_fit_is_not_run() -> None:
    with Executor(*towers(), cluster=cpus(memory_bytes=64), **STEPS) as executor:
        scores = executor.scorer(Problem(executor.graph, executor.cluster)).batch(spread_out(executor)[None])
        assert not scores.feasible.any()
        assert executor.n_runs == 0
        assert pids_of(executor) == []


# -- optimize and train -----------------------------------------------------------------------------------------


def test_a_heuristics_placement_stays_what_it_is(executor: Executor) -> None:
    plain = placement.optimize(executor.graph, TWO, "round_robin")
    found = placement.optimize(executor.graph, TWO, "round_robin", scorer=executor.scorer)
    assert (found.placement, found.order, found.step_time_s) == (plain.placement, plain.order, plain.step_time_s)
    assert found.note.startswith("measured ")
    assert ", predicted " in found.note
    assert placement.verify(found).holds


def test_the_fastest_of_a_few_is_the_answer(executor: Executor) -> None:
    before = executor.n_runs
    found = placement.optimize(executor.graph, TWO, "auto", evaluations=30, scorer=executor.scorer, strategy="none")
    assert executor.n_runs - before <= 8
    assert "the fastest of" in found.note
    assert placement.verify(found).holds
    own = executor.run(found.device_numbers(), found.order_numbers())
    runs = [execution for execution in executor._known.values() if execution.reason is None]
    assert own.reason is None
    assert own in runs
    one = executor.run(np.zeros(executor.graph.n_ops, dtype=np.int64))
    assert own.step_time_s <= one.step_time_s


def test_a_strategy_is_run_once(executor: Executor) -> None:
    first = executor.run_strategy("dp2 zero1")
    runs = executor.n_runs
    assert first.reason is None
    assert np.isfinite(first.step_time_s)
    assert executor.run_strategy(placement.Strategy.parse("dp2 zero1")) == first
    assert executor.n_runs == runs
    assert executor.run_strategy("none") == executor.run(np.zeros(executor.graph.n_ops, dtype=np.int64))


def test_a_strategy_uses_all_processes(executor: Executor) -> None:
    with pytest.raises(MismatchError, match="make an Executor on a cluster of 4"):
        executor.run_strategy("dp4")


def test_a_strategy_that_the_model_does_not_allow_says_so(executor: Executor) -> None:
    found = executor.run_strategy("cp2")
    assert np.isinf(found.step_time_s)
    assert "cut" in (found.reason or "")


def test_the_best_strategies_are_run_too(executor: Executor) -> None:
    found = placement.optimize(executor.graph, TWO, evaluations=30, scorer=executor.scorer)
    assert "measured " in found.note
    assert "strategies" in found.note
    assert found.alternatives


def test_what_cannot_be_run_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, _ = misbehaving(monkeypatch, lambda rank: sys.exit(3))
    with executor:
        found = placement.optimize(executor.graph, TWO, "round_robin", scorer=executor.scorer)
    assert not found.feasible
    assert found.reason == "the placement could not be run; Executor.run says why."


def test_training_is_rewarded_by_running(executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    softmax_policy.in_the_place_of_hierarchical(monkeypatch)
    before, output = executor.n_runs, tmp_path / "policy.zip"
    found = train(executor.graph, TWO, output=output, evaluations=2 * softmax_policy.BATCH, scorer=executor.scorer)
    assert executor.n_runs > before
    (result,), (measured_s,) = found.results, found.measured_s
    assert result is not None
    assert measured_s == executor.run(result.device_numbers(), result.order_numbers()).step_time_s
    assert result.note.startswith("measured ")
    assert Result.load(found.result_files[0]) == result
    assert not found.proven
    again = train(executor.graph, TWO, output=tmp_path / "simulated.zip", evaluations=8)
    assert again.measured_s == ()


def test_a_policy_of_the_simulator_is_gone_on_with(executor: Executor, tmp_path: Path) -> None:
    first, second = tmp_path / "simulated.zip", tmp_path / "tuned.zip"
    asked: dict[str, Any] = {"policy": "graph", "evaluations": 32}
    train(executor.graph, TWO, output=first, **asked)
    before = executor.n_runs
    found = train(executor.graph, TWO, output=second, scorer=executor.scorer, start_from=first, **asked)
    assert executor.n_runs > before
    assert found.results[0] is not None
    likeliest = train(
        executor.graph,
        TWO,
        "graph",
        output=tmp_path / "none.zip",
        evaluations=0,
        scorer=executor.scorer,
        start_from=first,
    )
    assert found.measured_s[0] <= likeliest.measured_s[0]  # type: ignore[operator] # where it began
    weights = [placement_policy(path) for path in (first, tmp_path / "none.zip", second)]
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[2].values(), strict=True))


def placement_policy(path: Path) -> dict[str, torch.Tensor]:
    from placement.learning.policies.policy_file import load_policy

    return dict(load_policy(path).policy.state_dict())


def test_another_policy_is_not_gone_on_with(executor: Executor, tmp_path: Path) -> None:
    train(executor.graph, TWO, "graph", output=tmp_path / "p.zip", evaluations=0)
    with pytest.raises(MismatchError, match=r"is called 'graph' and 'hierarchical' is to be trained; go on with"):
        train(executor.graph, TWO, output=tmp_path / "q.zip", evaluations=0, start_from=tmp_path / "p.zip")
    with pytest.raises(PolicyFileError):
        train(executor.graph, TWO, output=tmp_path / "q.zip", evaluations=0, start_from=tmp_path / "nothing.zip")


# -- what is refused --------------------------------------------------------------------------------------------


def test_what_cannot_be_run_is_refused(executor: Executor) -> None:
    model, args = towers()
    with pytest.raises(ClusterError, match=r"'gpu0' of cluster 'cpus' is a gpu; placements are tried out on CPU cores"):
        Executor(model, args, cluster=cpus(kind="gpu"))
    many = len(os.sched_getaffinity(0)) + 1
    with pytest.raises(ClusterError, match=rf"has {many} devices and this process may use {many - 1} cores"):
        Executor(model, args, cluster=cpus(many))
    with pytest.raises(MismatchError, match="steps = 5 and dropped = 5; expected to drop fewer"):
        Executor(model, args, cluster=TWO, steps=5)
    with pytest.raises(MismatchError, match="limit_s = 0; expected a finite number"):
        Executor(model, args, cluster=TWO, limit_s=0)
    with pytest.raises(MismatchError, match="is on meta, without data"):
        Executor(towers()[0].to("meta"), args, cluster=TWO)
    with pytest.raises(MismatchError, match=r"runs on cluster 'cpus', .* another one; make an Executor for that"):
        executor.scorer(Problem(executor.graph, cpus(memory_bytes=2**33)))
    other = placement.capture(nn.Linear(16, 16), args[0], train=True)
    with pytest.raises(MismatchError, match="place this model first"):
        executor.scorer(Problem(other, TWO))


def test_the_name_alone_is_not_enough(executor: Executor) -> None:
    sentence = "scorer 'execute' runs a model, and a graph has none; make an executor = placement.Executor"
    with pytest.raises(MismatchError, match=sentence):
        gymnasium.make("placement/Group-v0", graph=executor.graph, cluster=TWO, scorer="execute")
    with pytest.raises(MismatchError, match=sentence):
        placement.optimize(executor.graph, TWO, scorer="execute")
    with pytest.raises(UnknownNameError, match=r"unknown scorer 'exec', did you mean 'execute'\?"):
        placement.optimize(executor.graph, TWO, scorer="exec")
    with pytest.raises(MismatchError, match="a scorer gives step times; expected objective latency, got throughput"):
        placement.optimize(executor.graph, TWO, objective="throughput", scorer=executor.scorer)


# -- commands ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(TOWERS, encoding="utf-8")
    (tmp_path / "two.toml").write_text(TWO.to_toml(), encoding="utf-8")
    return tmp_path


def test_the_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.py:make", "--cluster", "two.toml", "--scorer", "execute", "--json"]
    assert run_command(["optimize", *words, "--method", "heft", "-o", "p.json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["note"].startswith("measured ")
    assert "--scorer execute" in found["command"]
    assert Result.load("p.json").placement == found["placement"]
    assert run_command(["train", *words, "--policy", "graph", "--evaluations", "0", "-o", "policy.zip"]) == 0
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["measured_step_s"] > 0


def test_the_commands_refuse(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        (["optimize", "nmt4", "--cluster", "8xV100-nvlink", "--scorer", "execute"], "tried out on CPU cores"),
        (["optimize", "g.json", "--cluster", "two.toml", "--scorer", "execute"], "there is no file g.json"),
        (["optimize", "nmt4", "--cluster", "two.toml", "--scorer", "exec"], "did you mean 'execute'?"),
        (["optimize", "nmt4", "--scorer", "execute", "--objective", "throughput"], "leave out --objective"),
        (["train", "nmt4", "--scorer", "execute", "--granularity", "module", "-o", "p.zip"], "leave out --granularity"),
    ):
        assert run_command(words) == 2
        assert sentence in capsys.readouterr().err
