"""Orders in which one device runs a step: that of the program, and one that holds little at a time."""

from __future__ import annotations

import heapq

import numpy as np

from graphs.arrays import FloatArray
from graphs.opgraph import OpGraph


def program_order(graph: OpGraph) -> FloatArray:
    """float64 [n], an explicit order: that of the graph's ops, in which a captured model runs in PyTorch."""
    return np.arange(graph.n_ops, dtype=np.float64)


def least_memory_order(graph: OpGraph) -> FloatArray:
    """float64 [n], an explicit order by a greedy choice: of the ops that are ready, the one that adds fewest bytes.

    An op adds what it writes and takes away what it is the last one to read; ties go to the program's order. No order
    of least memory: finding that is NP-hard (R. Sethi, "Complete Register Allocation Problems", SIAM Journal on
    Computing 4(3), 1975, doi:10.1137/0204020). O((n + e) log e).
    """
    size, written = graph.tensor_memory_bytes.tolist(), graph.output_ptr.tolist()
    reads_ptr, reads = (part.tolist() for part in graph.inputs)
    readers_ptr, readers = graph.consumer_ptr.tolist(), graph.consumers.tolist()
    left = np.diff(graph.consumer_ptr).tolist()
    waits_for = np.diff(graph.inputs[0]).tolist()
    made = [sum(size[t] for t in range(written[i], written[i + 1]) if left[t]) for i in range(graph.n_ops)]
    added = [
        made[i] - sum(size[t] for t in reads[reads_ptr[i] : reads_ptr[i + 1]] if left[t] == 1)
        for i in range(graph.n_ops)
    ]
    ready = [(added[i], i) for i in range(graph.n_ops) if not waits_for[i]]
    heapq.heapify(ready)
    place = np.full(graph.n_ops, -1, dtype=np.float64)
    count = 0
    while ready:
        known, op = heapq.heappop(ready)
        if place[op] >= 0 or known != added[op]:
            continue  # it has run, or it stands here once more with what it adds now
        place[op] = count
        count += 1
        for t in reads[reads_ptr[op] : reads_ptr[op + 1]]:
            left[t] -= 1
            if left[t] == 1:
                last = next(i for i in readers[readers_ptr[t] : readers_ptr[t + 1]] if place[i] < 0)
                added[last] -= size[t]
                if not waits_for[last]:
                    heapq.heappush(ready, (added[last], last))
        for t in range(written[op], written[op + 1]):
            for reader in readers[readers_ptr[t] : readers_ptr[t + 1]]:
                waits_for[reader] -= 1
                if not waits_for[reader]:
                    heapq.heappush(ready, (added[reader], reader))
    return place
