"""`placement.apply` and the command: which module comes back, what is refused, real runs and their traces."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import placement
from env.cluster import Cluster, Device, both_ways
from graphs.errors import MismatchError
from graphs.opgraph import Phase
from graphs.transforms.stacks import on_stack
from placement.cli import run
from placement.inputs.sources import read_source
from placement.measuring.runs import trial
from placement.measuring.runs.trial import try_out
from placement.results.result import Result
from placement.runtime.application import places_of

TOWERS = """
import torch
from torch import nn


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2))

    def forward(self, x, y):
        print("forward")
        return (self.left(x) * self.right(y)).t()


def make():
    return Towers(), (torch.randn(4, 16), torch.randn(4, 16))
"""
# Which of its branches runs depends on the data.
GATE = """
import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = self.stem(x)
        return self.left(x) if x.sum() > 0 else self.right(x)


def make():
    return Gate(), (torch.randn(4, 6),)


def misfit():
    return nn.Linear(6, 6), (torch.randn(4, 5),)
"""


def two(kind: str = "cpu") -> Cluster:
    devices = tuple(Device(f"{kind}{i}", kind, 2**34, {"float32": 1e10}, 1e10, 5e-6) for i in range(2))
    return Cluster("two", devices, both_ways(devices[0].name, devices[1].name, 1e9, 1e-5))


@pytest.fixture
def towers() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    scope: dict[str, object] = {}
    exec(TOWERS, scope)
    made: tuple[nn.Module, tuple[torch.Tensor, ...]] = scope["make"]()  # type: ignore[operator]
    return made


def placed(model: nn.Module, args: tuple[torch.Tensor, ...], train: bool, method: str = "round_robin") -> Result:
    return placement.optimize(placement.capture(model, args, train=train), two(), method)


@pytest.mark.parametrize("train", [False, True])
def test_it_is_a_drop_in(towers: tuple[nn.Module, tuple[torch.Tensor, ...]], train: bool) -> None:
    model, args = towers
    plain = copy.deepcopy(model)
    result = placed(model, args, train)
    assert len(set((result.placement or {}).values())) == 2
    faster = placement.apply(model, result, args)
    assert list(faster.state_dict()) == list(plain.state_dict())
    found, expected = faster(*args), plain(*args)
    torch.testing.assert_close(found, expected)
    if train:
        found.square().sum().backward()  # any loss may follow
        expected.square().sum().backward()
        for own, theirs in zip(faster.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, theirs.grad)


def test_one_device_is_the_model_itself(towers: tuple[nn.Module, tuple[torch.Tensor, ...]]) -> None:
    model, args = towers
    assert placement.apply(model, placed(model, args, False, "single_device"), args) is model


def test_a_file_will_do(towers: tuple[nn.Module, tuple[torch.Tensor, ...]], tmp_path: Path) -> None:
    model, args = towers
    placed(model, args, False).save(tmp_path / "p.json")
    expected = model(*args)
    torch.testing.assert_close(placement.apply(model, tmp_path / "p.json", args)(*args), expected)


def test_a_placement_found_on_another_stack_is_of_the_same_model() -> None:
    model, args = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Tanh()), (torch.randn(4, 8),)
    graph = on_stack(placement.capture(model, args), "compiled")  # what a kernel keeps inside takes no memory there
    for method in ("single_device", "round_robin"):
        placement.apply(model, placement.optimize(graph, two(), method), args)


def test_another_model_is_refused(towers: tuple[nn.Module, tuple[torch.Tensor, ...]]) -> None:
    model, args = towers
    result = placed(model, args, False)
    with pytest.raises(MismatchError, match=r"this model gives another one: .*place this model first"):
        placement.apply(nn.Linear(16, 16), result, args[0])
    with pytest.raises(MismatchError, match=r"makes \d+ bytes where the placement has \d+; give inputs of the shapes"):
        placement.apply(model, result, tuple(x[:2] for x in args))


def test_a_device_that_is_not_there_is_refused(towers: tuple[nn.Module, tuple[torch.Tensor, ...]]) -> None:
    model, args = towers
    result = placement.optimize(placement.capture(model, args), two("gpu"), "round_robin")
    if torch.cuda.device_count() < 2:
        with pytest.raises(MismatchError, match=r"stands for cuda:\d, and this machine has \d GPUs; pass devices="):
            placement.apply(model, result, args)
    expected = model(*args)
    elsewhere = placement.apply(model, result, args, devices={"gpu0": "cpu", "gpu1": "cpu"})
    torch.testing.assert_close(elsewhere(*args), expected)


def test_gpus_of_several_hosts_are_counted_on_each(
    towers: tuple[nn.Module, tuple[torch.Tensor, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args = towers
    result = placement.optimize(placement.capture(model, args), two("gpu"), "round_robin")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(MismatchError, match=r"'gpu1' .* stands for cuda:1, and this machine has 1 GPUs"):
        places_of(result)
    started = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for key, value in started.items():
        monkeypatch.setenv(key, value)
    assert places_of(result)["gpu1"] == torch.device("cuda:0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(MismatchError, match=r"'gpu1' .* stands for cuda:1"):
        places_of(result)


def test_an_infeasible_result_is_refused(towers: tuple[nn.Module, tuple[torch.Tensor, ...]]) -> None:
    model, args = towers
    result = placed(model, args, False)
    nothing = dataclasses.replace(result, answer=None, reason="it does not fit.")
    with pytest.raises(MismatchError, match="it does not fit"):
        placement.apply(model, nothing, args)


def test_a_strategy_for_another_step_of_the_model_is_refused_before_it_is_read() -> None:
    model, args = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), (torch.ones(4, 8),)
    result = placement.optimize(placement.capture(model, args, train=True), two(), strategy="dp2", seed=0)
    with pytest.raises(MismatchError, match="for a training step and asked for is inference; add --train"):
        try_out("never read", result, train=False)


HALVES = """
import torch
from torch import nn


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.net(x).square().mean()


