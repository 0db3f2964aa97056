"""HEFT: the paper's example, its own schedule obeys its own model, and instances worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from estimates import check, estimated_schedule, mesh, topcuoglu_cluster
from hypothesis import given
from strategies import problems

from baselines.list_schedulers.heft import heft, scheduler
from baselines.paths import upward_rank
from env.cluster import UNLIMITED_BYTES
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.errors import InfeasibleError
from graphs.generators import topcuoglu
from graphs.opgraph import Op, OpGraph, Tensor
from placement import optimize


@pytest.fixture
def paper() -> Problem:
    return Problem(topcuoglu(), mesh(*((f"P{i}", "cpu", UNLIMITED_BYTES) for i in (1, 2, 3))))


def test_ranks_of_the_paper(paper: Problem) -> None:
    expected = [108.0, 77.0, 80.0, 80.0, 69.0, 63.333, 42.667, 35.667, 44.333, 14.667]  # table 3
    np.testing.assert_allclose(upward_rank(paper), expected, atol=1e-3)


def test_schedule_of_the_paper_is_80_long(paper: Problem) -> None:
    estimate = estimated_schedule(paper, scheduler)
    assert estimate.makespan_s == 80.0
    assert (estimate.device + 1).tolist() == [3, 1, 3, 2, 3, 2, 3, 1, 2, 2]  # figure 3 (a)
    assert estimate.start_s.tolist() == [0, 27, 9, 18, 28, 26, 38, 57, 56, 73]


def test_the_paper_s_step_takes_80_where_links_do_not_contend() -> None:
    assert optimize(topcuoglu(), topcuoglu_cluster(), method="heft", seed=0).step_time_s == 80.0


def test_one_link_between_two_processors_costs_the_paper_11_seconds(paper: Problem) -> None:
    # T1 runs on P3 and sends 9 s to T4 and 14 s to T6, both on P2: side by side in the paper, in a row here.
    plan = heft(paper, 0)
    score, schedule = Simulator(paper).schedule(plan)
    arrives = schedule.transfer_end_s[(schedule.transfer_source == 2) & (schedule.transfer_target == 1)]
    assert arrives[:2].tolist() == [18.0, 32.0]
    assert score.step_time_s == 91.0


@given(problems(max_ops=12, edges=24))
def test_own_schedule_waits_for_all_inputs_and_never_doubles_a_device(problem: Problem) -> None:
    try:
        estimate = estimated_schedule(problem, scheduler)
    except InfeasibleError:
        return
    check(problem, estimate)


@given(problems(max_ops=12, max_devices=1, edges=24))
def test_one_device_is_kept_busy(problem: Problem) -> None:
    try:
        estimate = estimated_schedule(problem, scheduler)
    except InfeasibleError:
        return
    np.testing.assert_allclose(estimate.makespan_s, problem.op_s.sum(), rtol=1e-9)


def test_an_op_is_inserted_into_an_earlier_idle_interval() -> None:
    graph = OpGraph.build(
        [
            Op("before", time_s={"*": 1.0}, pins=("cpu",)),
            Op("after", time_s={"*": 5.0}, pins=("gpu",)),
            Op("filler", time_s={"*": 2.0}, pins=("gpu",)),
        ],
        [Tensor("before", 3, ("after",))],
    )
    problem = Problem(graph, mesh(("gpu0", "gpu", UNLIMITED_BYTES), ("cpu0", "cpu", UNLIMITED_BYTES)))
    estimate = estimated_schedule(problem, scheduler)  # "after" waits until 4; "filler" comes last but fits before it
    assert estimate.start_s.tolist() == [0.0, 4.0, 0.0]
    plan = heft(problem, 0)
    assert Simulator(problem).score(plan).step_time_s == 9.0


def test_the_last_of_several_inputs_counts() -> None:
    graph = OpGraph.build(
        [Op("early", time_s={"*": 1.0}), Op("late", time_s={"*": 7.0}), Op("join", time_s={"*": 1.0})],
        [Tensor("early", 1, ("join",)), Tensor("late", 1, ("join",))],
    )
    problem = Problem(graph, mesh(("d0", "gpu", UNLIMITED_BYTES), ("d1", "gpu", UNLIMITED_BYTES)))
    estimate = estimated_schedule(problem, scheduler)
    assert estimate.device[0] != estimate.device[1] == estimate.device[2]
    assert estimate.start_s[2] == 7.0


def test_a_full_device_is_passed_over() -> None:
    ops = [Op(f"op{i}", kept_bytes=10, time_s={"fast": 1.0, "slow": 9.0}) for i in range(3)]
    problem = Problem(OpGraph.build(ops, []), mesh(("fast", "gpu", 20), ("slow", "gpu", 20)))
    assert sorted(heft(problem, 0).device.tolist()) == [0, 0, 1]


def test_a_group_goes_where_all_of_it_is_fast() -> None:
    graph = OpGraph.build(
        [
            Op("look_up", colocation="tied", time_s={"d0": 1.0, "d1": 2.0}),
            Op("multiply", colocation="tied", time_s={"d0": 10.0, "d1": 1.0}),
        ],
        [Tensor("look_up", 0, ("multiply",))],
    )
    problem = Problem(graph, mesh(("d0", "cpu", UNLIMITED_BYTES), ("d1", "gpu", UNLIMITED_BYTES)))
    assert heft(problem, 0).device.tolist() == [1, 1]


def test_order_is_that_of_the_estimated_starts() -> None:
    problem = Problem(topcuoglu(), mesh(*((f"P{i}", "cpu", UNLIMITED_BYTES) for i in (1, 2, 3))))
    plan = heft(problem, 0)
    assert plan.order is not None
    assert (
        np.argsort(plan.order).tolist()
        == np.argsort(estimated_schedule(problem, scheduler).start_s, kind="stable").tolist()
    )
