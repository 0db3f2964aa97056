"""What a placement computes beside the plain model: equal within rounding, and every tensor compared."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from graphs.capture.record import default_loss
from placement.measuring.models.op_clock import Stretch
from placement.measuring.runs.differences import (
    EPS,
    GRADIENT,
    LARGEST,
    LOSS,
    MOVED,
    OUTPUT,
    RATES,
    WEIGHT,
    Compared,
    Difference,
    Off,
    all_equal,
    compared,
    largest_difference,
    rounded,
)
from placement.measuring.runs.steps import ModelStep
from placement.measuring.runs.trial_work import whole


def is_equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return compared({"output/1/0": found}, {"output/1/0": expected})["output/1/0"].is_equal


def test_when_results_are_equal() -> None:
    masked = torch.tensor([1.0, -math.inf, 2.0])
    assert is_equal(masked, masked.clone())
    assert not is_equal(masked + 1, masked)
    assert not is_equal(masked.nan_to_num(), masked)
    wave = torch.tensor([1 + 2j, 3j])
    assert is_equal(wave * (1 + 1e-7), wave)
    assert not is_equal(wave * 1.1, wave)
    assert not is_equal(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert not is_equal(torch.ones(1), torch.ones(3))


def test_a_gradient_that_is_zero_but_for_rounding_is_equal_to_another() -> None:
    # as of the bias of a convolution before a batch norm
    reference = {
        f"{GRADIENT}bias": torch.full((4,), 2e-9),
        f"{GRADIENT}weight": torch.ones(4),
        "output/1/0": torch.tensor(2e-9),
        LARGEST: torch.tensor(1.0),
    }
    names = [name for name in reference if name != LARGEST]
    same = compared({name: reference[name].clone() for name in names}, reference)
    assert {off.by for off in same.values()} == {0.0}
    other = {
        f"{GRADIENT}bias": torch.full((4,), -3e-9),
        f"{GRADIENT}weight": torch.ones(4) * 1.01,
        "output/1/0": torch.tensor(3e-9),
    }
    assert [off.is_equal for off in compared(other, reference).values()] == [True, False, False]
    assert not compared({f"{GRADIENT}bias": torch.full((4,), 1e-5)}, reference)[f"{GRADIENT}bias"].is_equal


def test_zeros_that_are_gathered_stand_for_no_gradient() -> None:
    found = {f"{GRADIENT}frozen": torch.zeros(3), f"{GRADIENT}new": torch.ones(3)}
    off = compared(found, {})
    assert list(off) == [f"{GRADIENT}new"]
    assert not off[f"{GRADIENT}new"].is_equal


def test_of_a_weight_its_change_counts() -> None:
    weight = torch.full((4,), 100.0)
    reference = {
        f"{WEIGHT}w": weight,
        f"{MOVED}{WEIGHT}w": torch.tensor(0.01),
        LARGEST: torch.tensor(1.0),
        EPS: torch.tensor(0.01),
        RATES: torch.tensor(1e-3),
    }
    for change, equal in ((0.0, True), (1e-4, True), (-0.01, False), (0.01, False)):
        assert compared({f"{WEIGHT}w": weight + change}, reference)[f"{WEIGHT}w"].is_equal is equal, change


def rank_that_compared(*names: str, unequal: str = "") -> Compared:
    return {name: Off(float(name == unequal), 0.0, 1.0) for name in names}


@pytest.mark.parametrize(
    ("computed", "ranks", "kinds", "equal"),
    [
        # What the plain model computed is the same on the ranks that have it.
        (["loss/1", "gradient/w", "gradient/b"], [("loss/1", "gradient/w"), ("loss/1", "gradient/b")], GRADIENT, True),
        (["loss/1", "gradient/w"], [("loss/1", "gradient/w")], LOSS, True),
        # Nothing of the kind was computed, so nothing was compared.
        (["output/1/0"], [("output/1/0",), ("output/1/0",)], GRADIENT, None),
        ([], [(), ()], LOSS, None),
        # A rank has computed too little, or too much.
        (["loss/1", "gradient/w", "gradient/b"], [("loss/1", "gradient/w"), ("loss/1",)], GRADIENT, False),
        (["output/1/0", "output/1/1"], [("output/1/0",)], OUTPUT, False),
    ],
)
def test_what_is_equal_was_compared(
    computed: list[str], ranks: list[tuple[str, ...]], kinds: str, equal: bool | None
) -> None:
    assert all_equal(computed, [rank_that_compared(*names) for names in ranks], (kinds,)) is equal
    if equal:
        name = next(name for name in computed if name.startswith(kinds))
        unequal = [rank_that_compared(*names, unequal=name) for names in ranks]
        assert all_equal(computed, unequal, (kinds,)) is False
        assert largest_difference(unequal) == Difference(name, 1.0)


def test_the_largest_difference_is_one_that_counts() -> None:
    found = {"weight/w": Off(0.01, 0.001, 1.0), "gradient/b": Off(0.5, 0.6, 1.0)}
    assert largest_difference([found]) == Difference("weight/w", 0.01)
    assert largest_difference([]) is None


def test_what_is_no_number_is_not_called_equal() -> None:
    nothing = torch.full((), math.nan)
    found = compared({"loss/1": nothing.clone()}, {"loss/1": nothing})
    assert math.isnan(found["loss/1"].by)
    assert all_equal(["loss/1"], [found], (LOSS,)) is None
    assert not compared({"loss/1": nothing}, {"loss/1": torch.ones(())})["loss/1"].is_equal


def test_twice_a_gradient_is_no_rounding() -> None:
    reference = {f"{GRADIENT}w": torch.ones(4), LARGEST: torch.tensor(1.0)}
    for factor, equal in ((1.05, True), (2.0, False)):
        found = compared({f"{GRADIENT}w": torch.full((4,), factor)}, reference)
        (off,) = (rank[f"{GRADIENT}w"] for rank in rounded([found], {f"{GRADIENT}w": 0.02}, 4.0))
        assert (off.is_equal, off.share) == (equal, pytest.approx(factor - 1, rel=1e-5))
        assert not found[f"{GRADIENT}w"].is_equal


class SecondStep(nn.Module):
    """Twice the loss from the second step on, or a buffer that it does not count in."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.weight, self.fault, self.calls = nn.Parameter(torch.ones(3)), fault, 0
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.count += self.fault != "buffer"
        return (x @ self.weight).square().mean() * (1 + (self.fault == "loss" and self.calls > 1))


