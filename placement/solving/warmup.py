"""A two-op problem that warms up compiled code and networks before timing starts."""

from __future__ import annotations

from env.cluster import Cluster, Device, both_ways
from env.objectives import LATENCY
from env.problem import Problem
from graphs.opgraph import Op, OpGraph, Tensor


def two_ops(objective: str = LATENCY) -> Problem:
    """Two ops in a row on two linked devices."""
    devices = tuple(Device(name, "cpu", 1, {"float32": 1.0}, 1.0) for name in "ab")
    ops = [Op("x", time_s={"*": 1.0}), Op("y", time_s={"*": 1.0})]
    graph = OpGraph.build(ops, [Tensor("x", 0, ("y",))], "two ops")
    return Problem(graph, Cluster("two devices", devices, both_ways("a", "b", 1.0, 0.0)), objective)
