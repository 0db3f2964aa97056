"""One step as a fixed sequence (docs/score.md, "Fixed sequences"): every device and link has its order given.

Start times are then the longest path through ops and transfers, and one pass in topological order finds them, in
O(n + e + links of all routes) after sorting. The preparation of this pass stands here too.
"""

# Letters
# n, m, e, x   numbers of ops, tensors, edges (a tensor and one consumer) and transfers
# i   an op; t, a tensor; h, k, a position, or in the longest path a node: an op, or n + a transfer

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from env.jit import entry, inlined
from env.simulation.scoring import Charges
from env.simulation.step_state import Arrays, Index, Output, memory_of
from graphs.errors import MismatchError

if TYPE_CHECKING:
    from env.plan import Plan
    from env.problem import Problem
    from graphs.opgraph import FloatArray, IntArray


_WAITS_SHOWN = 6  # of a deadlock, in its message


def run(problem: Problem, arrays: Arrays, plan: Plan) -> tuple[float, int, int, Output]:
    """Simulate one step: ``(step time s, number of transfers, bytes transferred, Output)``.

    Args:
        arrays: ``problem`` for the kernels.
        plan: with an order of ops, equal numbers by op number, and of transfers. The output has its transfers in
            sequence of start, those of one instant as given.

    Raises:
        MismatchError: not exactly the transfers that the placement needs, or the sequences wait for each other.
    """
    device = plan.device.astype(np.int32)
    assert plan.order is not None
    assert plan.transfer_order is not None
    sequence = _Sequence(problem, device, plan.order, plan.transfer_order)
    n, x = problem.graph.n_ops, len(sequence.tensor)
    seconds = np.concatenate([problem.seconds_of(device), sequence.transfer_s])
    # Nodes of the longest path: the ops, and behind them the transfers.
    start_s, done = longest_path(
        arrays.edge_ptr,
        arrays.consumer,
        problem.graph.consumer_ptr,
        sequence.copy_of,
        sequence.tensor,
        sequence.next_op(),
        arrays.route.reshape(-1, arrays.route.shape[2])[sequence.pair],
        len(problem.cluster.links),
        seconds,
    )
    if len(done) < n + x:
        raise MismatchError(sequence.deadlock(done))
    rank = np.empty(n + x, np.int64)
    # A topological order says which of two ops of one instant came first.
    rank[done] = np.arange(n + x)
    # Stable: transfers of one instant stay as given.
    by_start = np.argsort(start_s[n:], kind="stable")
    output = sequence.output(start_s, start_s + seconds, rank[:n], by_start)
    # Copies are numbered by transfers in sequence of start, as the output has them.
    place = np.arange(problem.graph.n_tensors + x, dtype=np.int32)
    place[problem.graph.n_tensors + by_start] = problem.graph.n_tensors + np.arange(x)
    step_s = float(output.op_end.max())
    memory_of(arrays, output, device, place[sequence.copy_of], x, step_s)
    moved = int(problem.graph.tensor_bytes[sequence.tensor].sum())
    return step_s, x, moved, output


