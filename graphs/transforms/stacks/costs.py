"""Bytes and launches of ops that share kernels: each member's part of what its kernel reads, writes and launches.

Inside of a kernel nothing lies in memory: a tensor that only members read is neither written nor read, and what several
members read is read once. Three corrections are made for compilers, which do more than share kernels:

- what every reader computes for itself (`KernelFacts.is_inlined`), or the backward pass computes again from tensors
  that lie in memory anyway, is not written;
- the mask of a dropout is kept as truth values, of one byte each;
- batch norms in training, and the backward passes of norms, take a second kernel that reads their inputs again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray, numbered, sums
from graphs.op_kinds import ATTENTION, KernelRole, base_name, item_bytes
from graphs.opgraph import OpGraph
from graphs.records import Phase
from graphs.transforms.stacks.facts import KernelFacts, read_bytes

# Norms whose sums over all rows need a kernel beside the one that passes over the elements.
_TWICE = ("native_layer_norm_backward", "native_group_norm_backward", "fused_rms_norm_backward")


@dataclass(frozen=True, eq=False)
class _Habits:
    """A compiler's habits besides sharing kernels.

    Attributes:
        width: float64 [m], the share of each tensor's bytes that it takes.
        is_unwritten: bool [m], computed by each of its readers.
        is_again: bool [m], computed once more by the backward pass.
        takes_two: bool [n], ops that launch a second kernel, which reads their inputs again.
    """

    width: FloatArray
    is_unwritten: BoolArray
    is_again: BoolArray
    takes_two: BoolArray

    @staticmethod
    def none(graph: OpGraph, is_again: BoolArray) -> _Habits:
        no = np.zeros(graph.n_tensors, dtype=np.bool_)
        return _Habits(np.ones(graph.n_tensors), no, is_again, np.zeros(graph.n_ops, dtype=np.bool_))

    @staticmethod
    def of_compiler(graph: OpGraph, kernel_of: IntArray) -> _Habits:
        facts = KernelFacts.of(graph)
        inlined = facts.is_inlined
        is_channels = np.array([role is KernelRole.CHANNELS for role in facts.role], dtype=np.bool_) & graph.is_training
        takes_two = np.array([base_name(kind) in _TWICE for kind in graph.kinds], dtype=np.bool_) | is_channels
        return _Habits(_widths(graph), inlined, _computed_again(graph, facts, kernel_of, inlined), takes_two)


def shared_kernels(
    graph: OpGraph, kernel_of: IntArray, is_compiled: bool, is_again: BoolArray
) -> tuple[FloatArray, IntArray]:
    """Bytes moved, float64 [n], and launches, int64 [n]; ops with a kernel of their own keep theirs.

    Args:
        kernel_of: int64 [n], any number for each kernel.
        is_compiled: whether a compiler made the kernels, rather than somebody by hand.
        is_again: bool [m], tensors that backward kernels by hand compute once more; a compiler has more of them.
    """
    kernel, first = numbered(kernel_of)
    is_shared = (np.bincount(kernel) > 1)[kernel]
    habits = _Habits.of_compiler(graph, kernel) if is_compiled else _Habits.none(graph, is_again)
    moved = np.where(is_shared, _moved(graph, kernel, habits), graph.bytes_moved)
    before, after = (sums(kernel, amounts, len(first)) for amounts in (graph.bytes_moved, moved))
    moved = moved * np.where(after > before, before / np.maximum(after, 1.0), 1.0)[kernel]
    launches = habits.takes_two.astype(np.int64)
    launches[first] += 1
    alone = graph.kernels
    if is_compiled:  # what else attention is made of are copies and scales, which go into the kernels beside it
        is_attention = np.array([base_name(kind) in ATTENTION for kind in graph.kinds], dtype=np.bool_)
        alone = np.where(is_attention, np.minimum(alone, 1), alone)
    return moved, np.where(is_shared, launches, alone)


def inside_kernels(graph: OpGraph, kernel_of: IntArray) -> BoolArray:
    """bool [m]: tensors that members of their own kernel read and nobody else, and that lie nowhere.

    One stays that is no larger than what its producer is the last to read: until the kernel ends, memory holds that.

    Args:
        kernel_of: as of `shared_kernels`.
    """
    result, freed = inner_tensors(graph, kernel_of)
    return result & (graph.tensor_bytes > freed)


def inner_tensors(graph: OpGraph, kernel_of: IntArray) -> tuple[BoolArray, IntArray]:
    """Tensors that members of their own kernel read and nobody else, bool [m], and what memory holds meanwhile.

    The latter are the bytes, int64 [m], of what the producer is the last to read: they are there until the kernel ends.

    Args:
        kernel_of: as of `shared_kernels`.
    """
    producer, consumer, tensor = graph.edge_list
    result = np.diff(graph.consumer_ptr) > 0
    result[tensor[kernel_of[producer] != kernel_of[consumer]]] = False
    last = np.full(graph.n_tensors, -1, dtype=np.int64)
    np.maximum.at(last, tensor, graph.topological_position[consumer])
    is_last = (last[tensor] == graph.topological_position[consumer]) & ~result[tensor]
    freed = sums(consumer[is_last], graph.tensor_memory_bytes[tensor[is_last]], graph.n_ops)
    return result, freed[graph.tensor_producer]


def _moved(graph: OpGraph, kernel: IntArray, habits: _Habits) -> FloatArray:
    """float64 [n]: what each op reads from outside of its kernel, and writes that leaves it."""
    producer, consumer, tensor = graph.edge_list
    n = graph.n_ops
    read, written, states = read_bytes(graph)
    amount = read * habits.width[tensor]
    is_outer = kernel[producer] != kernel[consumer]
    reads = _once(tensor[is_outer], consumer[is_outer], amount[is_outer], kernel, n)
    again = sums(consumer, amount, n) * habits.takes_two
    is_backward = (graph.phase[producer] == Phase.FORWARD) & (graph.phase[consumer] != Phase.FORWARD)
    is_needed = is_outer & ~(habits.is_again[tensor] & is_backward)
    leaves = np.diff(graph.consumer_ptr) == 0
    leaves[tensor[is_needed]] = True
    writes = written * habits.width * (leaves & ~habits.is_unwritten)
    result: FloatArray = np.minimum(reads + sums(graph.tensor_producer, writes, n) + states, graph.bytes_moved) + again
    return result


def _once(tensor: IntArray, reader: IntArray, amount: FloatArray, kernel: IntArray, n: int) -> FloatArray:
    """float64 [n]: bytes read where the first member of a kernel that reads a tensor reads it for all."""
    order = np.lexsort((reader, -amount, tensor, kernel[reader]))
    tensor, reader, amount = tensor[order], reader[order], amount[order]
    is_first = np.ones(len(order), dtype=np.bool_)
    is_first[1:] = (tensor[1:] != tensor[:-1]) | (kernel[reader[1:]] != kernel[reader[:-1]])
    return sums(reader[is_first], amount[is_first], n)


def _widths(graph: OpGraph) -> FloatArray:
    """float64 [m]: one byte an element where a tensor is the mask of a dropout, drawn or scaled; 1 of all others."""
    drawn = np.array([base_name(kind) == "bernoulli" for kind in graph.kinds], dtype=np.bool_)
    scales = np.array([base_name(kind) == "div" for kind in graph.kinds], dtype=np.bool_)
    producer, consumer, _ = graph.edge_list
    drawn[consumer[drawn[producer] & scales[consumer]]] = True
    items = np.array([item_bytes(k, d) for k, d in zip(graph.kinds, graph.dtypes, strict=True)], dtype=np.float64)
    return np.where(drawn, 1.0 / items, 1.0)[graph.tensor_producer]


def _computed_again(graph: OpGraph, facts: KernelFacts, kernel: IntArray, inlined: BoolArray) -> BoolArray:
    """bool [m]: tensors of the forward pass that its backward pass can compute from what lies in memory anyway."""
    producer, consumer, tensor = graph.edge_list
    forward = graph.phase == Phase.FORWARD
    lies = np.array([role in (KernelRole.NOTHING, KernelRole.LIBRARY) for role in facts.role])[graph.tensor_producer]
    lies[tensor[(kernel[producer] != kernel[consumer]) & forward[consumer]]] = True
    lies &= ~inlined
    can = np.zeros(graph.n_tensors, dtype=np.bool_)
    ptr, inputs = graph.inputs
    written = graph.output_ptr
    for op in graph.topological_order.tolist():
        if facts.role[op] is KernelRole.POINTWISE and forward[op]:
            read = inputs[ptr[op] : ptr[op + 1]]
            can[written[op] : written[op + 1]] = bool((lies[read] | can[read]).all())
    return can
