"""Extents of an op that a split row divides: the sizes that a part of a product or of attention still has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphs.arrays import FloatArray, IntArray
from graphs.op_kinds import op_kind
from graphs.records import ATTENTIONS, EXTENTS, Work
from graphs.rows import Partial, Shard, SplitRow

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph

BATCH, ROWS, COLUMNS, DEPTH = range(4)  # of a product
HEADS, QUERIES = 0, 1  # of attention
_NEARLY = 1e-9  # relative: shares of whole numbers are whole numbers but for rounding


def divided_extent(work: Work, extents: Sequence[float], row: SplitRow, columns: int) -> int:
    """The number of the extent that parts of an op divide among them; all others they have in full.

    Attention is cut by its queries where its sequence is, else by samples and heads. A product whose result is a
    summand is cut by its depth; one of many products, all of whose factors are cut, by their number; else by the
    columns or the rows of its result. One op for both gradients has the sizes of the forward product, of whose rows,
    columns and depth its results tell.

    Args:
        row: along which the op is cut.
        columns: the dimension of its result that has the columns, if it has more than one.
    """
    if work in ATTENTIONS:
        return QUERIES if row.axis == "sequence" else HEADS
    is_cut, is_sum = ([isinstance(part, kind) for part in row.outputs] for kind in (Shard, Partial))
    all_cut = extents[BATCH] > 1 and all(isinstance(part, Shard) for part in row.inputs)
    if work is Work.PRODUCT and len(row.outputs) > 1:
        if is_sum[0]:
            return COLUMNS
        if not is_cut[1]:
            return ROWS
        return BATCH if all_cut else DEPTH
    if any(is_sum[:1]):
        return DEPTH
    if all_cut or not any(is_cut[:1]):
        return BATCH
    made = row.outputs[0]
    has_columns = isinstance(made, Shard) and made.dim == columns and made.extent <= extents[COLUMNS]
    return COLUMNS if has_columns else ROWS


def divided_extents(graph: OpGraph, rows: Sequence[SplitRow | None]) -> IntArray:
    """int64 [n]: `divided_extent` of every op that is cut along these rows; 0 of others, and of ops without extents."""
    result = np.zeros(graph.n_ops, dtype=np.int64)
    known: dict[tuple[object, ...], int] = {}  # layers repeat
    for op in np.flatnonzero(graph.work).tolist():
        row = rows[op]
        if row is None:
            continue
        work, extents = Work(graph.work[op]), tuple(graph.extents[op].tolist())
        key = work, extents, graph.kinds[op], graph.row_numbers[op], id(row)
        if key not in known:
            columns = _columns(graph.kinds[op], graph.split_rows[op])
            known[key] = divided_extent(work, extents, row, columns)
        result[op] = known[key]
    return result


def _columns(kind: str, rows: Sequence[SplitRow]) -> int:
    """The dimension of a product's result that has its columns: the last one, but the channels of a convolution."""
    if op_kind(kind).is_convolution:
        return 1
    return max((row.outputs[0].dim for row in rows if row.outputs and isinstance(row.outputs[0], Shard)), default=1)


def scaled(extents: FloatArray, column: IntArray, factor: FloatArray) -> FloatArray:
    """float64 [k, ..., 5]: of each of k ops one extent times a factor, float64 [k, ...]."""
    chosen = (np.arange(EXTENTS) == column[:, None]).reshape(len(column), *(1,) * (factor.ndim - 1), EXTENTS)
    result: FloatArray = np.where(chosen, extents * factor[..., None], extents)
    return result


def settled(extents: FloatArray) -> FloatArray:
    """The extents, rounded where they are whole numbers but for rounding errors: a kernel works on whole tiles."""
    whole = np.rint(extents)
    result: FloatArray = np.where(np.abs(extents - whole) <= _NEARLY * extents, whole, extents)
    return result


def share_of_flops(flops: FloatArray, left: FloatArray, share: FloatArray) -> FloatArray:
    """Share of an op's FLOPs that a part has left; of its units where it has no FLOPs."""
    result: FloatArray = np.where(flops > 0, left / np.maximum(flops, 1e-300), share)
    return result
