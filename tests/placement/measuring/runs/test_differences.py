"""What a placement computes beside the plain model: equal within rounding, and every tensor compared."""

from __future__ import annotations

import math

import pytest
import torch

from placement.measuring.models.op_clock import Stretch
from placement.measuring.runs.differences import GRADIENT, Compared, all_equal, compared, equal
from placement.measuring.runs.recording import whole


def test_when_results_are_equal() -> None:
    masked = torch.tensor([1.0, -math.inf, 2.0])
    assert equal(masked, masked.clone())
    assert not equal(masked + 1, masked)
    assert not equal(masked.nan_to_num(), masked)
    wave = torch.tensor([1 + 2j, 3j])
    assert equal(wave * (1 + 1e-7), wave)
    assert not equal(wave * 1.1, wave)
    assert not equal(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert not equal(torch.ones(1), torch.ones(3))


def test_a_gradient_that_is_zero_but_for_rounding_is_equal_to_another() -> None:
    # as of the bias of a convolution before a batch norm
    reference = {
        f"{GRADIENT}bias": torch.full((4,), 2e-9),
        f"{GRADIENT}weight": torch.ones(4),
        "output/0": torch.tensor(2e-9),
    }
    same = compared({name: tensor.clone() for name, tensor in reference.items()}, reference)
    assert set(same.values()) == {(True, 0.0)}
    other = {
        f"{GRADIENT}bias": torch.full((4,), -3e-9),
        f"{GRADIENT}weight": torch.ones(4) * 1.01,
        "output/0": torch.tensor(3e-9),
    }
    assert [is_equal for is_equal, _ in compared(other, reference).values()] == [True, False, False]
    assert not compared({f"{GRADIENT}bias": torch.full((4,), 1e-5)}, reference)[f"{GRADIENT}bias"][0]


def rank_that_compared(*names: str, unequal: str = "") -> Compared:
    return {name: (name != unequal, 0.0) for name in names}


@pytest.mark.parametrize(
    ("computed", "ranks", "of_gradients", "is_equal"),
    [
        # What the plain model computed is the same on the ranks that have it.
        (["loss", "gradient/w", "gradient/b"], [("loss", "gradient/w"), ("loss", "gradient/b")], True, True),
        (["loss", "gradient/w"], [("loss", "gradient/w")], False, True),
        # Nothing of the kind was computed, so nothing was compared.
        (["output/0"], [("output/0",), ("output/0",)], True, None),
        ([], [(), ()], False, None),
        # A rank has computed too little, or too much.
        (["loss", "gradient/w", "gradient/b"], [("loss", "gradient/w"), ("loss",)], True, False),
        (["output/0", "output/1"], [("output/0",)], False, False),
    ],
)
def test_what_is_equal_was_compared(
    computed: list[str], ranks: list[tuple[str, ...]], of_gradients: bool, is_equal: bool | None
) -> None:
    assert all_equal(computed, [rank_that_compared(*names) for names in ranks], of_gradients) is is_equal
    if is_equal:
        name = next(name for name in computed if name.startswith("gradient/") == of_gradients)
        unequal = [rank_that_compared(*names, unequal=name) for names in ranks]
        assert all_equal(computed, unequal, of_gradients) is False


def test_what_is_no_number_is_not_called_equal() -> None:
    nothing = torch.full((), math.nan)
    found = compared({"loss": nothing.clone()}, {"loss": nothing})
    assert math.isnan(found["loss"][1])
    assert all_equal(["loss"], [found], False) is None
    assert not compared({"loss": nothing}, {"loss": torch.ones(())})["loss"][0]


def test_twice_a_gradient_is_no_rounding() -> None:
    reference = {f"{GRADIENT}w": torch.ones(4), f"rounding/{GRADIENT}w": torch.tensor(0.02)}
    for factor, is_equal in ((1.05, True), (2.0, False)):
        found = compared({f"{GRADIENT}w": torch.full((4,), factor)}, reference)[f"{GRADIENT}w"]
        assert found == (is_equal, pytest.approx(factor - 1, rel=1e-5))


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
