"""`LocalRings`: attention whose keys and values go round a ring, at one place, in the terms of an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from env.times.op_times import moving_seconds
from graphs.arrays import FloatArray, IntArray
from graphs.records import Work
from graphs.transforms.splitting.rings import KEYS, MERGE_KERNELS, MERGES, widened

if TYPE_CHECKING:
    from baselines.strategies.estimating.local_costs import LocalWork, OpTimes, Sizes
    from baselines.strategies.estimating.step import LocalStep


@dataclass(frozen=True)
class LocalRings:
    """Attention in rings at one place (r ops).

    Attributes:
        ops: int64 [r].
        parts: int64 [r], of each one's ring.
        read, merged: float64 [n], bytes that a block moves, and that putting its results to others does.
        kernels: int64 [n], for the latter.
        held: float64 [n], bytes beside what the op reads and writes.
    """

    ops: IntArray
    parts: IntArray
    read: FloatArray
    merged: FloatArray
    kernels: IntArray
    held: FloatArray

    @staticmethod
    def of(step: LocalStep, sizes: Sizes, tensor: FloatArray) -> LocalRings:
        """Those of a step.

        Args:
            tensor: float64 [m], bytes of each tensor at one place.
        """
        graph = step.frame.graph
        read, merged, held = np.zeros((3, graph.n_ops))
        kernels, parts = np.zeros(graph.n_ops, dtype=np.int64), np.zeros(graph.n_ops, dtype=np.int64)
        if not any(cut.turns.any() for cut in step.cuts):
            return LocalRings(np.flatnonzero(parts), parts[:0], read, merged, kernels, held)
        ptr, tensors = graph.inputs
        consumer = np.repeat(np.arange(graph.n_ops), np.diff(ptr))
        for cut, size in zip(step.cuts, sizes.axes, strict=True):
            going = np.bincount(consumer, np.where(cut.turns, tensor[tensors], 0.0), graph.n_ops)
            sums = np.bincount(graph.tensor_producer, np.where(cut.sums, tensor, 0.0), graph.n_ops)
            for op in np.unique(consumer[cut.turns]).tolist():
                made = tensor[graph.output_ptr[op] : graph.output_ptr[op + 1]].sum() * widened(graph, op)
                parts[op] = size
                read[op] = tensor[tensors[ptr[op] : ptr[op + 1]]].sum() + made
                merged[op] = MERGES[Work(graph.work[op])] * made * (size - 1)
                kernels[op] = MERGE_KERNELS[Work(graph.work[op])] * (size - 1)
                held[op] = 2 * going[op] + 2 * made + 2 * sums[op]
        ops = np.flatnonzero(parts)
        return LocalRings(ops, parts[ops], read, merged, kernels, held)

    def divide(self, work: LocalWork, has_extents: bool) -> None:
        """Make the work of each op that of one of its blocks."""
        if not len(self.ops):  # extents are then those of the graph, which cannot be written
            return
        work.flops[self.ops] /= self.parts
        work.moved[self.ops] = self.read[self.ops]
        if has_extents:
            work.extents[self.ops, KEYS] /= self.parts

    def merge_s(self, step: LocalStep, times: OpTimes, devices: Sequence[Sequence[int]]) -> FloatArray:
        """float64 [n]: seconds of putting the results of blocks together."""
        result = np.zeros(len(self.merged))
        for s, numbers in enumerate(devices) if len(self.ops) else ():
            here = self.ops[step.frame.stage[self.ops] == s]
            slowest = [times.cluster.devices[d] for d in numbers]
            seconds = [[moving_seconds(d, self.merged[op], int(self.kernels[op])) for op in here] for d in slowest]
            result[here] = np.max(np.array(seconds).reshape(len(slowest), len(here)), axis=0)
        return result