def autocast():
    torch.manual_seed(0)
    return Autocast(), (torch.randn(32, 64),)


def cast():
    return Autocast().net.to(torch.bfloat16), (torch.randn(32, 64, dtype=torch.bfloat16),)
"""


@pytest.mark.parametrize("function", ["autocast", pytest.param("cast", marks=pytest.mark.slow)])
def test_numbers_of_two_bytes_are_equal_within_their_rounding(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "halves.py").write_text(HALVES, encoding="utf-8")
    (tmp_path / "two.toml").write_text(two().to_toml(), encoding="utf-8")
    words = f"apply halves.py:{function} --train --cluster two.toml --strategy dp2 --steps 4 --json"
    assert run(words.split()) == 0
    found = json.loads(capfd.readouterr().out)
    kinds = ("outputs_equal", "gradients_equal", "weights_equal")
    assert [found[kind] for kind in kinds] == [True] * len(kinds), found["largest_difference"]
    assert 0 < found["largest_difference"]["share"] < 0.05
    assert found["largest_difference"]["name"]


@pytest.mark.parametrize("train", [False, True])
def test_the_command_runs_two_processes(
    towers: tuple[nn.Module, tuple[torch.Tensor, ...]],
    train: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(TOWERS, encoding="utf-8")
    placed(*towers, train).save(tmp_path / "p.json")
    words = ["apply", "model.py:make", "p.json", "--steps", "4", "--json", "--trace", "t.json"]
    capfd.readouterr()
    assert run([*words, *(["--train"] if train else [])]) == 0
    captured = capfd.readouterr()
    assert "forward" in captured.err  # what the model prints is no part of the answer
    found = json.loads(captured.out)
    assert found["outputs_equal"] is True
    assert found["compared_steps"] == 3
    # Inference has none that could be equal.
    assert found["gradients_equal"] is found["weights_equal"] is (True if train else None)
    assert found["speedup"] == pytest.approx(found["measured_single_step_s"] / found["measured_step_s"])
    assert found["predicted_step_s"] > 0
    assert found["op_times"] == "cost model"
    assert (found["steps"], found["dropped"], found["single_steps"], found["single_dropped"]) == (4, 2, 4, 2)
    # Each process has its own parameters and no others.
    all_bytes = sum(parameter.nbytes for parameter in towers[0].parameters())
    kept = [device["kept_bytes"] for device in found["devices"]]
    assert len(kept) == 2
    assert max(kept) < all_bytes
    assert sum(kept) == all_bytes
    assert all(device["busy_s"] >= 0 for device in found["devices"])
    trace = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    check_trace(trace, found, Result.load(tmp_path / "p.json"), train)


def check_trace(trace: dict[str, Any], found: dict[str, Any], result: Result, train: bool) -> None:
    """Both timelines, and in the measured one every op of each device once, within the step."""
    assert {key: trace["otherData"][key] for key in ("predicted_step_s", "measured_step_s")} == {
        key: found[key] for key in ("predicted_step_s", "measured_step_s")
    }
    processes = {e["args"]["name"]: e["pid"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert set(processes) == {"measured devices", "predicted devices", "predicted links"}
    measured = [e for e in trace["traceEvents"] if e["pid"] == processes["measured devices"]]
    predicted = [e for e in trace["traceEvents"] if e["pid"] == processes["predicted devices"] and e["ph"] == "X"]
    assert sorted(e["name"] for e in predicted) == sorted(result.graph.op_names)
    tracks = {e["args"]["name"]: e["tid"] for e in measured if e["name"] == "thread_name"}
    assert list(tracks) == ["cpu0", "cpu1"]
    updates = {
        name for name, phase in zip(result.graph.op_names, result.graph.phase, strict=True) if phase == Phase.UPDATE
    }
    assert bool(updates) == train
    transfers: Counter[tuple[str, str]] = Counter()
    for device, tid in tracks.items():
        step, *slices = [e for e in measured if e["ph"] == "X" and e["tid"] == tid]
        assert step["name"] == "step"
        assert all(step["ts"] <= e["ts"] and e["dur"] >= 0 for e in slices)
        assert all(e["ts"] + e["dur"] <= step["ts"] + step["dur"] + 1e-3 for e in slices)
        own = {op for op, where in (result.placement or {}).items() if where == device}
        assert Counter(e["name"] for e in slices if "kind" in e.get("args", {})) == Counter(own - updates)
        assert [e["name"] for e in slices if e["cat"] == "update"] == ["optimizer"] * train
        transfers.update((e["cat"], device) for e in slices if e["cat"] in ("send", "receive"))
        assert {e["args"]["peer"] for e in slices if e["cat"] == "send"} <= set(tracks) - {device}
    assert transfers["send", "cpu0"] == transfers["receive", "cpu1"]
    assert transfers["send", "cpu1"] == transfers["receive", "cpu0"]
    assert transfers.total() > 0


def test_the_command_repeats_the_doubts_of_a_placement(
    towers: tuple[nn.Module, tuple[torch.Tensor, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = placed(*towers, train=False)
    doubtful = dataclasses.replace(result.cluster, source="measured; doubtful: it was busy.")
    dataclasses.replace(result, cluster=doubtful).save(tmp_path / "p.json")
    (tmp_path / "model.py").write_text(TOWERS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial, "try_out", refused)
    with pytest.warns(UserWarning, match=r"are doubtful: it was busy\."):
        assert run(["apply", "model.py:make", "p.json"]) == 2


def refused(*_args: object, **_options: object) -> None:
    raise MismatchError("not run in this test.")


def test_outputs_do_not_take_the_place_of_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("model.py", TOWERS), ("p.json", "{}"), ("two.toml", two().to_toml())):
        (tmp_path / name).write_text(content, encoding="utf-8")
    for name in ("model.py", "p.json", "two.toml"):
        assert run(["apply", "model.py:make", "p.json", "--cluster", "two.toml", "--trace", name]) == 2
        assert f"{name} is also what the command reads" in capsys.readouterr().err
    assert run(["apply", "model.py:make", "--trace", "t.json", "-o", "t.json"]) == 2
    assert "given for two outputs" in capsys.readouterr().err


@pytest.mark.parametrize("train", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_command_runs_the_plain_model_once_where_one_device_is_best(
    towers: tuple[nn.Module, tuple[torch.Tensor, ...]],
    train: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(TOWERS, encoding="utf-8")
    (tmp_path / "other.py").write_text(OTHER, encoding="utf-8")
    graph = placement.capture(*towers, train=train)
    placement.optimize(graph, two(), "single_device").save("p.json")
    words = [*(["--train"] if train else []), "--steps", "2"]
    capfd.readouterr()
    assert run(["apply", "model.py:make", "p.json", *words, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [device["name"] for device in found["devices"]] == ["cpu0"]
    assert found["speedup"] is found["outputs_equal"] is found["gradients_equal"] is None
    assert found["measured_step_s"] == found["measured_single_step_s"] > 0
    assert found["spread"] == found["single_spread"] >= 0
    assert run(["apply", "model.py:make", "p.json", *words]) == 0
    out = capfd.readouterr().out
    assert out.startswith("one device is best: the model runs as it is; ")
    assert ", 1 step, so no spread is known" in out
    assert "op times are the cost model's" in out
    assert not re.search("speed-up|equal", out)
    # What ran is the plain model, of which the placement is: another one is refused.
    assert run(["apply", "other.py:make", "p.json", *words]) == 2
    assert "this model gives another one" in capfd.readouterr().err


NORMED = """
import torch

