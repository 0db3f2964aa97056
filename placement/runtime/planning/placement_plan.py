"""`placement_plan`: a placement of single ops as the plan of a strategy whose stages are devices.

    strategy pp2            placement on two devices
    row 0: stage 0          row 0: device 0, ops 0 1 4 5
    row 1: stage 1          row 1: device 1, ops 2 3 6

A row has one place and nothing is cut, so that ranks exchange nothing: a tensor that one row makes and another one
reads crosses from rank to rank, as between the stages of a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from env.plan import Plan
from env.problem import Problem
from placement.runtime.planning.strategy_plan import StrategyPlan
from placement.runtime.planning.values import Values
from placement.runtime.program.derived_layout import check_same_ops, nearest_devices
from placement.runtime.program.functional import Functional, functional

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.capture import Program


def placement_plan(
    step: Functional,
    cluster: Cluster,
    devices: Sequence[int],
    row: Sequence[int],
    order: Sequence[int] | None = None,
) -> StrategyPlan:
    """The plan of a placement.

    Args:
        devices: int [ranks], increasing numbers in `cluster`: the device of each rank.
        row: int [n], the rank of each op of the step.
        order: int [n], the ops as they are to start; None: in program order.
    """
    from baselines.strategies.applied import as_it_is  # loads all transforms and the simulator

    graph = step.program.graph
    ops = range(graph.n_ops) if order is None else order
    start = {graph.op_names[op]: float(number) for number, op in enumerate(ops)}
    plan = Plan(np.array(devices, dtype=np.int64)[np.asarray(row)])
    return StrategyPlan(Values(step, as_it_is(Problem(graph, cluster), plan, devices)), start)


def resized_plan(program: Program, plan: StrategyPlan) -> StrategyPlan:
    """The same placement of a step with the same ops: each on its rank, in the same order.

    Raises:
        MismatchError: the step has other ops.
    """
    check_same_ops(program, plan.values.step.program)
    return _on_ranks_of(plan, program, plan.values.split.rows, plan.sequence.tolist())


def forward_plan(program: Program, plan: StrategyPlan) -> StrategyPlan:
    """The forward pass alone of a training step, on its ranks, in program order: ops go where their parameters are."""
    known = plan.values.step.program
    kept = {name: min(rows) for names, rows in _keepers(plan) for name in names}
    row = nearest_devices(program, known, plan.values.split.rows, kept)
    return _on_ranks_of(plan, program, row)


def _keepers(plan: StrategyPlan) -> list[tuple[tuple[str, ...], frozenset[int]]]:
    """Names of each state of a step, and the ranks that store it."""
    states = plan.values.step.program.states
    return [(state.names, rows) for state, rows in zip(states, plan.storage.rows, strict=True)]


def _on_ranks_of(
    plan: StrategyPlan, program: Program, row: Sequence[int], order: Sequence[int] | None = None
) -> StrategyPlan:
    devices: list[int] = plan.values.split.rewrite.devices[:, 0].tolist()
    return placement_plan(functional(program), plan.values.applied.problem.cluster, devices, row, order)
