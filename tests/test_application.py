"""`placement.apply` and the command: which module comes back, what is refused, and a real run of two processes."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import placement
from env.cluster import Cluster, Device, both_ways
from graphs.errors import MismatchError
from placement.cli import run
from placement.result import Result

TOWERS = """
import torch
from torch import nn


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2))

    def forward(self, x, y):
        return (self.left(x) * self.right(y)).sum(1)


def make():
    return Towers(), (torch.randn(4, 16), torch.randn(4, 16))
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


def test_an_infeasible_result_is_refused(towers: tuple[nn.Module, tuple[torch.Tensor, ...]]) -> None:
    model, args = towers
    result = placed(model, args, False)
    names = ("placement", "order", "transfer_order", "objective_s", "step_time_s", "throughput", "peak_bytes", "gap")
    empty = dict.fromkeys((*names, "bytes_moved"))
    nothing = dataclasses.replace(result, feasible=False, reason="it does not fit.", **empty)  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="it does not fit"):
        placement.apply(model, nothing, args)


@pytest.mark.parametrize("train", [False, True])
def test_the_command_runs_two_processes(
    towers: tuple[nn.Module, tuple[torch.Tensor, ...]],
    train: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(TOWERS, encoding="utf-8")
    placed(*towers, train).save(tmp_path / "p.json")
    words = ["apply", "model.py:make", "p.json", "--steps", "4", "--json", *(["--train"] if train else [])]
    assert run(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["outputs_equal"] is found["gradients_equal"] is True
    assert found["speedup"] == pytest.approx(found["measured_single_step_s"] / found["measured_step_s"])
    assert found["predicted_step_s"] > 0
    # Each process has its own parameters and no others.
    all_bytes = sum(parameter.nbytes for parameter in towers[0].parameters())
    kept = [device["kept_bytes"] for device in found["devices"]]
    assert len(kept) == 2
    assert max(kept) < all_bytes
    assert sum(kept) == all_bytes
