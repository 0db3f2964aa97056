"""Offloading to hosts: updates and the state of the optimizer (ZeRO-Offload), and activations.

Gradients go from each device to the CPU of its host, which keeps the state and does the update; what was updated comes
back (J. Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021). The device keeps its
parameters and gradients, and no state. Under ZeRO only what a place stores goes there and back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray, groups
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph, Phase
from graphs.records import HOST, LANE
from graphs.transforms.derived import Derived, columns_with, rewired
from graphs.transforms.recomputing.selecting import computes_forward, selected
from graphs.transforms.sequencing import block_map
from graphs.transforms.splitting.op_states import states_of
from graphs.transforms.strategy import ACTIVATIONS

FETCH = "offload.fetch"  # kind of the op with which an updated parameter is back on its device


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
    _, consumer, tensor = graph.edge_list
    producer = of_update[graph.tensor_producer]
    tensors = [
        (producer, graph.tensor_bytes, graph.tensor_in_place, graph.tensor_transfer_s),
        (back, _updated_bytes(derived, before, back), np.zeros(k, np.bool_), np.full(k, np.nan)),
    ]
    edges = [(tensor, consumer), (np.arange(m, m + k), fetch)]
    columns = columns_with(graph, back)
    columns["optimizer_bytes"][:n] = _state_bytes(derived, before, updates)
    columns["colocation"][updates] = -1
    columns["colocation"] = groups(columns["colocation"])
    columns["op_names"] = (*graph.op_names, *(f"{graph.op_names[u]}/fetch" for u in back.tolist()))
    columns["kinds"] = (*graph.kinds, *[FETCH] * k)
    on_host = ((HOST,) if host else pins for pins, host in zip(graph.pins, is_update, strict=True))
    columns |= {"pins": (*on_host, *[()] * k), "split_rows": ()}
    result = replace(graph, **columns, **rewired(tensors, edges, np.arange(n + k)), states=())
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


# -- Activations ----------------------------------------------------------------------------------------------------
# `with_hosted_activations`: what the forward pass keeps for the backward pass waits in the memory of the host.
#
# A tensor leaves its device when it is there, and comes back one block before it is needed, over the links to the host
# (vDNN: M. Rhu et al., "vDNN: Virtualized deep neural networks for scalable, memory-efficient neural network design",
# MICRO 2016; as `torch.autograd.graph.save_on_cpu` has it). Forward ops that read it still find it on the device.


HOSTED = "offload.hosted"  # kind of the op with which tensors are on the host, and from which the device has them back
LEAST_BYTES = 1024  # of a tensor that is worth a transfer
_BLOCK = re.compile(r".*?\.[0-9]+(?=\.|\Z)", re.DOTALL)


@dataclass(frozen=True, eq=False)
class HostedTensors:
    """Tensors of a graph (n ops, m tensors) that wait on hosts.

    Attributes:
        is_hosted: bool [m].
        gate: int64 [m], the op of the backward pass at whose end a tensor is asked back; -1 for others.
    """

    is_hosted: BoolArray
    gate: IntArray


def hosted_tensors(graph: OpGraph, patterns: Sequence[str], stage: IntArray | None = None) -> HostedTensors:
    """The tensors that forward ops of the patterns write and ops of the backward pass read. O(n + e log e).

    Each is asked back as many ops of the backward pass before its first reader as mirror its block, the numbered module
    or else the outermost one that it is from. Tensors that the first op of the backward pass reads stay where they are.

    Args:
        graph: after recomputation: what is computed again does not wait.
        patterns: as of `Strategy.recompute`, or `ACTIVATIONS` for all.
        stage: int64 [n], of every op; all reads of a tensor are in the stage that makes it.
    """
    stages = np.zeros(graph.n_ops, dtype=np.int64) if stage is None else stage
    names = ["*" if name == ACTIVATIONS else name for name in patterns]
    chosen = selected(graph, names)
    if ACTIVATIONS in patterns:  # ops of no module, too
        chosen |= np.array([not module for module in graph.modules], dtype=np.bool_)
    chosen &= computes_forward(graph)
    producer, reader, tensor = graph.edge_list
    is_late = chosen[producer] & (graph.phase[reader] == Phase.BACKWARD)
    is_hosted = np.zeros(graph.n_tensors, dtype=np.bool_)
    is_hosted[tensor[is_late]] = True
    is_hosted[tensor[(stages[producer] != stages[reader]) & (graph.phase[reader] != Phase.FORWARD)]] = False
    is_hosted &= ~graph.tensor_in_place & (graph.tensor_bytes >= LEAST_BYTES)
    place, sizes = _backward_places(graph, stages), _block_sizes(graph)
    first = np.full(graph.n_tensors, graph.n_ops, dtype=np.int64)
    np.minimum.at(first, tensor[is_late], place[reader[is_late]])
    is_hosted &= (first > 0) & (first < graph.n_ops)
    gate = np.full(graph.n_tensors, -1, dtype=np.int64)
    at = np.flatnonzero(is_hosted)
    maker = graph.tensor_producer[at]
    wanted = np.maximum(first[at] - sizes[maker], 0)
    gates = _gates(graph, stages, place)
    for s in np.unique(stages[maker]).tolist():
        own = gates[stages[gates] == s]
        mine = at[stages[maker] == s]
        # The last one that comes no later; for what is needed early the first one, if that comes before.
        number = np.maximum(np.searchsorted(place[own], wanted[stages[maker] == s], side="right") - 1, 0)
        found = own[number] if len(own) else np.full(len(mine), -1)
        gate[mine] = np.where(place[found] < first[mine], found, -1) if len(own) else -1
    # All that one op wrote comes back together, and so with the first of them.
    known = np.flatnonzero(is_hosted & (gate >= 0))
    earliest = np.full(graph.n_ops, graph.n_ops, dtype=np.int64)
    np.minimum.at(earliest, graph.tensor_producer[known], place[gate[known]])
    is_first = place[gate[known]] == earliest[graph.tensor_producer[known]]
    gate_of = np.full(graph.n_ops, -1, dtype=np.int64)
    gate_of[graph.tensor_producer[known[is_first]]] = gate[known[is_first]]
    gate[known] = gate_of[graph.tensor_producer[known]]
    return HostedTensors(is_hosted & (gate >= 0), gate)


def with_hosted_activations(derived: Derived, before: OpGraph, hosted: HostedTensors) -> Derived:
    """The graph whose hosted tensors go through an op on the host of each device.

    That op reads what one op of the forward pass wrote, and waits for the copies of all gates; it takes no time, and
    the ops of the backward pass read what it writes. A tensor that an exchange reads in the backward pass stays.

    Args:
        derived: a graph before its collectives are spelt out.
        before: the graph before it was cut; ``derived.origins`` are numbers of its ops.
    """
    graph, n, m = derived.graph, derived.graph.n_ops, derived.graph.n_tensors
    found = _Copies.of(derived, before, hosted)
    makers, of_tensor = np.unique(graph.tensor_producer[found.tensors], return_inverse=True)
    k, own = len(makers), n + of_tensor.reshape(-1)
    if not k:
        return derived
    _, consumer, tensor = graph.edge_list
    copy_of = np.full(m, -1, dtype=np.int64)
    copy_of[found.tensors] = m + np.arange(len(found.tensors))
    is_late = (copy_of[tensor] >= 0) & (graph.phase[consumer] != Phase.FORWARD)
    gates, which = np.unique(found.gates, return_inverse=True)
    signals = m + len(found.tensors) + np.arange(len(gates))
    none, no = np.full(len(gates), np.nan), np.zeros(len(gates), np.bool_)
    size = graph.tensor_bytes[found.tensors]
    tensors = [
        (graph.tensor_producer, graph.tensor_bytes, graph.tensor_in_place, graph.tensor_transfer_s),
        (own, size, np.zeros(len(size), np.bool_), graph.tensor_transfer_s[found.tensors]),
        (gates, np.zeros(len(gates), np.int64), no, none),
    ]
    edges = [
        (np.where(is_late, copy_of[tensor], tensor), consumer),
        (found.tensors, own),
        (signals[which.reshape(-1)], own),
    ]
    columns = columns_with(graph, makers)
    columns["phase"][n:] = int(Phase.BACKWARD)
    columns["colocation"][n:] = -1
    columns["colocation"] = groups(columns["colocation"])
    columns["op_names"] = (*graph.op_names, *(f"{graph.op_names[op]}/hosted" for op in makers.tolist()))
    columns["kinds"] = (*graph.kinds, *[HOSTED] * k)
    columns |= {"pins": (*graph.pins, *[(LANE, HOST)] * k), "split_rows": ()}
    result = replace(graph, **columns, **rewired(tensors, edges, np.arange(n + k)), states=())
    return derived.with_more(result, makers)


@dataclass(frozen=True, eq=False)
class _Copies:
    """Hosted tensors of a derived graph (k of them).

    Attributes:
        tensors: int64 [k], their numbers.
        gates: int64 [k], the copy of each one's gate.
    """

    tensors: IntArray
    gates: IntArray

    @staticmethod
    def of(derived: Derived, before: OpGraph, hosted: HostedTensors) -> _Copies:
        """Those of which only copies of ops at the same place read in the backward pass."""
        graph, origin = derived.graph, derived.origin
        kinds = np.array(before.kinds, dtype=object)[origin]
        is_copy = np.array(graph.kinds, dtype=object) == kinds
        producer, reader, tensor = graph.edge_list
        is_apart = ~is_copy[reader] | (derived.part[reader] != derived.part[producer])
        stays = np.zeros(graph.n_tensors, dtype=np.bool_)
        stays[tensor[is_apart & (graph.phase[reader] != Phase.FORWARD)]] = True
        is_read = np.zeros(graph.n_tensors, dtype=np.bool_)
        is_read[tensor[graph.phase[reader] == Phase.BACKWARD]] = True
        maker = graph.tensor_producer
        slot = np.arange(graph.n_tensors) - graph.output_ptr[maker]
        is_own = is_copy[maker] & (slot < np.diff(before.output_ptr)[origin[maker]])
        source = np.where(is_own, before.output_ptr[origin[maker]] + slot, 0)
        at = np.flatnonzero(is_own & is_read & ~stays & hosted.is_hosted[source])
        copies = np.flatnonzero(is_copy)
        where = np.column_stack([origin, derived.part, derived.micro_batch])
        known = {tuple(where[op].tolist()): op for op in copies.tolist()}
        gates = []
        for gate, (_, part, batch) in zip(hosted.gate[source[at]].tolist(), where[maker[at]].tolist(), strict=True):
            gates.append(known.get((gate, part, batch), known.get((gate, part, -1), -1)))
        gate = np.array(gates, dtype=np.int64)
        return _Copies(at[gate >= 0], gate[gate >= 0])


def _backward_places(graph: OpGraph, stage: IntArray) -> IntArray:
    """int64 [n]: place of each op of the backward pass among those of its stage; -1 for others."""
    order = graph.topological_order
    backward = order[graph.phase[order] == Phase.BACKWARD]
    by_stage = backward[np.argsort(stage[backward], kind="stable")]
    counts = np.bincount(stage[by_stage], minlength=1 + int(stage.max(initial=0)))
    place = np.full(graph.n_ops, -1, dtype=np.int64)
    place[by_stage] = np.arange(len(by_stage)) - (np.cumsum(counts) - counts)[stage[by_stage]]
    return place


def _gates(graph: OpGraph, stage: IntArray, place: IntArray) -> IntArray:
    """int64: ops of the backward pass for which others of it wait, by stage and place.

    Gradients of weights may come later, in a block of their own.
    """
    one = replace(Derived.identity(graph), micro_batch=np.zeros(graph.n_ops, dtype=np.int64))
    found = np.flatnonzero((place >= 0) & (block_map(one, stage).kind == 1))
    result: IntArray = found[np.lexsort((place[found], stage[found]))]
    return result


def _block_sizes(graph: OpGraph) -> IntArray:
    """int64 [n]: of each forward op, how many ops of the backward pass mirror its block, 1 at least."""
    names: dict[str, int] = {}
    known: dict[str, int] = {}
    for module in set(graph.modules):
        found = _BLOCK.match(module)
        known[module] = names.setdefault(found[0] if found else module.partition(".")[0], len(names))
    block = np.array([known[module] for module in graph.modules], dtype=np.int64)
    mirrored = graph.forward_of[(graph.phase == Phase.BACKWARD) & (graph.forward_of >= 0)]
    count: IntArray = np.maximum(np.bincount(block[mirrored], minlength=len(names) or 1), 1)[block]
    return count
