"""Virtual time: seconds that can be worked out by hand, the same run for a seed, and memory that does not grow."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from fitted_models import classifier
from hypothesis import given
from hypothesis import strategies as st

from env.cluster import Cluster, Device, MeasuredCollective, both_ways
from graphs.capture import capture
from graphs.errors import FitError, StrategyError, UnknownNameError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.fitting import log as fit_log
from placement.fitting.log import FitRun, Stop
from placement.fitting.participants import AllGather, AllReduce, Compute, Participant, Post, Receive, Updated
from placement.fitting.task import fit_task_of
from placement.fitting.virtual.engine import VirtualEngine
from placement.fitting.virtual.speeds import Assignment, ExchangeTimes, Speeds, Stragglers, placed_step, speeds_of

BANDWIDTH, LATENCY_S, STEP_S = 1e6, 0.01, 1.0


def star(count: int, *extra: Device) -> Cluster:
    devices = [Device(f"gpu{k}", "gpu", 2**30, {"float32": 1e9}, 1e9) for k in range(count)]
    names = [device.name for device in (*devices, *extra)]
    links = [link for name in names for link in both_ways(name, "switch", BANDWIDTH, LATENCY_S)]
    return Cluster("star", (*devices, *extra), tuple(links))


CPU = Device("host", "cpu", 2**30, {"float32": 1e8}, 1e8)


def run_of(
    participants: list[Participant],
    cluster: Cluster,
    stop: Stop | None = None,
    workers: int = 2,
    exchanges: ExchangeTimes | None = None,
) -> FitRun:
    model, data = classifier()
    device = range(cluster.n_devices)
    speeds = Speeds(device, lambda worker, step, samples: STEP_S * (1 + worker), lambda _: 0.0, exchanges)
    task = fit_task_of(model, data, batch=4)
    return VirtualEngine(task, cluster, workers, participants, speeds).run("scripted", stop or Stop(updates=3, every=1))


def pushing(weights: torch.Tensor, size: int) -> Participant:
    """A worker that sends a gradient of so many entries to participant 2, and waits for a version."""
    version = 0
    while True:
        yield Compute(weights, version)
        yield Post(2, "push", (torch.zeros(size),), version)
        version = (yield Receive("fetch")).version


def serving(weights: torch.Tensor) -> Participant:
    for version in itertools.count(1):
        message = yield Receive("push")
        yield Updated(version, version - 1 - message.version, weights)
        yield Post(message.sender, "fetch", version=version)


def test_a_scripted_run_takes_the_time_that_can_be_worked_out() -> None:
    size = 250  # 1000 bytes over two links one after the other, as one route: 2 latencies and 1 ms
    weights = fit_task_of(*classifier(), batch=4).weights()
    found = run_of([pushing(weights, size), pushing(weights, size), serving(weights)], star(3))
    there = 2 * LATENCY_S + 4 * size / BANDWIDTH
    back = 2 * LATENCY_S
    # Worker 0 takes 1 s, worker 1 takes 2 s: it pushes once while worker 0 pushes twice.
    assert [point.seconds for point in found.points] == pytest.approx(
        [0.0, STEP_S + there, 2 * STEP_S + there, 2 * (STEP_S + there) + back]
    )
    assert [(line.worker, line.step, line.version) for line in found.trace] == [
        *[(0, 0, 0), (1, 0, 0), (0, 1, 1), (1, 1, 2)],
    ]
    assert found.bytes == 3 * 4 * size
    assert found.staleness == pytest.approx((0 + 1 + 1) / 3)
    assert (found.updates, found.reached, found.note) == (3, False, "")


def meeting(request: type[AllReduce] | type[AllGather], number: int, group: tuple[int, ...], size: int) -> Participant:
    yield request((torch.ones(size),), group)
    yield Updated(1, weights=fit_task_of(*classifier(), batch=4).weights() if number == group[0] else None)


@pytest.mark.parametrize(("request_type", "rounds"), [(AllReduce, 2), (AllGather, 1)])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_collectives_go_around_a_ring(request_type: type, rounds: int, workers: int) -> None:
    group, size = tuple(range(workers)), 300
    found = run_of([meeting(request_type, n, group, size) for n in group], star(workers), Stop(updates=1), workers)
    piece = 4 * size // workers if request_type is AllReduce else 4 * size
    turns = rounds * (workers - 1)
    assert found.seconds == pytest.approx(turns * (2 * LATENCY_S + piece / BANDWIDTH))
    assert found.bytes == turns * workers * piece


def test_measured_collectives_stand_in_place_of_the_ring() -> None:
    measured = tuple(MeasuredCollective(kind, 2, (1200, 2400), (5.0, 7.0)) for kind in ("all_reduce", "all_gather"))
    cluster = replace(star(2), collectives=measured)
    for request_type, expected in ((AllReduce, 5.0), (AllGather, 7.0)):  # of 1200 bytes, and of twice that
        plain = run_of([meeting(request_type, n, (0, 1), 300) for n in (0, 1)], star(2), Stop(updates=1))
        found = run_of([meeting(request_type, n, (0, 1), 300) for n in (0, 1)], cluster, Stop(updates=1))
        assert found.seconds == expected
        assert found.bytes == plain.bytes


class Measured:
    """Exchanges that take round figures."""

    def message_s(self, size: int, ends: tuple[int, int], computing: Collection[int]) -> tuple[float, float]:
        return 10.0, 100.0 + size

    def collective_s(self, kind: str, members: int, size: int) -> float:
        return {"all_reduce": 1000.0, "all_gather": 2000.0}[kind] + members + size


@pytest.mark.parametrize(("request_type", "expected"), [(AllReduce, 1000.0 + 2 + 400), (AllGather, 2000.0 + 2 + 400)])
def test_measured_exchanges_stand_in_place_of_links(request_type: type, expected: float) -> None:
    members: list[Participant] = [meeting(request_type, n, (0, 1), 100) for n in (0, 1)]
    plain = run_of([meeting(request_type, n, (0, 1), 100) for n in (0, 1)], star(2), Stop(updates=1))
    found = run_of(members, star(2), Stop(updates=1), exchanges=Measured())
    assert expected <= found.seconds < expected + 5  # what participants compute by themselves comes on top
    assert found.bytes == plain.bytes


def test_a_measured_message_holds_up_its_sender_and_takes_its_way() -> None:
    weights = fit_task_of(*classifier(), batch=4).weights()
    workers = [pushing(weights, 1), pushing(weights, 1)]
    found = run_of([*workers, serving(weights)], star(3), Stop(updates=3, every=1), exchanges=Measured())
    first_s = STEP_S + 104
    # Worker 1 begins its step with worker 0, takes 2 s; the server answers each in 10 s of its own and 100 on the way.
    times = [point.seconds for point in found.points]
    assert times == pytest.approx([0.0, first_s, first_s + 10, first_s + 100 + STEP_S + 104], abs=5)
    assert times[2] > first_s + 9.9


def test_computing_of_a_participant_takes_its_time_where_exchanges_are_measured() -> None:
    def busy() -> Participant:
        end_s = time.thread_time() + 0.2
        while time.thread_time() < end_s:
            pass
        yield Updated(1, weights=fit_task_of(*classifier(), batch=4).weights())

    assert run_of([busy()], star(2), Stop(updates=1), workers=1).seconds == 0.0
    assert run_of([busy()], star(2), Stop(updates=1), workers=1, exchanges=Measured()).seconds >= 0.2


def test_a_point_of_the_curve_has_the_version_that_was_told() -> None:
    log = fit_log.FitLog(Stop(updates=100, every=10), lambda _: 1.0, fit_log.tell_no_one)
    log.updated(Updated(13), 1.0, 0)  # another worker is ahead
    log.updated(Updated(10, weights=torch.zeros(1)), 2.0, 0)
    assert [point.updates for point in log.run("m", 2.0, 0).points] == [10]
    log.updated(Updated(116), 3.0, 0)
    assert not log.is_over
    log.updated(Updated(100, weights=torch.zeros(1)), 4.0, 0)
    assert (log.run("m", 4.0, 0).updates, log.is_over, log.note) == (100, True, "")


def test_a_run_that_waits_for_ever_ends_and_says_so() -> None:
    def waiting() -> Iterator[Receive]:
        yield Receive()

    assert "waited" in run_of([waiting(), waiting()], star(2)).note  # type: ignore[list-item]


def test_seconds_end_a_run() -> None:
    weights = fit_task_of(*classifier(), batch=4).weights()
    found = run_of([pushing(weights, 1), pushing(weights, 1), serving(weights)], star(3), Stop(seconds=1.5))
    assert (found.seconds, found.updates, found.reached) == (1.5, 1, False)


def test_curve_and_trace_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_log, "MOST_POINTS", 10)
    monkeypatch.setattr(fit_log, "MOST_LINES", 7)
    log = fit_log.FitLog(Stop(updates=1000, every=1), lambda _: 1.0, fit_log.tell_no_one)
    for version in range(1, 1001):
        log.read(0, version, version)
        log.updated(Updated(version, 2.0, torch.zeros(1)), float(version), version)
    found = log.run("m", 1000.0, 1000)
    assert len(found.trace) == 7
    assert len(found.points) <= 11
    assert (found.points[0].updates, found.points[-1].updates, found.staleness) == (1, 1000, 2.0)
    assert log.is_over


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_a_run_as_diverged(loss: float) -> None:
    log = fit_log.FitLog(Stop(loss=0.5), lambda _: loss, fit_log.tell_no_one)
    log.evaluate(torch.zeros(1), 1, 1.0, 1)
    assert log.is_over
    assert "diverged" in log.note
    begun = fit_log.FitLog(Stop(loss=0.5), lambda _: loss, fit_log.tell_no_one)
    begun.evaluate(torch.zeros(1), 0, 0.0, 0)
    assert "before the first update; look for NaN" in begun.note
    assert not log.run("m", 1.0, 1).reached


# -- stragglers -------------------------------------------------------------------------------------------------


@given(st.sampled_from(["none", "exponential:mean=0.5", "pareto:shape=1.5", "slow:worker=1:factor=3"]), st.integers(0))
def test_stragglers_do_not_depend_on_who_asks_first(text: str, seed: int) -> None:
    asked = [(worker, step) for worker in range(3) for step in range(4)]
    first, second = Stragglers.parse(text, seed), Stragglers.parse(text, seed)
    there = {each: first.factor(*each) for each in asked}
    assert there == {each: second.factor(*each) for each in reversed(asked)}
    assert min(there.values()) >= 1


def test_stragglers_have_the_distribution_that_they_state() -> None:
    def drawn(text: str) -> np.ndarray:
        delays = Stragglers.parse(text, 0)
        return np.array([delays.factor(0, step) for step in range(4000)])

    assert drawn("exponential:mean=0.5").mean() == pytest.approx(1.5, abs=0.05)
    assert (drawn("pareto:shape=2") > 4).mean() == pytest.approx(1 / 16, abs=0.02)
    slow = Stragglers.parse("slow:worker=1:factor=3", 0)
    assert [slow.factor(worker, 5) for worker in range(3)] == [1, 3, 1]


@pytest.mark.parametrize("text", ["exponential:mean=-1", "pareto:shape=x", "slow:who=1", "slow:factor=0.5", "none:a=1"])
def test_stragglers_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(FitError, match="expected"):
        Stragglers.parse(text, 0)
    with pytest.raises(UnknownNameError, match="'pareto'"):
        Stragglers.parse("parto", 0)


# -- where participants are, and how fast -----------------------------------------------------------------------


def test_servers_are_on_the_host_or_with_the_workers_or_where_they_say() -> None:
    assert Assignment.of(star(3), 3, 1, [None, None]).device == (0, 1, 2, 0, 1)
    assert Assignment.of(star(3, CPU), 2, 1, [None, None, "gpu2"]).device == (0, 1, 3, 3, 2)
    assert Assignment.of(star(5), 2, 2, []).workers == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("workers", "each", "servers", "said"),
    [
        (4, 1, (), "4 workers were asked for, and cluster 'star' has 3 devices"),
        (0, 1, (), "give 1 to 3"),
        (2, 2, (), "2 workers on 2 devices each"),
        (1, 4, (), "a worker takes 4 devices"),
        (1, 1, ("gpu9",), "no such device; take one of gpu0, gpu1, gpu2"),
    ],
)
def test_what_the_cluster_has_not_is_said(workers: int, each: int, servers: tuple[str, ...], said: str) -> None:
    with pytest.raises(FitError, match=said):
        Assignment.of(star(3), workers, each, servers)


@cache
def captured(samples: int) -> OpGraph:
    model, data = classifier()
    return capture(model, tuple(each[:samples] for each in data), train=True, optimizer="sgd")


def test_a_step_takes_what_its_ops_take_on_the_workers_own_device() -> None:
    slower = Device("gpu9", "gpu", 2**30, {"float32": 5e8}, 5e8)
    cluster = replace(star(1, slower, CPU))
    assignment = Assignment.of(cluster, 2, 1, [None])
    speeds = speeds_of(captured, 20, cluster, assignment, Strategy.parse("none"), Stragglers.parse("slow:factor=3", 0))
    graph = captured(20)
    ops_s = np.maximum(graph.flops / 1e9, graph.bytes_moved / 1e9)
    update_s = ops_s[graph.phase == 2].sum()
    assert speeds.step_s(0, 0, 20) == pytest.approx(3 * (ops_s.sum() - update_s))
    assert speeds.step_s(1, 0, 20) == pytest.approx(2 * (ops_s.sum() - update_s))
    assert [speeds.update_s(n) for n in range(3)] == pytest.approx([update_s, 2 * update_s, 10 * update_s])
    assert speeds.step_s(1, 0, 40) > speeds.step_s(1, 0, 20)


def test_a_worker_may_be_a_whole_strategy() -> None:
    one = placed_step(captured(20), star(4), (0,), Strategy.parse("none"))
    two = placed_step(captured(20), star(4), (2, 3), Strategy.parse("dp2"))
    slow_links = LATENCY_S + two.gradient_s + two.update_s
    assert two.gradient_s + two.update_s > LATENCY_S  # gradients go over the links within a worker
    assert one.gradient_s + one.update_s < slow_links
    with pytest.raises(StrategyError, match="devices"):
        placed_step(captured(20), star(4), (0,), Strategy.parse("dp2"))


def test_a_step_that_does_not_fit_is_refused() -> None:
    small = Device("gpu0", "gpu", 1000, {"float32": 1e9}, 1e9)
    with pytest.raises(FitError, match="does not fit in the memory of gpu0"):
        placed_step(captured(20), Cluster("small", (small,)), (0,), Strategy.parse("none"))
