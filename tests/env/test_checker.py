"""The checker finds what is wrong, and an audit scores a saved answer without the compiled simulator."""

from __future__ import annotations

import ast
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import orders, placements, problems

import env.checking.checker
import env.checking.naming
import env.checking.reference
import env.checking.reference_loads
import env.checking.reference_memory
import env.checking.reference_times
from env.checking.checker import audit, check_schedule
from env.checking.naming import plan_of
from env.checking.reference import simulate_reference
from env.checking.reference_loads import reference_loads
from env.cluster import COMMUNICATIONS, Cluster, Device, both_ways
from env.objectives import THROUGHPUT
from env.plan import Plan, Priority
from env.problem import Problem
from env.simulation.scoring import loads
from env.simulation.simulator import Schedule, Simulator
from graphs.errors import MismatchError, UnknownNameError
from graphs.opgraph import Op, OpGraph, Tensor

DEVICES = tuple(Device(name, kind, 1000, {"float32": 1.0}, 1.0) for name, kind in (("gpu0", "gpu"), ("cpu0", "cpu")))
CLUSTER = Cluster("pair", DEVICES, both_ways("gpu0", "cpu0", 10.0, 1.0))
# x feeds y and z, which run after each other on the other device; w runs beside them.
GRAPH = OpGraph.build(
    [
        Op("x", time_s={"*": 2.0}, pins=("gpu",)),
        Op("y", time_s={"*": 1.0}, colocation="pair"),
        Op("z", time_s={"*": 1.0}, colocation="pair", kept_bytes=300),
        Op("w", time_s={"*": 1.0}, workspace_bytes=50),
    ],
    [Tensor("x", 20, ("y", "z")), Tensor("x", 10, ("z",)), Tensor("w", 0)],
)
PLACEMENT = {"x": "gpu0", "y": "cpu0", "z": "cpu0", "w": "gpu0"}


def good() -> Schedule:
    return Simulator(Problem(GRAPH, CLUSTER)).schedule(Plan([0, 1, 1, 0]))[1]


def changed(**changes: dict[int, float]) -> Schedule:
    """The good schedule with single entries replaced."""
    fields = {}
    for key, entries in changes.items():
        fields[key] = getattr(good(), key).copy()
        for index, value in entries.items():
            fields[key][index] = value
    return dataclasses.replace(good(), **fields)


def without_transfer(number: int) -> Schedule:
    keys = [field.name for field in dataclasses.fields(Schedule) if field.name.startswith("transfer")]
    return dataclasses.replace(good(), **{key: np.delete(getattr(good(), key), number) for key in keys})


def repeated_transfer(number: int) -> Schedule:
    keys = [field.name for field in dataclasses.fields(Schedule) if field.name.startswith("transfer")]
    again = {key: np.append(getattr(good(), key), getattr(good(), key)[number]) for key in keys}
    again["transfer_start_s"][-1] += 50
    again["transfer_end_s"][-1] += 50
    return dataclasses.replace(good(), **again)


def test_a_good_schedule_has_nothing_wrong() -> None:
    assert good().transfer_end_s.tolist() == [5, 7]
    assert check_schedule(GRAPH, CLUSTER, good()) == []


