"""`Plan`: what a method decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from env.problem import Problem
from graphs.opgraph import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Plan:
    """Where every op runs, and possibly in which order (n ops, x transfers).

    Attributes:
        device: int64 [n], device number of each op.
        order: float64 [n], lower first, the explicit order of docs/score.md; None leaves the default priority.
        transfer_order: int64 [x, 2], (tensor, receiving device) in the sequence in which transfers start. With it the
            plan is a fixed sequence (docs/score.md): devices and links keep strictly to `order` and to this.
        note: one sentence for people about what a placement cannot say (replication factors, for one), or "".
    """

    device: IntArray
    order: FloatArray | None = None
    transfer_order: IntArray | None = None
    note: str = ""

    def __post_init__(self) -> None:
        for name, dtype in (("device", np.int64), ("order", np.float64), ("transfer_order", np.int64)):
            if (value := getattr(self, name)) is not None:
                array = np.array(value, dtype=dtype)
                array.setflags(write=False)
                object.__setattr__(self, name, array)


Method = Callable[[Problem, int], Plan]
