"""Derived graphs of one collective, and clusters on which its formula holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from env.cluster import Cluster
from env.device import Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.opgraph import OpGraph
from graphs.records import Op, Tensor
from graphs.transforms.derived import Collective, Derived


def one_collective(kind: str, ranks: int, size_bytes: int, *, in_place: bool = False) -> Derived:
    """Rank r makes a tensor, and its part of a collective reads those of all ranks; both run on device r."""
    given = size_bytes // ranks if kind in ("all_gather", "all_to_all") else size_bytes
    ops = [Op(f"make{r}", kernels=0) for r in range(ranks)]
    ops += [Op(f"use{r}", kind=kind, kernels=0) for r in range(ranks)]
    readers = tuple(f"use{r}" for r in range(ranks))
    tensors = [Tensor(f"make{r}", given, readers, in_place=in_place) for r in range(ranks)]
    tensors += [Tensor(f"use{r}", size_bytes, in_place=in_place) for r in range(ranks)]
    part = np.tile(np.arange(ranks), 2)
    collective = Collective(kind, "dp", tuple(range(ranks, 2 * ranks)), size_bytes)
    return replace(Derived.identity(OpGraph.build(ops, tensors)), part=part, collectives=(collective,))


def star(ranks: int, latency_s: float, s_per_byte: float, adding_s_per_byte: float) -> Cluster:
    """Devices on a switch, each on a port of its own that carries both directions at once."""
    memory = 3 / adding_s_per_byte if adding_s_per_byte else 1e30
    devices = [Device(f"gpu{r}", "gpu", 2**60, {"float32": 1e30}, memory) for r in range(ranks)]
    links = [link for r in range(ranks) for link in both_ways(f"gpu{r}", "switch", 1 / s_per_byte, latency_s / 2)]
    return Cluster("star", tuple(devices), tuple(links))


def step_s(derived: Derived, cluster: Cluster) -> float:
    """The simulated step, every op on the device of its part."""
    return Simulator(Problem(derived.graph, cluster)).score(Plan(derived.part)).step_time_s
