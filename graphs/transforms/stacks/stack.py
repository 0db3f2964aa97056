"""`on_stack`: a graph whose ops are launched as a stack launches them; `kernels_of` and `fused` to look at it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray, frozen, numbered, sums
from graphs.errors import GraphError, UnknownNameError
from graphs.op_kinds import ATTENTION, KernelRole, base_name, role_of
from graphs.opgraph import OpGraph
from graphs.origin import COMPILED, EAGER, STACKS, with_step_of
from graphs.records import Phase
from graphs.transforms.coarsen.contraction import contract
from graphs.transforms.derived import Derived
from graphs.transforms.stacks.compiled import compiled_kernels
from graphs.transforms.stacks.facts import FUSIBLE, KernelFacts, item_bytes, read_bytes
from graphs.transforms.stacks.handmade import handmade_kernels

# Bytes and launches of ops that share kernels: each member's part of what its kernel reads, writes and launches.
#
# Inside of a kernel nothing lies in memory: a tensor that only members read is neither written nor read, and what
# several
# members read is read once. Three corrections are made for compilers, which do more than share kernels:
#
# - what every reader computes for itself (`KernelFacts.is_inlined`), or the backward pass computes again from tensors
#   that lie in memory anyway, is not written;
# - the mask of a dropout is kept as truth values, of one byte each;
# - batch norms in training, and the backward passes of norms, take a second kernel that reads their inputs again.

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


# `HeldTensors`: tensors kept for the backward pass under a stack, where kernels keep what they read, not registers.
#
# A backward kernel that mirrors a forward kernel computes again what that had between its first read and its last
# write:
# the backward pass of SwiGLU has the gate's product, not its silu; that of a norm what the norm read and its
# statistics,
# not the normalised numbers in float32. torch.compile does so by its min-cut partitioner, as far as chains of
# pointwise
# ops go (`torch/_functorch/partitioners.py`).

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


def on_stack(graph: OpGraph, stack: str) -> OpGraph:
    """The same ops, tensors and names, launched as a stack does: bytes moved, launches and memory change, nothing else.

    The members of one kernel share it: its first member launches it, the others launch nothing, and the bytes that a
    member moves are what it reads from outside of its kernel and writes that leaves it. Tensors that only members
    read take no memory, nor do those that backward kernels compute again (`HeldTensors`). So a split graph, a
    recomputed one or one in micro-batches may come after, and values do not depend on the stack.

    Args:
        stack: ``"eager"``, every op by itself; ``"compiled"``, as torch.compile does; ``"fused"``, with the hand-made
            kernels of Megatron-LM and Transformer Engine.

    Raises:
        UnknownNameError: no stack of that name.
        GraphError: the graph is on another stack, or has measured times, which hold for their own stack.
    """
    now = stack_of(graph)
    _check(stack)
    if stack == now:
        return graph
    if now != EAGER:
        raise GraphError(
            f"graph {graph.name!r} is on stack {now} and cannot be put on {stack}; start from the eager one."
        )
    if graph.time_keys:
        raise GraphError(
            f"the op times of graph {graph.name!r} were measured op by op and do not tell those of stack {stack}; "
            "use a graph without measured times."
        )
    kernel_of = _kernels(graph, stack)
    held = HeldTensors.of(graph, kernel_of, stack == COMPILED)
    moved, kernels = shared_kernels(graph, kernel_of, stack == COMPILED, held.is_again)
    inside, sizes = inside_kernels(graph, kernel_of), held.bytes
    if stack == COMPILED:  # what is held until a kernel ends may be narrower than what lies inside of it
        inside, freed = inner_tensors(replace(graph, tensor_bytes=sizes), kernel_of)
        sizes = np.where(inside & (freed > 0), np.minimum(sizes, freed), sizes)
        inside = inside & (freed == 0)
    in_place = frozen(graph.tensor_in_place | inside | held.is_again)
    origin = replace(graph.origin, stack=stack)
    sizes = frozen(sizes)
    placed = replace(
        graph, bytes_moved=moved, kernels=kernels, tensor_bytes=sizes, tensor_in_place=in_place, origin=origin
    )
    return with_step_of(graph, placed)


def stack_of(graph: OpGraph) -> str:
    """The stack that a graph is on; eager where nobody put it on one."""
    return graph.origin.stack or EAGER


def kernels_of(graph: OpGraph, stack: str) -> IntArray:
    """int64 [n]: the number of each op's kernel under a stack, counted from 0 by their first members.

    An op that launches nothing, such as an input, has a number of its own, too. So has, in a graph that is on the stack
    already, a member whose reads and writes other members of its kernel make; ask for the kernels of the eager graph.

    Raises:
        UnknownNameError: no stack of that name.
    """
    _check(stack)
    return frozen(numbered(_kernels(graph, stack))[0])


def fused(graph: OpGraph, stack: str) -> Derived:
    """The graph on a stack with the members of each kernel merged into one op, for counting and looking.

    Raises:
        UnknownNameError: no stack of that name.
        GraphError: as `on_stack`.
    """
    placed = on_stack(graph, stack)
    merged = contract(placed, kernels_of(graph, stack))
    return Derived.merged(merged.graph, graph, merged.group_of)


def _check(stack: str) -> None:
    if stack not in STACKS:
        raise UnknownNameError("stack", str(stack), STACKS)


def _kernels(graph: OpGraph, stack: str) -> IntArray:
    if stack == EAGER:
        return np.arange(graph.n_ops)
    return compiled_kernels(graph) if stack == COMPILED else handmade_kernels(graph)
