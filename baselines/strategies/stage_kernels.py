"""Compiled loops of `baselines.strategies.stages`."""

from __future__ import annotations

from env.jit import entry
from graphs.arrays import BoolArray, FloatArray, IntArray


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
    # The letters are those of `stages`: j, the place before which a stage ends; i, the place where it begins.
    for j in range(first_end, len(cost)):
        # No stage may end here.
        if low[j] >= high[j]:
            continue
        # Half the square of a stage's time is what makes stages even where equally much is sent.
        at, least = low[j], cost[low[j]] + ((done_s[j] - done_s[low[j]]) / unit_s) ** 2 / 2
        for i in range(low[j] + 1, high[j]):
            option = cost[i] + ((done_s[j] - done_s[i]) / unit_s) ** 2 / 2
            # Strictly less: of equal ones the first stays.
            if option < least:
                at, least = i, option
        # The bytes sent after the stage are the same wherever it begins.
        # Cutting the stages follows these back from the end.
        begin[j] = at
        best_cost[j] = least + after[j]


@entry
def follow(
    stage: IntArray,
    order: IntArray,
    input_ptr: IntArray,
    producers: IntArray,
    output_ptr: IntArray,
    consumer_ptr: IntArray,
    consumers: IntArray,
    is_data: BoolArray,
) -> None:
    """Give ops without a stage the last of those they read from, else the first of those that read them, else 0.

    Args:
        stage: int64 [n], -1 for ops without one; changed in place.
        order: int64 [n], topological.
        input_ptr, producers: int64 [n + 1], [e]: ops that each op reads from.
        output_ptr, consumer_ptr, consumers: int64, tensors of each op and readers of each tensor, as of `OpGraph`.
        is_data: bool [n], ops that do nothing and read nothing; they are where they are read first.
    """
    for op in order:
        if stage[op] < 0:
            for i in range(input_ptr[op], input_ptr[op + 1]):
                stage[op] = max(stage[op], stage[producers[i]])
    for op in order[::-1]:
        if stage[op] < 0 or is_data[op]:
            first = -1
            for i in range(consumer_ptr[output_ptr[op]], consumer_ptr[output_ptr[op + 1]]):
                reader = stage[consumers[i]]
                if reader >= 0 and (first < 0 or reader < first):
                    first = reader
            stage[op] = first if first >= 0 else max(stage[op], 0)
