"""What every part of an op takes in full, read from the step on a part of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from placement.measuring.models.op_clock import PartOfStep
from placement.measuring.models.op_times import op_times
from placement.measuring.models.profiling import step_to_measure
from placement.measuring.models.repeats import Repeats

CPU = torch.device("cpu")
TWICE = Repeats.exactly(3, 1)
SECONDS = st.floats(1e-6, 1.0)


class Tower(nn.Module):
    """Two layers, whose second needs a sum over the batch, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        made = self.layers(x)
        loss: torch.Tensor = (made if scale is None else made * scale).square().mean()
        return loss


class Looking(nn.Module):
    """Rows of the batch that are chosen by data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(x).index_select(0, rows).square().mean()
        return loss


class OfEight(Tower):
    """A model for one batch."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x.view(8, 8))


def part_of(batch: int, model: nn.Module | None = None, *more: torch.Tensor) -> PartOfStep | None:
    return step_to_measure(model or Tower(), (torch.rand(batch, 8), *more), train=True).part


@given(st.lists(st.tuples(SECONDS, st.floats(0, 1), st.floats(0.1, 0.9)), min_size=1, max_size=5))
def test_the_fixed_part_is_what_a_part_has_too_much(ops: list[tuple[float, float, float]]) -> None:
    whole = {op: seconds for op, (seconds, _, _) in enumerate(ops)}
    fixed = {op: seconds * of_it for op, (seconds, of_it, _) in enumerate(ops)}
    share = {op: work for op, (_, _, work) in enumerate(ops)}
    part = {op: fixed[op] + share[op] * (whole[op] - fixed[op]) for op in whole}
    program: Any = None
    assert PartOfStep(program, {}, share).fixed_s(whole, part) == pytest.approx(fixed, abs=1e-12)


@pytest.mark.parametrize(("batch", "expected"), [(9, 4), (8, 4), (5, 2), (4, 2)])
def test_a_batch_is_cut_as_far_as_it_goes(batch: int, expected: int) -> None:
    found = part_of(batch, None, torch.tensor(2.0))
    assert found is not None
    assert {path: tuple(tensor.shape) for path, tensor in found.inputs.items()} == {
        "x": (batch // expected, 8),
        "scale": (),
    }
    # More than its samples where a part reads what the batch does not shrink.
    least = batch // expected / batch
    assert found.share
    assert all(least - 1e-9 <= share < 1 for share in found.share.values())
    kinds = {found.program.graph.kinds[op] for op in found.share}
    assert "aten.addmm" in kinds
    assert not any(kind.startswith("optimizer.") for kind in kinds)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_no_part_has_a_single_sample(batch: int) -> None:
    assert part_of(batch) is None


def test_a_model_for_one_batch_has_no_part() -> None:
    assert part_of(8, OfEight()) is None


def test_the_fixed_part_of_every_op_that_is_cut_is_measured() -> None:
    step = step_to_measure(Tower(), (torch.rand(64, 8),), train=True)
    found = op_times(step, CPU, TWICE)
    assert step.part is not None
    assert set(found.fixed) == set(step.part.share) & set(found.ops)
    assert {len(samples) for samples in found.fixed.values()} == {2}
    assert found.updates.keys() == found.updates_fixed.keys()
    assert found.updates


def test_a_part_that_cannot_run_is_not_measured() -> None:
    rows = torch.tensor([7, 0, 1, 2, 3, 4, 5, 6])
    step = step_to_measure(Looking(), (torch.rand(8, 8), rows), train=True)
    assert step.part is not None
    found = op_times(step, CPU, TWICE)
    assert found.fixed == {}
    assert len(found.step_s) == 2
