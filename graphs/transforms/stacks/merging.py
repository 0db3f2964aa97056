"""`Groups`: sets of ops that grow by merging and never wait for each other in a circle."""

from __future__ import annotations

from graphs.opgraph import OpGraph


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