@pytest.mark.parametrize("fault", ["", "loss", "buffer"])
def test_faults_of_the_second_step_are_found(fault: str) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    seen: list[int] = []
    expected = ModelStep(SecondStep(), (x,), {}, True, default_loss).first_steps(None, seen.append)
    step = ModelStep(SecondStep(fault), (x,), {}, True, default_loss)
    found = step.first_steps(expected, seen.append)
    off = compared({name: each for name, each in found.items() if not name.startswith("fact/")}, expected)
    unequal = {name for name, each in off.items() if not each.is_equal}
    assert unequal == {"": set(), "loss": {"loss/2", "loss/3", "weight/weight"}, "buffer": {"buffer/count"}}[fault]
    assert {"gradient/weight", "weight/weight", "loss/1"} <= set(off)
    assert seen == [1, 2, 3, 1, 2, 3]
    weight = step.model.get_parameter("weight").detach().clone()
    step()
    assert torch.equal(step.model.get_parameter("weight"), weight)  # later steps are for timing alone


def test_an_op_of_several_calls_is_one_span_and_one_without_code_has_no_length() -> None:
    calls = [
        Stretch("receive", 7, 1.0, 2.0),
        Stretch("op", 4, 2.0, 3.0),
        Stretch("send", 8, 3.0, 3.5),
        Stretch("op", 4, 3.5, 4.0),
    ]
    assert whole([*calls, Stretch("op", 5, 4.0, 6.0)], [3, 4, 9, 5]) == [
        Stretch("receive", 7, 1.0, 2.0),
        Stretch("op", 3, 1.0, 1.0),
        Stretch("op", 4, 2.0, 4.0),
        Stretch("send", 8, 3.0, 3.5),
        Stretch("op", 9, 4.0, 4.0),
        Stretch("op", 5, 4.0, 6.0),
    ]