@pytest.mark.parametrize(
    ("schedule", "complaint"),
    [
        (changed(op_end_s={3: 3.5}), "op 'w' takes 1.5 s on gpu0, expected 1.0 s"),
        (changed(op_start_s={1: 4.0}, op_end_s={1: 5.0}), "op 'y' starts at 4.0 s, before the output of op 'x'"),
        (changed(op_start_s={3: 1.0}, op_end_s={3: 2.0}), "device gpu0 has op 'w' at 1.0 s while op 'x' is on it"),
        (changed(device={0: 1}), "op 'x' may only run on gpu, but runs on cpu0"),
        (changed(device={1: 0}), "ops 'y' and 'z' must share a device, but run on gpu0 and cpu0"),
        (without_transfer(1), "op 'z' reads the output of op 'x', which is not sent"),
        (repeated_transfer(0), "sent twice"),
        (changed(transfer_end_s={0: 4.0}), "takes 2.0 s, expected 3.0 s"),
        (changed(transfer_start_s={0: 1.0}, transfer_end_s={0: 4.0}), "starts at 1.0 s, before the op ends at 2.0 s"),
        (
            changed(transfer_start_s={1: 4.0}, transfer_end_s={1: 6.0}),
            "link gpu0 -> cpu0 has the output of op 'x'",
        ),
        (changed(transfer_target={0: 0}), "already needed"),
        (changed(transfer_source={0: 1}), "is sent from cpu0, where it was not made"),
        (changed(transfer_tensor={0: 2}), "no op there reads it"),
        (changed(device={0: 7}), "outside 0 to 1"),
        (changed(op_start_s={0: -1.0}), "negative or not finite"),
        (changed(op_end_s={0: np.nan}), "negative or not finite"),
        (dataclasses.replace(good(), device=np.array([0])), "each op runs exactly once"),
        (dataclasses.replace(good(), transfer_source=np.array([0])), "differ in length"),
    ],
)
def test_each_fault_is_found(schedule: Schedule, complaint: str) -> None:
    found = check_schedule(GRAPH, CLUSTER, schedule)
    assert any(complaint in sentence for sentence in found), found
    assert all(sentence.endswith(".") for sentence in found)


def test_too_little_memory_is_found() -> None:
    small = Cluster(
        "small", (DEVICES[0], dataclasses.replace(DEVICES[1], memory_bytes=329)), both_ways("gpu0", "cpu0", 10.0, 1.0)
    )
    assert check_schedule(GRAPH, small, good()) == ["device cpu0 holds up to 330 bytes, but its memory is 329 bytes."]
    assert audit(GRAPH, small, plan_of(GRAPH, small, PLACEMENT)).problems == tuple(check_schedule(GRAPH, small, good()))


@given(st.data())
def test_moving_any_op_earlier_is_noticed(data: st.DataObject) -> None:
    # In a schedule without idling no op can start earlier alone, unless it or what keeps it back takes no time.
    problem = data.draw(problems(max_devices=3))
    _, schedule = Simulator(problem).schedule(Plan(data.draw(placements(problem))))
    i = data.draw(st.integers(0, problem.graph.n_ops - 1))
    length_s = schedule.op_end_s[i] - schedule.op_start_s[i]
    if schedule.op_start_s[i] < 0.5 or length_s == 0:
        return
    start_s, end_s = schedule.op_start_s.copy(), schedule.op_end_s.copy()
    start_s[i] -= 0.5
    end_s[i] -= 0.5
    moved = dataclasses.replace(schedule, op_start_s=start_s, op_end_s=end_s)
    words = ("while", "before the output")
    assert any(word in line for line in check_schedule(problem.graph, problem.cluster, moved) for word in words)


def test_an_audit_scores_like_the_compiled_simulator() -> None:
    score, schedule = Simulator(Problem(GRAPH, CLUSTER)).schedule(Plan([0, 1, 1, 0]))
    order = [GRAPH.op_names[i] for i in schedule.order]
    for found in (audit(GRAPH, CLUSTER, plan_of(GRAPH, CLUSTER, PLACEMENT, *names)) for names in ((), (order,))):
        assert found.step_time_s == score.step_time_s == 8.0
        assert found.peak_bytes == {"gpu0": 80, "cpu0": 330}
        assert found.bytes_moved == score.bytes_moved == 30
        assert found.problems == ()


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"x": "gpu0", "y": "cpu0", "z": "cpu0"}, "no device for op 'w'"),
        ({**PLACEMENT, "v": "gpu0"}, "names op 'v', which graph"),
        ({**PLACEMENT, "w": "gpu7"}, "op 'w' is placed on 'gpu7', but cluster 'pair' has gpu0, cpu0"),
    ],
)
def test_a_placement_for_something_else_is_refused(placement: dict[str, str], message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        plan_of(GRAPH, CLUSTER, placement)


def test_an_order_that_is_none_is_refused() -> None:
    for order in (["x", "y", "z"], ["x", "y", "z", "w", "w"], ["x", "y", "z", "v"]):
        with pytest.raises(MismatchError, match="exactly once"):
            plan_of(GRAPH, CLUSTER, PLACEMENT, order)
    with pytest.raises(UnknownNameError, match="did you mean 'fifo'"):
        audit(GRAPH, CLUSTER, Plan([0, 1, 1, 0]), priority="fif")
    with pytest.raises(MismatchError, match="each of 4 ops"):
        simulate_reference(GRAPH, CLUSTER, Plan([0, 1, 2, 0]))


def test_the_reference_knows_the_priorities_of_the_simulator() -> None:
    assert list(env.checking.reference.PRIORITIES) == [priority.value for priority in Priority]


@pytest.mark.parametrize(
    "module",
    [
        env.checking.reference,
        env.checking.reference_loads,
        env.checking.reference_memory,
        env.checking.reference_times,
        env.checking.checker,
        env.checking.naming,
    ],
)
def test_the_second_opinion_shares_no_code_with_the_first(module: object) -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))  # type: ignore[attr-defined]
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {
        "env.cluster",
        "env.plan",
        "env.checking.naming",
        "env.checking.reference",
        "env.checking.reference_loads",
        "env.checking.reference_memory",
        "env.checking.reference_times",
    }
    assert {name for name in imported if name.startswith("env.")} <= own


