"""How long HEFT takes once compiled: ``python benchmarks/heft.py [--seed N]``.

Prints the time for 1,000 ops on 4 devices and the cost per op from 1,000 to 100,000 ops on 4 and 16 devices, each the
median of repeated runs on one core, on layered graphs with communication as dear as computing. What is timed is
everything from the problem to the plan, with the check by the simulator.
"""

from __future__ import annotations

import argparse
import statistics
import time

from baselines import METHODS
from env.cluster import Cluster, Device, both_ways
from env.problem import Problem
from graphs.generators import layered


def cluster(n_devices: int) -> Cluster:
    """Equal devices, every pair with a link of its own."""
    devices = tuple(Device(f"gpu{i}", "gpu", 2**60, {"float32": 1e13}, 1e12) for i in range(n_devices))
    pairs = [(a.name, b.name) for i, a in enumerate(devices) for b in devices[:i]]
    return Cluster(f"{n_devices}xgpu", devices, tuple(link for a, b in pairs for link in both_ways(a, b, 1e9, 0.0)))


def seconds(n_ops: int, n_devices: int, runs: int, seed: int) -> float:
    """Median over runs on graphs that HEFT has not seen."""
    found = []
    for run in range(runs):
        problem = Problem(layered(n_ops, seed=seed + run), cluster(n_devices))
        start = time.perf_counter()
        METHODS["heft"](problem, seed)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    seconds(100, 4, 2, seed)  # compiles
    print(f"HEFT, 1,000 ops x 4 devices: {seconds(1_000, 4, 9, seed) * 1e3:.2f} ms")
    print(f"{'ops':>8} {'devices':>8} {'seconds':>9} {'us per op':>10}")
    for n_devices in (4, 16):
        for n_ops in (1_000, 10_000, 100_000):
            elapsed = seconds(n_ops, n_devices, 3, seed)
            print(f"{n_ops:8d} {n_devices:8d} {elapsed:9.4f} {elapsed / n_ops * 1e6:10.2f}")


if __name__ == "__main__":
    main()
