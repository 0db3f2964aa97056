"""How many tokens the devices of experts have, and experts a token: evenly many, unless a graph says otherwise.

Where experts are dropless, the data says how many tokens each has. A step waits for the device that has most, and so
each counts as that one. Where experts have seats, their capacity, all seats are computed, whatever the data.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from graphs.arrays import per_graph
from graphs.errors import GraphError
from graphs.opgraph import OpGraph, Phase
from graphs.origin import with_step_of
from graphs.records import ByGroups, Part, SplitRow, Work


def expert_load(graph: OpGraph) -> float | None:
    """Tokens of the device that has most over an even share, where experts are spread; None where none are dropless."""
    loads = [row.load for rows in dict.fromkeys(graph.split_rows) for row in rows if row.is_by_groups]
    return max(loads, default=None)


@per_graph
def expert_choices(graph: OpGraph) -> float:
    """Experts that a token asks, or has seats at, in the mean; 1 where there are none, or no input with tokens."""
    of_experts = np.array([any(row.axis == "experts" for row in rows) for rows in graph.split_rows], dtype=np.bool_)
    is_product = np.isin(graph.work, (Work.GROUPED, Work.PRODUCT)) & (graph.phase == Phase.FORWARD)
    products = graph.extents[is_product & of_experts]
    rows = (products[:, 0] * products[:, 1]).max(initial=0.0)  # of all groups together
    return max(1.0, float(rows) / graph.tokens) if graph.tokens else 1.0


def with_expert_load(graph: OpGraph, load: float) -> OpGraph:
    """The graph with another load of the device that has most; the graph itself for the load that it has.

    Raises:
        GraphError: no number from 1 up, or no dropless experts.
    """
    if not (math.isfinite(load) and load >= 1.0):
        raise GraphError(
            f"got an expert load of {load:g}, tokens of the device that has most over an even share; expected 1 for "
            "even ones or more."
        )
    now = expert_load(graph)
    if load == (now or 1.0):
        return graph
    if now is None:
        raise GraphError(
            f"graph {graph.name!r} has no experts whose tokens the data deals out; leave out the expert load, or, "
            "where experts have seats, change their capacity in the model."
        )
    made = {rows: tuple(_with_load(row, load) for row in rows) for rows in dict.fromkeys(graph.split_rows)}
    origin = replace(graph.origin, expert_load=None if load == 1.0 else load)
    loaded = replace(graph, split_rows=tuple(made[rows] for rows in graph.split_rows), origin=origin)
    return with_step_of(graph, loaded)


def _with_load(row: SplitRow, load: float) -> SplitRow:
    return replace(row, inputs=_parts(row.inputs, load), outputs=_parts(row.outputs, load)) if row.is_by_groups else row


def _parts(parts: tuple[Part, ...], load: float) -> tuple[Part, ...]:
    return tuple(replace(part, load=load) if isinstance(part, ByGroups) else part for part in parts)
