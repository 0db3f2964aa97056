"""Very large graphs: what does each step take, in time and memory?

    python benchmarks/scale.py [--ops 10000,100000,1000000] [--devices 64] [--improve-s 60] [--methods heft,m_topo]
        [--seed 0] [--markdown]

A random layered graph of so many ops is generated and, on hosts of eight H100, placed by list schedulers, coarsened,
improved by local search for a given time, scored again by `placement.verify`, and reported. Each size is a process of
its own, which compiled its code on a small graph first. Memory is the most that the process had so far (resident),
compiled code and torch included. Methods that take longer than --most-s at one size are left out at larger ones, and
say so. `placement.verify` simulates a second time in plain Python.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from table import Printer, parser

import placement
from env.cluster import Cluster
from env.resizing import resized
from graphs.formatting import format_bytes, format_seconds
from graphs.generators import layered
from graphs.opgraph import OpGraph
from graphs.transforms.coarsen import to_size
from placement.report import write_html

HOSTS = "2x8xH100-ib"
CCR = 0.1  # time of transfers to that of ops
GROUPS = 10_000  # ops after coarsening
WARM_OPS = 1_000


@dataclass(frozen=True)
class Step:
    """What one step took.

    Attributes:
        name: of the step.
        seconds: by the clock.
        rss: bytes that the process had at most so far.
        found: what there is to say about its outcome.
    """

    name: str
    seconds: float
    rss: int
    found: str


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ops", default="10000,100000,1000000", help="default: %(default)s")
    options.add_argument("--devices", type=int, default=64, help="default: %(default)s")
    options.add_argument("--improve-s", type=float, default=60.0, help="seconds of local search (default: %(default)s)")
    options.add_argument("--methods", default="m_topo,heft,cpop", help="default: %(default)s")
    options.add_argument("--most-s", type=float, default=300.0, help="of a method (default: %(default)s)")
    given = options.parse_args()
    show = Printer("Very large graphs", given.markdown)
    methods = given.methods.split(",")
    for n in [int(word) for word in given.ops.split(",")]:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            steps = pool.submit(_steps, n, methods, given).result()
        lines = [[s.name, format_seconds(s.seconds), format_bytes(s.rss), s.found] for s in steps]
        show.table(f"{n:,} ops, {given.devices} devices", ["step", "time", "memory", "outcome"], lines)
        slow = [step.name for step in steps if step.name in methods and step.seconds > given.most_s]
        if slow:
            show.note(f"Left out from here on, for their time: {', '.join(slow)}.")
            methods = [name for name in methods if name not in slow]


def _steps(n: int, methods: list[str], given: argparse.Namespace) -> list[Step]:
    cluster, seed = resized(Cluster.preset(HOSTS, rates="peak"), given.devices), given.seed
    small = layered(WARM_OPS, seed, CCR)
    for method in methods:
        placement.optimize(small, cluster, method, seed=seed)
    placement.optimize(small, cluster, "local_search", seed=seed, evaluations=100)
    steps: list[Step] = []

    def step(name: str, work: Callable[[], Any], say: Callable[[Any], str] = lambda found: "") -> Any:
        began_s = time.perf_counter()
        found = work()
        seconds = time.perf_counter() - began_s
        steps.append(Step(name, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, say(found)))
        return found

    graph = step("generate", lambda: layered(n, seed, CCR), lambda g: f"{len(g.consumers):,} edges")
    best, results = _place(step, graph, cluster, methods, given)
    _check(step, graph, cluster, best, results, seed)
    step("coarsen", lambda: to_size(graph, GROUPS), lambda derived: f"{derived.graph.n_ops:,} groups")
    return steps


def _place(
    step: Callable[..., Any], graph: OpGraph, cluster: Cluster, methods: list[str], given: argparse.Namespace
) -> tuple[placement.Result, dict[str, placement.Result]]:
    improve_s, seed = given.improve_s, given.seed

    def say(result: placement.Result) -> str:
        gap = "" if result.gap is None else f", gap {result.gap:.0%}"
        return "no answer" if result.objective_s is None else f"{format_seconds(result.objective_s)}{gap}"

    results = {m: step(m, lambda m=m: placement.optimize(graph, cluster, m, seed=seed), say) for m in methods}
    best = step(
        f"local search, {format_seconds(improve_s)}",
        lambda: placement.optimize(graph, cluster, "local_search", seed=seed, budget_s=improve_s),
        say,
    )
    return best, results


def _check(
    step: Callable[..., Any],
    graph: OpGraph,
    cluster: Cluster,
    best: placement.Result,
    results: dict[str, placement.Result],
    seed: int,
) -> None:
    step("verify", lambda: placement.verify(best), lambda found: "equal" if found.holds else "differs")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        compared = placement.compare(graph, cluster, ["single_device", *results], seed=seed, known=results)
        step("report", lambda: write_html(compared, page), lambda _: f"a page of {format_bytes(page.stat().st_size)}")


if __name__ == "__main__":
    main()
