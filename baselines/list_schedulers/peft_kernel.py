"""Compiled loop of PEFT's table; `baselines.list_schedulers.peft` says what it computes."""

from __future__ import annotations

import numpy as np

from env.jit import njit
from env.problem import BoolArray
from graphs.opgraph import FloatArray, IntArray


@njit(cache=True, nogil=True)
def optimistic_cost(
    topological: IntArray,
    graph: tuple[IntArray, IntArray, IntArray],
    unit_of: IntArray,
    allowed: BoolArray,
    op_s: FloatArray,
    transfer_s: FloatArray,
    result: FloatArray,
) -> None:
    """Fill the optimistic cost table [n, D]; 0 where an op may not run."""
    output_ptr, consumer_ptr, consumers = graph
    n, n_devices = op_s.shape
    least_s = np.empty(n)  # from the start of each op to the end of the graph on the best of its devices
    for k in range(n - 1, -1, -1):
        op = topological[k]
        result[op] = 0.0
        for t in range(output_ptr[op], output_ptr[op + 1]):
            for e in range(consumer_ptr[t], consumer_ptr[t + 1]):
                c = consumers[e]
                together = unit_of[c] == unit_of[op]
                for d in range(n_devices):
                    if not allowed[op, d]:
                        continue
                    here_s = result[c, d] + op_s[c, d] if allowed[c, d] else np.inf
                    cost_s = here_s if together else min(here_s, least_s[c] + transfer_s[t])
                    result[op, d] = max(result[op, d], cost_s)
        least_s[op] = np.inf
        for d in range(n_devices):
            if allowed[op, d]:
                least_s[op] = min(least_s[op], result[op, d] + op_s[op, d])
