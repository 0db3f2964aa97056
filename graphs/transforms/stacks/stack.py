"""`on_stack`: a graph whose ops are launched as a stack launches them; `kernels_of` and `fused` to look at it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphs.arrays import IntArray, frozen, numbered
from graphs.errors import GraphError, UnknownNameError
from graphs.opgraph import OpGraph
from graphs.origin import COMPILED, EAGER, STACKS, with_step_of
from graphs.transforms.coarsen.contraction import contract
from graphs.transforms.derived import Derived
from graphs.transforms.stacks.compiled import compiled_kernels
from graphs.transforms.stacks.costs import inner_tensors, inside_kernels, shared_kernels
from graphs.transforms.stacks.handmade import handmade_kernels
from graphs.transforms.stacks.held import HeldTensors


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
