"""Measuring the ops of a model: clock readings, updates, profiles and the commands."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from cases.measured_cases import cpu_cluster
from torch import nn

import placement
from env.cluster import Cluster
from env.problem import Problem
from graphs.capture import capture_program
from graphs.errors import ClusterError, MismatchError
from graphs.opgraph import OpGraph, Phase
from placement.cli import run
from placement.measuring.machine import local_machine as measure
from placement.measuring.machine.speeds import BRIEF
from placement.measuring.machine.workers import cores_for
from placement.measuring.models.op_clock import ClockedRoutine, clocked, host_clock
from placement.measuring.models.op_times import OPTIMIZERS, update_times_s
from placement.measuring.models.profiling import measured_profile, step_to_measure
from placement.measuring.models.repeats import Repeats
from placement.runtime.program.device_layout import DeviceLayout
from placement.runtime.program.functional import functional
from placement.runtime.program.routines import compile_routines

CPU = torch.device("cpu")
N_CORES = len(cores_for(None))
QUICK = Repeats(dropped=1, least=3, most=3)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "cache"))


class Small(nn.Module):
    """Buffers that a step writes, random numbers, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.first(x))).t().contiguous().t())


# -- clock readings ------------------------------------------------------------------------------------------------


def test_clock_readings_change_nothing_but_add_times() -> None:
    torch.manual_seed(0)
    model, x = Small().eval(), torch.rand(3, 4)
    program = capture_program(model, (x,))
    order = program.graph.topological_order.tolist()
    n = len(order)
    layout = DeviceLayout(functional(program), [0] * n, [order], list(range(n)), [CPU])
    routine = compile_routines(layout, [layout.forward()]).sections[0][0]
    states = dict(model.state_dict())
    taken = [x if kind == "input" else states[name] for kind, name in routine.takes]
    read, between = host_clock()
    code = clocked(routine, read)
    with torch.no_grad():
        (plain,) = routine.run(None, *taken)
        output, *readings = code.run(None, *taken)
    assert torch.equal(plain, output)
    assert readings == sorted(readings)
    assert list(code.labels) == [("op", op) for op in routine.ops if program.graph.kernels[op]]
    assert len(readings) == len(code.labels) + 2
    assert set(code.seconds(readings, between)) == {op for _, op in code.labels}
    spans = code.spans(readings)
    assert [(span.what, span.number) for span in spans] == list(code.labels)
    assert [span.start_s for span in spans] == readings[1:-1]
    assert [span.end_s for span in spans] == readings[2:]


def test_what_a_reading_takes_is_left_out() -> None:
    code = ClockedRoutine(lambda: (), (("op", 5), ("send", 0), ("op", 3)))
    assert code.seconds([0.0, 1.0, 4.0, 6.0, 6.5], lambda a, b: b - a) == {5: 2.0, 3: 0.0}


# -- updates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "momentum", "sgd"])
def test_updates_of_all_parameters_take_time(optimizer: str) -> None:
    updates = [(op, torch.ones(op, 8), torch.ones(op, 8)) for op in (3, 4, 5)]
    kind, settings = OPTIMIZERS[optimizer]
    make = partial(kind, lr=1e-6, **settings)
    found = update_times_s(updates, make, CPU, 3, lambda: None)
    assert {op: len(samples) for op, samples in found.items()} == {3: 3, 4: 3, 5: 3}
    assert all(np.median(samples) > 0 for samples in found.values())
    assert update_times_s([], make, CPU, 3, lambda: None) == {}


# -- profiles ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True])
def test_every_op_gets_a_time(train: bool) -> None:
    torch.manual_seed(0)
    model, x = Small(), torch.rand(3, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = measured_profile(step_to_measure(model, (x,), train=train), cpu_cluster(min(2, N_CORES)), QUICK)
    graph = found.graph
    captured = placement.capture(model, (x,), train=train)
    assert (graph.op_names, graph.kinds, graph.time_keys) == (captured.op_names, captured.kinds, ("cpu",))
    has_time = ~np.isnan(graph.time_s[:, 0])
    assert has_time.tolist() == (graph.kernels > 0).tolist()
    assert (graph.time_s[has_time] > 0).any()
    assert (np.isnan(found.spread_s) == np.isnan(graph.time_s)).all()
    assert found.steps == {"cpu": 3 * min(2, N_CORES)}
    assert found.typical_spread("cpu") >= 0
    assert found.alone.shape == graph.time_s.shape
    assert (found.alone[~has_time] == 1.0).all()
    assert (found.alone > 0).all()
    assert (found.alone != 1.0).any() == (N_CORES > 1)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())
    if train:
        assert (graph.time_s[graph.phase == Phase.UPDATE] > 0).all()
    else:
        # What the ops take adds up to the step.
        assert np.nansum(graph.time_s) == pytest.approx(found.step_s["cpu"], rel=1e-3)
        assert Problem(graph, cpu_cluster()).op_s.sum() == pytest.approx(found.step_s["cpu"], rel=1e-3)


