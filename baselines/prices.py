"""Prices of work: seconds that it takes on a quiet machine of two cores, by which budgets are counted.

A price that is off makes an answer take longer or shorter than its budget says; the answer is the same everywhere.
`benchmarks/prices.py` measures how far off they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from env.problem import Problem

CORES = 2  # that share what is done side by side

HEURISTIC_S = 1e-5  # for each op: a quick heuristic
RELAXATION_S = 3e-4  # for each costly arc: the linear programme of m_sct
VISIT_S = 2e-8  # a slice that dp_contiguous looks at
IDEAL_S = 1e-6  # an ideal that it finds
STAGE_S, STAGES_S = 2e-9, 2e-5  # a stage that pipedream compares, and a call that compares many

ANNEAL_S, ANNEAL_OP_S, ANNEAL_WHOLE_S = 1.5e-6, 1e-7, 1e-8  # a change, an op simulated anew, an op or edge looked at
LOAD_S, LOAD_DEVICE_S = 2e-6, 2e-8  # a change of loads, for each device or link
PLACEMENT_S, SIMULATED_S = 1e-4, 1e-7  # a placement scored from Python, and for each of its ops and edges
SOLVER_S, INTERVAL_S = 1.0, 2e-4  # a unit of CP-SAT's deterministic time; an interval of its model, to build it
TERM_S = 2e-6  # a coefficient of HiGHS' model, each time that its branch and bound looks whether to go on

SAMPLE_S, SAMPLE_OP_S = 1e-3, 1e-6  # a placement that a policy draws and scores, and for each op on each device
LEARNED_S, LEARNED_OP_S = 2e-3, 1e-6  # a placement that a policy learns from

ESTIMATE_S, ESTIMATE_OP_S = 1e-3, 8e-6  # an estimate of a strategy, and for each op
SCORING_OP_S = 2e-5  # for each op of the graph of a strategy: carried out and simulated


def sample_s(problem: Problem) -> float:
    """Seconds of drawing and scoring a placement by a policy."""
    return SAMPLE_S + SAMPLE_OP_S * problem.op_s.size


def learned_s(problem: Problem) -> float:
    """Seconds of learning from a placement, drawn and scored."""
    return LEARNED_S + LEARNED_OP_S * problem.op_s.size


def placement_s(problem: Problem) -> float:
    """Seconds of scoring a placement from Python."""
    return PLACEMENT_S + SIMULATED_S * (problem.graph.n_ops + len(problem.graph.consumers))
