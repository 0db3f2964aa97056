"""How long HEFT takes once compiled, and what an op costs from 1,000 to 100,000 ops.

    python benchmarks/heft.py [--seed 0] [--repeats 9] [--markdown]

On layered graphs with communication as dear as computing, a new graph for each repeat. What is timed is everything
from the problem to the plan, with the check by the simulator; wall time, on one core.
"""

from __future__ import annotations

import statistics
import time

from table import Printer, parser

from baselines import METHODS
from env.cluster import Cluster, Device, both_ways
from env.problem import Problem
from graphs.generators import layered


def cluster(n_devices: int) -> Cluster:
    """Equal devices, every pair with a link of its own."""
    devices = tuple(Device(f"gpu{i}", "gpu", 2**60, {"float32": 1e13}, 1e12) for i in range(n_devices))
    pairs = [(a.name, b.name) for i, a in enumerate(devices) for b in devices[:i]]
    return Cluster(f"{n_devices}xgpu", devices, tuple(link for a, b in pairs for link in both_ways(a, b, 1e9, 0.0)))


def seconds(n_ops: int, n_devices: int, repeats: int, seed: int) -> list[float]:
    """Of each repeat, on graphs that HEFT has not seen."""
    found = []
    for repeat in range(repeats):
        problem = Problem(layered(n_ops, seed=seed + repeat), cluster(n_devices))
        start = time.perf_counter()
        METHODS["heft"](problem, seed)
        found.append(time.perf_counter() - start)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--repeats", type=int, default=9, help="graphs per row, 3 above 1,000 ops (default: %(default)s)"
    )
    chosen = options.parse_args()
    out = Printer("HEFT", chosen.markdown)
    seconds(100, 4, 2, chosen.seed)  # compiles
    rows = []
    for n_devices in (4, 16):
        for n_ops in (1_000, 10_000, 100_000):
            found = seconds(n_ops, n_devices, chosen.repeats if n_ops <= 1_000 else min(3, chosen.repeats), chosen.seed)
            best, median = min(found), statistics.median(found)
            times = [f"{best * 1e3:,.2f}", f"{median * 1e3:,.2f}", f"{best / n_ops * 1e6:.2f}"]
            rows.append([f"{n_ops:,}", str(n_devices), *times])
    out.table(
        "Milliseconds from problem to plan, compiled", ("ops", "devices", "best", "median", "best, us per op"), rows
    )


if __name__ == "__main__":
    main()
