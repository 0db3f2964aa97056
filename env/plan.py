"""`Plan`: what a method decides and the score is of. `Priority`: what decides where a plan leaves it open."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from graphs.errors import MismatchError, UnknownNameError
from graphs.opgraph import FloatArray, IntArray

if TYPE_CHECKING:
    from env.problem import Problem


@dataclass(frozen=True, eq=False)
class Plan:
    """The device of every op, and possibly an order (n ops, x transfers).

    Attributes:
        device: int64 [n], device number of each op.
        order: float64 [n], lower first, the explicit order of docs/score.md; None leaves the default priority.
        transfer_order: int64 [x, 2], (tensor, receiving device) in the sequence in which transfers start. With it the
            plan is a fixed sequence (docs/score.md): devices and links keep strictly to `order` and to this.
        note: one sentence for people about what a placement cannot say (replication factors, for one), or "".

    Raises:
        MismatchError: not one whole device number and one order number per op, not two whole numbers per transfer, or
            an order of transfers without one of the ops. Whether the numbers suit a problem is for who takes the plan.
    """

    device: IntArray
    order: FloatArray | None = None
    transfer_order: IntArray | None = None
    note: str = ""

    def __post_init__(self) -> None:
        device = _whole(self.device)
        if device is None or device.ndim != 1:
            raise MismatchError(
                f"a placement has one whole device number for each op, got an array of {_looks_like(self.device)}."
            )
        self._keep("device", device)
        if self.order is not None:
            order = np.array(self.order, dtype=np.float64)
            if order.shape != device.shape or np.isnan(order).any():
                raise MismatchError(
                    f"an explicit order has one number per op, shape {device.shape} and none of them NaN, got shape "
                    f"{order.shape}."
                )
            self._keep("order", order)
        if self.transfer_order is not None:
            self._keep("transfer_order", _transfers(self.transfer_order))
            if self.order is None:
                raise MismatchError("a transfer order needs an order of the ops beside it; pass both or neither.")

    def __reduce__(self) -> tuple[type[Plan], tuple[object, ...]]:
        """A copy, in another process say, is built anew, so that its arrays are read-only, as kernels expect them."""
        return Plan, (self.device, self.order, self.transfer_order, self.note)

    def _keep(self, name: str, array: IntArray | FloatArray) -> None:
        array.setflags(write=False)
        object.__setattr__(self, name, array)


Method = Callable[["Problem", int], Plan]


class Priority(enum.Enum):
    """How a device chooses among its ready ops (docs/score.md, "Priorities")."""

    LONGEST_PATH = "longest_path"
    FIFO = "fifo"
    MSR = "msr"

    @staticmethod
    def of(name: str | Priority) -> Priority:
        """The priority of that name.

        Raises:
            UnknownNameError: lists the valid names.
        """
        try:
            return Priority(name)
        except ValueError:
            raise UnknownNameError("priority", str(name), [p.value for p in Priority]) from None


def _transfers(given: ArrayLike) -> IntArray:
    """int64 [x, 2] of its own."""
    pairs = np.empty((0, 2), dtype=np.int64) if np.size(given) == 0 else _whole(given)
    if pairs is None or pairs.ndim != 2 or pairs.shape[1] != 2:
        raise MismatchError(
            "a transfer order has two whole numbers per transfer, tensor and receiving device, "
            f"got an array of {_looks_like(given)}."
        )
    return pairs


def _whole(given: ArrayLike) -> IntArray | None:
    """A copy as int64, or None where there are numbers that are not whole ones."""
    array = np.asarray(given)
    return np.array(array, dtype=np.int64) if array.dtype.kind in "iu" or array.size == 0 else None


def _looks_like(given: ArrayLike) -> str:
    array = np.asarray(given)
    return f"{array.dtype} and shape {array.shape}"
