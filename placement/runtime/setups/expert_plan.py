"""The experts that ranks have, as constants of the torch runner."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphs.errors import MismatchError
from graphs.formatting import show
from graphs.opgraph import OpGraph
from graphs.records import Phase
from graphs.rows import Shard
from graphs.transforms.splitting.cuts import SUM
from graphs.transforms.splitting.cutting import cut
from graphs.transforms.splitting.op_states import states_of
from graphs.transforms.strategy import Strategy

if TYPE_CHECKING:
    from torch import nn

_ASKED = ("hidden_states", "top_k_index", "top_k_weights")  # what experts of transformers get


@dataclass(frozen=True)
class ExpertPlan:
    """How experts are cut.

    Attributes:
        size: number of parts.
        modules: with stacked weights, and whether they get tokens, experts that these ask, and weights.
    """

    size: int
    modules: Mapping[str, bool]


def expert_plan(graph: OpGraph, strategy: Strategy, model: nn.Module) -> ExpertPlan:
    """How a strategy cuts experts.

    Raises:
        MismatchError: weights that are not stacked, or products of another kind.
    """
    rule = next(rule for rule in strategy.mesh if rule.name == "ep")
    sharding, used = cut(graph, rule.axis(), []), states_of(graph)
    found: dict[str, bool] = {}
    for op in graph.topological_order.tolist():
        row = sharding.row[op]
        if graph.phase[op] != Phase.FORWARD or row is None:
            continue
        for state in used[op]:
            if int(sharding.state[state]) <= SUM or not graph.states[state].gradient_bytes:
                continue
            name = graph.states[state].name
            path = name.rpartition(".")[0]
            module = model.get_submodule(path)
            is_asked = tuple(inspect.signature(module.forward).parameters)[:3] == _ASKED
            part = next((part for part in row.inputs if isinstance(part, Shard)), None)
            extent = model.get_parameter(name).shape[0]
            if part is None or extent % rule.size or not (is_asked or graph.kinds[op] == "aten.bmm"):
                raise MismatchError(
                    f"ep{rule.size} cuts experts, and op {show(graph.op_names[op])} reads {show(name)} of {extent}, "
                    f"no batched product of stacked experts that {rule.size} divides; take dp{rule.size}, or tp."
                )
            found[path] = is_asked
    if not found:
        raise MismatchError(
            f"ep{rule.size} cuts experts, and the model has no stacked weights of any; take dp{rule.size}."
        )
    return ExpertPlan(rule.size, found)
