"""Tensors of a graph whose ops get new numbers, and the rows of a table taken anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphs.arrays import IntArray, distinct, pointers


def rewired(
    tensors: Sequence[Sequence[Any]], edges: Sequence[tuple[IntArray, IntArray]], number: IntArray
) -> dict[str, Any]:
    """The tensor arrays of an `OpGraph`.

    Args:
        tensors: producer, bytes, in place and transfer_s, four arrays for each batch of tensors.
        edges: (tensor, op) pairs, two arrays for each batch; the same pair may come twice.
        number: int64, the new number of each op; several may have the same.
    """
    producer, size, in_place, transfer_s = (np.concatenate(part) for part in zip(*tensors, strict=True))
    order = np.argsort(number[producer], kind="stable")
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    tensor, consumer = (np.concatenate(part) for part in zip(*edges, strict=True))
    pairs = distinct(rank[tensor] * len(number) + number[consumer])
    read = pairs // len(number)
    return {
        "tensor_producer": number[producer][order],
        "tensor_bytes": size[order],
        "tensor_in_place": in_place[order],
        "tensor_transfer_s": transfer_s[order],
        "consumer_ptr": pointers(read, len(order)),
        "consumers": pairs % len(number),
    }


def taken(ptr: IntArray, values: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Rows of a table in CSR form, in a new order and some of them several times."""
    length = np.diff(ptr)[rows]
    starts = np.concatenate([[0], np.cumsum(length)]).astype(np.int64)
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], length)
    return starts, values[np.repeat(ptr[rows], length) + within]
