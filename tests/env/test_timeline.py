"""The sentence that says where memory runs out, and figures for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import placements, problems

from env.cluster import Cluster, Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from env.simulation.timeline import memory_steps, overflow_reason
from graphs.formatting import exact_bytes, format_bytes, format_seconds
from graphs.opgraph import Op, OpGraph, Tensor


def reason(ops: list[Op], tensors: list[Tensor], placement: list[int]) -> str | None:
    devices = tuple(Device(name, "gpu", 1000, {"float32": 1.0}, 1.0) for name in ("gpu0", "gpu1"))
    cluster = Cluster("pair", devices, both_ways("gpu0", "gpu1", 100.0, 0.0))
    problem = Problem(OpGraph.build(ops, tensors), cluster)
    return overflow_reason(problem, Simulator(problem).schedule(Plan(placement))[1])


def test_the_running_op_is_named() -> None:
    ops = [Op("a", kept_bytes=655, time_s={"*": 2}), Op("x", workspace_bytes=300, time_s={"*": 1})]
    tensors = [Tensor("a", 0, ("x",)), Tensor("x", 1100)]
    assert reason(ops, tensors, [0, 0]) == (
        "op 'x' needs 1.4 kB (1400 bytes) on gpu0, where 345 bytes are free 2 s into the step."
    )


def test_the_arriving_tensor_is_named() -> None:
    ops = [Op("a", time_s={"*": 1}), Op("x", kept_bytes=600, time_s={"*": 1})]
    assert reason(ops, [Tensor("a", 500, ("x",))], [0, 1]) == (
        "an output of op 'a', arriving for op 'x', needs 500 bytes on gpu1, where 400 bytes are free 1 s into the step."
    )


def test_kept_bytes_that_do_not_fit_name_the_first_op_too_many() -> None:
    ops = [Op(f"op{i}", kept_bytes=400, time_s={"*": 1}) for i in range(4)]
    assert reason(ops, [], [0, 0, 0, 1]) == (
        "op 'op2' keeps 400 bytes for the whole step on gpu0, where 200 bytes are free; all that is placed "
        "there keeps 1.2 kB (1200 bytes)."
    )


def test_what_fits_has_no_reason() -> None:
    assert reason([Op("a", kept_bytes=1000, time_s={"*": 1})], [], [1]) is None


@given(st.data())
def test_there_is_a_reason_exactly_when_a_placement_is_infeasible(data: st.DataObject) -> None:
    problem = data.draw(problems(shared=True))
    score, schedule = Simulator(problem).schedule(Plan(data.draw(placements(problem))))
    assert (overflow_reason(problem, schedule) is None) == score.feasible
    for d, (times_s, size_bytes) in enumerate(memory_steps(problem, schedule)):
        assert times_s[0] == 0
        assert (times_s[1:] > times_s[:-1]).all()
        assert size_bytes[-1] == problem.graph.kept_bytes[problem.memory_owner[schedule.device] == d].sum()


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (1234567890, "1.23 GB"),
        (999_999, "1 MB"),
        (2**60, "1153 PB"),
    ],
)
def test_bytes_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_bytes_for_error_messages() -> None:
    assert exact_bytes(345) == "345 bytes"
    assert exact_bytes(1234567890) == "1.23 GB (1234567890 bytes)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.5e-9, "1.5 ns"),
        (12.34e-6, "12.3 us"),
        (0.9996, "1 s"),
        (4.56e-3, "4.56 ms"),
        (7.8, "7.8 s"),
        (4321, "4321 s"),
    ],
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