@pytest.mark.parametrize("precision", ["mixed", "master", "master-bf16-reduce"])
def test_a_step_is_measured_in_the_precision_that_is_asked_for(precision: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)), torch.rand(3, 4)
    step = step_to_measure(model, (x,), train=True, precision=precision)
    graph = measured_profile(step, cpu_cluster(), QUICK).graph
    captured = placement.capture(model, (x,), train=True, precision=precision)
    assert (graph.op_names, graph.kinds, graph.origin.precision) == (captured.op_names, captured.kinds, precision)
    assert (graph.time_s[graph.phase == Phase.UPDATE] > 0).all()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_times_are_kept_under_the_model_of_the_device() -> None:
    step = step_to_measure(nn.Linear(2, 2), torch.rand(1, 2))
    graph = measured_profile(step, cpu_cluster(model="Z80"), QUICK).graph
    assert graph.time_keys == ("Z80",)


def test_sparse_gradients_are_refused_before_anything_runs() -> None:
    model, words = nn.Embedding(12, 8, sparse=True), torch.randint(0, 12, (4, 5))
    with pytest.raises(MismatchError, match="makes a sparse gradient, and adam, with which"):
        step_to_measure(model, words, train=True)
    assert step_to_measure(model, words, train=True, optimizer="sgd").program.graph.is_training


def test_a_profile_is_a_graph_file(tmp_path: Path) -> None:
    graph = measured_profile(step_to_measure(nn.Linear(2, 2), torch.rand(1, 2)), cpu_cluster(), QUICK).graph
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    placement.save_graph(graph, one)
    loaded = placement.load_graph(one)
    placement.save_graph(loaded, two)
    assert loaded == graph
    assert one.read_bytes() == two.read_bytes()


def test_profile_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    local = cpu_cluster()
    monkeypatch.setattr(measure, "local_cluster", lambda *_, **__: local)
    graph = placement.profile(nn.Linear(2, 2), torch.rand(1, 2), name="one layer")
    assert isinstance(graph, OpGraph)
    assert (graph.name, graph.time_keys) == ("one layer", ("cpu",))


def test_what_cannot_be_profiled() -> None:
    with torch.device("meta"):
        nowhere = nn.Linear(2, 2)
    with pytest.raises(MismatchError, match="weight' is on meta, without data"):
        placement.profile(nowhere, torch.rand(1, 2), cluster=cpu_cluster())
    with pytest.raises(ClusterError, match="device 'd0' of cluster 'test' is a accelerator, and this machine has"):
        placement.profile(nn.Linear(2, 2), torch.rand(1, 2), cluster=cpu_cluster(kind="accelerator"))


class Failing(nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[index]


def test_a_step_that_fails_is_named() -> None:
    with pytest.raises(ClusterError, match="failed with IndexError"):
        placement.profile(Failing(), (torch.rand(2), torch.tensor([5])), cluster=cpu_cluster())


LOUD = """
import torch

class Loud(torch.nn.Linear):
    def forward(self, x):
        print("forward")
        return super().forward(x)

def make():
    return Loud(2, 2), (torch.rand(1, 2),)
"""


# -- commands ----------------------------------------------------------------------------------------------------


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("local_cluster", "measured_machine"):
        monkeypatch.setattr(measure, name, partial(getattr(measure, name), effort=BRIEF))
    assert run(["calibrate", "--minutes", "0.01", "--devices", "1", "-o", "mine.toml"]) == 0
    out, _ = capsys.readouterr()
    assert "written to mine.toml" in out
    assert f"kept as Cluster.local(1) in Python in {tmp_path / 'cache'}" in out
    assert re.search(r"cpu0 +launch +\S+ .s +\S+% +\d+%", out)
    assert Cluster.from_toml("mine.toml").n_devices == 1
    assert run(["calibrate", "--minutes", "0.01", "--devices", "1"]) == 0
    assert measure.cpu_model() in capsys.readouterr().out
    Path("tiny.py").write_text(LOUD, encoding="utf-8")
    assert run(["profile", "tiny.py:make", "--cluster", "mine.toml", "--train", "-o", "graph.json"]) == 0
    out, err = capsys.readouterr()
    assert "forward" in err  # what the model prints is no part of the answer
    assert "forward" not in out
    assert f"tiny on {measure.cpu_model()} core: " in out
    assert "saved to graph.json" in out
    assert placement.load_graph("graph.json").time_keys == (f"{measure.cpu_model()} core",)
    assert run(["optimize", "graph.json", "--cluster", "local", "--method", "single_device"]) == 0
    assert "on local" in capsys.readouterr().out
    assert run(["clusters", "local"]) == 0


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("calibrate --devices 100000", "got devices = 100000; expected 1 to"),
        ("clusters lokal", "did you mean 'local'?"),
        ("profile alexnet", "profile saves a graph; say where with --output FILE"),
        ("profile nothing -o g.json", "unknown model 'nothing'"),
        ("profile graph.onnx -o g.json", "there is no file graph.onnx; give a built-in model"),
        ("profile alexnet --cluster 1xV100 -o g.json", "is a gpu, and this machine has"),
    ],
)
def test_bad_commands(
    line: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "local_cluster", lambda *_, **__: cpu_cluster())
    if "100000" in line:
        monkeypatch.undo()
    assert run(line.split()) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.out == ""
    assert captured.err.count("\n") == 1
