"""m-ETF: earliest task first, within memory."""

from __future__ import annotations

import numpy as np

from baselines.list_schedulers.estimate import (
    Scheduler,
    place_as_estimated,
    rank_order,
    start_earliest,
)
from baselines.paths import upward_rank
from env.plan import Plan
from env.problem import Problem
from env.units import Units


def m_etf(problem: Problem, seed: int) -> Plan:
    """Again and again the op that can start first, on the device where it can.

    Sources: J.-J. Hwang, Y.-C. Chow, F. Anger, C.-Y. Lee, "Scheduling Precedence Graphs in Systems with Interprocessor
    Communication Times", SIAM J. Computing 18(2), 1989 (doi:10.1137/0218016); with memory: B. Jeon, L. Cai,
    P. Srivastava et al., "Baechi: Fast Device Placement of Machine Learning Graphs", SoCC 2020
    (doi:10.1145/3419111.3421302).
    As published, only starts are compared, so that a slow device that is free is preferred to a fast one that is busy;
    links are never busy in its own estimate; of ops that can start at once the one with the longest path ahead does.
    Beyond the papers: such an op takes the device that runs it fastest, and the first op of a colocation group
    fixes the device of all.

    Every device keeps its candidates in two heaps, by start and by rank, from which those placed elsewhere vanish when
    they come up: O(e D + n D log n), with room for 3 n D numbers.

    Raises:
        InfeasibleError: a unit finds no room, or the step overflows a device.
    """
    return place_as_estimated(problem, scheduler)


def scheduler(units: Units) -> Scheduler:
    """ETF itself, for any account of memory."""
    op_of = rank_order(units.problem, upward_rank(units.problem))
    nobody = np.full(len(op_of), -1, dtype=np.int64)
    return lambda allowance: start_earliest(units, op_of, allowance, nobody)
