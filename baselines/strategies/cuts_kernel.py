"""The compiled loop of `baselines.strategies.stages`: where a stage begins, for each place where it may end."""

from __future__ import annotations

from env.jit import entry
from graphs.arrays import FloatArray, IntArray


@entry
def best_begins(
    cost: FloatArray,
    done_s: FloatArray,
    unit_s: float,
    low: IntArray,
    high: IntArray,
    after: FloatArray,
    first_end: int,
    best_cost: FloatArray,
    begin: IntArray,
) -> None:
    """The cheapest beginning of a stage for each place j, from `first_end` on, before which it may end.

    Args:
        cost: float64 [f + 1], of all stages before, by the place where this one begins; infinite where none end there.
        done_s: float64 [f + 1], seconds of all ops before each place.
        unit_s: seconds that count as 1; half the square of a stage's time is added to its cost.
        low, high: int64 [f + 1]: it may begin at ``low[j] .. high[j] - 1``.
        after: float64 [f + 1], bytes sent where it ends before op j.
        best_cost, begin: float64 and int64 [f + 1]: results; those of places where no stage may end stay as they are.
    """
    for j in range(first_end, len(cost)):
        if low[j] >= high[j]:
            continue
        at, least = low[j], cost[low[j]] + ((done_s[j] - done_s[low[j]]) / unit_s) ** 2 / 2
        for i in range(low[j] + 1, high[j]):
            option = cost[i] + ((done_s[j] - done_s[i]) / unit_s) ** 2 / 2
            if option < least:
                at, least = i, option
        begin[j] = at
        best_cost[j] = least + after[j]
