"""`decided_rows`: by which rows a graph is cut along an axis, as numbers that `shard` takes in place of a choice."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from graphs.arrays import IntArray
from graphs.opgraph import OpGraph
from graphs.transforms.splitting.ring_rows import SEQUENCE, turned
from graphs.transforms.splitting.sharding import Sharding, shard, with_whole_tables


def decided_rows(graph: OpGraph, sharding: Sharding) -> IntArray | None:
    """int64 [n]: the number of each op's row among its split rows, -1 for a whole op.

    None where `shard` would not give the same sharding for these numbers: it is then chosen again, which costs time
    and nothing else.
    """
    n_read = np.diff(graph.inputs[0]).tolist()
    known: dict[tuple[int, int, int], int] = {}
    numbers = np.full(graph.n_ops, -1, dtype=np.int64)
    for op, row in enumerate(sharding.row):
        if row is None:
            continue
        key = graph.row_numbers[op], id(row), n_read[op]
        if key not in known:
            rows = enumerate(graph.split_rows[op])
            if turned(graph, op, row) is None:
                known[key] = next((k for k, each in rows if with_whole_tables(each, n_read[op]) == row), -1)
            else:  # in a ring, by the row of the sequence
                known[key] = next(k for k, each in rows if each.axis == SEQUENCE)
        if known[key] < 0:
            return None
        numbers[op] = known[key]
    again = shard(graph, sharding.axis, decided=numbers)
    return numbers if _are_same(sharding, again) else None


def _are_same(one: Sharding, other: Sharding) -> bool:
    arrays = (each.name for each in fields(one) if each.name not in ("axis", "row"))
    return one.row == other.row and all(np.array_equal(getattr(one, key), getattr(other, key)) for key in arrays)
