"""`Problem` and `Units`: derived arrays against their definitions, one op, pair or unit at a time."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import problems

from env.cluster import Cluster, Device, both_ways
from env.problem import Problem
from env.units import Units
from graphs.opgraph import Op, OpGraph, Tensor


@given(st.data())
def test_hops_and_least_times_follow_their_definitions(data: st.DataObject) -> None:
    problem = data.draw(problems())
    n = problem.cluster.n_devices
    for a in range(n):
        for b in range(n):
            assert problem.hops[a, b] == (0 if a == b else len(problem.cluster.routes[a, b].links))
    for i, row in enumerate(problem.op_s):
        assert problem.fastest_s[i] == min(s for s, allowed in zip(row, problem.allowed[i], strict=True) if allowed)


@given(st.data())
def test_units_are_colocation_groups_and_free_ops(data: st.DataObject) -> None:
    problem = data.draw(problems())
    group = problem.graph.colocation
    for i in range(problem.graph.n_ops):
        together = np.flatnonzero((group == group[i]) & (group[i] >= 0)).tolist() or [i]
        assert problem.units[problem.unit_of[i]].tolist() == together
    assert problem.n_units == len(problem.units) == len(set(problem.unit_of.tolist()))


@given(st.data())
def test_what_units_amount_to(data: st.DataObject) -> None:
    problem = data.draw(problems())
    n = problem.graph.n_ops
    # Any division into sets will do, as long as none is empty.
    _, unit_of = np.unique(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)), return_inverse=True)
    units = Units(problem, unit_of.astype(np.int64)) if data.draw(st.booleans()) else Units.of(problem)
    for u in range(units.n_units):
        ops = np.flatnonzero(units.unit_of == u)
        assert units.members[units.ptr[u] : units.ptr[u + 1]].tolist() == ops.tolist()
        assert (units.size[u], units.first_op[u]) == (len(ops), ops[0])
        assert units.label[u] == problem.graph.op_names[ops[0]]
        np.testing.assert_allclose(units.op_s[u], problem.op_s[ops].sum(axis=0), rtol=1e-12)
        assert units.allowed[u].tolist() == problem.allowed[ops].all(axis=0).tolist()
        assert units.kept_bytes[u] == problem.graph.kept_bytes[ops].sum()
        assert units.working_bytes[u] == problem.working_bytes[ops].max()


def test_an_op_suits_devices_with_room_for_it_and_all_its_unit_keeps() -> None:
    ops = [
        Op("a", time_s={"*": 1.0}, kept_bytes=60, colocation="pair"),
        Op("b", time_s={"*": 1.0}, workspace_bytes=30, colocation="pair"),
        Op("c", time_s={"*": 0.0}, workspace_bytes=500),
        Op("huge", time_s={"*": 1.0}, kept_bytes=1000),
    ]
    graph = OpGraph.build(ops, [Tensor("a", 5, ("b", "c"))])
    devices = tuple(Device(name, "gpu", size, {"float32": 1.0}, 1.0) for name, size in (("small", 94), ("large", 95)))
    problem = Problem(graph, Cluster("two", devices, both_ways("small", "large", 1.0, 0.0)))
    assert problem.working_bytes.tolist() == [5, 35, 0, 0]  # what takes no time may need no memory
    assert problem.suits.tolist() == [[False, True], [False, True], [True, True], [True, True]]


def test_compute_devices_are_those_that_are_no_cpus() -> None:
    assert Cluster.preset("2xK40-pcie").compute_devices.tolist() == [0, 1]
    assert Cluster.preset("cpu-gpu").compute_devices.tolist() == [1]
    only = Cluster("host", (Device("cpu0", "cpu", 1, {"float32": 1.0}, 1.0),))
    assert only.compute_devices.tolist() == [0]


@pytest.mark.parametrize("package", ["env", "baselines"])
def test_every_name_of_a_front_door_resolves(package: str) -> None:
    door = importlib.import_module(package)
    for name in door.__all__:
        assert getattr(door, name) is not None
    assert set(door.__all__) <= set(dir(door))
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'; it has "):
        _ = door.nothing
