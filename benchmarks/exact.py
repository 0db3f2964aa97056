"""How often constraint programming proves the best step time of small random graphs, and how long it takes.

    python benchmarks/exact.py [--seed 0] [--graphs 40] [--ops 30] [--budget-s 60] [--markdown]

Graphs of all generators with a communication-to-computation ratio of 0.1, 0.5 or 1, on three devices, alike or unlike
(times that differ by up to a factor of 3), in turn joined by links of their own or by one switch. Each is solved as
``method="exact"`` does it: from the best quick heuristic, for --budget-s. Proved means a gap of 0 in the result.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

from table import Printer, parser

from env.cluster import UNLIMITED_BYTES, Cluster, Device, Link, both_ways
from graphs.formatting import format_seconds
from graphs.generators import GENERATORS, REFERENCE_BYTES_PER_S
from graphs.opgraph import OpGraph
from placement import Result, optimize

RATIOS = (0.1, 0.5, 1.0)
LATENCY_S = 1e-5
COLUMNS = ["graph", "start", "found", "bound", "gap", "seconds", "fixed sequence"]


def cluster(alike: bool, switch: bool) -> Cluster:
    """Three devices, each pair with a link of its own, or all at one switch."""
    devices = tuple(
        Device(f"d{i}", "a" if alike else "abc"[i], UNLIMITED_BYTES, {"float32": 1e12}, 1e12) for i in range(3)
    )
    names = [device.name for device in devices]
    if switch:
        links = [link for name in names for link in both_ways(name, "switch", REFERENCE_BYTES_PER_S, LATENCY_S)]
    else:
        links = [Link(a, b, REFERENCE_BYTES_PER_S, LATENCY_S) for a, b in itertools.permutations(names, 2)]
    return Cluster("switch" if switch else "mesh", devices, tuple(links))


def instances(count: int, n_ops: int, seed: int) -> Iterator[tuple[str, OpGraph, Cluster]]:
    """Name, graph and cluster; any 12 in a row have every generator with every ratio."""
    for k in range(count):
        name = list(GENERATORS)[k % len(GENERATORS)]
        ratio = RATIOS[k // len(GENERATORS) % len(RATIOS)]
        alike, switch = k // 2 % 2 == 0, k % 3 == 0
        kinds = ("a",) if alike else ("a", "b", "c")
        graph = GENERATORS[name](n_ops, seed + k, ratio, kinds=kinds, heterogeneity=0.0 if alike else 1.0)
        kind, joined = "alike" if alike else "unlike", "switch" if switch else "mesh"
        label = f"{name} {seed + k}, ratio {ratio:g}, {kind}, {joined}"
        yield label, graph, cluster(alike, switch)


def row(label: str, start: Result, found: Result) -> list[str]:
    """One line of the table."""
    assert start.objective_s is not None
    assert found.objective_s is not None
    assert found.gap is not None
    return [
        label,
        format_seconds(start.objective_s),
        format_seconds(found.objective_s),
        format_seconds(found.lower_bound_s),
        "proved" if found.gap == 0 else f"{found.gap:.1e}",
        f"{found.solve_time_s:.1f}",
        "yes" if found.transfer_order is not None else "no",
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--graphs", type=int, default=40, help="graphs to solve (default: %(default)s)")
    options.add_argument("--ops", type=int, default=30, help="ops of each graph (default: %(default)s)")
    options.add_argument("--budget-s", type=float, default=60.0, help="seconds for each graph (default: %(default)s)")
    chosen = options.parse_args()
    out = Printer("Proofs by constraint programming", chosen.markdown)
    rows, times, proved = [], [], 0
    for label, graph, where in instances(chosen.graphs, chosen.ops, chosen.seed):
        start = optimize(graph, where, method="heft", seed=chosen.seed)
        found = optimize(graph, where, method="exact", seed=chosen.seed, budget_s=chosen.budget_s)
        rows.append(row(label, start, found))
        times.append(found.solve_time_s)
        proved += found.gap == 0
    out.table(f"{chosen.ops} ops on 3 devices; start: HEFT.", COLUMNS, rows)
    out.note(
        f"Proved {proved} of {len(rows)}, within {chosen.budget_s:g} s each; mean {statistics.fmean(times):.1f} s, "
        f"median {statistics.median(times):.1f} s, longest {max(times):.1f} s."
    )


if __name__ == "__main__":
    main()
