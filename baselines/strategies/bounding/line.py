"""`Line`: the work of a pipeline in topological order, and whether the stretches that stages take of it cover it.

A stage begins no sooner than its head, and what of its work the backward pass waits for ends a tail before the step
does. Neither falls along the line. So a step of T seconds leaves a stage that begins at a head of h and a tail of t
seconds T - h for all of its work, and T - h - t for that part. If p stages that each take as much as they may do not
cover the line, no cuts do.

Under a V-shaped order a device has a stretch near each end of what the devices before it leave, and the later stretch
begins no sooner than its own head. For each end of the early stretch the late one is as long as it may be.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graphs.arrays import FloatArray

if TYPE_CHECKING:
    from baselines.strategies.bounding.line_kernel import Grid

_ROUNDING = 1e-12  # relative: sums along a line are of millions of numbers
_BOUNDARIES = 512  # of a line with two stretches for each device: time grows with the square


@dataclass(frozen=True, eq=False)
class Line:
    """The work of a pipeline in topological order (n ops).

    Attributes:
        done_s: float64 [n + 1], seconds on one device of all that comes before each op, for all micro-batches.
        held_s: float64 [n + 1], the same of the work that must end a tail before the step does.
        head_s: float64 [n], how soon each op can start; does not fall.
        tail_s: float64 [n], seconds that follow at least what is held of an op and those after it; does not fall, but
            is 0 once nothing is held any more.
    """

    done_s: FloatArray
    held_s: FloatArray
    head_s: FloatArray
    tail_s: FloatArray

    def is_covered(self, devices: int, step_s: float) -> bool:
        """Whether stretches of whole ops, one for each device, cover all of it."""
        end, slack_s = len(self.head_s), _ROUNDING * (step_s + float(self.done_s[-1]))
        free_s = step_s - self.head_s + slack_s
        till = np.searchsorted(self.done_s, self.done_s[:-1] + free_s, side="right") - 1
        held = np.searchsorted(self.held_s, self.held_s[:-1] + free_s - self.tail_s, side="right") - 1
        # A stretch that begins later reaches as far at least: to have come further is no drawback.
        reach = np.maximum.accumulate(np.maximum(np.minimum(till, held), np.arange(end)))
        at = 0
        for _ in range(devices):
            if at >= end:
                break
            at = int(reach[at])
        return at >= end

    def is_covered_twice(self, devices: int, step_s: float) -> bool:
        """Whether two stretches for each device, nested as a V lays them, cover all of it."""
        from baselines.strategies.bounding.line_kernel import is_nested_cover  # loads the compiler

        slack_s = _ROUNDING * (step_s + float(self.done_s[-1]))
        return bool(is_nested_cover(self._grid, devices, step_s, slack_s))

    @cached_property
    def _grid(self) -> Grid:
        """All ends of ops, or of a longer line so many of them that a stretch may end between for nothing."""
        from baselines.strategies.bounding.line_kernel import Grid

        n = len(self.head_s)
        at = np.unique(np.linspace(0, n, min(n, _BOUNDARIES) + 1).astype(np.int64))
        amount = np.stack([self.done_s, self.held_s])
        wait = np.concatenate([np.stack([self.head_s, self.tail_s]), np.zeros((2, 1))], axis=1)
        # The first op after the boundary before, and the last one before the boundary after, is certainly theirs.
        near = np.concatenate([at[:1], at[:-1] + 1])
        far = np.concatenate([at[1:] - 1, at[-1:]])
        return Grid(amount[:, at], amount[:, near], amount[:, far], wait[:, near], wait[:, at])
