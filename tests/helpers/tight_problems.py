"""Small random problems whose memory is so tight that heuristics often find nothing, and all their placements."""

from __future__ import annotations

import itertools
import math

import numpy as np

from env.cluster import Cluster, Device, Link
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from env.simulation.simulator import Simulator
from graphs.opgraph import Op, OpGraph, Tensor


def tight_graph(seed: int, n_ops: int = 7, n_devices: int = 2) -> tuple[OpGraph, Cluster]:
    """Chains and branches of ops that keep a lot, on devices with hardly more memory than that in all."""
    rng = np.random.default_rng(seed)
    kept, workspace = rng.integers(0, 30, n_ops), rng.integers(0, 8, n_ops)
    ops = [
        Op(f"o{i}", time_s={"*": float(rng.integers(1, 9))}, kept_bytes=int(k), workspace_bytes=int(w))
        for i, (k, w) in enumerate(zip(kept, workspace, strict=True))
    ]
    tensors = []
    for i in range(n_ops - 1):
        readers = sorted(set(rng.integers(i + 1, n_ops, int(rng.integers(1, 3))).tolist()))
        tensors.append(Tensor(f"o{i}", int(rng.integers(1, 12)), tuple(f"o{r}" for r in readers)))
    share = kept.sum() / n_devices * 1.05 + rng.integers(5, 20)
    devices = tuple(
        Device(f"d{i}", "gpu", int(share * rng.uniform(0.8, 1.2)), {"float32": 1.0}, 1.0) for i in range(n_devices)
    )
    pairs = itertools.permutations([device.name for device in devices], 2)
    links = tuple(Link(a, b, float(rng.uniform(2, 8)), 0.1) for a, b in pairs)
    return OpGraph.build(ops, tensors, f"tight{seed}"), Cluster("tight", devices, links)


def planted(seed: int, n_ops: int, n_devices: int) -> Problem:
    """A problem in which a random placement fits to the byte."""
    graph, cluster = tight_graph(seed, n_ops, n_devices)
    device = np.random.default_rng(seed).integers(n_devices, size=n_ops)
    peak_bytes = Simulator(Problem(graph, cluster)).score(Plan(device)).peak_bytes.tolist()
    devices = tuple(
        Device(d.name, d.kind, size, d.peak_flops, 1.0) for d, size in zip(cluster.devices, peak_bytes, strict=True)
    )
    return Problem(graph, Cluster("planted", devices, cluster.links))


def best_of_all_s(problem: Problem) -> float:
    """The best value of all placements under the default priority, infinite where none fits."""
    scorer, choices = Scorer(problem), range(problem.cluster.n_devices)
    placements = itertools.product(choices, repeat=problem.graph.n_ops)
    return min((scorer.value(Plan(device)) for device in placements), default=math.inf)
