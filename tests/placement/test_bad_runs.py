"""What cannot be run is refused in one sentence: by `placement.apply`, by a placed model, and by the commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from placed_models import cpus
from torch import nn

import placement
from graphs.errors import CaptureError, MismatchError, PlacementError, UnknownNameError
from placement.cli import run
from placement.results.result import Result
from placement.runtime.application import check_same

SOURCE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, hidden=8, bias=True, extra=False, first="left"):
        super().__init__()
        self.first = first
        setattr(self, first, nn.Linear(6, hidden))
        self.right = nn.Linear(hidden, 4, bias=bias)
        self.extra = nn.Parameter(torch.ones(4)) if extra else None

    def forward(self, x, y, scale=None):
        z = self.right(getattr(self, self.first)(x)) * y
        z = z if self.extra is None else z * self.extra
        return z if scale is None else z * scale


class Gate(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


def inputs(batch=5):
    return torch.randn(batch, 6), torch.randn(batch, 4)


def make(): return Net(), inputs()
def renamed(): return Net(first="west"), inputs()
def removed(): return Net(bias=False), inputs()
def added(): return Net(extra=True), inputs()
def reshaped(): return Net(hidden=9), inputs()
def larger(): return Net(), inputs(10)
def double(): return Net().double(), tuple(x.double() for x in inputs())
def missing(): return Net(), inputs()[:1]
def too_many(): return Net(), (*inputs(), None, 3)
def unknown(): return Net(), inputs(), {"scal": 2}
def keyword(): return Net(), inputs(), {"scale": torch.ones(4)}
def gate(): return Gate(6, 6), (torch.randn(5, 6),)
def on_meta(): return Net().to("meta"), inputs()
def inputs_on_meta(): return Net(), tuple(x.to("meta") for x in inputs())
def number(): return Net(), 3
def listed(): return Net(), inputs(), [1]
"""
Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def made(name: str) -> Made:
    torch.manual_seed(0)
    scope: dict[str, Any] = {}
    exec(SOURCE, scope)
    model, args, kwargs = (*scope[name](), {})[:3]
    return model, args, kwargs


def place(name: str = "make", **options: Any) -> Result:
    return placement.optimize(placement.capture(*made(name), **options), cpus(2), "round_robin")


@pytest.fixture(scope="module")
def inference() -> Result:
    return place()


@pytest.fixture(scope="module")
def training() -> Result:
    return place(train=True)


