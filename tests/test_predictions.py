"""What the pages of predicted and measured step times add to a score."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from env.cluster import Cluster, Device
from env.device import both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.opgraph import Op, OpGraph, Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import predictions

# Three cores; a link takes 1 s and 1 s a byte.
CORES = Cluster(
    "three",
    tuple(Device(name, "cpu", 10**6, {"float32": 1.0}, 1.0) for name in "abc"),
    tuple(link for pair in ("ab", "ac", "bc") for link in both_ways(*pair, 1.0, 1.0)),
)


def step() -> OpGraph:
    """An op that two others read, and one that reads nothing and comes after it on the first core."""
    ops = [Op(name, time_s={"cpu": 10.0}) for name in ("first", "left", "right", "own")]
    return OpGraph.build(ops, [Tensor("first", 2, ("left", "right"))])


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ([0, 0, 0, 0], 40.0),  # nothing is sent
        ([0, 1, 1, 0], 33.0),  # sent once, in 1 + 2 s, and read by one op after the other
        ([0, 1, 2, 0], 26.0),  # sent twice, by the core of the sender
    ],
)
def test_a_sender_is_busy_while_it_copies(device: list[int], expected: float) -> None:
    plan = Plan(np.array(device), np.arange(4.0))
    assert predictions.predicted_s(Problem(step(), CORES), plan, np.ones(4)) == expected


def test_ops_are_faster_for_the_share_of_their_time_in_which_no_other_core_computes() -> None:
    """The first op runs alone; the three others meet, one of them for 7 of its 10 s, before its core is alone again."""
    problem, plan = Problem(step(), CORES), Plan(np.array([0, 1, 2, 0]), np.arange(4.0))
    _, schedule = Simulator(problem).schedule(plan)
    found = predictions.with_company(problem, schedule, np.full(4, 0.5)).graph.time_s[:, 0]
    assert found.tolist() == pytest.approx([5.0, 10.0, 10.0, 10.0 * (0.5 + 0.5 * 0.7)])


@given(st.lists(st.integers(0, 2), min_size=4, max_size=4), st.floats(0.3, 1.0))
def test_company_makes_no_op_slower_than_measured_nor_faster_than_alone(device: list[int], alone: float) -> None:
    problem = Problem(step(), CORES)
    _, schedule = Simulator(problem).schedule(Plan(np.array(device)))
    found = predictions.with_company(problem, schedule, np.full(4, alone)).graph.time_s[:, 0]
    assert (found >= 10.0 * alone - 1e-9).all()
    assert (found <= 10.0 + 1e-9).all()
    if len(set(device)) == 1:
        assert found == pytest.approx(10.0 * alone)


def test_what_was_not_measured_is_sent_as_before() -> None:
    graph = OpGraph.build([Op("a", flops=3.0), Op("b", time_s={"cpu": 1.0})], [Tensor("a", 2, ("b",))])
    problem = Problem(graph, CORES)
    assert predictions.with_copying_senders(problem, np.array([0, 1])).graph.hash == graph.hash


def test_ties_are_predictions_that_read_the_same() -> None:
    rows = [{"predicted_s": p, "measured_s": m} for p, m in ((1.0001, 2.0), (1.0002, 1.0), (3.0, 3.0))]
    assert predictions.tau(rows, 17) == pytest.approx(1 / 3)
    assert predictions.tau(rows) == pytest.approx(2 / np.sqrt(2 * 3))


def test_large_errors_are_named() -> None:
    rows = [
        {"model": "one", "strategy": "dp2 | statistics=local", "predicted_s": 7.0, "measured_s": 10.0},
        {"model": "two", "strategy": "dp2", "predicted_s": 9.0, "measured_s": 10.0},
    ]
    assert "Off by more than 20%: one dp2; statistics=local -30.0%." in predictions.ends(rows, "strategy")
