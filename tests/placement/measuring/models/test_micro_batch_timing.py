"""What every part of an op takes in full, read from a step in micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from graphs.capture import capture_program
from placement.measuring.models.micro_batch_timing import MicroBatchStep, Nobody
from placement.measuring.models.op_clock import clocked
from placement.runtime.program.functional import functional
from placement.runtime.program.routines import Routine

SECONDS = st.floats(1e-6, 1.0)


class Tower(nn.Module):
    """Two layers, whose second needs a sum over micro-batches, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def in_parts(batch: int, train: bool = True) -> tuple[nn.Module, torch.Tensor, MicroBatchStep | None]:
    torch.manual_seed(0)
    model, x = Tower(), torch.rand(batch, 8)
    return model, x, MicroBatchStep.of(functional(capture_program(model, (x,), {}, train)), torch.device("cpu"))


@given(st.lists(st.tuples(SECONDS, st.floats(0, 1), st.integers(2, 8)), min_size=1, max_size=5))
def test_the_fixed_part_is_what_parts_have_too_much(ops: list[tuple[float, float, int]]) -> None:
    whole = {op: seconds for op, (seconds, _, _) in enumerate(ops)}
    fixed = {op: seconds * share for op, (seconds, share, _) in enumerate(ops)}
    copies = {op: n for op, (_, _, n) in enumerate(ops)}
    work = dict.fromkeys(whole, 1.0)
    parts = {op: copies[op] * fixed[op] + whole[op] - fixed[op] for op in whole}
    step = MicroBatchStep(Routine(lambda: (), (), (), (), None), copies, work)  # type: ignore[arg-type]
    assert step.fixed_s(whole, parts) == pytest.approx(fixed, abs=1e-12)


@pytest.mark.parametrize(("batch", "expected"), [(9, 4), (8, 4), (5, 2), (4, 2)])
def test_a_batch_is_cut_as_far_as_it_goes(batch: int, expected: int) -> None:
    _, _, found = in_parts(batch)
    assert found is not None
    assert set(found.copies.values()) == {expected}
    # More than the whole where each part reads what the batch does not shrink.
    assert all(1 - 1e-9 <= work < expected for work in found.work.values())


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_no_part_has_a_single_sample(batch: int) -> None:
    assert in_parts(batch)[2] is None


def test_the_step_in_parts_computes_the_step_and_says_which_op_takes_how_long() -> None:
    model, x, found = in_parts(8)
    assert found is not None
    ticks = iter(range(10**6))
    code = clocked(found.routine, lambda: float(next(ticks)))
    state = model.state_dict()
    taken = [x if kind == "input" else state[str(name)] for kind, name in found.routine.takes]
    with torch.no_grad():
        results_and_readings = code.run(None, Nobody(), *taken)
    results = dict(zip(found.routine.gives, results_and_readings, strict=False))
    model(x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(results["gradient", name], parameter.grad)
    # Adding up what micro-batches gave is no op of the model, and counts towards none.
    sums = [label for label in code.labels if label[0] == "sum"]
    assert len(sums) == 3 * 5  # four gradients and the loss, of four micro-batches
    seconds = code.seconds(results_and_readings[len(found.routine.gives) :], lambda before, after: after - before)
    assert set(found.copies) - {0} <= set(seconds)  # op 0 is the input
