"""`stage_fill`: about how much of the memory of a stage each op takes, for stages that fit where equal ones do not."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from env.cluster import Cluster
from graphs.arrays import FloatArray, IntArray
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.strategy import Strategy

_USED = 0.9  # of a memory: the rest is for workspaces and for what lives but briefly


def stage_fill(graph: OpGraph, cluster: Cluster, strategy: Strategy, devices: IntArray) -> FloatArray:
    """float64 [n, p]: share of the memory of each of p stages' smallest device that a forward op takes there, about.

    Counted are what is kept of its parameters, as tensor parallelism and ZeRO split it, and what it writes for the
    backward pass, for as many micro-batches as the order has under way. Where tensor parallelism leaves activations
    whole, it is more.
    """
    sizes = {rule.name: rule.size for rule in strategy.mesh}
    parts, tp = strategy.storage_parts, sizes.get("tp", 1)
    kept = np.zeros(graph.n_ops)
    for level, part in ((2, graph.parameter_bytes), (2, graph.gradient_bytes), (1, graph.optimizer_bytes)):
        kept += part / tp / (parts if strategy.zero >= level else 1)
    waiting = _waiting_bytes(graph) / (strategy.places * strategy.micro_batches)
    grid = devices[: strategy.devices].reshape(strategy.stages, -1).tolist()
    room = _USED * np.array([min(cluster.devices[d].usable_bytes for d in row) for row in grid], dtype=np.float64)
    under_way = np.array([_under_way(strategy, stage) for stage in range(strategy.stages)])
    result: FloatArray = (kept[:, None] + waiting[:, None] * under_way) / np.maximum(room, 1.0)
    return result


@lru_cache(maxsize=8)
def _waiting_bytes(graph: OpGraph) -> FloatArray:
    """float64 [n]: bytes of what each forward op writes and the backward pass reads."""
    producer, consumer, tensor = graph.edge_list
    is_read = np.zeros(graph.n_tensors, dtype=np.bool_)
    is_read[tensor[(graph.phase[producer] == Phase.FORWARD) & (graph.phase[consumer] == Phase.BACKWARD)]] = True
    waiting = np.bincount(graph.tensor_producer, graph.tensor_memory_bytes * is_read, graph.n_ops)
    return waiting.astype(np.float64)


def _under_way(strategy: Strategy, stage: int) -> int:
    """Micro-batches whose forward pass a stage has done at most, and not all of their backward pass.

    Zero-bubble orders put gradients of weights off for as long as a stage comes later, so all stages have as many.
    """
    p, m = strategy.stages, strategy.micro_batches
    return min({"gpipe": m, "zb-h1": p, "zb-h2": 2 * p - 1}.get(strategy.order, p - stage), m)
