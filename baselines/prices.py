"""Prices of work: seconds that it takes on a quiet machine of two cores, by which budgets are counted.

Rounded from runs on an Intel Xeon (numba 0.68, ortools 9.15, highspy 1.13, 2026-11-27), most within a factor of 1.5;
`benchmarks/budgets.py` measures how far off they are. A price that is off makes an answer take longer or shorter than
its budget says; the answer is the same everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from env.problem import Problem
    from graphs.opgraph import OpGraph

CORES = 2  # that share what is done side by side

HEURISTIC_S = 1e-5  # for each op: a quick heuristic
RELAXATION_S = 3e-4  # for each costly arc: the linear programme of m_sct
VISIT_S = 6e-8  # a slice that dp_linear looks at
STAGE_S, STAGES_S = 1.5e-9, 2e-5  # a stage that pipedream compares, and a call that compares many

INSTANT_S = 7.5e-8  # an instant of a schedule that annealing simulates, with what goes before the first
EVALUATION_S = 1.5e-8  # the same ahead of it, for each op and edge of the graph, about: most evaluations end early
LOAD_S, LOAD_DEVICE_S = 1.6e-6, 1.6e-8  # a change of loads, and for each device or link
PLACEMENT_S, SIMULATED_S = 1e-4, 1e-7  # a placement scored from Python, and for each of its ops and edges
SOLVER_S, INTERVAL_S = 1.6, 2e-4  # a unit of CP-SAT's deterministic time; an interval of its model, to build it
TERM_S = 3e-6  # a coefficient of HiGHS' model, each time that its branch and bound looks whether to go on
SAMPLE_S, SAMPLE_OP_S = 1.5e-3, 5e-7  # a placement that a policy draws and scores, and for each op on each device


class Learning(NamedTuple):
    """Seconds that a policy takes to begin, and for each placement that it draws and learns from: for it, and for each
    op on each device."""

    begin_s: float
    sample_s: float
    sample_op_s: float


# Of graphs of 76 to 1,225 ops on 4 and 8 devices. `hierarchical` looks at a problem anew now and then, which is in it.
LEARNING = {
    "hierarchical": Learning(0.7, 2.6e-3, 0.0),
    "seq2seq": Learning(0.8, 5.5e-3, 5e-7),
    "graph": Learning(1.0, 1.7e-3, 2e-6),
    "ppo": Learning(0.0, 1e-2, 5e-7),
}

ESTIMATE_S, ESTIMATE_OP_S = 1e-3, 4.5e-6  # an estimate of a strategy, and for each op
PLACED_OP_S = 1e-3  # for each op: the placement that every replica of a strategy takes
SCORING_OP_S = 1.5e-5  # for each op of the graph of a strategy: carried out and simulated


def estimate_s(graph: OpGraph) -> float:
    """Seconds of estimating a strategy."""
    return ESTIMATE_S + ESTIMATE_OP_S * graph.n_ops


def sample_s(problem: Problem) -> float:
    """Seconds of drawing and scoring a placement by a policy."""
    return SAMPLE_S + SAMPLE_OP_S * problem.op_s.size


def learned_s(problem: Problem, policy: str) -> float:
    """Seconds of learning from a placement, drawn and scored."""
    price = LEARNING[policy]
    return price.sample_s + price.sample_op_s * problem.op_s.size


def placement_s(problem: Problem) -> float:
    """Seconds of scoring a placement from Python."""
    return PLACEMENT_S + SIMULATED_S * (problem.graph.n_ops + len(problem.graph.consumers))
