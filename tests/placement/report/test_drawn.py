"""What a page draws of very large problems: every op is in a bar of its device, and the page stays small."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from env.cluster import Cluster, Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Schedule, Simulator
from graphs import generators
from graphs.opgraph import OpGraph
from placement.comparing.methods import compare
from placement.report import content
from placement.report import content as limits
from placement.report.content import Drawn, drawn_of, link_seconds, page_data, shown_schedules, together
from placement.report.page import render_html

GRAPHS = st.builds(generators.random_dag, st.integers(2, 40), seed=st.integers(0, 100))


def _cluster(n: int) -> Cluster:
    """Devices behind one switch: a route has two links."""
    devices = tuple(Device(f"gpu{i}", "gpu", 10**12, {"float32": 1e12}, 1e11, 1e-6) for i in range(n))
    links = tuple(link for d in devices for link in both_ways(d.name, "switch", 1e9, 1e-6))
    return Cluster(f"{n}xgpu", devices, links)


def _schedule(problem: Problem, seed: int) -> Schedule:
    device = np.random.default_rng(seed).integers(0, problem.cluster.n_devices, problem.graph.n_ops)
    return Simulator(problem).schedule(Plan(device))[1]


@given(st.data(), GRAPHS, st.integers(1, 4), st.integers(1, 40))
def test_a_bar_is_of_ops_that_follow_one_another_on_a_device(
    data: st.DataObject, graph: OpGraph, n_devices: int, most: int
) -> None:
    problem = Problem(graph, _cluster(n_devices))
    schedule = _schedule(problem, data.draw(st.integers(0, 100)))
    is_drawn = np.array(data.draw(st.lists(st.booleans(), min_size=n_devices, max_size=n_devices)))
    bar_of, op = together(schedule, is_drawn, most)
    assert len(op) <= most + n_devices
    assert sorted(set(bar_of.tolist())) == list(range(len(op)))
    assert (bar_of[op] == np.arange(len(op))).all()
    spent = schedule.op_end_s - schedule.op_start_s
    rows = []
    for bar in range(len(op)):
        members = np.flatnonzero(bar_of == bar)
        assert set(schedule.device[members].tolist()) == {schedule.device[op[bar]]}
        assert spent[op[bar]] == spent[members].max()
        rows.append((schedule.device[op[bar]], schedule.op_start_s[members].min(), schedule.op_end_s[members].max()))
    for (a, _, end), (b, start, _) in itertools.pairwise(sorted(rows)):
        assert a != b or start >= end
    for device in np.flatnonzero(~is_drawn):
        assert len(set(bar_of[schedule.device == device].tolist())) <= 1


@given(GRAPHS, st.integers(0, 100))
def test_time_of_links_is_that_of_the_transfers_over_them(graph: OpGraph, seed: int) -> None:
    problem = Problem(graph, _cluster(3))
    schedule = _schedule(problem, seed)
    expected = np.zeros(len(problem.cluster.links))
    for k in range(len(schedule.transfer_tensor)):
        route = problem.cluster.routes[int(schedule.transfer_source[k]), int(schedule.transfer_target[k])]
        for link in route.links:
            expected[link] += schedule.transfer_end_s[k] - schedule.transfer_start_s[k]
    assert link_seconds(problem.cluster, schedule) == pytest.approx(expected)


def test_a_small_problem_is_drawn_whole() -> None:
    graph = generators.layered(200, seed=1)
    problem = Problem(graph, _cluster(4))
    schedule = _schedule(problem, 0)
    drawn = Drawn.of(graph, problem.cluster, [schedule], np.ones(4))
    assert drawn.names(graph) == list(graph.op_names)
    assert not drawn.has_others
    assert drawn.left_out(graph, [schedule]) == ""
    start_s, end_s = drawn.spans(schedule)
    assert (start_s == schedule.op_start_s).all()
    assert (end_s == schedule.op_end_s).all()
    assert len(drawn.transfers(schedule)) == len(schedule.transfer_tensor)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_OPS": 100, "MAX_BARS": 60, "MAX_TRANSFERS": 20, "MAX_DEVICES": 3}.items():
        monkeypatch.setattr(limits, name, value)


@pytest.mark.usefixtures("narrow")
def test_what_is_not_drawn_one_by_one_is_still_counted() -> None:
    graph = generators.layered(400, seed=1)
    problem = Problem(graph, _cluster(6))
    comparison = compare(graph, problem.cluster, ["round_robin"])
    shown = shown_schedules(problem, comparison)
    data = page_data(problem, shown, drawn_of(problem, shown), comparison.lower_bound_s)
    (schedule,) = data["schedules"]
    assert [d["name"] for d in data["devices"]][-1] == "3 other devices"
    assert sum(schedule["op_counts"]) == data["n_ops"] == 400
    assert schedule["op_counts"][3] > 0
    assert schedule["n_transfers"] == len(shown[0].schedule.transfer_tensor) > 20
    assert sum(schedule["pair_bytes"]) == graph.tensor_bytes[shown[0].schedule.transfer_tensor].sum()
    assert len(data["ops"]["names"]) <= 60 + 6
    assert any(name.endswith(" more") for name in data["ops"]["names"])
    n_links = len(data["links"])
    assert len(data["routes"]) == 16
    assert all(0 <= link < n_links for route in data["routes"] for link in route)
    page = render_html(comparison)
    assert "for 400 ops" in page
    assert "transfers the 20 that take the longest" in page
    assert "of 6 devices the 3 that compute the most" in page


@pytest.mark.usefixtures("narrow")
def test_where_nothing_fits_ops_are_counted_too() -> None:
    graph = generators.layered(401, seed=1)
    drawn = Drawn.of(graph, _cluster(2), [], np.zeros(2))
    assert drawn.count.sum() == 401
    assert len(drawn.names(graph)) == 60
    assert (drawn.bar_of[drawn.op] == np.arange(60)).all()


def test_a_page_of_a_hundred_thousand_ops_is_small() -> None:
    graph = generators.layered(100_000, seed=0)
    comparison = compare(graph, _cluster(4), ["round_robin"])
    assert len(render_html(comparison).encode()) < 5_000_000


def test_the_best_is_shown_first_of_a_very_large_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "MAX_SCHEDULED_OPS", 50)
    graph = generators.layered(60, seed=0)
    problem = Problem(graph, _cluster(2))
    comparison = compare(graph, problem.cluster, ["single_device", "heft"])
    assert [one.result.method for one in shown_schedules(problem, comparison)] == [comparison.results[0].method]
