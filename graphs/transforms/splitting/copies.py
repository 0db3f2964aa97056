"""`Copies`: the copies that every op of a graph gets on a mesh and over micro-batches, and their numbers.

Letters: n ops and m tensors of the source; K places of the mesh; M micro-batches. Op i has ``copies[i] x K`` copies, of
which number ``first[i] + b * K + p`` works at place p for micro-batch b; so with tensors. On a folded mesh there is the
first place alone, and K is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.op_kinds import op_kind
from graphs.opgraph import OpGraph
from graphs.records import ATTENTIONS, EXTENTS, Partial, Shard, SplitRow, Work
from graphs.transforms.splitting.cuts import SUM, WHOLE, Sharding

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


@dataclass(frozen=True, eq=False)
class Copies:
    """Copies of ops and tensors.

    Attributes:
        graph: the source.
        mesh: how it is cut along each axis of the mesh.
        chunks: how it is cut into micro-batches; None for one.
    """

    graph: OpGraph
    mesh: Sequence[Sharding]
    chunks: Sharding | None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Places along each axis that have copies."""
        return tuple(sharding.share.shape[1] for sharding in self.mesh)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Places along each axis, with copies or not."""
        return tuple(sharding.axis.size for sharding in self.mesh)

    @cached_property
    def places(self) -> int:
        return int(np.prod(self.sizes, dtype=np.int64))

    @property
    def is_folded(self) -> bool:
        """Whether only the first place has copies."""
        return self.sizes != self.parts

    @property
    def micro_batches(self) -> int:
        return 1 if self.chunks is None else self.chunks.axis.size

    @cached_property
    def is_chunked(self) -> BoolArray:
        """bool [n]: whether each micro-batch has an own copy of the op."""
        if self.chunks is None:
            return np.zeros(self.graph.n_ops, dtype=np.bool_)
        return np.array([row is not None for row in self.chunks.row], dtype=np.bool_)

    @cached_property
    def copies(self) -> IntArray:
        """int64 [n]: micro-batches for which an op runs apart, 1 if it runs once."""
        return np.where(self.is_chunked, self.micro_batches, 1).astype(np.int64)

    @cached_property
    def first_op(self) -> IntArray:
        """int64 [n + 1]: number of each op's first copy."""
        return np.concatenate([[0], np.cumsum(self.copies * self.places)]).astype(np.int64)

    @cached_property
    def tensor_copies(self) -> IntArray:
        """int64 [m]."""
        return self.copies[self.graph.tensor_producer]

    @cached_property
    def first_tensor(self) -> IntArray:
        """int64 [m + 1]: number of each tensor's first copy."""
        return np.concatenate([[0], np.cumsum(self.tensor_copies * self.places)]).astype(np.int64)

    @cached_property
    def op_copy(self) -> tuple[IntArray, IntArray, IntArray]:
        """``(op, micro-batch or -1, place)`` of each copy of an op."""
        op = np.repeat(np.arange(self.graph.n_ops), self.copies * self.places)
        number = np.arange(len(op)) - self.first_op[op]
        batch = np.where(self.is_chunked[op], number // self.places, -1)
        return op, batch.astype(np.int64), (number % self.places).astype(np.int64)

    def op_ids(self, op: int) -> IntArray:
        """int64 [copies, K]: numbers of an op's copies."""
        return np.arange(self.first_op[op], self.first_op[op + 1]).reshape(-1, self.places)

    def tensor_ids(self, tensor: int) -> IntArray:
        """int64 [copies, K]: numbers of a tensor's copies."""
        return np.arange(self.first_tensor[tensor], self.first_tensor[tensor + 1]).reshape(-1, self.places)

    # -- what a copy has ------------------------------------------------------------------------------------

    @cached_property
    def op_share(self) -> FloatArray:
        """float64 [n, K]: share of the divided work at each place, all micro-batches together."""
        return _outer([sharding.share for sharding in self.mesh], self.graph.n_ops)

    def copy_share(self, op: int, but: int) -> FloatArray:
        """float64 [copies, K]: share of the divided work of each copy of an op, were one axis of one part."""
        axes = [np.ones((1, n)) if a == but else self.mesh[a].share[[op]] for a, n in enumerate(self.sizes)]
        by_batch = np.ones((1, 1))
        if self.chunks is not None and self.copies[op] > 1:
            by_batch = self.chunks.share[[op]].T
        return by_batch * _outer(axes, 1)

    def amounts(self, total: FloatArray, whole: str = "") -> FloatArray:
        """float64 of every copy of an op: `total`, FLOPs or bytes, divided as the rows say.

        Args:
            total: float64 [n].
            whole: the field of `SplitRow` that says what every part has in full; "" for nothing.
        """
        value = total[:, None]
        for sharding in self.mesh:
            value = _divided(value, sharding, whole)
        per_copy = value.reshape(self.graph.n_ops, self.places)
        op, batch, place = self.op_copy
        result = per_copy[op, place]
        if self.chunks is not None:
            full = _whole(self.chunks, whole)
            part = np.minimum(full / np.maximum(total, 1e-300), 1.0)[op]
            share = self.chunks.share[op, np.maximum(batch, 0)]
            result = np.where(batch >= 0, result * (part + (1.0 - part) * share), result)
        return result

    @cached_property
    def extents(self) -> FloatArray:
        """float64 [copies, 5] of every copy of an op: those of products and attention divided as their FLOPs are."""
        known = np.flatnonzero(self.graph.work)
        op, batch, place = self.op_copy
        result = self.graph.extents[op]
        if not len(known):
            return result
        flops, value = self.graph.flops[known][:, None], self.graph.extents[known][:, None, :]
        for sharding in self.mesh:
            left, share = _left(flops, sharding, known), sharding.share[known][:, None, :]
            factor = share_of_flops(flops[:, :, None], left, share)
            value = scaled(value[:, :, None, :], divided_extents(self.graph, sharding.row)[known], factor)
            flops, value = left.reshape(len(known), -1), value.reshape(len(known), -1, EXTENTS)
        at = np.flatnonzero(self.graph.work[op])
        number = np.searchsorted(known, op[at])
        found = value[number, place[at]]
        if self.chunks is not None:
            left, share = _left(flops, self.chunks, known), self.chunks.share[known][:, None, :]
            factor = share_of_flops(flops[:, :, None], left, share)[number, place[at], np.maximum(batch[at], 0)]
            column = divided_extents(self.graph, self.chunks.row)[op[at]]
            found = scaled(found, column, np.where(batch[at] >= 0, factor, 1.0))
        result[at] = settled(found)
        return result

    @cached_property
    def tensor_size(self) -> IntArray:
        """int64 of every copy of a tensor: its bytes; those of cut tensors add up to the whole."""
        value = self.graph.tensor_bytes[:, None]
        for sharding in self.mesh:
            value = _cut(value, sharding)
        tensor = np.repeat(np.arange(self.graph.n_tensors), self.tensor_copies * self.places)
        number = np.arange(len(tensor)) - self.first_tensor[tensor]
        if self.chunks is None:
            return np.asarray(value.reshape(self.graph.n_tensors, self.places)[tensor, number], dtype=np.int64)
        by_batch = _cut(value, self.chunks).reshape(self.graph.n_tensors, self.places, self.micro_batches)
        chunked = self.tensor_copies[tensor] > 1
        once = value.reshape(self.graph.n_tensors, self.places)[tensor, number % self.places]
        batch = np.where(chunked, number // self.places, 0)
        result: IntArray = np.where(chunked, by_batch[tensor, number % self.places, batch], once).astype(np.int64)
        return result


def _outer(shares: list[FloatArray], n: int) -> FloatArray:
    result = np.ones((n, 1))
    for share in shares:
        result = (result[:, :, None] * share[:, None, :]).reshape(n, -1)
    return result


def _whole(sharding: Sharding, field: str) -> FloatArray:
    """float64 [n]: what every part has in full; nothing of an op that is not cut is divided."""
    return np.array([0.0 if row is None or not field else getattr(row, field) for row in sharding.row])


def _left(flops: FloatArray, sharding: Sharding, ops: IntArray) -> FloatArray:
    """[k, a] of some ops along one more axis: [k, a, size]."""
    full = np.minimum(_whole(sharding, "whole_flops")[ops][:, None], flops)[:, :, None]
    return np.asarray(full + (flops[:, :, None] - full) * sharding.share[ops][:, None, :])


def _divided(value: FloatArray, sharding: Sharding, field: str) -> FloatArray:
    """[n, a] along one more axis: [n, a * size]."""
    full = np.minimum(_whole(sharding, field)[:, None], value)
    rest = (value - full)[:, :, None] * sharding.share[:, None, :] + full[:, :, None]
    return rest.reshape(len(value), -1)


def _cut(value: IntArray, sharding: Sharding) -> IntArray:
    """int64 [m, a] along one more axis: [m, a * size]; cut tensors add up to what they were."""
    is_cut = ~np.isin(sharding.written, (WHOLE, SUM))
    ends = np.rint(value[:, :, None] * np.cumsum(sharding.written_share, axis=1)[:, None, :]).astype(np.int64)
    parts = np.diff(ends, axis=2, prepend=0)
    whole = np.broadcast_to(value[:, :, None], parts.shape)
    return np.where(is_cut[:, None, None], parts, whole).reshape(len(value), -1)
