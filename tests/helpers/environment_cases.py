"""What the tests of the environments share: problems small enough to work out by hand, and a way to make them."""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import ArrayLike

import placement  # noqa: F401  (registers the environments)
from env.cluster import Cluster, Device, both_ways
from env.gym.base import PlacementEnv
from env.problem import Problem
from env.simulation.simulator import BatchScores, Simulator
from graphs.opgraph import Op, OpGraph, Tensor

GROUP, SEQUENTIAL, IMPROVE = "placement/Group-v0", "placement/Sequential-v0", "placement/Improve-v0"
IDS = (GROUP, SEQUENTIAL, IMPROVE)
FOUR = Cluster.preset("4xV100-pcie")


def make(name: str, graph: Any, cluster: Any = FOUR, **options: Any) -> PlacementEnv:
    """The bare environment of an id."""
    env = gymnasium.make(name, graph=graph, cluster=cluster, **options).unwrapped
    assert isinstance(env, PlacementEnv)
    return env


def small_cluster(memory_bytes: int = 100) -> Cluster:
    """A CPU of 1 GFLOP/s and two GPUs of 2 GFLOP/s with this memory, joined by direct links of 10 ms."""
    devices = (
        Device("cpu0", "cpu", 10**6, {"float32": 1e9}, 1e9),
        Device("gpu0", "gpu", memory_bytes, {"float32": 2e9}, 1e9),
        Device("gpu1", "gpu", memory_bytes, {"float32": 2e9}, 1e9),
    )
    names = [device.name for device in devices]
    links = [link for a, b in itertools.combinations(names, 2) for link in both_ways(a, b, 1e9, 0.01)]
    return Cluster("small", devices, tuple(links))


def small_graph(kept_bytes: int = 0) -> OpGraph:
    """``load`` (CPU only, 1 s there), then ``a`` and ``b`` (one device, 1 s in all on a GPU), then ``c`` (1 s)."""
    return OpGraph.build(
        [
            Op("load", flops=1e9, pins=("cpu",)),
            Op("a", flops=1e9, kept_bytes=kept_bytes, colocation="pair"),
            Op("b", flops=1e9, kept_bytes=kept_bytes, colocation="pair"),
            Op("c", flops=2e9, kept_bytes=kept_bytes),
        ],
        [Tensor("load", 8, ("a",)), Tensor("a", 4, ("b",)), Tensor("b", 2, ("c",))],
        "small",
    )


class CountingScorer:
    """The simulator, and how often it was asked for how many placements."""

    def __init__(self, problem: Problem) -> None:
        self.simulator = Simulator(problem)
        self.asked: list[int] = []

    def batch(self, devices: ArrayLike, *, orders: ArrayLike | None = None) -> BatchScores:
        self.asked.append(len(np.asarray(devices)))
        return self.simulator.batch(devices, orders=orders)


class Counting:
    """A factory of scorers that remembers what it made."""

    def __init__(self) -> None:
        self.made: list[CountingScorer] = []

    def __call__(self, problem: Problem) -> CountingScorer:
        self.made.append(CountingScorer(problem))
        return self.made[-1]

    @property
    def asked(self) -> list[int]:
        return [count for scorer in self.made for count in scorer.asked]
