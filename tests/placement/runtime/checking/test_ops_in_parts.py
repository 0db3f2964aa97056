"""Ops computed in parts by DTensor, all ranks in one process, and as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from baselines.strategies.allowed import check_allowed
from env.cluster import Cluster
from graphs.capture import Program, capture_program
from graphs.records import SplitRow
from graphs.transforms.strategy import Strategy
from graphs.zoo import build
from placement.runtime.checking.ops_in_parts import (
    DIFFERS,
    NOT_COMPUTED,
    SAME,
    CutCall,
    as_ranks,
    cut_calls,
    in_blocks,
    of_first,
    of_parts,
    ops_in_parts,
    ranks_of_this_process,
)
from placement.solving.checked import Checked


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with ranks_of_this_process(2) as found, torch.no_grad():
        yield found


def program_of(model: nn.Module, *args: torch.Tensor) -> Program:
    return capture_program(model, args, None, True)


def calls(program: Program, strategy: str) -> dict[str, CutCall]:
    """By the name of the op."""
    found = cut_calls(program, Strategy.parse(strategy))
    return {program.graph.op_names[call.op]: call for call in found}


class Products(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).softmax(-1)).square().mean()


@pytest.mark.parametrize("width", [8, 4096])
def test_rows_that_are_right(mesh: DeviceMesh, width: int) -> None:
    with torch.device("meta"):
        program = program_of(Products(width), torch.zeros(4 * width, width))
    for strategy in ("dp2", "tp2"):
        found = Counter(call.verdict(mesh) for call in calls(program, strategy).values())
        assert found[SAME] > 8
        assert set(found) == {SAME}


@pytest.mark.parametrize(
    "row",
    [
        "features: R,S(0,8),S(0,8)->S(0,8)",  # of the other dimension
        "features: R,S(0,8),S(0,8)->P",  # a stretch is no summand
        "batch: S(0,32),R,R->P",
    ],
)
def test_a_wrong_row_is_found(mesh: DeviceMesh, row: str) -> None:
    program = program_of(Products(8), torch.zeros(32, 8))
    call = next(call for name, call in calls(program, "tp2").items() if name == "first/addmm")
    assert call.verdict(mesh) == SAME
    assert replace(call, row=SplitRow.parse(row)).verdict(mesh) == DIFFERS


def test_one_wrong_row_is_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(Products(8), torch.zeros(32, 8))
    assert ops_in_parts(program, Strategy.parse("tp2")).problem == ""
    monkeypatch.setattr(CutCall, "verdict", lambda call, mesh: DIFFERS)
    problem = ops_in_parts(program, Strategy.parse("tp2")).problem
    assert " computes other numbers in parts than as a whole (" in problem


def test_nothing_is_called_checked_without_time() -> None:
    program = program_of(Products(8), torch.zeros(32, 8))
    found = ops_in_parts(program, Strategy.parse("dp2"), ends_s=0.0)
    assert found == Checked(reason="no smaller model runs, and none of its ops could be computed in parts")


@pytest.mark.parametrize("name", ["bert_base", "resnet50"])
@pytest.mark.parametrize("strategy", ["dp2", "tp2 sp"])
def test_no_false_alarm(mesh: DeviceMesh, name: str, strategy: str) -> None:
    zoo = build(name, small=True, batch_size=8, device="cpu")
    found = Counter(call.verdict(mesh) for call in calls(program_of(zoo.model, *zoo.train_args), strategy).values())
    assert found[DIFFERS] == 0
    assert found[SAME] > 2 * found[NOT_COMPUTED]


@pytest.mark.parametrize("strategy", ["dp2", "mb2", "tp2"])
def test_statistics_of_norms_in_evaluation_mode_are_constants(strategy: str) -> None:
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8).eval(), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8).eval()]
    program = program_of(nn.Sequential(*layers, nn.Linear(8, 8)), torch.zeros(16, 8))
    check_allowed(program.graph, Cluster.preset("2xV100-pcie"), Strategy.parse(strategy))
    assert not ops_in_parts(program, Strategy.parse(strategy)).problem


# -- what torch keeps to itself ----------------------------------------------------------------------------------------


def test_ranks_of_one_process(mesh: DeviceMesh) -> None:
    x = torch.arange(6.0)
    with as_ranks(2):
        whole = DTensor.from_local(of_parts([x, 2 * x]), mesh, [Partial()], run_check=False).full_tensor()
    assert of_first(whole).equal(3 * x)


def test_stretches_of_blocks(mesh: DeviceMesh) -> None:
    x, halves = torch.arange(8), [torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])]
    with as_ranks(2):
        cut = DTensor.from_local(
            of_parts(halves), mesh, [in_blocks(0, 2)], run_check=False, shape=x.shape, stride=x.stride()
        )
        blocks = cut.view(2, 4).full_tensor()
    assert of_first(blocks).equal(x.view(2, 4))


def test_the_process_group_is_gone_afterwards() -> None:
    with ranks_of_this_process(2):
        assert dist.is_initialized()
    assert not dist.is_initialized()
