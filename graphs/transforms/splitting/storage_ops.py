"""Ops that work on what is stored of parameters, and the gathers of what is stored in parts.

Beside updates these are the casts of a mixed precision, of a parameter before its first reader. Each place can do its
stored part of them: a cast commutes with a gather. So what travels is the narrower format, as in torch's FSDP2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphs.arrays import BoolArray, per_graph
from graphs.op_kinds import base_name
from graphs.recipes import PRECISIONS
from graphs.records import Phase
from graphs.transforms.splitting.op_states import states_of

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph

_LAYER = re.compile(r"^(.*?\.\d+)\.")  # the modules that are gathered together
_CAST = "to_copy"


class Gathered(NamedTuple):
    """A gather of a parameter that is stored in parts, for one pass.

    Attributes:
        state: its number.
        phase: the pass of the first reader.
        readers: ops that wait for it, by their places in the step.
        cast: the op whose result is gathered in the parameter's place; -1 for the parameter itself.
        layer: the modules that are gathered together, with the pass.
    """

    state: int
    phase: Phase
    readers: tuple[int, ...]
    cast: int
    layer: str


def parameter_casts(graph: OpGraph) -> Mapping[int, int]:
    """Those of `weight_casts` that a mixed precision made -> the parameter's number.

    Autocast in a model makes none: its casts are the model's own, and FSDP gathers before them.
    """
    precision = PRECISIONS.get(graph.origin.precision or "")
    return {} if precision is None or not precision.casts_parameters else weight_casts(graph)


@per_graph
def weight_casts(graph: OpGraph) -> Mapping[int, int]:
    """Ops that do nothing but cast a state for its readers -> the state's number."""
    ptr, tensors = graph.inputs
    is_update = graph.phase == Phase.UPDATE
    found = {}
    for op, states in enumerate(states_of(graph)):
        if len(states) == 1 and base_name(graph.kinds[op]) == _CAST and not is_update[op]:
            read = tensors[ptr[op] : ptr[op + 1]]  # an op that runs again waits for an empty tensor
            if not graph.tensor_bytes[read].any():
                found[op] = states[0]
    return found


@per_graph
def gradient_casts(graph: OpGraph) -> Mapping[int, tuple[int, int]]:
    """Tensors that nobody reads but casts that make them a gradient -> the last such op, and the state's number."""
    ptr, tensors = graph.inputs
    found = {}
    writes, of_ops = writes_only_gradients(graph), states_of(graph)
    for op in np.flatnonzero((graph.phase == Phase.BACKWARD) & writes).tolist():
        states, before = of_ops[op], op
        while len(states) == 1 and base_name(graph.kinds[before]) == _CAST:  # to a norm's own format, and then to that
            read = tensors[ptr[before] : ptr[before + 1]].tolist()
            if len(read) != 1 or len(graph.consumers_of(read[0])) != 1:
                break
            found[read[0]] = op, states[0]
            before = int(graph.tensor_producer[read[0]])
    return found


def on_storage(graph: OpGraph) -> BoolArray:
    """bool [n]: ops of which each place may do the part that it stores, along with updates: no row says so."""
    result: BoolArray = graph.phase == Phase.UPDATE
    result = result.copy()
    result[[*parameter_casts(graph)]] = True
    return result


def cast_tensor(graph: OpGraph, cast: int) -> int:
    """The tensor that a cast writes, beside empty ones that others wait for."""
    return int(graph.output_ptr[cast])


def gathers_of(graph: OpGraph, casts: Mapping[int, int]) -> list[Gathered]:
    """The gathers of parameters that a step needs if they are stored in parts, in the order of their readers.

    An op that writes nothing but a gradient does not read its parameter.

    Args:
        casts: those of `parameter_casts` whose results are gathered.
    """
    index = {name: i for i, name in enumerate(graph.op_names)} if graph.states else {}
    position, phases = graph.topological_position.tolist(), graph.phase.tolist()
    writes = (writes_only_gradients(graph) & (graph.phase == Phase.BACKWARD)).tolist()
    found = []
    for number, state in enumerate(graph.states):
        users = [index[user] for user in state.users]
        own = [op for op in users if op not in casts and not writes[op]]
        wanted = [(-1, own)]
        wanted += [(op, graph.consumers_of(cast_tensor(graph, op)).tolist()) for op in users if op in casts]
        for cast, ops in wanted:
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                readers = sorted((op for op in ops if phases[op] == phase), key=position.__getitem__)
                if readers:
                    layer = layer_of(state.name) + phase.name
                    found.append(Gathered(number, phase, tuple(readers), cast, layer))
    return sorted(found, key=lambda one: (position[one.readers[0]], one.state))


def once_a_step(graph: OpGraph, gathers: Sequence[Gathered]) -> list[Gathered]:
    """The gathers of a step that keeps what it has gathered: one of each parameter, for its readers in both passes.

    Ops that run again read it, too.
    """
    found: dict[tuple[int, int], Gathered] = {}
    for one in gathers:
        first_run = int(graph.forward_of[one.cast]) if one.cast >= 0 else -1
        key = one.state, one.cast if first_run < 0 else first_run
        first = found.setdefault(key, one)
        if first is not one:
            found[key] = first._replace(readers=first.readers + one.readers)
    return [*found.values()]


@per_graph
def writes_only_gradients(graph: OpGraph) -> BoolArray:
    """bool [n]: ops all of whose tensors lie in bytes that are kept."""
    result = np.ones(graph.n_ops, dtype=np.bool_)
    np.logical_and.at(result, graph.tensor_producer, graph.tensor_is_kept)
    return result


@per_graph
def sums_of_uses(graph: OpGraph) -> BoolArray:
    """bool [n]: ops of the backward pass that add up gradients of the uses of a state, with the casts behind them."""
    result = np.zeros(graph.n_ops, dtype=np.bool_)
    writes, ptr, producer = writes_only_gradients(graph), graph.output_ptr, graph.tensor_producer
    of_casts = gradient_casts(graph)
    for op in np.flatnonzero(graph.phase == Phase.BACKWARD).tolist():
        if base_name(graph.kinds[op]) == "add" and (writes[op] or any(t in of_casts for t in range(*ptr[op : op + 2]))):
            result[op] = True
    for tensor, (cast, _) in of_casts.items():
        if result[producer[tensor]]:
            result[graph.consumers_of(tensor)] = True
            result[cast] = True
    return result


def layer_of(name: str) -> str:
    """The module of a parameter that is gathered as one: the first with a number in its path."""
    found = _LAYER.match(name)
    return found[1] if found else name.rpartition(".")[0]