def make():
    layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
    return torch.nn.Sequential(*layers), (torch.rand(8, 4),)
"""


def test_who_asked_for_local_statistics_is_told_why_the_step_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(NORMED, encoding="utf-8")
    graph = read_source("model.py:make", train=True).graph
    placement.optimize(graph, two(), strategy="dp2 | statistics=local").save("p.json")
    assert run(["apply", "model.py:make", "p.json", "--train", "--steps", "2"]) == 1
    out = capfd.readouterr().out
    assert "DIFFERENT" in out
    assert "statistics=local asks for that" in out
    assert out.startswith("other results than")


OTHER = "import torch\n\n\ndef make():\n    return torch.nn.Linear(2, 2), (torch.rand(1, 2),)\n"


# -- what cannot be traced ----------------------------------------------------------------------------------------


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gate.py").write_text(GATE, encoding="utf-8")
    (tmp_path / "two.toml").write_text(two().to_toml(), encoding="utf-8")
    return tmp_path


def test_the_command_places_by_module_what_cannot_be_traced(gate: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["apply", "gate.py:make", "--cluster", "two.toml", "--method", "round_robin", "--train", "--steps", "4"]
    with pytest.warns(UserWarning, match=r"^tracing failed in module Gate at .*; so it is placed by leaf module, with"):
        assert run([*words, "--json", "--trace", "t.json", "-o", "p.json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["by_module"] is found["outputs_equal"] is found["gradients_equal"] is True
    assert found["speedup"] == pytest.approx(found["measured_single_step_s"] / found["measured_step_s"])
    assert [device["name"] for device in found["devices"]] == ["cpu0", "cpu1"]
    assert [device["busy_s"] for device in found["devices"]] == [None, None]
    kept = [device["kept_bytes"] for device in found["devices"]]
    assert min(kept) > 0
    assert sum(kept) == 3 * (6 * 6 + 6) * 4
    events = json.loads((gate / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    assert [e["name"] for e in events if e["pid"] == 3 and e["ph"] == "X"] == ["step"]
    with pytest.raises(MismatchError, match="for a training step and asked for is inference; add --train"):
        try_out("gate.py:make", Result.load(gate / "p.json"), train=False)


def test_a_model_that_does_not_run_is_not_placed_by_module(gate: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["apply", "gate.py:misfit", "--cluster", "two.toml"]) == 2
    assert "check that the model runs on these inputs" in capsys.readouterr().err
