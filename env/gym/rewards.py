"""Rewards: pure functions of what scoring a batch of placements found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from env.problem import BoolArray
from graphs.errors import UnknownNameError
from graphs.opgraph import FloatArray

INFEASIBLE = -10.0
BYTES_PER_GB = 1e9


@dataclass(frozen=True, eq=False)
class Outcome:
    """Scores of k placements.

    Attributes:
        step_time_s: float64 [k]; infinite where nothing was scored, because pins forbid the placement.
        feasible: bool [k], allowed by pins and within every device's memory.
        over_bytes: float64 [k], bytes beyond the memory of all devices that overflow, together.
        reference_s: float64 [k], step time of the best single device (`env.gym.task.Task.reference_s`).
    """

    step_time_s: FloatArray
    feasible: BoolArray
    over_bytes: FloatArray
    reference_s: FloatArray

    @staticmethod
    def unscored(reference_s: FloatArray) -> Outcome:
        """Outcome of placements that pins forbid."""
        k = len(reference_s)
        return Outcome(np.full(k, np.inf), np.zeros(k, dtype=np.bool_), np.zeros(k), reference_s)


Reward = Callable[[Outcome], FloatArray]
"""An outcome of k placements -> k finite rewards, larger is better."""


def sqrt_time(outcome: Outcome) -> FloatArray:
    """-sqrt(seconds); -10 where infeasible.

    Source: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017, section 3.1
    (doi:10.48550/arXiv.1706.04972); the -10 of the 2018 paper (ICLR, "A Hierarchical Model for Device Placement").
    """
    return -np.sqrt(np.where(outcome.feasible, outcome.step_time_s, INFEASIBLE**2))


def normalized(outcome: Outcome) -> FloatArray:
    """-time / time on the best single device; 10 less where memory overflows, -20 where pins forbid the placement.

    So -1 is one device, and among placements of like speed those that fit are always better.
    """
    scored = np.isfinite(outcome.step_time_s)
    ratio = np.where(scored, outcome.step_time_s, -INFEASIBLE * outcome.reference_s) / outcome.reference_s
    return np.where(outcome.feasible, 0.0, INFEASIBLE) - ratio


def memory_penalty(outcome: Outcome) -> FloatArray:
    """-(seconds + 2 seconds for every GB beyond the memory of a device); -10 where pins forbid the placement.

    Source: Addanki et al., "Placeto: Learning Generalizable Device Placement Algorithms for Distributed Machine
    Learning", NeurIPS 2019 (doi:10.48550/arXiv.1906.08879).
    """
    scored = np.isfinite(outcome.step_time_s)
    seconds = np.where(scored, outcome.step_time_s, -INFEASIBLE)
    return -(seconds + 2.0 * outcome.over_bytes / BYTES_PER_GB)


REWARDS: dict[str, Reward] = {"sqrt_time": sqrt_time, "normalized": normalized, "memory_penalty": memory_penalty}


def reward_of(reward: str | Reward) -> Reward:
    """The reward of that name, or the function itself.

    Raises:
        UnknownNameError: lists the valid names.
    """
    if callable(reward):
        return reward
    if reward not in REWARDS:
        raise UnknownNameError("reward", str(reward), REWARDS)
    return REWARDS[reward]
