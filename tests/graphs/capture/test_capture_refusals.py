"""Models that cannot be captured: the sentence names the module, the line and a way out."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import captured_models
import pytest
import torch
import torch.distributed as dist
from captured_models import Failing, Perceptron
from torch import nn
from torch.distributed.fsdp import fully_shard

from graphs.capture import capture, costs
from graphs.errors import CaptureError, UnknownNameError


@pytest.mark.parametrize("train", [False, True])
def test_a_failure_names_module_line_and_way_out(train: bool, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(captured_models.__file__)
    line = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if text.endswith("# the line"))
    with pytest.raises(CaptureError) as caught:
        capture(Failing(), torch.zeros(3, 4), train=train)
    message = str(caught.value)
    assert "'blocks.1.0' (Choosing)" in message
    assert f"{file}:{line}" in message
    assert "depends on the data" in message
    assert message.endswith('pass granularity="module" to capture leaf modules as ops.')
    assert "\n" not in message
    assert capsys.readouterr().err == ""


class Conditional(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = super().forward(x)
        found: torch.Tensor = torch.cond(h.sum() > 0, torch.relu, torch.tanh, (h,))
        return found


@pytest.mark.parametrize("granularity", ["op", "module"])
def test_a_branch_in_training_is_refused_without_addresses(granularity: Any) -> None:
    with pytest.raises(CaptureError, match=r"torch\.cond is followed in inference alone") as caught:
        capture(Conditional(4, 4), torch.zeros(3, 4), train=True, granularity=granularity)
    assert " at 0x" not in str(caught.value)


class Selecting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[torch.nonzero(x.sum(1) > 0).squeeze(1)] * 2


def test_a_size_that_depends_on_data_is_refused() -> None:
    sentence = r"module '0' .*test_capture_refusals\.py:\d+: .*size that depends on data \(u0\)"
    with pytest.raises(CaptureError, match=sentence):
        capture(nn.Sequential(Selecting()), torch.zeros(3, 4))


@pytest.mark.parametrize("train", [False, True])
def test_a_shape_error_names_the_users_line(train: bool, capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level, handler = log.level, logging.StreamHandler()  # to the stderr of this test
    log.addHandler(handler)
    try:
        with pytest.raises(CaptureError, match=re.escape("'first' (Linear)") + ".*captured_models.py:") as caught:
            capture(Perceptron(), torch.zeros(3, 5), train=train)
    finally:
        log.removeHandler(handler)
    assert str(caught.value).endswith("; check that the model runs on these inputs.")
    assert capsys.readouterr().err == ""  # torch logs the traceback of its own kernel
    assert log.level == level


class Pair(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape != y.shape:
            raise ValueError("unlike inputs")
        return x + y


@pytest.mark.parametrize("train", [False, True])
def test_inputs_the_model_refuses_do_not_advise_another_granularity(train: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.append(Pair())
    for broken, args, match in (
        (model, torch.zeros(3, 4), "missing .*'y'"),
        (Perceptron(), (), "missing"),
        (_Checked(), torch.zeros(3, 4), "ValueError: unlike inputs"),
    ):
        with pytest.raises(CaptureError, match=match + ".*; check that the model runs on these inputs"):
            capture(broken, args, train=train)


class Inverse(nn.Module):
    """Its window must not be zero, which is looked at when it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        window = torch.hann_window(4)
        return torch.istft(torch.stft(x, 4, window=window, return_complex=True), 4, window=window)


def test_a_composite_operator_that_looks_at_values() -> None:
    graph = capture(Inverse(), (torch.zeros(2, 16),))
    assert "aten.istft" in graph.kinds


class OwnError(Exception):
    """Of the model's own code."""


