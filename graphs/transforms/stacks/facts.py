"""`KernelFacts`: what the rules of a compiler ask of the ops of a graph, which knows bytes but no shapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray, sums
from graphs.op_kinds import HEAVY, PRODUCTS, TRUTHS, KernelRole, base_name, role_of
from graphs.opgraph import OpGraph
from graphs.recipes import number_bytes
from graphs.records import Phase, Shard
from graphs.transforms.coarsen.contraction import merge_classes

FUSIBLE = (
    KernelRole.POINTWISE,
    KernelRole.WINDOW,
    KernelRole.RANDOM,
    KernelRole.ROWS,
    KernelRole.CHANNELS,
    KernelRole.REDUCTION,
)
MOST_READS = 4  # that an op read several times may make to be inlined (torch._inductor.config.realize_reads_threshold)


@dataclass(frozen=True, eq=False)
class KernelFacts:
    """Facts about the ops (n) and tensors (m) of a graph.

    Attributes:
        role: n values of `KernelRole`.
        elements: n numbers of elements that an op passes over.
        left: n numbers of elements that a reduction leaves; -1 for others.
        is_column: bool [n], whether a reduction runs along columns, as the gradient of a bias does.
        class_of: n numbers; ops of one may share a kernel as far as phases and devices go.
        is_inlined: bool [m], tensors that each of their readers computes for itself, and that lie nowhere.
        absorbed: int64 [n], the product that an op is part of, as the sum of a product and a matrix is; -1 for others.
    """

    role: list[KernelRole]
    elements: list[int]
    left: list[int]
    is_column: BoolArray
    class_of: list[int]
    is_inlined: BoolArray
    absorbed: IntArray

    @staticmethod
    def of(graph: OpGraph) -> KernelFacts:
        launches = (graph.kernels > 0) | (graph.bytes_moved > 0)
        roles = zip(launches.tolist(), graph.kinds, strict=True)
        role = [role_of(kind) if launched else KernelRole.NOTHING for launched, kind in roles]
        width = np.array([item_bytes(k, d) for k, d in zip(graph.kinds, graph.dtypes, strict=True)], dtype=np.int64)
        numbers = (graph.tensor_bytes // width[graph.tensor_producer]).tolist()
        ptr, inputs = graph.inputs
        written = graph.output_ptr.tolist()
        reads = [max((numbers[t] for t in inputs[ptr[i] : ptr[i + 1]].tolist()), default=0) for i in range(len(role))]
        writes = [numbers[written[i]] if written[i] < written[i + 1] else 0 for i in range(len(role))]
        reduces = [each is KernelRole.REDUCTION for each in role]
        ways = list(zip(reduces, reads, writes, strict=True))
        classes, absorbed = merge_classes(graph).tolist(), _absorbed(graph)
        return KernelFacts(
            role,
            [max(read, write) if reduced else write or read for reduced, read, write in ways],
            [write if reduced else -1 for reduced, _, write in ways],
            _columns(graph, np.array(reduces, dtype=np.bool_)),
            classes,
            _inlined(graph, role, classes, absorbed),
            absorbed,
        )


def read_bytes(graph: OpGraph) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Bytes read along each edge of `edge_list` [e], written of each tensor [m], and of states by each op [n].

    An op's bytes moved are known in all. Those that its tensors do not explain are states (parameters, tables). Where
    it moves less than its tensors have, it reads its largest inputs in part: a slice, the rows of a table.
    """
    _, consumer, tensor = graph.edge_list
    n, size = graph.n_ops, graph.tensor_bytes.astype(np.float64)
    written = sums(graph.tensor_producer, size, n)
    left = np.maximum(graph.bytes_moved - written, 0.0)
    order = np.lexsort((size[tensor], consumer))
    before = np.cumsum(size[tensor][order]) - size[tensor][order]
    starts = np.searchsorted(consumer[order], np.arange(n))
    base = before[np.minimum(starts, max(len(order) - 1, 0))] if len(order) else np.zeros(n)
    amount = np.zeros(len(order))
    amount[order] = np.clip(left[consumer[order]] - (before - base[consumer[order]]), 0.0, size[tensor][order])
    states = np.maximum(left - sums(consumer, size[tensor], n), 0.0)
    share = np.minimum(graph.bytes_moved, written) / np.maximum(written, 1.0)
    return amount, size * share[graph.tensor_producer], states


def _columns(graph: OpGraph, reduces: BoolArray) -> BoolArray:
    """Reductions of the backward pass that nobody in it reads: gradients of biases and scales, sums over all rows."""
    producer, consumer, _ = graph.edge_list
    is_read = np.zeros(graph.n_ops, dtype=np.bool_)
    is_read[producer[graph.phase[producer] == graph.phase[consumer]]] = True
    result: BoolArray = reduces & (graph.phase == Phase.BACKWARD) & ~is_read
    return result


