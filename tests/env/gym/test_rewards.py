"""Rewards: the published formulas, on numbers that can be checked by eye."""

from __future__ import annotations

import numpy as np
import pytest
from environment_cases import GROUP, make, small_cluster, small_graph
from hypothesis import given
from hypothesis import strategies as st

from env.gym.rewards import REWARDS, Outcome, reward_of
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.errors import MismatchError, UnknownNameError
from graphs.opgraph import FloatArray


def outcome(times_s: list[float], feasible: list[bool], over_bytes: list[float]) -> Outcome:
    return Outcome(np.array(times_s), np.array(feasible), np.array(over_bytes), np.full(len(times_s), 2.0))


# Fits; fits, slower; 3 GB too much; forbidden by pins.
FOUND = outcome([1.0, 4.0, 1.0, np.inf], [True, True, False, False], [0.0, 0.0, 3e9, 0.0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sqrt_time", [-1.0, -2.0, -10.0, -10.0]),
        ("normalized", [-0.5, -2.0, -10.5, -20.0]),
        ("memory_penalty", [-1.0, -4.0, -7.0, -10.0]),
    ],
)
def test_formulas(name: str, expected: list[float]) -> None:
    assert REWARDS[name](FOUND).tolist() == expected


@given(st.lists(st.tuples(st.floats(0, 50), st.booleans(), st.floats(0, 1e12)), min_size=1))
def test_faster_is_better_and_infeasible_is_finite(rows: list[tuple[float, bool, float]]) -> None:
    times, fits, over = (list(column) for column in zip(*rows, strict=True))
    found = outcome(times, fits, [0.0 if fit else size for fit, size in zip(fits, over, strict=True)])
    for reward in REWARDS.values():
        values = reward(found)
        assert np.isfinite(values).all()
        good = values[found.feasible]
        assert (np.diff(good[np.argsort(found.step_time_s[found.feasible])]) <= 0).all()


def test_rewards_leave_the_outcome_alone() -> None:
    before = FOUND.step_time_s.copy()
    for reward in REWARDS.values():
        reward(FOUND)
    assert np.array_equal(FOUND.step_time_s, before)


def test_a_function_of_ones_own_is_a_reward() -> None:
    def speed_up(found: Outcome) -> FloatArray:
        return np.where(found.feasible, found.reference_s / found.step_time_s, 0.0)

    graph, cluster = small_graph(), small_cluster()
    env = make(GROUP, graph, cluster, reward=speed_up)
    env.reset()
    _, reward, *_ = env.step(np.array([0, 1, 1]))
    simulator = Simulator(Problem(graph, cluster))
    assert reward == 1.0
    env.reset()
    _, reward, *_ = env.step(np.array([0, 0, 0]))
    assert reward == simulator.score(Plan([0, 1, 1, 1])).step_time_s / simulator.score(Plan([0, 0, 0, 0])).step_time_s


def test_memory_penalty_counts_the_bytes_of_all_devices_that_overflow() -> None:
    env = make(GROUP, small_graph(kept_bytes=400_000_000), small_cluster(900_000_000), reward="memory_penalty")
    env.reset()
    _, reward, _, _, info = env.step(np.array([0, 1, 1]))  # 1.2 GB on a GPU of 0.9 GB
    assert not info["feasible"]
    assert reward == pytest.approx(-info["step_time_s"] - 2 * 0.3, abs=1e-6)


@pytest.mark.parametrize("wrong", [lambda found: -found.step_time_s, lambda found: 1.0, lambda found: [np.nan]])
def test_a_reward_that_is_no_number_for_each_placement_is_refused(wrong: object) -> None:
    env = make(GROUP, small_graph(), small_cluster(), reward=wrong)
    env.reset()
    with pytest.raises(MismatchError, match="a reward is one finite number for each of 1 placements"):
        env.step(np.array([1, 1, 1]))


def test_unknown_rewards_are_named() -> None:
    with pytest.raises(UnknownNameError, match="unknown reward 'sqrt', did you mean 'sqrt_time'"):
        reward_of("sqrt")