class _Sequence:
    """A checked pair of sequences as arrays (n ops, x transfers in the given sequence).

    Attributes:
        tensor, source, target, pair: int64 [x].
        transfer_s: float64 [x].
        copy_of: int32 [e], the copy each edge reads: its tensor, or ``n_tensors`` + its transfer.
        op_sequence: int64 [n], ops by device, each device's in its order.
    """

    def __init__(self, problem: Problem, device: Index, order: FloatArray, transfer_order: IntArray) -> None:
        graph, n_devices = problem.graph, problem.cluster.n_devices
        self.problem, self.device = problem, device
        self.tensor, self.target = _pairs(problem, transfer_order)
        self.source = device[graph.tensor_producer[self.tensor]].astype(np.int64)
        self.pair = self.source * n_devices + self.target
        self.copy_of = self._copies(self.tensor * n_devices + self.target)
        self.transfer_s = Charges(problem).transfer_s(self.tensor, self.source, self.target)
        # Device by device, each in its order; equal numbers by op.
        self.op_sequence = np.lexsort((order, device))

    def _copies(self, given: IntArray) -> Index:
        """`copy_of`, with a refusal of anything but the transfers that are needed; ``given`` is tensor * D + target."""
        producer, consumer, tensor = self.problem.graph.edge_list
        remote = self.device[producer] != self.device[consumer]
        read = tensor * self.problem.cluster.n_devices + self.device[consumer]
        # A tensor goes to a device once, however many ops read it there.
        needed = np.unique(read[remote])
        # Sorted, so that what is listed twice stands side by side.
        by_key = np.argsort(given, kind="stable")
        keys = given[by_key]
        self._refuse(keys[1:][keys[1:] == keys[:-1]], "lists", "twice; list it once.")
        self._refuse(needed[~np.isin(needed, keys)], "lacks", "which the placement needs; list every transfer once.")
        self._refuse(keys[~np.isin(keys, needed)], "lists", "which the placement does not need; leave it out.")
        result = tensor.copy()
        result[remote] = self.problem.graph.n_tensors + by_key[np.searchsorted(keys, read[remote])]
        return result.astype(np.int32)

    def _refuse(self, wrong: IntArray, verb: str, rest: str) -> None:
        if len(wrong):
            tensor, target = divmod(int(wrong[0]), self.problem.cluster.n_devices)
            comma = "" if rest.startswith("twice") else ","
            raise MismatchError(f"the transfer order {verb} {self._moved(tensor, target)}{comma} {rest}")

    def next_op(self) -> IntArray:
        """int64 [n]: the op after each on its device, or -1."""
        # Neighbours in the sequence, unless a new device begins there.
        result = np.full(len(self.device), -1)
        before, after = self.op_sequence[:-1], self.op_sequence[1:]
        same = self.device[before] == self.device[after]
        result[before[same]] = after[same]
        return result

    def output(self, start_s: FloatArray, end_s: FloatArray, rank: IntArray, by_start: NDArray[np.intp]) -> Output:
        """The run's outcome, all but the peaks; ``rank`` [n] is any order in which ops may enable each other."""
        problem, n = self.problem, len(self.device)
        n_devices, n_links = problem.cluster.n_devices, len(problem.cluster.links)
        op_rank = np.empty(n, np.int32)
        # Ops that start at one instant: first what lets the other start.
        op_rank[np.lexsort((rank, start_s[:n]))] = np.arange(n)
        pair_bytes = np.bincount(self.pair, problem.graph.tensor_bytes[self.tensor], n_devices * n_devices)
        route_ptr, route_link = problem.route
        return Output(
            busy_s=np.bincount(self.device, problem.seconds_of(self.device), n_devices).astype(np.float64),
            peak_bytes=np.empty(n_devices, np.int64),
            link_bytes=np.bincount(route_link, np.repeat(pair_bytes, np.diff(route_ptr)), n_links).astype(np.float64),
            op_start=start_s[:n],
            op_end=end_s[:n],
            op_rank=op_rank,
            transfer_tensor=self.tensor[by_start].astype(np.int32),
            transfer_pair=self.pair[by_start].astype(np.int32),
            transfer_start=start_s[n:][by_start],
            transfer_end=end_s[n:][by_start],
        )

    def deadlock(self, done: Index) -> str:
        """One sentence: which ops and transfers wait for each other; ``done`` are the nodes that could start."""
        stuck = np.ones(len(self.device) + len(self.tensor), dtype=np.bool_)
        stuck[done] = False
        before = np.full(len(self.device), -1)
        after = self.next_op()
        before[after[after >= 0]] = np.flatnonzero(after >= 0)
        number = {key: k for k, key in enumerate(zip(self.tensor.tolist(), self.target.tolist(), strict=True))}
        # From any stuck node to one it waits for, until one comes again: a cycle.
        path: dict[int, str] = {}
        node = int(np.argmax(stuck))
        while node not in path:
            waits = self._op_waits(node, before, number) if node < len(self.device) else self._transfer_waits(node)
            path[node], node = next((why, k) for k, why in waits if stuck[k])
        cycle = list(path.values())[list(path).index(node) :]
        shown = ", ".join(cycle[:_WAITS_SHOWN]) + (", ..." if len(cycle) > _WAITS_SHOWN else "")
        return f"the order and the transfer order can never be carried out: {shown}; change one of them."

    def _op_waits(self, op: int, before: IntArray, number: dict[tuple[int, int], int]) -> Iterator[tuple[int, str]]:
        """Every node an op waits for, in words; ``before`` is the op before each on its device, or -1."""
        graph, n = self.problem.graph, len(self.device)
        name, here = graph.op_names[op], int(self.device[op])
        if before[op] >= 0:
            yield int(before[op]), f"op {name!r} waits for its turn after op {graph.op_names[before[op]]!r}"
        ptr, inputs = graph.inputs
        for t in inputs[ptr[op] : ptr[op + 1]].tolist():
            producer = int(graph.tensor_producer[t])
            if self.device[producer] == here:
                yield producer, f"op {name!r} waits for an output of op {graph.op_names[producer]!r}"
            else:
                yield n + number[t, here], f"op {name!r} waits for {self._moved(t, here)}"

    def _transfer_waits(self, node: int) -> Iterator[tuple[int, str]]:
        """Every node a transfer waits for, in words."""
        graph, cluster, n = self.problem.graph, self.problem.cluster, len(self.device)
        at = node - n
        what = self._moved(int(self.tensor[at]), int(self.target[at]))
        producer = int(graph.tensor_producer[self.tensor[at]])
        yield producer, f"{what} waits for op {graph.op_names[producer]!r}"
        route = cluster.routes[int(self.source[at]), int(self.target[at])].links
        mine = {link for link in route if cluster.links[link].exclusive}
        for k in range(at - 1, -1, -1):
            if not mine.isdisjoint(cluster.routes[int(self.source[k]), int(self.target[k])].links):
                yield n + k, f"{what} waits for its turn after {self._moved(int(self.tensor[k]), int(self.target[k]))}"

    def _moved(self, tensor: int, target: int) -> str:
        graph, cluster = self.problem.graph, self.problem.cluster
        producer = int(graph.tensor_producer[tensor])
        number = tensor - int(graph.output_ptr[producer])
        return f"output {number} of op {graph.op_names[producer]!r} to {cluster.devices[target].name}"


