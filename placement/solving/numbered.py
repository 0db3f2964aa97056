"""`numbered_plan`: one of the plans beside an answer, by its number, as a `Result` of its own."""

from __future__ import annotations

import dataclasses

from env.lanes import without_lanes
from graphs.errors import InfeasibleError, MismatchError
from graphs.opgraph import OpGraph
from placement.results.alternatives import ONE_DEVICE
from placement.results.result import Result
from placement.results.same_model import check_same_model, with_recipe_of
from placement.results.stacks import asked_for
from placement.solving.methods import AUTO, SINGLE
from placement.solving.solver import Solver
from placement.solving.strategy_row import strategy_row


def numbered_plan(result: Result, number: int, graph: OpGraph | None = None) -> Result:
    """Carry out the plan of a number beside an answer, as a summary counts them.

    Args:
        result: of a search over strategies.
        number: from 1, fastest first.
        graph: of the model; None: that of the result, where its strategy is ``none`` and so has rewritten nothing.

    Raises:
        MismatchError: no such plan, another model, or no graph where one is needed.
        InfeasibleError: it does not fit.
    """
    if not 1 <= number <= len(result.alternatives):
        has = f"plans 1 to {len(result.alternatives)}" if result.alternatives else "no plans beside its answer"
        raise MismatchError(f"the result has {has}, got {number}; `placement optimize -o` saves those of a search.")
    chosen = result.alternatives[number - 1]
    if chosen.strategy == result.strategy and not chosen.strategy.is_none:
        return result
    if graph is None and not result.strategy.is_none:
        raise MismatchError(
            f"plan {number} is made of the model, and the result has its answer's graph alone; give the model, too."
        )
    source = result.graph
    if graph is not None and not result.strategy.is_none:
        source = asked_for(with_recipe_of(result, graph), result.stack)
        check_same_model(result, source)
    cluster = without_lanes(result.cluster)
    if chosen.strategy.is_none:
        solver = Solver(source, cluster, result.seed, result.objective, result.priority)
        found = solver.solve(SINGLE if chosen.name == ONE_DEVICE else AUTO)
    else:
        found = strategy_row(source, cluster, chosen.strategy, result.seed).result
    if found.answer is None:
        raise InfeasibleError(f"plan {number} does not fit: {found.reason}")
    return dataclasses.replace(found, command=result.command)