def _inlined(graph: OpGraph, role: list[KernelRole], classes: list[int], absorbed: IntArray) -> BoolArray:
    """bool [m]: what is cheap, or read once, is computed where it is read, if only the compiler's own code reads it."""
    amount, _, states = read_bytes(graph)
    _, consumer, _ = graph.edge_list
    by_tensor, edge_ptr = amount.tolist(), graph.consumer_ptr.tolist()
    consumers, sizes = consumer.tolist(), graph.tensor_bytes.tolist()
    ptr, inputs = (array.tolist() for array in graph.inputs)
    written, producers = graph.output_ptr.tolist(), graph.tensor_producer.tolist()
    result = [False] * graph.n_tensors
    reads = [1] * graph.n_ops  # that an op makes, those of what is inlined in it among them
    for op in graph.topological_order.tolist():
        own = [reads[producers[t]] if result[t] else 1 for t in inputs[ptr[op] : ptr[op + 1]]]
        reads[op] = sum(own) + (states[op] > 0)
        if role[op] is not KernelRole.POINTWISE or absorbed[op] >= 0:
            continue
        for t in range(written[op], written[op + 1]):
            edges = range(edge_ptr[t], edge_ptr[t + 1])
            if not edges:
                continue
            # Readers of different parts are one reader of the whole.
            is_once = len(edges) == 1 or sum(by_tensor[e] for e in edges) <= sizes[t]
            is_cheap = reads[op] <= MOST_READS and base_name(graph.kinds[op]) not in HEAVY
            result[t] = (is_once or is_cheap) and all(
                role[reader] in FUSIBLE
                and classes[reader] == classes[op]
                and (role[reader] is not KernelRole.WINDOW or reads[op] <= 1)
                for reader in consumers[edges.start : edges.stop]
            )
    return np.array(result, dtype=np.bool_)


def _absorbed(graph: OpGraph) -> IntArray:
    """int64 [n]: of a sum of two matrices the last product that it is the only reader of; -1 for other ops."""
    result = np.full(graph.n_ops, -1, dtype=np.int64)
    producer, readers = graph.tensor_producer, np.diff(graph.consumer_ptr)
    ptr, inputs = graph.inputs
    for op in np.flatnonzero([base_name(kind) == "add" for kind in graph.kinds]).tolist():
        tensors = inputs[ptr[op] : ptr[op + 1]].tolist()
        if len(tensors) != 2 or not _is_matrix(graph, op):
            continue
        products = [
            int(producer[t])
            for t in tensors
            if readers[t] == 1
            and base_name(graph.kinds[producer[t]]) in PRODUCTS
            and graph.phase[producer[t]] == graph.phase[op]
        ]
        result[op] = max(products, default=-1)
    return result


def _is_matrix(graph: OpGraph, op: int) -> bool:
    """Whether what an op writes has two dimensions, as far as the ways in which it may be split tell."""
    dims = [part.dim for row in graph.split_rows[op] for part in row.outputs if isinstance(part, Shard)]
    return max(dims, default=0) == 1


class Groups:
    """A partition of the ops of a graph whose contraction stays acyclic.

    Reachability is kept as bit sets of ops, one whole number for each group: Python's own are as fast as arrays for the
    few thousand ops of a step, and what merging changes is passed on to later groups only as far as it is new.
    """

    def __init__(self, graph: OpGraph) -> None:
        n = graph.n_ops
        self._group = list(range(n))
        self.members: list[list[int]] = [[op] for op in range(n)]
        self._before: list[set[int]] = [set() for _ in range(n)]
        self._after: list[set[int]] = [set() for _ in range(n)]
        producer, consumer, _ = graph.edge_list
        for source, target in zip(producer.tolist(), consumer.tolist(), strict=True):
            self._before[target].add(source)
            self._after[source].add(target)
        self._own = [1 << op for op in range(n)]
        self._ancestors = [0] * n
        for op in graph.topological_order.tolist():
            reach = 0
            for source in self._before[op]:
                reach |= self._ancestors[source] | self._own[source]
            self._ancestors[op] = reach

    def of(self, op: int) -> int:
        """The group of an op: the number of one of its members."""
        root = op
        while self._group[root] != root:
            root = self._group[root]
        while self._group[op] != root:
            self._group[op], op = root, self._group[op]
        return root

    def can_merge(self, one: int, other: int) -> bool:
        """Whether no path leads from one group to the other through a third."""
        return not (self._leads(one, other) or self._leads(other, one))

    def merge(self, one: int, other: int) -> int:
        """Make two groups one, and give it."""
        before = (self._before[one] | self._before[other]) - {one, other}
        after = (self._after[one] | self._after[other]) - {one, other}
        self._group[other] = one
        for source in self._before[other] - {one}:
            self._after[source].discard(other)
            self._after[source].add(one)
        for target in self._after[other] - {one}:
            self._before[target].discard(other)
            self._before[target].add(one)
        self._before[one], self._after[one] = before, after
        self._own[one] |= self._own[other]
        self._ancestors[one] = (self._ancestors[one] | self._ancestors[other]) & ~self._own[one]
        self.members[one] += self.members[other]
        self._pass_on(one)
        return one

    def labels(self) -> list[int]:
        """The group of every op."""
        return [self.of(op) for op in range(len(self._group))]

    def _leads(self, first: int, last: int) -> bool:
        """Whether a path of two edges or more leads from one group to another."""
        if not self._ancestors[last] & self._own[first]:
            return False
        return any(self._ancestors[source] & self._own[first] for source in self._before[last] if source != first)

    def _pass_on(self, group: int) -> None:
        waiting = [group]
        while waiting:
            source = waiting.pop()
            reach = self._ancestors[source] | self._own[source]
            for target in self._after[source]:
                if reach & ~self._ancestors[target]:
                    self._ancestors[target] |= reach
                    waiting.append(target)


def item_bytes(kind: str, dtype: str) -> int:
    """Bytes of one element of what an op writes."""
    return 1 if base_name(kind) in TRUTHS else number_bytes(dtype)
