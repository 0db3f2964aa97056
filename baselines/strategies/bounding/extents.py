"""`Extents`: how far each op of a graph may be cut, read off the split rows alone, for bounds over all strategies.

The rules of `graphs.transforms.splitting.sharding` for rows, as limits: an op is cut along an axis only by a
row that has a part for every place, so along all axes and in time into no more parts than such rows allow. An op
without rows is whole wherever it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from graphs.arrays import BoolArray, FloatArray
from graphs.opgraph import OpGraph, Phase
from graphs.origin import FUSED
from graphs.records import Partial, Shard, SplitRow, op_with_statistics
from graphs.transforms.axes import AXES
from graphs.transforms.splitting.splitter import BATCH

_AXES = len(AXES) + 1  # with that of time
_OWN = ("batch", "sequence", "height", "width")  # words whose cuts fit to no other word's


@dataclass(frozen=True, eq=False)
class Extents:
    """Limits on the parts of each op (n ops).

    Attributes:
        most: float64 [n], parts along all axes of a mesh and in time together; 1: always whole.
        along: float64 [n] by axis word, parts where a mesh has axes of this word alone.
        is_chunked: bool [n], whether each micro-batch certainly has an own copy, of a part of `along` the batch.
        micro_batches: so many at most.
        keeps_states: whether states are certainly whole in every replica, as none is cut with the batch.
        keeps_batch: no strategy cuts the batch in time, since ops work with its statistics.
        added: float64 [2, n], number and bytes of the gradients that an op makes for updates, and that are certainly
            added up over micro-batches, for each one after the first.
    """

    most: FloatArray
    along: Mapping[str, FloatArray]
    is_chunked: BoolArray
    micro_batches: int
    keeps_states: bool
    keeps_batch: bool
    added: FloatArray

    @staticmethod
    def of(graph: OpGraph, keeps_statistics: bool = True) -> Extents:
        """The limits of a graph. O(rows).

        Args:
            keeps_statistics: those of a batch stay those of the whole batch, so that it is not cut in time.
        """
        n_read = np.diff(graph.inputs[0]).tolist()
        largest = np.ones(graph.n_ops)
        along = {word: np.ones(graph.n_ops) for word in _OWN}
        leaks, known = False, dict[tuple[int, int], _Summary]()
        is_stateless, is_clear = np.ones((2, graph.n_ops), dtype=np.bool_)
        for op, rows in enumerate(graph.split_rows):
            if not rows:
                continue
            key = (id(rows), n_read[op])
            found = known.get(key) or known.setdefault(key, _Summary.of(rows, n_read[op]))
            leaks |= found.leaks
            largest[op] = found.extent
            is_stateless[op], is_clear[op] = not found.cuts_state, found.batch_rows <= 1
            for word, extent in found.along.items():
                along[word][op] = extent
        most = np.minimum(largest**_AXES, 1e18)
        batch, is_input = along[BATCH], np.array([kind == "input" for kind in graph.kinds], dtype=np.bool_)
        of_inputs = float(batch[is_input].max(initial=1.0))
        limit = of_inputs if of_inputs > 1 else float((largest if leaks else batch).max(initial=1.0))
        # A state that a row of the batch cuts could keep another row from fitting.
        keeps_states = bool(is_stateless.all()) and not leaks
        is_chunked = (batch >= limit) & is_clear & (limit > 1 and keeps_states)
        has_statistics = op_with_statistics(graph.kinds, graph.split_rows) is not None
        keeps_batch = keeps_statistics and graph.is_training and has_statistics
        limit = 1.0 if keeps_batch else limit
        added = np.where(is_chunked, _summed(graph), 0.0)
        along = dict.fromkeys(along, most) if leaks else along
        return Extents(most, along, is_chunked, int(limit), keeps_states, keeps_batch, added)


@dataclass(frozen=True)
class _Summary:
    """Limits that the rows of one op set.

    Attributes:
        extent: the largest of them.
        along: largest extent by word of `_OWN`.
        batch_rows: how many different extents rows of the batch have, beside 1.
        cuts_state: whether a row of the batch cuts a state.
        leaks: whether a row makes a cut tensor of whole ones and sums, so that cuts of another word may begin there.
    """

    extent: int
    along: Mapping[str, int]
    batch_rows: int
    cuts_state: bool
    leaks: bool

    @staticmethod
    def of(rows: tuple[SplitRow, ...], n_read: int) -> _Summary:
        along: dict[str, int] = {}
        cuts_state = leaks = False
        for row in rows:
            extent = max(row.extent, 1)
            if row.axis in _OWN:
                along[row.axis] = max(extent, along.get(row.axis, 1))
            read, states = row.inputs[:n_read], row.inputs[n_read:]
            cuts_state |= row.axis == BATCH and any(isinstance(part, Shard) for part in states)
            is_sum = any(isinstance(part, Partial) for part in read)
            leaks |= is_sum and extent > 1 and not any(isinstance(part, Shard) for part in read)
        of_batch = {row.extent for row in rows if row.axis == BATCH and row.extent > 1}
        return _Summary(max(max(row.extent, 1) for row in rows), along, len(of_batch), cuts_state, leaks)


def _summed(graph: OpGraph) -> FloatArray:
    """float64 [2, n]: number and bytes of the tensors for updates that an op of the backward pass makes as summands.

    Each part of the batch has one. None on the stack of hand-made kernels, whose products add to what is there.
    """
    result = np.zeros((2, graph.n_ops))
    if graph.origin.stack == FUSED:
        return result
    producer, consumer, tensor = graph.edge_list
    read = np.unique(tensor[(graph.phase[consumer] == Phase.UPDATE) & (graph.phase[producer] == Phase.BACKWARD)])
    for t in read.tolist():
        op = int(graph.tensor_producer[t])
        rows = [row for row in graph.split_rows[op] if row.axis == BATCH and row.extent > 1]
        if rows and all(isinstance(row.outputs[t - int(graph.output_ptr[op])], Partial) for row in rows):
            result[:, op] += 1, graph.tensor_bytes[t]
    return result
