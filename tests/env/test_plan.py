"""`Plan`: what it takes, keeps and refuses, whatever the problem."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from env.plan import Plan
from graphs.errors import MismatchError


def test_a_plan_keeps_arrays_of_its_own_that_nobody_changes() -> None:
    device, order = np.array([0, 1], dtype=np.int32), np.array([1, 0])
    plan = Plan(device, order, np.array([[0, 1]]))
    device[0] = order[0] = 7
    assert plan.order is not None
    assert plan.transfer_order is not None
    assert (plan.device.tolist(), plan.order.tolist(), plan.transfer_order.tolist()) == ([0, 1], [1.0, 0.0], [[0, 1]])
    assert [str(a.dtype) for a in (plan.device, plan.order, plan.transfer_order)] == ["int64", "float64", "int64"]
    for array in (plan.device, plan.order, plan.transfer_order):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_an_empty_order_of_transfers_is_one() -> None:
    plan = Plan([0], [0.0], [])
    assert plan.transfer_order is not None
    assert plan.transfer_order.shape == (0, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([0.0, 1.0],), "one whole device number for each op, got an array of float64 and shape"),
        (([True, False],), "one whole device number for each op, got an array of bool"),
        (([[0, 1]],), "one whole device number for each op"),
        ((3,), "one whole device number for each op"),
        (([0, 1], [0.0]), r"one number per op, shape \(2,\) and none of them NaN, got shape \(1,\)"),
        (([0, 1], [0.0, np.nan]), "none of them NaN"),
        (([0, 1], [0.0, 1.0], [0, 1]), "two whole numbers per transfer"),
        (([0, 1], [0.0, 1.0], [(0, 1, 2)]), "two whole numbers per transfer"),
        (([0, 1], [0.0, 1.0], [(0.0, 1.0)]), "two whole numbers per transfer, .* got an array of float64"),
        (([0, 1], None, [(0, 1)]), "needs an order of the ops beside it; pass both or neither"),
    ],
)
def test_what_is_no_plan_is_refused(given: Any, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        Plan(*given)
