"""`offloaded`: updates and the state of the optimizer in the memory of the host (ZeRO-Offload).

Gradients go from each device to the CPU of its host, which keeps the state and does the update; what was updated comes
back (J. Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021). The device keeps its
parameters and gradients, and no state. Under ZeRO only what a place stores goes there and back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from graphs.arrays import FloatArray, IntArray, groups
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph, Phase
from graphs.records import HOST
from graphs.transforms.collectives.rewiring import rewired
from graphs.transforms.derived import Derived
from graphs.transforms.splitting.op_states import states_of

FETCH = "offload.fetch"  # kind of the op with which an updated parameter is back on its device
NUMBERS = {"flops": 0.0, "bytes_moved": 0.0, "parameter_bytes": 0, "gradient_bytes": 0, "workspace_bytes": 0} | {
    **{"kernels": 0, "work": 0, "extents": 0.0, "time_s": np.nan, "fixed_s": 0.0}
}  # of that op


def offloaded(derived: Derived, before: OpGraph, returns: bool = True) -> Derived:
    """The graph whose updates run on hosts: pinned to CPUs, apart from the other ops of their parameters.

    Behind each update there is an op on the device, which takes no time and needs what was updated: all that read the
    update's results read them from there.

    Args:
        derived: a graph before or after its collectives are spelt out.
        before: the graph before it was cut, with its states; ``derived.origins`` are numbers of its ops.
        returns: whether devices have back what was updated; else nothing stands behind the updates.

    Raises:
        StrategyError: the graph has no states, so nothing says what updates keep.
    """
    graph, n, m = derived.graph, derived.graph.n_ops, derived.graph.n_tensors
    updates = _updates(derived, before)
    is_update = np.zeros(n, dtype=np.bool_)
    is_update[updates] = True
    back = updates if returns else updates[:0]
    k = len(back)
    fetch = np.arange(n, n + k)
    of_update = np.arange(n)
    of_update[back] = fetch
    tensor = np.repeat(np.arange(m), np.diff(graph.consumer_ptr)).astype(np.int64)
    producer = of_update[graph.tensor_producer]
    tensors = [
        (producer, graph.tensor_bytes, graph.tensor_in_place, graph.tensor_transfer_s),
        (back, _updated_bytes(derived, before, back), np.zeros(k, np.bool_), np.full(k, np.nan)),
    ]
    edges = [(tensor, graph.consumers), (np.arange(m, m + k), fetch)]
    columns: dict[str, Any] = {
        key: np.concatenate([value := getattr(graph, key), np.full((k, *value.shape[1:]), own)])
        for key, own in NUMBERS.items()
    }
    columns |= {key: np.concatenate([getattr(graph, key), getattr(graph, key)[back]]) for key in ("phase", "stream")}
    columns["forward_of"] = np.concatenate([graph.forward_of, np.full(k, -1)])
    columns["optimizer_bytes"] = np.concatenate([_state_bytes(derived, before, updates), np.zeros(k, np.int64)])
    colocation = np.concatenate([graph.colocation, graph.colocation[back]])
    colocation[updates] = -1
    texts: dict[str, Any] = {
        key: (*(value := getattr(graph, key)), *(value[u] for u in back.tolist())) for key in ("dtypes", "modules")
    }
    result = replace(
        graph,
        **texts,
        **columns,
        **rewired(tensors, edges, np.arange(n + k)),
        op_names=(*graph.op_names, *(f"{graph.op_names[u]}/fetch" for u in back.tolist())),
        kinds=(*graph.kinds, *[FETCH] * k),
        pins=(*((HOST,) if on_host else pins for pins, on_host in zip(graph.pins, is_update, strict=True)), *[()] * k),
        split_rows=(),
        colocation=groups(colocation),
        states=(),
    )
    return derived.with_more(result, back)


def _updates(derived: Derived, before: OpGraph) -> IntArray:
    """int64 [k]: copies of the ops that update a state."""
    if not before.states:
        raise StrategyError(
            f"graph {before.name!r} does not say what its updates keep, so that cannot be offloaded; capture the model "
            "from PyTorch, or leave out 'offload='."
        )
    writes = np.zeros(before.n_ops, dtype=np.bool_)
    writes[[op for op, states in enumerate(states_of(before)) if states]] = True
    is_same = np.array(derived.graph.kinds, dtype=object) == np.array(before.kinds, dtype=object)[derived.origin]
    return np.flatnonzero((derived.graph.phase == Phase.UPDATE) & is_same & writes[derived.origin])


def _updated_bytes(derived: Derived, before: OpGraph, updates: IntArray) -> IntArray:
    """int64 [k]: bytes of parameters that each update writes: of as much as it reads of gradients."""
    kept = np.zeros(before.n_ops)
    for op, states in enumerate(states_of(before)):
        kept[op] = sum(before.states[s].parameter_bytes for s in states)
    share = kept / np.maximum(_read_bytes(before), 1.0)
    found: IntArray = np.rint(_read_bytes(derived.graph)[updates] * share[derived.origin[updates]]).astype(np.int64)
    return found


def _read_bytes(graph: OpGraph) -> FloatArray:
    """float64 [n]: of all that each op reads."""
    _, consumer, tensor = graph.edge_list
    return np.bincount(consumer, graph.tensor_bytes[tensor], graph.n_ops).astype(np.float64)


def _state_bytes(derived: Derived, before: OpGraph, updates: IntArray) -> IntArray:
    """int64 [n]: state of the optimizer where every update keeps its own; else the first op of a parameter does."""
    graph = derived.graph
    result = graph.optimizer_bytes.copy()
    kept = np.zeros(before.n_ops)
    for op, states in enumerate(states_of(before)):
        kept[op] = sum(before.states[s].optimizer_bytes for s in states)
    group, own = graph.colocation[updates], kept[derived.origin[updates]]
    for label in np.unique(group[group >= 0]).tolist():
        chosen, together = group == label, graph.colocation == label
        total, sums = int(result[together].sum()), np.cumsum(own[chosen])
        if total and sums[-1]:
            result[together] = 0
            result[updates[chosen]] = np.diff(np.rint(total * sums / sums[-1]).astype(np.int64), prepend=0)
    return result
