"""Score plans: one at a time with a schedule on demand, or many placements at once in parallel.

The meaning of every number is docs/score.md; the compiled loop is `env.simulation.kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from env.plan import Plan, Priority
from env.problem import Problem
from env.simulation import kernel, sequence_kernel
from env.simulation.step_state import Index, Output, arrays_of
from graphs.arrays import frozen, sums
from graphs.errors import MismatchError
from graphs.opgraph import FloatArray, IntArray

_MODE = {Priority.LONGEST_PATH: kernel.LONGEST_PATH, Priority.FIFO: kernel.FIFO, Priority.MSR: kernel.MSR}


@dataclass(frozen=True, eq=False)
class Schedule:
    """Times of all ops and transfers in one step (n ops, x transfers). Times in seconds from the start of the step.

    Attributes:
        device: int64 [n], device of each op.
        op_start_s, op_end_s: float64 [n].
        order: int64 [n], op numbers in the sequence they start; as an explicit order it repeats the step exactly, for a
            fixed sequence together with `transfer_order`.
        transfer_tensor, transfer_source, transfer_target: int64 [x], tensor and devices, in order of request, or of
            start in a fixed sequence. Over any one exclusive link both are the sequence of the transfers.
        transfer_start_s, transfer_end_s: float64 [x].
    """

    device: IntArray
    op_start_s: FloatArray
    op_end_s: FloatArray
    order: IntArray
    transfer_tensor: IntArray
    transfer_source: IntArray
    transfer_target: IntArray
    transfer_start_s: FloatArray
    transfer_end_s: FloatArray

    @property
    def step_time_s(self) -> float:
        """End of the last op."""
        return float(self.op_end_s.max())

    @property
    def transfer_order(self) -> IntArray:
        """int64 [x, 2], (tensor, receiving device): with `order` as explicit order, the fixed sequence that was run."""
        return np.column_stack([self.transfer_tensor, self.transfer_target])


@dataclass(frozen=True, eq=False)
class Score:
    """The score of one placement (D devices, L links).

    Attributes:
        step_time_s: makespan of one step.
        busy_s: float64 [D], seconds each device computes.
        peak_bytes: int64 [D]; of devices on one memory at its owner, and 0 at the others.
        link_bytes: float64 [L], bytes over each link of the cluster.
        bytes_moved: bytes sent from device to device, each tensor once per receiver.
        feasible: no device's peak exceeds its memory. Pins and colocation groups are not looked at: any placement has a
            score, and `env.checking.checker` tells whether it is allowed.
    """

    step_time_s: float
    busy_s: FloatArray
    peak_bytes: IntArray
    link_bytes: FloatArray
    bytes_moved: int
    feasible: bool


@dataclass(frozen=True, eq=False)
class BatchScores:
    """Scores of k placements: as `Score`, with a leading axis [k]."""

    step_time_s: FloatArray
    busy_s: FloatArray
    peak_bytes: IntArray
    link_bytes: FloatArray
    bytes_moved: IntArray
    feasible: NDArray[np.bool_]


class Simulator:
    """Scores plans of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._arrays = arrays_of(problem)

    def resized(self, kind_s: FloatArray, tensor_bytes: IntArray) -> Simulator:
        """A simulator of the same graph with other figures, which nobody checks; its `problem` is still the first.

        Args:
            kind_s: float64 [n, K], seconds of each op on each of `Problem.kind_of`.
            tensor_bytes: int64 [m]; tensors whose transfers were measured take as long as they did.
        """
        graph, arrays = self.problem.graph, self._arrays
        held = np.where(graph.tensor_in_place, 0, tensor_bytes)
        result = copy(self)
        result._arrays = arrays._replace(
            kind_s=frozen(kind_s),
            edge_bytes=np.where(arrays.edge_latency > 0, tensor_bytes[arrays.edge_tensor], 0).astype(np.float64),
            tensor_bytes=frozen(tensor_bytes),
            memory_bytes=frozen(held),
            output_bytes=sums(graph.tensor_producer, held, graph.n_ops) + graph.coming_bytes,
        )
        return result

    def score(self, plan: Plan, priority: Priority | str = Priority.LONGEST_PATH) -> Score:
        """Score one plan.

        Args:
            plan: where every op runs, and possibly in which order. With an order of transfers the step is a fixed
                sequence (docs/score.md): devices and links wait for what is next rather than take what is ready.
            priority: how devices choose among ready ops where the plan has no order.

        Raises:
            MismatchError: not a plan of this problem; an order of transfers with other transfers than the placement
                needs, or that can never be carried out.
            UnknownNameError: the priority does not exist.
        """
        return self._run(plan, priority)[0]

    def schedule(self, plan: Plan, priority: Priority | str = Priority.LONGEST_PATH) -> tuple[Score, Schedule]:
        """`score`, and when every op and transfer starts and ends."""
        score, out, count = self._run(plan, priority)
        source, target = np.divmod(out.transfer_pair[:count].astype(np.int64), self.problem.cluster.n_devices)
        return (
            score,
            Schedule(
                device=plan.device.copy(),  # a plan's own is read-only, and numba would compile again for such an array
                op_start_s=out.op_start,
                op_end_s=out.op_end,
                order=np.argsort(out.op_rank),
                transfer_tensor=out.transfer_tensor[:count].astype(np.int64),
                transfer_source=source,
                transfer_target=target,
                transfer_start_s=out.transfer_start[:count],
                transfer_end_s=out.transfer_end[:count],
            ),
        )

    def batch(
        self, devices: ArrayLike, priority: Priority | str = Priority.LONGEST_PATH, orders: ArrayLike | None = None
    ) -> BatchScores:
        """Score k placements, ``devices`` int [k, n] and ``orders`` float [k, n], on all threads numba may use."""
        placed = self._checked(devices, 2)
        mode, explicit = self._mode(priority, orders, placed.shape)
        k, n_devices = len(placed), self.problem.cluster.n_devices
        time_s, busy_s = np.empty(k), np.empty((k, n_devices))
        peak, links = np.empty((k, n_devices), np.int64), np.empty((k, len(self.problem.cluster.links)))
        moved = np.empty(k, np.int64)
        kernel.run_batch(self._arrays, placed, mode, explicit, time_s, busy_s, peak, links, moved)
        feasible = np.all(peak <= self.problem.capacity_bytes, axis=1)
        return BatchScores(time_s, busy_s, peak, links, moved, feasible)

    def _run(self, plan: Plan, priority: Priority | str) -> tuple[Score, Output, int]:
        placed = self._checked(plan.device, 1)
        mode, explicit = self._mode(priority, plan.order, placed.shape)
        if plan.transfer_order is None:
            n_links = len(self.problem.cluster.links)
            time_s, count, moved, out = kernel.run_one(self._arrays, n_links, placed, mode, explicit)
        else:
            time_s, count, moved, out = sequence_kernel.run(self.problem, self._arrays, plan)
        feasible = bool((out.peak_bytes <= self.problem.capacity_bytes).all())
        return Score(time_s, out.busy_s, out.peak_bytes, out.link_bytes, int(moved), feasible), out, count

    def _checked(self, device: ArrayLike, dimensions: int) -> Index:
        placed = np.asarray(device)
        n, n_devices = self.problem.graph.n_ops, self.problem.cluster.n_devices
        if placed.ndim != dimensions or placed.shape[-1] != n or (placed.size and placed.dtype.kind not in "iu"):
            raise MismatchError(
                f"a placement of graph {self.problem.graph.name!r} has one whole device number for each of {n} ops, "
                f"got an array of {placed.dtype} and shape {placed.shape}."
            )
        if placed.size and (placed.min() < 0 or placed.max() >= n_devices):
            raise MismatchError(
                f"device numbers of cluster {self.problem.cluster.name!r} go from 0 to {n_devices - 1}, "
                f"got {placed.min()} to {placed.max()}."
            )
        return np.ascontiguousarray(placed, dtype=np.int32)

    def _mode(self, priority: Priority | str, order: ArrayLike | None, shape: Sequence[int]) -> tuple[int, FloatArray]:
        if order is None:
            return _MODE[Priority.of(priority)], np.empty((0,) if len(shape) == 1 else (1, 0))
        # A copy, since a plan's order is read-only, and numba would compile everything again for such an array.
        explicit = np.array(order, dtype=np.float64, order="C")
        if explicit.shape != tuple(shape) or np.isnan(explicit).any():
            raise MismatchError(
                f"an explicit order has one number per op, shape {tuple(shape)} and none of them NaN, got shape "
                f"{explicit.shape}."
            )
        return kernel.EXPLICIT, explicit