class Strict(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


def test_a_tracers_error_in_the_words_of_the_model_is_the_tracers() -> None:
    class Wrapping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return x if x.sum() > 0 else -x
            except Exception as error:
                raise ValueError("cannot choose") from error

    with pytest.raises(CaptureError, match='cannot choose; pass granularity="module"'):
        capture(Wrapping(), (torch.zeros(2),))


class Forgetful(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class Misspelt(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.shap[0]  # type: ignore[attr-defined, no-any-return]


class Optional(nn.Module):
    def forward(self, x: torch.Tensor, y: Any = None) -> torch.Tensor:
        return x + y  # type: ignore[no-any-return]


class Classes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(x, torch.zeros(5, dtype=torch.int64))


@pytest.mark.parametrize(
    ("layer", "x", "reason"),
    [
        (nn.Embedding(10, 4), torch.zeros(2, 3), "Expected tensor for argument #1 'indices'"),
        (nn.BatchNorm2d(3), torch.zeros(2, 4, 5, 5), "running_mean should contain 4 elements not 3"),
        (nn.BatchNorm2d(3), torch.zeros(2, 3), r"expected 4D input \(got 2D input\)"),
        (nn.Conv2d(3, 8, 3), torch.zeros(2, 4, 9, 9), r"to have 3 channels, but got 4"),
        (nn.Conv2d(3, 8, 5), torch.zeros(2, 3, 3, 3), "Kernel size can't be greater than actual input size"),
        (nn.Linear(3, 3), None, "must be Tensor, not NoneType"),
        (nn.LSTM(4, 8), torch.zeros(2, 3, 5), "Expected 4, got 5"),
        (nn.Conv1d(3, 8, 3), torch.zeros(2, 3, 9).double(), r"Input type \(double\) and bias type \(float\)"),
        (Strict(RuntimeError("eight words at most")), torch.zeros(2, 3), "eight words at most"),
        (Strict(OwnError("metadata are missing")), torch.zeros(2, 3), "metadata are missing"),
        (Strict(ZeroDivisionError("no heads")), torch.zeros(2, 3), "no heads"),
        (Classes(), torch.zeros(2, 3), "Expected input batch_size"),
        (Forgetful(), torch.zeros(2, 3), "'Forgetful' object has no attribute 'layer'"),
        (Misspelt(), torch.zeros(2, 3), "'Tensor' object has no attribute 'shap'"),
        (Optional(), torch.zeros(2, 3), r"unsupported operand type\(s\) for \+: 'Tensor' and 'NoneType'"),
    ],
)
def test_what_a_layer_refuses_is_not_blamed_on_the_granularity(layer: nn.Module, x: Any, reason: str) -> None:
    match = (
        rf"in module '1' \({type(layer).__name__}\).*: \w+: .*{reason}.*; check that the model runs on these inputs\.$"
    )
    with pytest.raises(CaptureError, match=match):
        capture(nn.Sequential(nn.Identity(), layer), (x,))


class Differences(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.diff(x, n=30).sum() + torch.diff(x, n=31).sum() + torch.diff(x, n=32).sum()


def test_calls_of_all_composite_operators_together_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some 155 calls each; the sizes are in no other test, so that none is cached.
    monkeypatch.setattr(costs, "MOST_CALLS", 320)
    with pytest.raises(CaptureError, match="may be made of 320 in all; pass granularity"):
        capture(Differences(), torch.zeros(2, 173))
    monkeypatch.setattr(costs, "MOST_CALLS", 640)
    assert capture(Differences(), torch.zeros(2, 174)).n_ops == 9


class _Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.pair = Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pair(x * self.weight, self.weight)


def test_bad_arguments() -> None:
    with pytest.raises(UnknownNameError, match="granularity"):
        capture(Perceptron(), torch.zeros(3, 4), granularity="modules")
    with pytest.raises(UnknownNameError, match="'adam'"):
        capture(Perceptron(), torch.zeros(3, 4), train=True, optimizer="adan")
    with pytest.raises(UnknownNameError, match="Valid: adam, adamw, momentum, sgd"):
        capture(Perceptron(), torch.zeros(3, 4), train=True, optimizer=torch.optim.Adam)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="got loss='mse'; expected a function"):
        capture(Perceptron(), torch.zeros(3, 4), train=True, loss="mse")  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"loss= does not take the model's output \(TypeError: MSELoss"):
        capture(Perceptron(), torch.zeros(3, 4), train=True, loss=nn.MSELoss())
    with pytest.raises(CaptureError, match=r"expected a torch\.nn\.Module"):
        capture(torch.relu, torch.zeros(3, 4))  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"'0' \(LazyLinear\) is lazy"):
        capture(nn.Sequential(nn.LazyLinear(3)), torch.zeros(3, 4))
    with pytest.raises(CaptureError, match="computes nothing"):
        capture(nn.Identity(), torch.zeros(3))


@pytest.fixture
def _alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_replicas_are_captured_as_the_model_and_shards_are_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.zeros(3, 4)
    plain = capture(model, x, train=True)
    assert capture(nn.parallel.DistributedDataParallel(model), x, train=True).hash == plain.hash
    fully_shard(model[0])
    with pytest.raises(CaptureError, match=r"module '0' are cut over processes already .*; capture the model before"):
        capture(model, x, train=True)
