"""`Plan`: what a heuristic decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from env.problem import Problem
from graphs.opgraph import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Plan:
    """Where every op runs, and possibly in which order (n ops).

    Attributes:
        device: int64 [n], device number of each op.
        order: float64 [n], lower first, the explicit order of docs/score.md; None leaves the default priority.
    """

    device: IntArray
    order: FloatArray | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", np.array(self.device, dtype=np.int64))
        self.device.setflags(write=False)
        if self.order is not None:
            object.__setattr__(self, "order", np.array(self.order, dtype=np.float64))
            self.order.setflags(write=False)


Method = Callable[[Problem, int], Plan]
