"""`compiled_kernels`: which ops become one kernel by the rules of torch.compile's Inductor.

The rules are those of `torch/_inductor` (graph.py, lowering.py, scheduler.py) of torch 2.13, told in terms of a graph
that knows bytes but no shapes:

1. A pointwise op is *inlined* into its readers where all of them are code of the compiler's own and it is cheap, or
   read once: it is computed where it is used and never lies in memory, whatever sizes the two have.
2. An op whose result lies in memory shares a kernel with a reader that passes over as many elements, or over as many as
a reduction in that kernel leaves.
3. Kernels that read the same tensor and pass over as many elements are one kernel, side by side.

Products, convolutions, attention, sorts and exchanges stay as they are; the passes of a step are compiled apart; and
no kernel waits for another that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from graphs.arrays import IntArray
from graphs.op_kinds import COPIES, MATRIX_PRODUCTS, KernelRole, base_name, role_of
from graphs.opgraph import OpGraph
from graphs.recipes import OPTIMIZERS, UPDATE_KIND
from graphs.transforms.coarsen.contraction import merge_classes
from graphs.transforms.stacks.facts import FUSIBLE, Groups, KernelFacts

MOST_APART = 64  # ops between two kernels that are joined side by side (Scheduler.are_long_distant_nodes)
MOST_POINTERS = 250  # that a kernel of many small updates may be given (triton_combo_kernel.py, MAX_NUM_ARGS)


def compiled_kernels(graph: OpGraph) -> IntArray:
    """int64 [n]: the number of each op's kernel, which is that of one of its members."""
    joining = _Joining(graph)
    if not graph.is_training:
        joining.attention()
    joining.down()
    joining.beside()
    labels = np.array(joining.groups.labels(), dtype=np.int64)
    return updates_together(graph, labels, lambda tensors: MOST_POINTERS // tensors)


class _Joining:
    """Groups of ops, grown by the rules of this module."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph, self.facts, self.groups = graph, KernelFacts.of(graph), Groups(graph)
        self.inlined = self.facts.is_inlined.tolist()
        self._elements = list(self.facts.elements)  # of groups, by their number
        self._left: list[set[int]] = [{left} if left >= 0 else set() for left in self.facts.left]
        written = graph.output_ptr.tolist()
        ends = pairwise(written)
        self._is_light = [start < end and all(self.inlined[start:end]) for start, end in ends]

    def attention(self) -> None:
        """A softmax between two products, which is attention spelt out, is one library kernel with both of them.

        In inference alone: `torch/_inductor/fx_passes/fuse_attention.py` leaves training mostly as it is.
        """
        graph = self.graph
        names = [base_name(kind) for kind in graph.kinds]
        producer, readers = graph.tensor_producer, np.diff(graph.consumer_ptr)
        ptr, inputs = graph.inputs
        for op in np.flatnonzero([name == "softmax" for name in names]).tolist():
            chain, now = [op], op
            while names[now] not in MATRIX_PRODUCTS:  # up, through scales and masks
                before = inputs[ptr[now] : ptr[now + 1]]
                large = before[np.argmax(graph.tensor_bytes[before])] if len(before) else -1
                if large < 0 or readers[large] != 1 or self.facts.role[now] not in FUSIBLE:
                    break
                now = int(producer[large])
                chain.append(now)
            written, last = int(graph.output_ptr[op]), int(graph.output_ptr[op + 1])
            after = graph.consumers_of(written).tolist() if written < last else []
            if names[now] in MATRIX_PRODUCTS and len(after) == 1 and names[after[0]] in MATRIX_PRODUCTS:
                for each in (*chain[1:], *after):
                    one, other = self.groups.of(op), self.groups.of(each)
                    if self.groups.can_merge(one, other):
                        self._merge(one, other)

    def down(self) -> None:
        """Rules 1 and 2: every op with those that wrote what it reads."""
        ptr, inputs = self.graph.inputs
        producer, sizes = self.graph.tensor_producer.tolist(), self.graph.tensor_bytes
        for op in self.graph.topological_order.tolist():
            if self.facts.role[op] not in FUSIBLE:
                continue
            product = int(self.facts.absorbed[op])
            if product >= 0 and self.groups.can_merge(self.groups.of(product), self.groups.of(op)):
                self._merge(self.groups.of(product), self.groups.of(op))
                continue
            tensors = inputs[ptr[op] : ptr[op + 1]]
            for tensor in tensors[np.argsort(-sizes[tensors], kind="stable")].tolist():
                self._join(producer[tensor], op, tensor)

    def beside(self) -> None:
        """Rule 3: the readers of one tensor."""
        ptr, consumers = self.graph.consumer_ptr.tolist(), self.graph.consumers.tolist()
        for tensor in range(self.graph.n_tensors):
            readers = [op for op in consumers[ptr[tensor] : ptr[tensor + 1]] if self.facts.role[op] in FUSIBLE]
            for one, other in pairwise(readers):
                first, second = self.groups.of(one), self.groups.of(other)
                if (
                    first != second
                    and other - one <= MOST_APART
                    and self.facts.class_of[one] == self.facts.class_of[other]
                    and self._elements[first] == self._elements[second]
                    and self._columns_in(first) == self._columns_in(second)
                    and self.groups.can_merge(first, second)
                ):
                    self._merge(first, second)

    def _join(self, source: int, op: int, tensor: int) -> None:
        facts = self.facts
        first, second = self.groups.of(source), self.groups.of(op)
        if first == second or facts.role[source] not in FUSIBLE or facts.class_of[source] != facts.class_of[op]:
            return
        roles = facts.role[source], facts.role[op]
        fits = self._elements[first] == facts.elements[op] or facts.elements[op] in self._left[first]
        is_inlined = self.inlined[tensor] and self._is_light[first]
        if facts.is_column[op] or facts.is_column[source] or base_name(self.graph.kinds[op]) in COPIES:
            fits = False
        if roles[1] is KernelRole.WINDOW or facts.absorbed[source] >= 0:
            fits = False  # what they write, or read, lies in memory
        if (fits or is_inlined) and self.groups.can_merge(first, second):
            self._merge(first, second)

    def _merge(self, first: int, second: int) -> None:
        # An op that is computed where it is used takes the size of its user.
        if self._is_light[first] and not self._is_light[second]:
            elements = self._elements[second]
        elif self._is_light[second] and not self._is_light[first]:
            elements = self._elements[first]
        else:
            elements = max(self._elements[first], self._elements[second])
        light = self._is_light[first] and self._is_light[second]
        left = self._left[first] | self._left[second]
        group = self.groups.merge(first, second)
        self._elements[group], self._is_light[group], self._left[group] = elements, light, left

    def _columns_in(self, group: int) -> bool:
        return any(self.facts.is_column[op] for op in self.groups.members[group])


def updates_together(graph: OpGraph, labels: IntArray, most: Callable[[int], int]) -> IntArray:
    """The labels with the updates of one kind and number format in as few kernels as `most` allows.

    Args:
        most: of the number of tensors that an update touches, how many updates share a kernel.
    """
    labels = labels.copy()
    for ops in _updates(graph):
        optimizer = OPTIMIZERS.get(graph.kinds[ops[0]].removeprefix(UPDATE_KIND))
        count = most(optimizer.kept_copies if optimizer else 2)
        for start in range(0, len(ops), count):
            labels[ops[start : start + count]] = ops[start]
    return labels


def _updates(graph: OpGraph) -> Iterator[list[int]]:
    classes = merge_classes(graph).tolist()
    found: dict[tuple[str, str, int], list[int]] = {}
    for op, kind in enumerate(graph.kinds):
        if role_of(kind) is KernelRole.UPDATE:
            found.setdefault((kind, graph.dtypes[op], classes[op]), []).append(op)
    yield from found.values()
