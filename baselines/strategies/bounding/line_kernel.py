"""Compiled loop over the nested stretches of a V-shaped pipeline; `baselines.strategies.bounding.line` says why."""

# Letters
# x, y    what is left: from boundary x to boundary y; Y[x], the least y that some choice of the devices before leaves
# all, held   rows of `amount`: all work, and what of it must end a tail before the step does

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from env.jit import entry

if TYPE_CHECKING:
    from graphs.arrays import FloatArray


class Grid(NamedTuple):
    """Boundaries at which a stretch may begin and end, g + 1 of them (both rows: all work, and what is held).

    Attributes:
        before: float64 [2, g + 1], seconds of what lies before each boundary.
        ended, begun: the same, of a stretch that ends, or begins, there or less than a boundary away.
        first: float64 [2, g + 1], head and tail of a stretch that begins there after others.
        later: float64 [2, g + 1], head and tail of one that begins there before others.
    """

    before: FloatArray
    ended: FloatArray
    begun: FloatArray
    first: FloatArray
    later: FloatArray


@entry
def is_nested_cover(grid: Grid, devices: int, step_s: float, slack_s: float) -> bool:
    """Whether two stretches for each device, nested, cover all from the first boundary to the last. O(devices g^2)."""
    last = grid.before.shape[1] - 1
    least = np.full(last + 1, last + 1)
    least[0] = last
    for _ in range(devices):
        after = np.full(last + 1, last + 1)
        for x in range(last + 1):
            y = least[x]
            if y > last:  # no choice comes so far
                continue
            if x >= y:
                return True
            free_s = step_s - grid.first[0, x] + slack_s
            bound_s = free_s - grid.first[1, x]
            # As the earlier stretch grows, the later one shrinks, so that its begin only moves on.
            begin = x
            for end in range(x, y + 1):
                left_s = free_s - (max(grid.ended[0, end] - grid.before[0, x], 0.0) if end > x else 0.0)
                held_s = bound_s - (max(grid.ended[1, end] - grid.before[1, x], 0.0) if end > x else 0.0)
                if end > x and (left_s < 0 or held_s < 0):
                    break
                begin = max(begin, end)
                while begin < y:
                    all_s = max(grid.before[0, y] - grid.begun[0, begin], 0.0)
                    late_s = max(grid.before[1, y] - grid.begun[1, begin], 0.0)
                    room_s = step_s - grid.later[0, begin] + slack_s
                    if all_s <= min(left_s, room_s) and late_s <= min(held_s, room_s - grid.later[1, begin]):
                        break
                    begin += 1
                if begin <= end:
                    return True
                after[end] = min(after[end], begin)
        # To have come less far is possible as well, and may be better: heads are lower there.
        for x in range(last - 1, -1, -1):
            after[x] = min(after[x], after[x + 1])
        least = after
    return False
