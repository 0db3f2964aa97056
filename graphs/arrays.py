"""Small helpers for numpy arrays, used all over the project."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Number = TypeVar("Number", np.float64, np.int64)
ScalarT = TypeVar("ScalarT", bound=np.generic)


def frozen(array: NDArray[ScalarT]) -> NDArray[ScalarT]:
    """The array, read-only from now on."""
    array.setflags(write=False)
    return array


def sums(index: IntArray, values: NDArray[Number], size: int) -> NDArray[Number]:
    """[size], of the type of the values: those of each index added up.

    Exact for whole numbers, which `numpy.bincount` adds as floats.
    """
    result = np.zeros(size, dtype=values.dtype)
    np.add.at(result, index, values)
    return result


def distinct(values: IntArray) -> IntArray:
    """The different values of a long array, increasing; `numpy.unique` takes several times as long for these."""
    ordered = np.sort(values, axis=None)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def distinct_rows(flags: BoolArray) -> tuple[BoolArray, IntArray]:
    """The different rows of flags [n, k], False before True, and int64 [n], which of them each row is.

    `numpy.unique` compares rows byte by byte, and takes a hundred times as long for many of them.
    """
    packed = np.packbits(flags, axis=1)
    packed = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8)))
    which = np.zeros(len(flags), dtype=np.int64)
    for word in packed.view(">u8").astype(np.uint64).T:
        _, code = np.unique(word, return_inverse=True)
        code = code.reshape(-1).astype(np.int64)
        _, which = np.unique(which * (int(code.max(initial=0)) + 1) + code, return_inverse=True)
        which = which.reshape(-1).astype(np.int64)
    first = np.zeros(int(which.max(initial=-1)) + 1, dtype=np.int64)
    first[which[::-1]] = np.arange(len(flags))[::-1]
    return flags[first], which


def numbered(labels: IntArray) -> tuple[IntArray, IntArray]:
    """Labels as numbers 0, 1, ... by first appearance, and the place where each appears first."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse.reshape(-1)], np.sort(first).astype(np.int64)


def groups(labels: IntArray) -> IntArray:
    """Labels as numbers 0, 1, ... by first appearance; those below 0, of what is in no group, as -1.

    So `OpGraph` numbers colocation groups, and its hash tells graphs with other numbers apart.
    """
    result = np.full(len(labels), -1, dtype=np.int64)
    grouped = labels >= 0
    result[grouped], _ = numbered(labels[grouped])
    return result


def pointers(row: NDArray[np.integer[Any]], count: int) -> IntArray:
    """int64 [count + 1]: where the entries of each row 0 .. count - 1 begin, once they are sorted by row (CSR)."""
    return np.concatenate([[0], np.cumsum(np.bincount(row, minlength=count))]).astype(np.int64)


def nearly_least(values: Sequence[float], slack: float = 1e-9) -> list[int]:
    """The places of the values that are no larger than the least, but for this share of it; by default for rounding."""
    least = min(values)
    return [k for k, value in enumerate(values) if value <= least * (1 + slack)]


Found = TypeVar("Found")

_KEPT = "_found"  # attribute of a graph, beside its cached properties


def per_graph(find: Callable[..., Found]) -> Callable[..., Found]:
    """A function of a graph, and hashable arguments beside it, that works out once for each graph what it returns.

    Callers change nothing of that; an array is read-only. It is gone with the graph, and no part of its copies.
    """

    @wraps(find)
    def known(graph: Any, *others: Hashable) -> Found:
        kept: dict[tuple[Any, ...], Found] = vars(graph).setdefault(_KEPT, {})
        key = (find, *others)
        if key not in kept:
            found = kept[key] = find(graph, *others)
            if isinstance(found, np.ndarray):
                found.setflags(write=False)
        return kept[key]

    return known
