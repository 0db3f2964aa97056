"""`HeldTensors`: tensors kept for the backward pass under a stack, where kernels keep what they read, not registers.

A backward kernel that mirrors a forward kernel computes again what that had between its first read and its last write:
the backward pass of SwiGLU has the gate's product, not its silu; that of a norm what the norm read and its statistics,
not the normalised numbers in float32. torch.compile does so by its min-cut partitioner, as far as chains of pointwise
ops go (`torch/_functorch/partitioners.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphs.arrays import BoolArray, IntArray
from graphs.op_kinds import KernelRole, base_name, role_of
from graphs.opgraph import OpGraph
from graphs.records import Phase
from graphs.transforms.stacks.facts import FUSIBLE

_LOG_SOFTMAX = "log_softmax"
_CASTS = ("to_copy", "convert_element_type")


@dataclass(frozen=True, eq=False)
class HeldTensors:
    """Tensors under a stack (m), with the bytes that lie in memory.

    Attributes:
        bytes: int64 [m]; a wider copy that a kernel makes of what it reads, for itself and its mirror alone, is as
            large as what it read: that is what is kept.
        is_again: bool [m], computed again by the mirror from what is kept for it, so that it lies nowhere.
    """

    bytes: IntArray
    is_again: BoolArray

    @staticmethod
    def of(graph: OpGraph, kernel_of: IntArray, is_compiled: bool) -> HeldTensors:
        """Read off the eager graph.

        Args:
            kernel_of: int64 [n], the number of each op's kernel.
            is_compiled: whether a compiler made the kernels: of the logarithm of a softmax it keeps what that read, and
                numbers of each row, where library kernels have the result.
        """
        sizes, is_again = graph.tensor_bytes.copy(), np.zeros(graph.n_tensors, dtype=np.bool_)
        is_private, kept_for = _private(graph, kernel_of), _kept_for(graph, kernel_of)
        ptr, inputs = graph.inputs
        makers, written = graph.tensor_producer, graph.output_ptr.tolist()
        kernel_of_maker = kernel_of[graph.tensor_producer].tolist()
        on_the_way = np.zeros(graph.n_tensors, dtype=np.bool_)  # computed again, whether or not a mirror reads it
        for op in graph.topological_order.tolist():
            own = range(written[op], written[op + 1])
            if is_compiled and base_name(graph.kinds[op]) == _LOG_SOFTMAX and is_private[written[op]]:
                (source,) = inputs[ptr[op] : ptr[op + 1]].tolist()
                maker = int(makers[source])
                if kernel_of[maker] == kernel_of[op] and base_name(graph.kinds[maker]) in _CASTS:
                    source = int(inputs[ptr[maker]])
                sizes[written[op]] = min(sizes[written[op]], sizes[source])
            if role_of(graph.kinds[op]) is not KernelRole.POINTWISE or graph.phase[op] != Phase.FORWARD:
                continue
            read, kernel = inputs[ptr[op] : ptr[op + 1]].tolist(), int(kernel_of[op])
            can = bool(read) and all(
                (on_the_way[t] and kernel_of_maker[t] == kernel) or (t, kernel) in kept_for for t in read
            )
            for t in own:
                is_again[t] = can and is_private[t]
                on_the_way[t] = can and (is_compiled or is_private[t])
            if not any(is_private[t] for t in own):
                continue
            if not can and len(read) == 1 and base_name(graph.kinds[op]) in _CASTS:
                sizes[written[op]] = min(sizes[written[op]], sizes[read[0]])
        return HeldTensors(sizes, is_again)


def _private(graph: OpGraph, kernel_of: IntArray) -> BoolArray:
    """bool [m]: tensors of the forward pass that both their own kernel and backward ops read, all of these its mirrors.

    Mirrors are kernels themselves: a product reads what lies in memory.
    """
    producer, consumer, tensor = graph.edge_list
    forward = graph.phase[consumer] == Phase.FORWARD
    mirrored = graph.forward_of[consumer]
    is_fusible = np.array([role_of(kind) in FUSIBLE for kind in graph.kinds], dtype=np.bool_)
    is_mirror = (graph.phase[consumer] == Phase.BACKWARD) & (mirrored >= 0) & is_fusible[consumer]
    is_mirror &= kernel_of[mirrored] == kernel_of[producer]
    is_inner = forward & (kernel_of[consumer] == kernel_of[producer])
    result = np.zeros(graph.n_tensors, dtype=np.bool_)
    result[tensor[is_inner]] = True
    has_mirror = np.zeros(graph.n_tensors, dtype=np.bool_)
    has_mirror[tensor[is_mirror]] = True
    result &= has_mirror & (graph.phase[graph.tensor_producer] == Phase.FORWARD)
    result[tensor[~is_inner & ~is_mirror]] = False
    return result


def _kept_for(graph: OpGraph, kernel_of: IntArray) -> set[tuple[int, int]]:
    """Pairs (tensor, kernel): tensors that the mirror of a kernel reads anyway."""
    _, consumer, tensor = graph.edge_list
    mirrored = graph.forward_of[consumer]
    is_mirror = (graph.phase[consumer] == Phase.BACKWARD) & (mirrored >= 0)
    return set(zip(tensor[is_mirror].tolist(), kernel_of[mirrored[is_mirror]].tolist(), strict=True))
