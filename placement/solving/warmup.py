"""Problems of a few ops that warm up compiled code and networks before timing starts."""

from __future__ import annotations

from typing import Any

from env.cluster import Cluster, Device, both_ways
from env.objectives import LATENCY
from env.problem import Problem
from graphs.opgraph import Op, OpGraph, Phase, Tensor
from graphs.rows import SplitRow


def two_ops(objective: str = LATENCY) -> Problem:
    """Two ops in a row on two linked devices."""
    devices = tuple(Device(name, "cpu", 1, {"float32": 1.0}, 1.0) for name in "ab")
    ops = [Op("x", time_s={"*": 1.0}), Op("y", time_s={"*": 1.0})]
    graph = OpGraph.build(ops, [Tensor("x", 0, ("y",))], "two ops")
    return Problem(graph, Cluster("two devices", devices, both_ways("a", "b", 1.0, 0.0)), objective)


def small_step() -> tuple[OpGraph, Cluster]:
    """A training step of two layers whose batch of four may be cut, and two linked devices for it."""
    read, back = "batch: S(0,4)->S(0,4)", "batch: S(0,4),S(0,4)->S(0,4)"
    backward = Phase.BACKWARD
    ops = [
        _op("x", "batch: ->S(0,4)"),
        _op("a", read),
        _op("b", read),
        _op("b/backward", read, phase=backward, forward_of="b"),
        _op("a/backward", back, phase=backward, forward_of="a"),
    ]
    reads = {
        "x": ("a",),
        "a": ("b", "a/backward"),
        "b": ("b/backward",),
        "b/backward": ("a/backward",),
        "a/backward": (),
    }
    graph = OpGraph.build(ops, [Tensor(name, 16, readers) for name, readers in reads.items()], "small step")
    devices = tuple(Device(name, "gpu", 1 << 30, {"float32": 1e9}, 1e9) for name in "ab")
    return graph, Cluster("two devices", devices, both_ways("a", "b", 1e9, 1e-6))


def _op(name: str, row: str, **given: Any) -> Op:
    return Op(name, flops=1e6, bytes_moved=16.0, split_rows=(SplitRow.parse(row),), **given)
