"""Clusters on which the formulas of collectives hold, and what a step takes there."""

from __future__ import annotations

from env.cluster import Cluster
from env.device import Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.transforms.derived import Derived


def star(ranks: int, latency_s: float, s_per_byte: float, adding_s_per_byte: float) -> Cluster:
    """Devices on a switch, each on a port of its own that carries both directions at once."""
    memory = 3 / adding_s_per_byte if adding_s_per_byte else 1e30
    devices = [Device(f"gpu{r}", "gpu", 2**60, {"float32": 1e30}, memory) for r in range(ranks)]
    links = [link for r in range(ranks) for link in both_ways(f"gpu{r}", "switch", 1 / s_per_byte, latency_s / 2)]
    return Cluster("star", tuple(devices), tuple(links))


def step_s(derived: Derived, cluster: Cluster) -> float:
    """The simulated step, every op on the device of its part."""
    return Simulator(Problem(derived.graph, cluster)).score(Plan(derived.part)).step_time_s