@pytest.mark.parametrize(("pin", "suits"), [("gpu0", True), ("gpu", True), ("cpu0", False), ("", False)])
def test_pins_by_name_or_kind(pin: str, suits: bool) -> None:
    ops, tensors = GRAPH.records()
    pinned = OpGraph.build([dataclasses.replace(op, pins=(pin,) if op.name == "x" else ()) for op in ops], tensors)
    problems = [found for found in check_schedule(pinned, CLUSTER, good()) if "may only run on" in found]
    assert (not problems) == suits


# -- loads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("communication", COMMUNICATIONS)
@given(st.data())
def test_loads_agree_with_the_plain_ones(communication: str, data: st.DataObject) -> None:
    drawn = data.draw(problems())
    cluster = dataclasses.replace(drawn.cluster, communication=communication)
    placement = data.draw(placements(drawn))
    problem = Problem(drawn.graph, cluster, THROUGHPUT)
    fast = loads(problem, Plan(placement))
    slow = reference_loads(drawn.graph, cluster, Plan(placement))
    np.testing.assert_allclose(fast.device_s, slow.device_s, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(fast.link_s, slow.link_s, rtol=1e-9, atol=1e-12)
    assert fast.value_s == pytest.approx(slow.value_s, rel=1e-9)
    assert fast.held_bytes.tolist() == list(slow.held_bytes)
    assert (fast.bytes_moved, fast.feasible) == (slow.bytes_moved, slow.feasible)
    ordered = Plan(placement, data.draw(orders(drawn)))
    step = simulate_reference(drawn.graph, cluster, ordered)
    in_order = reference_loads(drawn.graph, cluster, ordered).held_bytes
    assert loads(problem, ordered).held_bytes.tolist() == list(in_order)
    assert all(held >= peak for held, peak in zip(in_order, step.peak_bytes, strict=True))


@given(st.data())
def test_one_device_holds_in_steady_state_what_one_step_needs(data: st.DataObject) -> None:
    problem = data.draw(problems())
    where = data.draw(st.integers(0, problem.cluster.n_devices - 1))
    placement = np.full(problem.graph.n_ops, where)
    steady = loads(Problem(problem.graph, problem.cluster, THROUGHPUT), Plan(placement))
    score = Simulator(problem).score(Plan(placement))
    assert steady.held_bytes.tolist() == score.peak_bytes.tolist()
    assert (steady.steady.reason is None) == steady.feasible == score.feasible


def test_stages_that_train_hold_the_activations_of_the_steps_in_flight() -> None:
    """PipeDream's counts: of four equal stages the first has four steps in flight, the last one."""
    ops = [Op(f"f{i}", time_s={"*": 1.0}) for i in range(4)] + [Op(f"b{i}", time_s={"*": 2.0}) for i in range(4)]
    tensors = [Tensor(f"f{i}", 0, (f"f{i + 1}",)) for i in range(3)] + [
        Tensor(f"f{i}", 100, (f"b{i}",)) for i in range(4)
    ]
    tensors += [Tensor(f"b{i + 1}", 0, (f"b{i}",)) for i in range(3)]
    devices = tuple(Device(f"d{i}", "gpu", 399, {"float32": 1.0}, 1.0) for i in range(4))
    links = tuple(link for i in range(3) for link in both_ways(f"d{i}", f"d{i + 1}", 1.0, 0.0))
    found = loads(
        Problem(OpGraph.build(ops, tensors), Cluster("row", devices, links), THROUGHPUT), Plan(np.arange(8) % 4)
    )
    assert found.held_bytes.tolist() == [400, 300, 200, 100]
    assert found.steady.reason == (
        "op 'f0' needs 400 bytes on d0 in steady state, where 399 bytes are free beside the 0 bytes of the other ops "
        "placed there."
    )


def test_stages_of_inference_hold_what_one_turn_needs() -> None:
    """Two stages of three ops: inside a stage two tensors at a time; what is sent and received counts once each."""
    ops = [Op(f"op{i}", time_s={"*": 1.0}, kept_bytes=1000) for i in range(6)]
    tensors = [Tensor(f"op{i}", size, (f"op{i + 1}",)) for i, size in enumerate((40, 50, 7, 60, 70))]
    devices = tuple(Device(f"d{i}", "gpu", 9999, {"float32": 1.0}, 1.0) for i in range(2))
    cluster = Cluster("pair", devices, both_ways("d0", "d1", 7.0, 0.0))
    problem = Problem(OpGraph.build(ops, tensors), cluster, THROUGHPUT)
    # d0: 40 + 50 in its turn, and 7 on their way; d1: 60 + 70, and the 7 that arrive.
    assert loads(problem, Plan([0, 0, 0, 1, 1, 1])).held_bytes.tolist() == [3000 + 90 + 7, 3000 + 130 + 7]


@pytest.mark.parametrize("measured_s", [None, 5.0])
@pytest.mark.parametrize("communication", COMMUNICATIONS)
def test_loads_by_hand(communication: str, measured_s: float | None) -> None:
    # Two accelerators on a switch; the CPU core works in the switch's memory. x goes to both others.
    devices = tuple(Device(name, "any", 300, {"float32": 1.0}, 1.0) for name in ("a", "b", "cpu"))
    links = (
        *both_ways("a", "host", 10.0, 1.0),
        *both_ways("b", "host", 10.0, 1.0),
        *both_ways("cpu", "host", math.inf, 0.0),
    )
    cluster = Cluster("host", devices, links, communication=communication)
    graph = OpGraph.build(
        [
            Op("x", time_s={"*": 2.0}, kept_bytes=200, workspace_bytes=7),
            Op("y", time_s={"*": 3.0}, workspace_bytes=50),
            Op("y2", time_s={"*": 1.0}, workspace_bytes=60),
            Op("z", time_s={"*": 9.0}, kept_bytes=281),
        ],
        [Tensor("x", 20, ("y", "y2", "z"), transfer_s=measured_s), Tensor("y", 1, ("y2",))],
    )
    found = reference_loads(graph, cluster, plan_of(graph, cluster, {"x": "a", "y": "b", "y2": "b", "z": "cpu"}))
    to_b_s, to_cpu_s = (2 + 20 / 10, 1 + 20 / 10) if measured_s is None else (2 * 5.0, 5.0)
    if communication == "blocking":
        once_s = to_b_s if measured_s is None else measured_s
        assert found.device_s == (2 + once_s, 4 + once_s, 9)
        assert found.link_s == (0,) * 6
        assert found.value_s == 9
    else:
        assert found.device_s == (2, 4, 9)
        assert found.link_s == (to_b_s + to_cpu_s, 0, 0, to_b_s, 0, 0)
        assert found.value_s == max(9, to_b_s + to_cpu_s)
    # Everywhere x's output waits for transfers; cpu's begins when the other one has left a.
    lasts_s = (2 + to_b_s + to_cpu_s, to_b_s + 3 + 1, to_cpu_s + 9)
    copies = [math.ceil(seconds / found.value_s) for seconds in lasts_s]
    assert found.held_bytes == (200 + 7 + 20 * copies[0], 1 + 60 + 20 * copies[1], 281 + 20 * copies[2])
    assert found.bytes_moved == 40
    assert not found.feasible  # 301 bytes on the CPU