def _pairs(problem: Problem, transfer_order: IntArray) -> tuple[IntArray, IntArray]:
    """Tensors and receiving devices, each int64 [x]."""
    tops = (problem.graph.n_tensors, problem.cluster.n_devices)
    for what, column, top in zip(("tensor", "device"), transfer_order.T, tops, strict=True):
        if column.size and (column.min() < 0 or column.max() >= top):
            raise MismatchError(
                f"{what} numbers of a transfer order go from 0 to {top - 1}, got {column.min()} to {column.max()}."
            )
    tensor, target = transfer_order.T.copy()  # each contiguous, for one compiled form
    return tensor, target


@inlined
def _release(k: int, end: float, start_s: FloatArray, waits: Index, done: Index, n_done: int) -> int:
    """One thing that ``k`` waits for ends; returns the new number of nodes that could start."""
    start_s[k] = end if end > start_s[k] else start_s[k]
    waits[k] -= 1
    if waits[k] == 0:
        done[n_done] = k
        n_done += 1
    return n_done


@entry
def longest_path(
    edge_ptr: Index,
    consumer: Index,
    consumer_ptr: IntArray,
    copy_of: Index,
    tensor: IntArray,
    next_op: IntArray,
    route: Index,
    n_links: int,
    seconds: FloatArray,
) -> tuple[FloatArray, Index]:
    """Start of every node (op, or n + transfer), and the nodes in a topological order: fewer than all in a deadlock.

    Args:
        edge_ptr, consumer: as in `Arrays`.
        consumer_ptr: int64 [m + 1], edges of each tensor.
        copy_of: int32 [e], tensor or m + transfer that each edge reads.
        tensor: int64 [x], of each transfer in sequence.
        next_op: int64 [n], the next op on the same device or -1.
        route: int32 [x, H], links each transfer waits for; repeated, or ``n_links``, where there are fewer.
        seconds: float64 [n + x].
    """
    n, x, m, hops = len(next_op), len(tensor), len(consumer_ptr) - 1, route.shape[1]
    # Number of nodes that each node still waits for.
    waits = np.zeros(n + x, np.int32)
    next_transfer = np.full(x * hops, -1, np.int64)
    last = np.full(n_links, -1, np.int64)
    # Each link serves its transfers in the given sequence: link each to the one before it there.
    for k in range(x * hops):
        link = route[k // hops, k % hops]
        if link < n_links:
            # Padding repeats a link of the same transfer, which does not wait for itself.
            if last[link] >= 0 and last[link] // hops < k // hops:
                next_transfer[last[link]] = n + k // hops
                waits[n + k // hops] += 1
            last[link] = k
    for e in range(len(consumer)):
        waits[consumer[e]] += 1
        if copy_of[e] >= m:
            waits[n + copy_of[e] - m] += 1  # once for each of its readers
    # And the op before on the same device.
    for i in range(n):
        if next_op[i] >= 0:
            waits[next_op[i]] += 1
    # Releases in the order in which nodes can start: each start is final once nothing is waited for.
    start_s = np.zeros(n + x)
    done = np.empty(n + x, np.int32)
    n_done = 0
    for k in range(n):  # a transfer always waits for its producer
        if waits[k] == 0:
            done[n_done] = k
            n_done += 1
    # `done` is the queue too: what has been released is behind, what has been passed on before.
    at = 0
    while at < n_done:
        k = done[at]
        at += 1
        end = start_s[k] + seconds[k]
        if k < n:
            # It leaves its device, and hands its tensors on.
            if next_op[k] >= 0:
                n_done = _release(next_op[k], end, start_s, waits, done, n_done)
            for e in range(edge_ptr[k], edge_ptr[k + 1]):
                reader = consumer[e] if copy_of[e] < m else n + copy_of[e] - m
                n_done = _release(reader, end, start_s, waits, done, n_done)
        else:
            # It leaves every link of its route to the next in line there.
            for h in range((k - n) * hops, (k - n + 1) * hops):
                if next_transfer[h] >= 0:
                    n_done = _release(next_transfer[h], end, start_s, waits, done, n_done)
            # Edges of the tensor that read this very copy, and not another device's.
            t = tensor[k - n]
            for e in range(consumer_ptr[t], consumer_ptr[t + 1]):
                if copy_of[e] - m == k - n:
                    n_done = _release(consumer[e], end, start_s, waits, done, n_done)
    return start_s, done[:n_done]
