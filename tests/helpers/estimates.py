"""List schedulers' own estimates of the schedule, checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from baselines.list_schedulers.estimate import FinishEstimate, Scheduler
from baselines.memory import Allowance
from env.cluster import UNLIMITED_BYTES, Cluster, Device, Link, both_ways
from env.problem import Problem
from env.units import Units


def mesh(*devices: tuple[str, str, int]) -> Cluster:
    """Devices (name, kind, memory bytes), each pair joined both ways by a link of 1 byte/s."""
    made = tuple(Device(name, kind, memory, {"float32": 1.0}, 1.0) for name, kind, memory in devices)
    pairs = [(a.name, b.name) for k, a in enumerate(made) for b in made[:k]]
    return Cluster("mesh", made, tuple(link for a, b in pairs for link in both_ways(a, b, 1.0, 0.0)))


def check(problem: Problem, estimate: FinishEstimate) -> None:
    """Every op waits for the last of its inputs, takes its time, and has its device for itself."""
    graph, device = problem.graph, estimate.device
    own = problem.op_s[np.arange(graph.n_ops), device]
    np.testing.assert_allclose(estimate.end_s, estimate.start_s + own, rtol=1e-12)
    for producer, consumer, tensor in zip(*(part.tolist() for part in graph.edge_list), strict=True):
        arrives = estimate.end_s[producer] + problem.transfer_s(tensor, device[producer], device[consumer])
        assert estimate.start_s[consumer] >= arrives * (1 - 1e-12)
    for d in range(problem.cluster.n_devices):
        mine = np.flatnonzero((device == d) & (own > 0))
        mine = mine[np.argsort(estimate.start_s[mine])]
        assert np.all(estimate.start_s[mine[1:]] >= estimate.end_s[mine[:-1]] * (1 - 1e-12))


def estimated_schedule(problem: Problem, scheduler: Callable[[Units], Scheduler]) -> FinishEstimate:
    """A scheduler's own schedule, without contention and with kept bytes and one op's tensors as the only memory.

    Raises:
        InfeasibleError: a unit finds no room.
    """
    units = Units.of(problem)
    return scheduler(units)(Allowance(units.kept_bytes, units.working_bytes))


def topcuoglu_cluster() -> Cluster:
    """The three fully connected processors of the canonical HEFT example (`graphs.generators.topcuoglu`).

    Its links carry any number of messages at once, as the paper assumes (Topcuoglu, Hariri, Wu, IEEE TPDS 13(3), 2002,
    section 2, doi:10.1109/71.993206).
    """
    names = ("P1", "P2", "P3")
    return Cluster(
        name="topcuoglu",
        devices=tuple(Device(name, "cpu", UNLIMITED_BYTES, {"float32": 1.0}, 1.0) for name in names),
        links=tuple(Link(a, b, 1.0, exclusive=False) for a in names for b in names if a != b),
        summary="three processors without contention",
        source="Topcuoglu, Hariri, Wu, Performance-effective and low-complexity task scheduling, IEEE TPDS 2002",
    )
