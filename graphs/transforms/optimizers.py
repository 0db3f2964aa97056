"""`with_optimizer`: a training step whose parameters are updated by another optimizer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphs.errors import GraphError, UnknownNameError
from graphs.formatting import show
from graphs.opgraph import OpGraph
from graphs.origin import with_step_of
from graphs.recipes import OPTIMIZERS, PRECISIONS, UPDATE_KIND, number_bytes
from graphs.records import State


def with_optimizer(graph: OpGraph, name: str) -> OpGraph:
    """The graph that `graphs.capture` makes of the same step with another optimizer; measured updates lose their times.

    Args:
        name: as in `OPTIMIZERS`.

    Raises:
        UnknownNameError: no such optimizer.
        GraphError: the graph does not say whose update it ends with.
    """
    if name not in OPTIMIZERS:
        raise UnknownNameError("optimizer", name, sorted(OPTIMIZERS))
    before = graph.origin.optimizer
    if before == name:
        return graph
    if before not in OPTIMIZERS:
        raise GraphError(
            f"graph {show(graph.name)} has no update of a known optimizer; capture a training step of the model."
        )
    old, new = OPTIMIZERS[before], OPTIMIZERS[name]
    precision = PRECISIONS[graph.origin.precision or "float32"]  # without one they all have one format, too
    widths = [number_bytes(dtype) for dtype in (precision.parameter, precision.gradient, precision.state)]
    moved, moved_before = (
        one.moved_bytes(widths[0], widths[1], widths[2], has_masters=precision.has_masters) for one in (new, old)
    )
    copies = new.remembered_copies(precision.has_masters)
    states_per_gradient = copies * widths[2] // widths[1]
    is_update = np.array([kind == f"{UPDATE_KIND}{before}" for kind in graph.kinds], dtype=np.bool_)
    renamed = {
        op: f"{op.removesuffix(before)}{name}"
        for op, mine in zip(graph.op_names, is_update.tolist(), strict=True)
        if mine and op.endswith(f".{before}")
    }
    made = replace(
        graph,
        op_names=tuple(renamed.get(op, op) for op in graph.op_names),
        kinds=tuple(
            f"{UPDATE_KIND}{name}" if mine else kind for kind, mine in zip(graph.kinds, is_update.tolist(), strict=True)
        ),
        bytes_moved=np.where(is_update, graph.bytes_moved / moved_before * moved, graph.bytes_moved),
        optimizer_bytes=graph.gradient_bytes * states_per_gradient,
        time_s=np.where(is_update[:, None], np.nan, graph.time_s),
        fixed_s=np.where(is_update[:, None], 0.0, graph.fixed_s),
        states=tuple(_state(state, renamed, states_per_gradient) for state in graph.states),
        origin=replace(graph.origin, optimizer=name),
    )
    return with_step_of(graph, made)


def _state(state: State, renamed: dict[str, str], copies: int) -> State:
    users = tuple(renamed.get(op, op) for op in state.users)
    return replace(state, users=users, optimizer_bytes=copies * state.gradient_bytes)
