"""What half of an op takes in full, read from one half of a step whose weights are cut in two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphs.capture import capture_program
from graphs.opgraph import OpGraph
from graphs.transforms.splitting import split
from graphs.transforms.splitting.sharding import Axis
from placement.measuring.models import op_times as op_times_module
from placement.measuring.models.half_step_timing import HalfStep, Imagined, with_whole_times
from placement.measuring.models.op_clock import clocked
from placement.measuring.models.op_times import op_times
from placement.measuring.models.profiling import step_to_measure
from placement.measuring.models.repeats import Repeats
from placement.runtime.program.functional import functional

CPU = torch.device("cpu")


class Block(nn.Module):
    """Two layers of which the second adds up what halves of the first made, a norm, and the loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8), nn.LayerNorm(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def captured() -> OpGraph:
    return capture_program(Block(), (torch.rand(4, 8),), {}, True).graph


def test_one_half_runs_alone_and_reads_half_of_the_weights() -> None:
    model, x = Block(), torch.rand(4, 8)
    step = functional(capture_program(model, (x,), {}, True))
    half = HalfStep.of(step, torch.device("cpu"))
    assert half is not None
    whole = {key: x if key[0] == "input" else model.state_dict()[str(key[1])] for key in half.routine.takes}
    own = half.parts_of(whole)
    for name in ("layers.0.weight", "layers.2.weight"):
        assert own["state", name].numel() == whole["state", name].numel() / 2
    ticks = iter(range(10**6))
    code = clocked(half.routine, lambda: float(next(ticks)))
    with torch.no_grad():
        given = code.run(None, Imagined(half.exchanges, CPU), *(own[key] for key in half.routine.takes))
    results = dict(zip(half.routine.gives, given, strict=False))
    assert results["gradient", "layers.0.weight"].shape == own["state", "layers.0.weight"].shape
    seconds = code.seconds(given[len(half.routine.gives) :], lambda before, after: after - before)
    kinds = {step.program.graph.kinds[op] for op in seconds}
    assert {"aten.addmm", "aten.relu", "aten.native_layer_norm"} <= kinds


def test_a_step_whose_weights_cannot_be_cut_has_no_halves() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.square().sum()

    step = functional(capture_program(Odd(), (torch.rand(3, requires_grad=True),), {}, False))
    assert HalfStep.of(step, torch.device("cpu")) is None


class Refusing(Imagined):
    """As an op that cannot take the zeros that stand for what the other half would send."""

    def finish(self, handle: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("singular matrix")


@pytest.mark.parametrize("imagined", [Imagined, Refusing])
def test_a_half_that_cannot_run_without_the_other_is_not_measured(
    imagined: type[Imagined], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_times_module, "Imagined", imagined)
    step = step_to_measure(Block(), (torch.rand(8, 8),), train=True)
    found = op_times(step, CPU, Repeats(dropped=1, least=2, settled=2, most=2))
    assert bool(found.halves) == (imagined is Imagined)
    assert found.updates
    assert found.updates.keys() == found.updates_fixed.keys()
    assert len(found.step_s) == 2


@settings(max_examples=30)
@given(fixed=st.floats(0, 0.9), whole=st.integers(0, 100))
def test_rows_say_what_was_measured(fixed: float, whole: int) -> None:
    """Halves of a graph whose rows say so take as long as those that were measured."""
    graph = captured()
    time_s = np.linspace(1e-3, 2e-3, graph.n_ops)[:, None]
    measured = replace(graph, time_keys=("*",), time_s=time_s, fixed_s=fixed * time_s)
    rows = tuple(tuple(replace(row, whole_time=whole / 100) for row in rows) for rows in graph.split_rows)
    halves_s = first_parts_s(replace(measured, split_rows=rows))
    found = with_whole_times(measured, 0, halves_s)
    assert first_parts_s(found) == pytest.approx(halves_s)
    assert (found.split_rows == graph.split_rows) == (whole == 0)


def test_what_takes_less_than_half_as_long_takes_nothing_in_full() -> None:
    graph = captured()
    measured = replace(graph, time_keys=("*",), time_s=np.ones((graph.n_ops, 1)), fixed_s=np.zeros((graph.n_ops, 1)))
    halves_s = dict.fromkeys(first_parts_s(measured), 0.1)
    assert with_whole_times(measured, 0, halves_s).split_rows == graph.split_rows


def first_parts_s(graph: OpGraph) -> dict[int, float]:
    """Of each op the seconds of the first of two parts."""
    cut = split(graph, [Axis("tp", 2)])
    here = ~np.isnan(cut.graph.time_s[:, 0]) & (cut.part == 0)
    return dict(zip(cut.origin[here].tolist(), cut.graph.time_s[here, 0].tolist(), strict=True))
