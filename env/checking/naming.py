"""`plan_of`: a saved answer, which names ops and devices, as a `Plan`.

Part of the second opinion: it shares no code with what wrote the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from env.cluster import Cluster
from env.plan import Plan
from graphs.errors import MismatchError
from graphs.opgraph import FloatArray, IntArray, OpGraph


def plan_of(
    graph: OpGraph,
    cluster: Cluster,
    placement: Mapping[str, str],
    order: Sequence[str] | None = None,
    transfer_order: Sequence[tuple[str, int, str]] | None = None,
) -> Plan:
    """The plan that these names stand for.

    Args:
        graph, cluster: what the answer is for.
        placement: op name -> device name.
        order: all op names in the order they started.
        transfer_order: (producer, output number, receiving device) of every transfer in the sequence in which they
            start, the output number counting the producer's tensors in graph order from 0.

    Raises:
        MismatchError: the placement or the order does not name every op of the graph exactly once, or something names
            an unknown device, op or output; or a transfer order without ``order``.
    """
    return Plan(
        _devices(graph, cluster, placement),
        None if order is None else _ranks(graph, order),
        None if transfer_order is None else _moves(graph, cluster, transfer_order),
    )


def _devices(graph: OpGraph, cluster: Cluster, placement: Mapping[str, str]) -> IntArray:
    names = {device.name: number for number, device in enumerate(cluster.devices)}
    for op in graph.op_names:
        if op not in placement:
            raise MismatchError(f"the placement has no device for op {op!r}; place every op of the graph once.")
    for op in set(placement) - set(graph.op_names):
        raise MismatchError(f"the placement names op {op!r}, which graph {graph.name!r} does not have.")
    for op, device in placement.items():
        if device not in names:
            raise MismatchError(
                f"op {op!r} is placed on {device!r}, but cluster {cluster.name!r} has {', '.join(names)}."
            )
    return np.array([names[placement[op]] for op in graph.op_names], dtype=np.int64)


def _ranks(graph: OpGraph, order: Sequence[str]) -> FloatArray:
    rank = {name: float(k) for k, name in enumerate(order)}
    if len(rank) < len(order) or rank.keys() != set(graph.op_names):
        wrong = sorted(rank.keys() ^ set(graph.op_names))
        named = repr(wrong[0]) if wrong else "an op twice"
        raise MismatchError(f"an order names every op of graph {graph.name!r} exactly once; check {named}.")
    return np.array([rank[name] for name in graph.op_names])


def _moves(graph: OpGraph, cluster: Cluster, transfer_order: Sequence[tuple[str, int, str]]) -> IntArray:
    """int64 [x, 2]: names as (tensor, receiving device)."""
    devices = {device.name: number for number, device in enumerate(cluster.devices)}
    outputs: dict[str, list[int]] = {name: [] for name in graph.op_names}
    for t, producer in enumerate(graph.tensor_producer.tolist()):
        outputs[graph.op_names[producer]].append(t)
    result = []
    for producer, number, device in transfer_order:
        if producer not in outputs:
            raise MismatchError(f"the transfer order names op {producer!r}, which graph {graph.name!r} does not have.")
        if device not in devices:
            raise MismatchError(
                f"the transfer order sends to {device!r}, but cluster {cluster.name!r} has {', '.join(devices)}."
            )
        if not 0 <= number < len(outputs[producer]):
            raise MismatchError(
                f"the transfer order names output {number} of op {producer!r}, which has {len(outputs[producer])} "
                "outputs, counted from 0."
            )
        result.append((outputs[producer][number], devices[device]))
    return np.array(result, dtype=np.int64).reshape(-1, 2)
