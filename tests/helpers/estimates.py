"""List schedulers' own estimates of the schedule, checked."""

from __future__ import annotations

import numpy as np

from baselines.list_schedulers.estimate import FinishEstimate
from env.cluster import Cluster, Device, both_ways
from env.problem import Problem


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
