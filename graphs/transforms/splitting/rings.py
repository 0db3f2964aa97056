"""Attention in a ring: blocks of keys and values go from part to part, each used while the next one is on its way.

In turn j of n a part has the keys and values of the j-th part before it. An op of the graph becomes, at each place, n
block ops, n - 1 shifts, and ops that put results together; the op itself puts the last one to the others. The backward
pass sends gradients of keys and values behind their blocks: each part adds its summand, and in the end they are home.

    forward     shift 1 ─▶ shift 2 ─▶ ...           backward   block j ─▶ sum j ─▶ shift of the sum ─▶ sum j + 1
                   │          │ (block 0 is done)
    block 0    block 1    block 2
        └──────▶ merge 1 ─▶ merge 2 ─▶ the op

A shift waits until the block before the one that it sends has been used, so no part has more than two beside its own:
one in use, one on its way (Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context",
section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from graphs.arrays import FloatArray, IntArray
from graphs.opgraph import OpGraph, Phase
from graphs.records import ATTENTIONS, LANE, SEQUENCE, Shard, Work
from graphs.transforms.derived import Collective, Exchanged
from graphs.transforms.splitting.cuts import Sharding, differs
from graphs.transforms.splitting.ring_rows import turned

if TYPE_CHECKING:
    from graphs.transforms.splitting.copies import Copies
    from graphs.transforms.splitting.emission import Emission
    from graphs.transforms.splitting.exchange import Exchanges


SHIFT = "shift"  # kind of a collective by which each part sends to the next one
RING_BLOCK, RING_MERGE = "ring_block", "ring_merge"  # kinds of ops
KEYS = 2  # number of attention's extent that blocks divide
# Times the bytes of results that are moved to put two together: by a product and a sum of products; by a sum.
MERGES = {Work.ATTENTION: 5, Work.ATTENTION_BACKWARD: 3}
MERGE_KERNELS = {Work.ATTENTION: 8, Work.ATTENTION_BACKWARD: 3}  # most of them small: of one number a query
_WIDE = {"float16": 2, "bfloat16": 2}  # results are put together in float32, so many times as large


def in_rings(graph: OpGraph, mesh: Sequence[Sharding]) -> dict[int, int]:
    """Ops of attention in a ring, and along which axis of the mesh."""
    rings = [(a, sharding) for a, sharding in enumerate(mesh) if sharding.axis.is_ring]
    return {op: a for a, one in rings for op, row in enumerate(one.row) if turned(graph, op, row) is not None}


def widened(graph: OpGraph, op: int) -> int:
    """How many times the bytes of an op's results they have while they are put together."""
    return _WIDE.get(graph.dtypes[op], 1) if graph.work[op] == Work.ATTENTION else 1


class Rings:
    """The ops of a graph's rings, beside copies that the split makes of all ops."""

    def __init__(self, layout: Copies, out: Emission, exchanges: Exchanges) -> None:
        self.layout, self.graph, self.out, self.exchanges = layout, layout.graph, out, exchanges
        self.axis_of = in_rings(layout.graph, layout.mesh)

    def merging(
        self, flops: FloatArray, moved: FloatArray, extents: FloatArray, times: tuple[FloatArray, FloatArray]
    ) -> tuple[NDArray[Any], ...]:
        """FLOPs, bytes moved, extents, work, kernels and measured times of all copies; rings put results together.

        Args: of the copies, were there no ring.
        """
        graph, (op, _, place) = self.graph, self.layout.op_copy
        is_merge = np.isin(op, list(self.axis_of))
        count, results = np.ones(graph.n_ops, dtype=np.int64), np.zeros(graph.n_ops)
        for each in self.axis_of:
            count[each] = MERGE_KERNELS[Work(graph.work[each])]
            made = graph.tensor_bytes[graph.output_ptr[each] : graph.output_ptr[each + 1]].sum()
            results[each] = MERGES[Work(graph.work[each])] * made * widened(graph, each)
        share = self.layout.op_share[op, place] / self.layout.copies[op]
        return (
            np.where(is_merge, 0.0, flops),
            np.where(is_merge, results[op] * share, moved),
            np.where(is_merge[:, None], 0.0, extents),
            np.where(is_merge, 0, graph.work[op]),
            np.where(is_merge, count[op], graph.kernels[op]),
            np.where(is_merge[:, None], np.nan, times[0]),
            np.where(is_merge[:, None], 0.0, times[1]),
        )

    def emit(self, flops: FloatArray, extents: FloatArray, times: tuple[FloatArray, FloatArray]) -> None:
        """Add the blocks, shifts and merges of all rings.

        Args:
            flops, extents: of every copy of an op, were it no ring.
            times: measured ones, likewise: ``(time_s, fixed_s)``.
        """
        for op, axis in self.axis_of.items():
            _Ring(self, op, axis, flops, extents, times).emit()


