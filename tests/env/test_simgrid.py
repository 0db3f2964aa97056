"""SimGrid, an independent simulator, as oracle for whole schedules.

H. Casanova et al., "Versatile, scalable, and accurate simulation of distributed applications and platforms", J. of
Parallel and Distributed Computing 74 (2014), doi:10.1016/j.jpdc.2014.06.008.

Skipped where no Python with the ``simgrid`` module is found: this one, or Debian's (package python3-simgrid).
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from env.cluster import Cluster, Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Schedule, Simulator
from graphs.opgraph import IntArray, Op, OpGraph, Tensor

ORACLE = Path(__file__).parents[1] / "workers" / "simgrid_oracle.py"


@cache
def interpreter() -> str | None:
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            if subprocess.run([python, "-c", "import simgrid"], capture_output=True, timeout=60).returncode == 0:
                return python
        except OSError:
            continue
    return None


def ask_simgrid(instances: list[dict[str, Any]]) -> list[tuple[list[float], list[float]]]:
    """Start and end of every op of every instance, in seconds."""
    python = interpreter()
    if python is None:
        pytest.skip("no Python with the simgrid module; on Debian: apt-get install python3-simgrid")
    done = subprocess.run(
        [python, str(ORACLE)], input=json.dumps(instances), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [(start_s, end_s) for start_s, end_s in json.loads(done.stdout)]


def instance(problem: Problem, placement: IntArray, real_network: bool) -> dict[str, Any]:
    graph, cluster = problem.graph, problem.cluster
    sends: list[list[Any]] = [[] for _ in range(graph.n_ops)]
    for t, producer in enumerate(graph.tensor_producer.tolist()):
        readers, home = graph.consumers_of(t).tolist(), int(placement[producer])
        for target in dict.fromkeys(int(placement[c]) for c in readers):
            there = [c for c in readers if placement[c] == target]
            if target == home:
                sends[producer].append([there, None, [], 0.0, 0])
            else:
                links = list(cluster.routes[home, target].links)
                seconds, size = problem.transfer_s(t, home, target), int(graph.tensor_bytes[t])
                sends[producer].append([there, target, links, seconds, size])
    n_inputs = np.diff(graph.inputs[0]).tolist()
    found: dict[str, Any] = {
        "n_devices": cluster.n_devices,
        "n_links": len(cluster.links),
        "ops": [[int(d), float(problem.op_s[i, d]), n_inputs[i]] for i, d in enumerate(placement)],
        "sends": sends,
    }
    if real_network:
        found["pairs"] = [
            [a, b, route.bandwidth_bytes_per_s, route.latency_s] for (a, b), route in cluster.routes.items()
        ]
    return found


def random_cluster(rng: np.random.Generator, shape: str) -> Cluster:
    """Four or five devices with direct links, around one switch, or around two."""
    n = int(rng.integers(4, 6))
    devices = tuple(Device(f"d{i}", "gpu", 10**9, {"float32": 1.0}, 1.0) for i in range(n))
    if shape == "mesh":
        pairs = [(f"d{a}", f"d{b}") for a in range(n) for b in range(a)]
    else:
        switches = ["left", "right"] if shape == "two switches" else ["left", "left"]
        pairs = [(f"d{i}", switches[i % 2]) for i in range(n)] + [("left", "right")] * (shape == "two switches")
    links = [
        link for a, b in pairs for link in both_ways(a, b, float(rng.uniform(1, 9)) * 1e6, float(rng.uniform(0.1, 1)))
    ]
    return Cluster(shape, devices, tuple(links))


def random_graph(rng: np.random.Generator, n: int) -> OpGraph:
    """Times are real numbers, so that no two independent events coincide: SimGrid breaks ties in its own way."""
    ops = [Op(f"op{i}", time_s={"*": float(rng.uniform(0.5, 5))}) for i in range(n)]
    tensors = [
        Tensor(f"op{i}", int(rng.integers(1, 20_000_000)), tuple(f"op{j}" for j in sorted(later)))
        for i in range(n - 1)
        if (later := set(rng.integers(i + 1, min(n, i + 12), rng.integers(0, 4)).tolist()))
    ]
    return OpGraph.build(ops, tensors)


def compare(cases: list[tuple[Problem, IntArray]], real_network: bool) -> list[Schedule]:
    """Check start and end of every op against SimGrid."""
    schedules = [Simulator(problem).schedule(Plan(placement), "fifo")[1] for problem, placement in cases]
    answers = ask_simgrid([instance(*case, real_network) for case in cases])
    for schedule, (start_s, end_s) in zip(schedules, answers, strict=True):
        np.testing.assert_allclose(schedule.op_start_s, start_s, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(schedule.op_end_s, end_s, rtol=1e-9, atol=1e-9)
    return schedules


def test_simgrid_agrees_on_links_that_serve_first_come_first_served() -> None:
    rng = np.random.default_rng(0)
    cases = []
    for shape in ("mesh", "one switch", "two switches"):
        for _ in range(8):
            problem = Problem(random_graph(rng, 40), random_cluster(rng, shape))
            cases.append((problem, rng.integers(0, problem.cluster.n_devices, 40)))
    schedules = compare(cases, real_network=False)
    waited = [
        (schedule.transfer_start_s > schedule.op_end_s[problem.graph.tensor_producer[schedule.transfer_tensor]]).sum()
        for schedule, (problem, _) in zip(schedules, cases, strict=True)
    ]
    assert sum(waited) > 5 * len(cases)  # the test is about queues, so there must be some


def test_simgrid_agrees_on_links_without_contention() -> None:
    # At most one tensor per ordered pair of devices on a mesh: SimGrid's own network model, which shares links, never
    # has to share one.
    rng = np.random.default_rng(1)
    cases = []
    for _ in range(12):
        cluster = random_cluster(rng, "mesh")
        placement = rng.integers(0, cluster.n_devices, 40)
        ops, tensors = random_graph(rng, 40).records()
        used: set[tuple[int, int]] = set()
        kept = []
        for tensor in tensors:
            home = int(placement[int(tensor.producer[2:])])
            readers = {name: int(placement[int(name[2:])]) for name in tensor.consumers}
            free = {d for d in readers.values() if d == home or (home, d) not in used}
            used |= {(home, d) for d in free}
            kept.append(Tensor(tensor.producer, tensor.bytes, tuple(c for c, d in readers.items() if d in free)))
        cases.append((Problem(OpGraph.build(ops, kept), cluster), placement))
    schedules = compare(cases, real_network=True)
    assert all(len(schedule.transfer_tensor) > 5 for schedule in schedules)
