"""Columns of `OpGraph` from records, and what they hold where nobody gave any."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from graphs.arrays import FloatArray, IntArray
from graphs.errors import GraphError
from graphs.records import EXTENTS, Op, Tensor, Work

FEW_KEYS = 64  # of measured times: any number of ops may have that many
TIMES_LIMIT = 10**7  # measured times of a graph with more keys: one for each op and key, measured or not


def numbers(ops: list[Op]) -> dict[str, int]:
    """The number of each op by its name."""
    index: dict[str, int] = {}
    for i, op in enumerate(ops):
        if op.name in index:
            raise GraphError(f"op name {op.name!r} appears twice; op names must be unique, rename one of them.")
        index[op.name] = i
    return index


def times(ops: list[Op], name: str) -> tuple[tuple[str, ...], FloatArray, FloatArray]:
    """`OpGraph.time_keys`, `OpGraph.time_s` and `OpGraph.fixed_s`."""
    keys = tuple(sorted({key for op in ops for key in op.time_s}))
    check_time_keys(name, len(ops), len(keys))
    column = {key: j for j, key in enumerate(keys)}
    time_s = np.full((len(ops), len(keys)), np.nan)
    fixed_s = np.zeros(time_s.shape)
    for i, op in enumerate(ops):
        for key, seconds in op.time_s.items():
            if seconds != seconds:
                raise GraphError(f"op {op.name!r} has time_s on {key!r} = nan; leave an unmeasured time out.")
            time_s[i, column[key]] = amount(op.name, seconds, f"time_s on {key!r}")
        for key, seconds in op.fixed_s.items():
            if key not in op.time_s:
                raise GraphError(f"op {op.name!r} has fixed_s on {key!r} and no time_s there; give both or neither.")
            fixed_s[i, column[key]] = amount(op.name, seconds, f"fixed_s on {key!r}")
    return keys, time_s, fixed_s


def transfer_times(tensors: list[Tensor]) -> FloatArray:
    """`OpGraph.tensor_transfer_s`."""
    for tensor in tensors:
        if tensor.transfer_s is not None and tensor.transfer_s != tensor.transfer_s:
            raise GraphError(f"op {tensor.producer!r} has transfer_s = nan; leave an unmeasured time out.")
    # A tensor nobody reads is never sent, so a transfer time on it would only change the hash.
    given = [np.nan if t.transfer_s is None or not t.consumers else t.transfer_s for t in tensors]
    return amounts([t.producer for t in tensors], given, "transfer_s")


def facts(ops: Sequence[Op]) -> tuple[IntArray | None, FloatArray | None, IntArray]:
    """`OpGraph.work`, `OpGraph.extents` and `OpGraph.stream`; None where no op has any."""
    stream = counts([op.name for op in ops], [op.stream for op in ops], "stream")
    if not any(op.work or any(op.extents) for op in ops):
        return None, None, stream
    for op in ops:
        if not isinstance(op.work, Work):
            raise GraphError(f"op {op.name!r} has work = {op.work!r:.40}; expected a graphs.Work.")
        if len(op.extents) != EXTENTS:
            raise GraphError(f"op {op.name!r} has {len(op.extents)} extents; expected {EXTENTS} numbers.")
    names = [op.name for op in ops for _ in range(EXTENTS)]
    extents = amounts(names, [extent for op in ops for extent in op.extents], "extents").reshape(-1, EXTENTS)
    return np.array([int(op.work) for op in ops], dtype=np.int64), extents, stream


def check_time_keys(name: str, n_ops: int, n_keys: int) -> None:
    """Whether the table of measured times, one row an op and one column a key, may be made.

    Raises:
        GraphError: many ops with many keys.
    """
    if n_keys > FEW_KEYS and n_ops * n_keys > TIMES_LIMIT:
        raise GraphError(
            f"graph {name!r} has {n_ops} ops with time_s on {n_keys} different names; expected at most {FEW_KEYS} "
            f"names, or ops times names at most {TIMES_LIMIT:,}; give times by the devices' models or kinds."
        )


def counts(names: Iterable[str], values: Sequence[Any], what: str) -> IntArray:
    """Whole numbers as int64; refuses what a cast would silently cut off or wrap around."""
    for name, value in zip(names, values, strict=True):
        whole = isinstance(value, int | np.integer) or (isinstance(value, float | np.floating) and value.is_integer())
        if not whole or abs(value) >= 2**63:
            raise GraphError(f"op {name!r} has {what} = {value!r:.40}; expected a whole number below 2**63.")
    return np.array([int(value) for value in values], dtype=np.int64)


def amount(name: str, value: Any, what: str) -> float:
    """A number as a float; refuses what is no number or would become infinite."""
    largest = sys.float_info.max
    if not isinstance(value, int | float | np.integer | np.floating) or value > largest or value < -largest:
        raise GraphError(f"op {name!r} has {what} = {value!r:.40}; expected a finite number, 0 or more.")
    return float(value) + 0.0  # + 0.0: minus zero would change the hash


def amounts(names: Iterable[str], values: Sequence[Any], what: str) -> FloatArray:
    """Numbers as float64; refuses as `amount`."""
    return np.array([amount(name, value, what) for name, value in zip(names, values, strict=True)], dtype=np.float64)