class _Ring:
    """One op in a ring (n parts; copies for micro-batches, K places)."""

    def __init__(
        self, rings: Rings, op: int, axis: int, flops: FloatArray, extents: FloatArray,
        times: tuple[FloatArray, FloatArray],
    ) -> None:  # fmt: skip
        self.layout, self.graph, self.out, self.exchanges = rings.layout, rings.graph, rings.out, rings.exchanges
        self.op, self.axis, self.n = op, axis, self.layout.parts[axis]
        self.copies = self.layout.op_ids(op)
        at = self.copies.reshape(-1)
        self.flops, self.extents = flops[at] / self.n, extents[at].copy()
        self.extents[:, KEYS] /= self.n
        self.times = tuple(each[at] for each in times)
        found = turned(self.graph, op, self.layout.mesh[axis].row[op])
        assert found is not None
        first, made = int(self.graph.inputs[0][op]), int(self.graph.output_ptr[op])
        self.turning = [int(self.graph.inputs[1][first + k]) for k in found[0]]
        self.summed = [made + k for k in found[1]]
        self.is_forward = self.graph.work[op] == Work.ATTENTION
        self._targets: dict[int, list[int | None]] = {}  # of each tensor read, as `Exchanges.converted` takes them
        self.made = range(made, int(self.graph.output_ptr[op + 1]))

    def emit(self) -> None:
        """Its ops and tensors, turn by turn."""
        given = self._read()
        own = [self._sizes(t) for t in self.turning]
        reads = sum((self._sizes(t) for t in given), np.zeros(self.copies.shape))
        sums = sum((self._sizes(t) for t in self.summed), np.zeros(self.copies.shape))
        results = sum((self._sizes(t) for t in self.made), np.zeros(self.copies.shape))
        block_bytes = results * widened(self.graph, self.op)
        moved, merged = reads + block_bytes, MERGES[Work(self.graph.work[self.op])] * block_bytes
        size = np.rint(sum(own, np.zeros(self.copies.shape))).astype(np.int64)
        blocks: list[IntArray] = []
        arriving: list[IntArray] = [given[t] for t in self.turning]
        before: IntArray | None = None  # what is put together so far
        coming: IntArray | None = None  # sums of gradients, from the part before
        for j in range(self.n):
            if j:
                gates = [self._signal(blocks[j - 2])] if j > 1 else self._beginning(given)
                arriving = [self._shift(arriving, size, [self._about(t, j - 1) for t in self.turning], gates)]
            block = self._ops(RING_BLOCK, f"block{j}", moved)
            blocks.append(block)
            for ids in (*given.values(), *arriving):
                self.out.edges(ids, block)
            made = block_bytes if j or self.is_forward else block_bytes - sums
            result = self.out.tensors(block.reshape(-1), made.reshape(-1)).reshape(block.shape)
            last = [] if coming is None else [coming]
            if j == self.n - 1 and self.is_forward:
                ends = self.copies
            elif j == 0:
                before = result
                continue
            else:
                ends = self._ops(RING_MERGE, f"merge{j}", merged)
            for ids in (result, *([] if before is None else [before]), *last):
                self.out.edges(ids, ends)
            if ends is self.copies:
                continue
            kept = block_bytes - (0 if self.is_forward else sums)
            before = self.out.tensors(ends.reshape(-1), kept.reshape(-1)).reshape(ends.shape)
            if not self.is_forward and self.summed:
                total = self.out.tensors(ends.reshape(-1), sums.reshape(-1)).reshape(ends.shape)
                members = [self._about(t, j) for t in self.summed]
                coming = self._shift([total], np.rint(sums).astype(np.int64), members, [])
        if not self.is_forward:  # its own summand of the gradients of its keys, and those of all others
            own_first = self.out.tensors(blocks[0].reshape(-1), sums.reshape(-1)).reshape(self.copies.shape)
            for ids in (own_first, *([] if before is None else [before]), *([] if coming is None else [coming])):
                self.out.edges(ids, self.copies)

    def _read(self) -> dict[int, IntArray]:
        """By tensor that the op reads, the tensors that hold what its copies need of it."""
        ptr, tensors = self.graph.inputs
        found = {}
        for e in range(int(ptr[self.op]), int(ptr[self.op + 1])):
            t = int(tensors[e])
            pairs = [(int(one.written[t]), int(one.read[e])) for one in self.layout.mesh]
            targets = self._targets[t] = [read if differs(written, read) else None for written, read in pairs]
            found[t] = self.exchanges.converted(t, targets, False, Phase(int(self.graph.phase[self.op])))
        return found

    def _sizes(self, tensor: int) -> FloatArray:
        """float64 [copies, K]: bytes of a part of a tensor."""
        sizes = self.exchanges.sizes[self.layout.tensor_ids(tensor)]
        return np.broadcast_to(sizes, self.copies.shape).astype(np.float64)

    def _beginning(self, given: Mapping[int, IntArray]) -> list[IntArray]:
        """Signals that the backward pass has come to the op: gradients that it reads are there."""
        producers = {int(self.graph.tensor_producer[t]) for t in given} if not self.is_forward else set()
        found = (self.layout.op_ids(p) for p in sorted(producers) if self.graph.phase[p] == Phase.BACKWARD)
        return [self._signal(np.broadcast_to(ids, self.copies.shape)) for ids in found]

    def _signal(self, ops: IntArray) -> IntArray:
        """Empty tensors that say that ops are done."""
        return self.out.tensors(ops.reshape(-1), 0).reshape(ops.shape)

    def _about(self, tensor: int, turn: int) -> Exchanged:
        """A tensor that goes on from one part to the next."""
        written = [int(one.written[tensor]) for one in self.layout.mesh]
        targets = self._targets.get(tensor, [None] * len(written))
        codes = tuple(code if target is None else target for code, target in zip(written, targets, strict=True))
        phase = int(self.graph.phase[self.op])
        return Exchanged("tensor", tensor, codes, codes, False, not self.is_forward, phase, turn=turn)

    def _ops(self, kind: str, word: str, moved: FloatArray) -> IntArray:
        """int64 [copies, K]: one op for each copy, beside it."""
        layout, graph, count = self.layout, self.graph, len(self.copies)
        place = np.tile(np.arange(layout.places), count)
        is_block = kind == RING_BLOCK
        group = int(graph.colocation[self.op])
        time_s, fixed_s = self.times
        measured = fixed_s + (time_s - fixed_s) / self.n
        made = self.out.ops(
            self._named(word, place),
            time_s=measured if is_block else np.nan,
            fixed_s=fixed_s if is_block else 0.0,
            extents=self.extents if is_block else 0.0,
            work=graph.work[self.op] if is_block else 0,
            kinds=kind,
            dtypes=graph.dtypes[self.op],
            modules=graph.modules[self.op],
            flops=self.flops if is_block else 0.0,
            bytes_moved=moved.reshape(-1),
            kernels=graph.kernels[self.op] if is_block else MERGE_KERNELS[Work(graph.work[self.op])],
            colocation=-1 if group < 0 else group * layout.places + place,
            phase=graph.phase[self.op],
            pins=graph.pins[self.op],
            origin=self.op,
            part=place,
            micro_batch=self._batches(),
        )
        return made.reshape(self.copies.shape)

    def _batches(self) -> IntArray:
        count = len(self.copies)
        return np.repeat(np.arange(count) if count > 1 else np.array([-1]), self.layout.places)

    def _named(self, word: str, place: IntArray) -> list[str]:
        marks = ["" if b < 0 else f" mb{b}" for b in self._batches().tolist()]
        spots = (self.exchanges.spot(p) for p in place.tolist())
        return [f"{self.graph.op_names[self.op]}/{word}{s}{m}" for s, m in zip(spots, marks, strict=True)]

    def _shift(
        self, given: Sequence[IntArray], size: IntArray, members: Sequence[Exchanged], gates: Sequence[IntArray]
    ) -> IntArray:
        """int64 [copies, K]: what arrives from the part before, of tensors of these bytes together."""
        layout, graph = self.layout, self.graph
        k, before = layout.sizes[self.axis], int(np.prod(layout.sizes[: self.axis], dtype=np.int64))
        place = np.tile(np.arange(layout.places), len(self.copies))
        word = f"{SHIFT}{members[0].turn + 1}{'_sum' if members[0].number in self.summed else ''}"
        ops = self.out.ops(
            self._named(word, place),
            kinds=SHIFT,
            dtypes=graph.dtypes[self.op],
            modules=graph.modules[self.op],
            phase=int(graph.phase[self.op]),
            pins=(LANE,),
            origin=self.op,
            part=place,
            micro_batch=self._batches(),
            along=self.axis,
        ).reshape(self.copies.shape)
        grid = (len(self.copies), before, k, layout.places // before // k)
        ranks = np.moveaxis(ops.reshape(grid), 2, -1)
        for ids in given:
            own = np.broadcast_to(ids, self.copies.shape)
            self.out.edges(np.moveaxis(own.reshape(grid), 2, -1)[..., None, :], ranks[..., :, None])
        for ids in gates:
            self.out.edges(ids, ops)
        name, sizes = layout.mesh[self.axis].axis.name, np.moveaxis(size.reshape(grid), 2, -1)[..., 0]
        self.exchanges.collectives += [
            Collective(SHIFT, name, tuple(row), int(one) * self.n, tuple(members))
            for row, one in zip(ranks.reshape(-1, k).tolist(), sizes.reshape(-1).tolist(), strict=True)
        ]
        return self.out.tensors(ops.reshape(-1), size.reshape(-1)).reshape(self.copies.shape)


# -- Balance of rings -----------------------------------------------------------------------------------------------
# Balance of causal attention: which axes give each part of a sequence a stretch of each half.
#
# Part r of a sequence in 2 k stretches has the stretches r and 2 k - 1 - r. So the queries of each part see as many
# keys,
# 2 k + 1 halves of a stretch, where of k plain stretches the last sees 2 - 1 / k times the mean. Megatron-LM (its
# ``get_batch_on_this_cp_rank``) and PyTorch (``context_parallel`` with its default load balancer) cut in the same way.


_DENSITY = 4  # of attention's extents: the share of the pairs of queries and keys that is not masked


def is_balanced(graph: OpGraph, sharding: Sharding) -> bool:
    """Whether the parts of a graph along an axis have a stretch of each half of the sequence.

    They do where queries of causal attention are cut, and every sequence divides into two stretches for each part.
    """
    axis = sharding.axis
    if axis.words != (SEQUENCE,) or sharding.halo.any() or not cuts_causal_attention(graph, sharding):
        return False
    rows = {id(row): row for row in sharding.row if row is not None and row.axis == SEQUENCE}.values()
    shards = (part for row in rows for part in (*row.inputs, *row.outputs) if isinstance(part, Shard))
    return all(part.extent % (2 * axis.size) == 0 for part in shards)


def cuts_causal_attention(graph: OpGraph, sharding: Sharding) -> bool:
    """Whether an axis cuts the queries of causal attention in one call."""
    causal = np.isin(graph.work, ATTENTIONS) & (graph.extents[:, _DENSITY] < 1)
    rows = (sharding.row[op] for op in np.flatnonzero(causal).tolist())
    return any(row is not None and row.axis == SEQUENCE for row in rows)