OTHERS = {
    "renamed": "op 'west/linear' where the placement has 'left/linear'; place this model first",
    "removed": "op 'right/linear' keeps 128 bytes of parameters where the placement has 144; place this model first",
    "added": "6 ops where the placement has 5; place this model first",
    "reshaped": "op 'left/linear' makes 180 bytes where the placement has 160; place this model first",
    "larger": "argument 'x' of shape (10, 6) makes 240 bytes where the placement has 120; give inputs of the shapes "
    "that were placed, with 5 in dimension 0 or 3 in dimension 1, or place the model for these",
    "double": "argument 'x' is float64 where the placement has float32; convert it, or place the model",
    "missing": "Net takes (x, y, scale), and got others: missing a required argument: 'y'; pass the arguments",
    "too_many": "Net takes (x, y, scale), and got others: too many positional arguments; pass the arguments",
    "unknown": "Net takes (x, y, scale), and got others: got an unexpected keyword argument 'scal'; pass the arguments",
    "keyword": "op 'scale' where the placement has 'left/linear'; place this model first",
    "number": "the example inputs are a int; expected a tuple of the positional arguments, or one tensor",
    "listed": "the keyword arguments are a list; expected a mapping from their names to their values",
    "on_meta": "'left.weight' is on meta, without data",
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_and_other_inputs(inference: Result, name: str) -> None:
    model, args, kwargs = made(name)
    with pytest.raises((CaptureError, MismatchError), match=re.escape(OTHERS[name])) as caught:
        placement.apply(model, inference, args, kwargs)
    assert "\n" not in str(caught.value)


def test_training_and_inference_are_told_apart(inference: Result, training: Result) -> None:
    with pytest.raises(
        MismatchError, match="is for inference of graph 'Net', and this is training; run what was placed"
    ):
        check_same(training.graph, inference.graph)
    model, args, _ = made("make")
    with pytest.raises(MismatchError, match="placed for inference; capture it with train=True"):
        placement.apply(model, inference, args).train()


def test_the_same_ops_wired_otherwise() -> None:
    def captured(swap: bool) -> Any:
        class Wired(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                a, b = x.sin(), x.cos()
                return (a + b) * (b if swap else a)

        return placement.capture(Wired(), torch.ones(3), name="wired")

    check_same(captured(True), captured(True))
    with pytest.raises(MismatchError, match=r"other ops read what op '(sin|cos)' makes; place this model first"):
        check_same(captured(True), captured(False))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_the_optimizer_of_the_capture_does_not_matter(optimizer: str) -> None:
    model, args, _ = made("make")
    placed = placement.apply(model, place(train=True, optimizer=optimizer), args)
    placed(*args).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("result", "got"), [(None, "a NoneType"), ({"left/linear": "cpu0"}, "a dict"), (placement.capture, "a function")]
)
def test_what_is_no_placement(result: Any, got: str) -> None:
    model, args, _ = made("make")
    with pytest.raises(MismatchError, match=f"got {got} as the placement; expected what placement.optimize returned"):
        placement.apply(model, result, args)


def test_a_number_of_thousands_of_digits() -> None:
    with pytest.raises(MismatchError, match=r"it holds a number that cannot be read: .* has 5000 digits\.$"):
        Result.from_json('{"seed": ' + "9" * 5000 + "}", "it")


@pytest.mark.parametrize("content", ["", "[1, 2]", "half"])
def test_a_damaged_file(inference: Result, content: str, tmp_path: Path) -> None:
    text = inference.to_json()
    (tmp_path / "p.json").write_text(text[: len(text) // 2] if content == "half" else content, encoding="utf-8")
    model, args, _ = made("make")
    with pytest.raises(MismatchError, match="is not a saved result"):
        placement.apply(model, tmp_path / "p.json", args)


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        ({"gpu0": "cpu"}, "unknown device of cluster 'cpus' 'gpu0', did you mean"),
        ({"cpu0": "abacus"}, "device 'cpu0' is to be 'abacus', which this PyTorch or machine does not have"),
        ({"cpu0": "meta"}, "device 'cpu0' is to be 'meta', which this PyTorch or machine does not have"),
        ({"cpu1": "cuda:99"}, "device 'cpu1' of cluster 'cpus' stands for cuda:99, and this machine has"),
        (["cpu", "cpu"], "devices is a list; expected a mapping"),
    ],
)
def test_devices_that_are_not_there(inference: Result, devices: Any, sentence: str) -> None:
    model, args, _ = made("make")
    with pytest.raises((MismatchError, UnknownNameError), match=re.escape(sentence)):
        placement.apply(model, inference, args, devices=devices)


# -- calls of a placed model -----------------------------------------------------------------------------------------

X, Y = torch.ones(5, 6), torch.ones(5, 4)


@pytest.mark.parametrize(
    ("args", "kwargs", "sentence"),
    [
        ((X,), {}, "Net takes (x, y, scale), and got others: missing a required argument: 'y'"),
        ((X, Y, None, 3), {}, "Net takes (x, y, scale), and got others: too many positional arguments"),
        ((X, Y), {"scal": 2}, "got an unexpected keyword argument 'scal'"),
        ((X, Y), {"scale": 2}, "argument 'scale' is 2; it was None when the model was captured; pass that, or place"),
        ((X, Y), {"scale": Y[0]}, "argument 'scale' was not there when the model was captured; leave it out, or place"),
        (("words", Y), {}, "argument 'x' is 'words'; it was a tensor when the model was captured, so pass one"),
        (([1.0], Y), {}, "argument 'x' is missing or no tensor"),
        ((X.to("meta"), Y), {}, "'x' is on meta, without data; to run the model give it a tensor that has data"),
        ((X.long(), Y), {}, "argument 'x' is torch.int64; expected torch.float32, as captured; convert it, or place"),
        # The batch may change, and what the model takes; what it does not take is to blame.
        (
            (torch.ones(3, 7), torch.ones(3, 4)),
            {},
            "argument 'x' has 7 in dimension 1; expected 6, shape (5, 6) as captured, and for these shapes tracing "
            "failed in module 'left' (Linear)",
        ),
    ],
)
def test_calls_that_do_not_fit(inference: Result, args: tuple[Any, ...], kwargs: dict[str, Any], sentence: str) -> None:
    model, example, _ = made("make")
    placed = placement.apply(model, inference, example)
    with pytest.raises(MismatchError, match=re.escape(sentence)):
        placed(*args, **kwargs)
    assert placed(X[:2], Y[:2]).shape == (2, 4)  # and it still runs


# -- by module -------------------------------------------------------------------------------------------------------


def test_another_model_placed_by_module() -> None:
    result = place("gate", granularity="module")
    _, args, _ = made("gate")
    with pytest.raises(MismatchError, match="this model has a ReLU where that has a Gate"):
        placement.apply(nn.ReLU(), result, args)
    with pytest.raises(MismatchError, match="'weight' is on meta, without data"):
        placement.apply(made("gate")[0].to("meta"), result, args)


# -- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "method", "processes", "sentence"),
    [
        ({}, "round_robin", 1, "there are devices: 2, processes: 1; start it with torchrun"),
        ({}, "single_device", 2, "there are devices: 1, processes: 2; start it with torchrun"),
        ({"granularity": "module"}, "round_robin", 2, "is by module, which one process runs, and there are several"),
    ],
)
def test_another_number_of_processes(
    options: dict[str, Any], method: str, processes: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args, kwargs = made("make")
    result = placement.optimize(placement.capture(model, args, kwargs, **options), cpus(2), method)
    environment = {"RANK": "0", "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**environment, "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PlacementError, match=sentence):
        placement.apply(model, result, args)


# -- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(inference: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text(SOURCE, encoding="utf-8")
    for name, count in (("two", 2), ("three", 3)):
        (tmp_path / f"{name}.toml").write_text(cpus(count).to_toml(), encoding="utf-8")
    inference.save(tmp_path / "p.json")
    return tmp_path


# Those that start processes take seconds: one that fails in the plain model's process is enough.
COMMANDS = {
    "profile m.py:missing -o g.json --cluster two.toml": "Net takes (x, y, scale), and got others: missing a required",
    "profile m.py:too_many -o g.json --cluster two.toml": "got others: too many positional arguments",
    "profile m.py:unknown -o g.json --cluster two.toml": "got an unexpected keyword argument 'scal'",
    "profile m.py:number -o g.json --cluster two.toml": "the example inputs are a int; expected a tuple",
    "profile m.py:listed -o g.json --cluster two.toml": "the keyword arguments are a list; expected a mapping",
    "profile m.py:on_meta -o g.json --cluster two.toml": "'left.weight' is on meta, without data",
    "profile m.py:inputs_on_meta -o g.json --cluster two.toml": "'x' is on meta, without data",
    "profile m.py:inputs -o g.json --cluster two.toml": "m.py:inputs returned a tuple of 2; expected (model, args)",
    "profile m.py -o g.json --cluster two.toml": "m.py is a Python file; say which function",
    "apply m.py p.json": "m.py is a Python file; say which function",
    "apply m.py:missing p.json": "Net takes (x, y, scale), and got others: missing a required argument: 'y'",
    "apply m.py:make nowhere.json": "cannot read nowhere.json",
    "apply m.py:make m.py": "m.py is not a saved result",
    "apply m.py:make p.json --cluster nowhere": "nowhere",
    "apply m.py:make p.json --cluster three.toml": "for cluster 'cpus', and --cluster three.toml is another one; leave",
    "apply m.py:make --cluster two.toml --budget-s -1": "a finite number of seconds, 0 or more, got -1.0",
    "apply nowhere.py:make --cluster two.toml --strategy dp2x": "cannot be read at 'dp2x'",  # before anything is run
    "apply nowhere.json": "there is no file nowhere.json; give a built-in model",
    "profile p.json -o g.json --cluster two.toml": "p.json has no weights to run; give a built-in model",
    "profile m.py:gate -o g.json --cluster two.toml": "`placement apply` places it by leaf module",
    "export p.json --to device_map --model m.py:renamed": "a module 'left', which Net does not have",
    "export p.json --to device_map --model m.py": "m.py is a Python file; say which function",
    "export m.py --to device_map": "m.py is not a saved result",
}


@pytest.mark.parametrize("words", COMMANDS)
def test_commands(folder: Path, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(words.split()) == 2
    found = capfd.readouterr()
    assert found.out == ""
    *told, sentence = found.err.splitlines()  # what `apply` waits for, and the sentence
    assert sentence.startswith("placement: ")
    assert COMMANDS[words] in sentence
    assert told in ([], ["running the plain model"])
    assert not (folder / "g.json").exists()
