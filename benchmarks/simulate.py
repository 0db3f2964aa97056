"""How many placements are scored per second, how that grows with cores, and what an op or edge costs.

    python benchmarks/simulate.py [--seed 0] [--repeats 9] [--markdown]

1. One core, 1,243 ops, 1,806 edges, 4 devices, a new random placement each time, memory tracked: one at a time, as a
   batch, and with the slow plain-Python simulator (env/checking/reference.py) in the same run; the scores must agree.
2. The same batch on 1, 2, 4, ... cores, wall time.
3. Nanoseconds per op and edge from 200 to 100,000 ops on 4 devices.

Machines are shared, so rates on one core are by CPU time (of the thread; of the process for batches), and both the
best and the median of the repeats are printed: the best is what the code costs, the median what one gets here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numba
import numpy as np
from table import Printer, n_cores, parser, timed

from env.checking.reference import simulate_reference
from env.cluster import Cluster
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.generators import layered, random_dag
from graphs.opgraph import Op, OpGraph, Tensor

N_OPS, N_EDGES = 1_243, 1_806
PUBLISHED_PER_S = 120.0  # reported for the environments of park and Placeto at 1,243 ops, 4 devices, one core
CLUSTER = "4xV100-pcie"
NARROW, WIDE = 8, N_OPS  # how far back an op reads
BATCH = 500  # placements per repeat
FEW = 10  # placements per repeat of the slow simulator
MAX_THREADS = numba.get_num_threads()
SIZES = (200, 1_000, 5_000, 20_000, 100_000)
FAMILIES: dict[str, Callable[[int, int], OpGraph]] = {
    "layered, width 16": lambda n_ops, seed: layered(n_ops, seed, width=16),
    "layered, width √ops": layered,
    "random, 1.5 edges per op": lambda n_ops, seed: random_dag(n_ops, seed, degree=1.5),
}


def published_size(seed: int, reach: int) -> OpGraph:
    """1,243 ops, 1,806 edges: each op reads one of the `reach` ops before it, and some read more of them.

    Times of 50 us to 2 ms, tensors up to 8 MiB, 10 MiB kept and 1 MiB of workspace per op.
    """
    rng = np.random.default_rng(seed)

    def edge(target: int) -> tuple[int, int]:
        return int(rng.integers(max(0, target - reach), target)), target

    edges = {edge(target) for target in range(1, N_OPS)}
    while len(edges) < N_EDGES:
        edges.add(edge(int(rng.integers(1, N_OPS))))
    readers: dict[int, list[str]] = {}
    for source, target in sorted(edges):
        readers.setdefault(source, []).append(f"op{target}")
    times_s, sizes = rng.uniform(50e-6, 2e-3, N_OPS).tolist(), rng.integers(1, 2**23, N_OPS).tolist()
    ops = [Op(f"op{i}", kept_bytes=10 * 2**20, workspace_bytes=2**20, time_s={"*": times_s[i]}) for i in range(N_OPS)]
    return OpGraph.build(ops, [Tensor(f"op{i}", sizes[i], tuple(names)) for i, names in readers.items()])


def random_placements(seed: int, count: int, n_ops: int) -> np.ndarray:
    """Device numbers, int32 [count, n_ops]."""
    return np.random.default_rng(seed).integers(0, 4, (count, n_ops), dtype=np.int32)


def score_each(simulator: Simulator, placements: np.ndarray) -> None:
    for placed in placements:
        simulator.score(Plan(placed))


def one_core(out: Printer, seed: int, repeats: int) -> None:
    rows = [["published environments, as reported", "", f"{PUBLISHED_PER_S:,.0f}", "", "", "1"]]
    for shape, reach in (("narrow", NARROW), ("wide", WIDE)):
        rows += [[name, shape, *rates] for name, *rates in one_core_rates(published_size(seed, reach), seed, repeats)]
    out.table(
        f"Placements per second on one core: {N_OPS:,} ops, {N_EDGES:,} edges, {CLUSTER}, random placements",
        ("simulator", "graph", "best", "median", "times reference", "times published"),
        rows,
    )
    out.note(
        f"Narrow: an op reads from the {NARROW} ops before it, about as wide as captured networks; wide: from any. CPU "
        f"time of {repeats} repeats of {BATCH} placements (reference: {FEW}). The published figure is what is reported "
        "for the environments of park and Placeto at this size and 4 devices, on one core of another machine; it was "
        "not measured here. Goal: 12,000 per second."
    )


def one_core_rates(graph: OpGraph, seed: int, repeats: int) -> list[list[str]]:
    cluster = Cluster.preset(CLUSTER, rates="peak")
    assert (graph.n_ops, graph.n_edges, cluster.n_devices) == (N_OPS, N_EDGES, 4)
    simulator, placements = Simulator(Problem(graph, cluster)), random_placements(seed, BATCH, N_OPS)
    few = placements[:FEW]
    plans = [Plan(placed) for placed in few]
    slow = [simulate_reference(graph, cluster, plan) for plan in plans]
    np.testing.assert_allclose(simulator.batch(few).step_time_s, [r.step_time_s for r in slow], rtol=1e-9)
    np.testing.assert_array_equal(simulator.batch(few).peak_bytes, [r.peak_bytes for r in slow])
    score_each(simulator, placements[:1])  # compiles

    measured: dict[str, tuple[int, Callable[[], object], Callable[[], float]]] = {
        "plain Python, `env/checking/reference.py`": (
            FEW,
            lambda: [simulate_reference(graph, cluster, plan) for plan in plans],
            time.thread_time,
        ),
        "one at a time, `Simulator.score`": (BATCH, lambda: score_each(simulator, placements), time.thread_time),
        "one batch, `Simulator.batch`": (BATCH, lambda: simulator.batch(placements), time.process_time),
    }
    numba.set_num_threads(1)
    rates = {name: [count / s for s in timed(work, repeats, clock)] for name, (count, work, clock) in measured.items()}
    numba.set_num_threads(MAX_THREADS)
    reference = next(iter(rates.values()))[0]
    return [
        [
            name,
            f"{found[0]:,.0f}",
            f"{statistics.median(found):,.0f}",
            f"{found[0] / reference:,.0f}",
            f"{found[0] / PUBLISHED_PER_S:,.1f}",
        ]
        for name, found in rates.items()
    ]


def scaling(out: Printer, seed: int, repeats: int) -> None:
    simulator = Simulator(Problem(published_size(seed, NARROW), Cluster.preset(CLUSTER, rates="peak")))
    placements = random_placements(seed, 4 * BATCH, N_OPS)
    simulator.batch(placements[:16])
    limit = min(n_cores(), MAX_THREADS)
    counts = sorted({2**i for i in range(limit.bit_length())} | {limit})
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    for _ in range(repeats):  # in turn, so that a busy moment hits all alike
        for count in counts:
            numba.set_num_threads(count)
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            simulator.batch(placements)
            found[count].append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
    numba.set_num_threads(MAX_THREADS)
    one_s, rows = min(found[1])[0], []
    for count, seconds in found.items():
        best_s, cpu_s = min(seconds)
        rates = [len(placements) / s for s in (best_s, statistics.median(wall_s for wall_s, _ in seconds))]
        rows.append([str(count), *(f"{r:,.0f}" for r in rates), f"{one_s / best_s:.2f}", f"{cpu_s / best_s:.2f}"])
    out.table(
        f"One batch of {len(placements):,} placements of the narrow graph on several cores, placements per second",
        ("cores", "best", "median", "times one core", "cores it got"),
        rows,
    )
    out.note(
        f"Wall time, {repeats} repeats. Cores it got: CPU time / wall time of the best repeat; where that is below the "
        "first column, other programs had the rest."
    )


def sizes(out: Printer, seed: int, repeats: int) -> None:
    rows = []
    numba.set_num_threads(1)
    for name, make in FAMILIES.items():
        first = 0.0
        for n_ops in SIZES:
            graph = make(n_ops, seed)
            simulator = Simulator(Problem(graph, Cluster.preset(CLUSTER, rates="peak")))
            placements = random_placements(seed, max(2, 100_000 // n_ops), n_ops)
            scored = len(placements) * (graph.n_ops + graph.n_edges)
            score_each(simulator, placements[:1])
            simulator.batch(placements[:1])

            def batch(simulator: Simulator = simulator, placements: np.ndarray = placements) -> None:
                simulator.batch(placements)

            def single(simulator: Simulator = simulator, placements: np.ndarray = placements) -> None:
                score_each(simulator, placements)

            in_batch = [s / scored * 1e9 for s in timed(batch, repeats, time.process_time)]
            alone = [s / scored * 1e9 for s in timed(single, repeats, time.thread_time)]
            first = first or in_batch[0]
            costs = [in_batch[0], statistics.median(in_batch), alone[0]]
            counts = [f"{n_ops:,}", f"{graph.n_edges:,}"]
            rows.append([name, *counts, *(f"{cost:.1f}" for cost in costs), f"{in_batch[0] / first:.2f}"])
    numba.set_num_threads(MAX_THREADS)
    out.table(
        f"Nanoseconds per op and edge on one core, {CLUSTER}, random placements",
        ("graph", "ops", "edges", "batch, best", "batch, median", "one at a time, best", f"times {SIZES[0]} ops"),
        rows,
    )
    out.note(
        f"CPU time of {repeats} repeats. A call of `Simulator.score` has a fixed cost, which shows on small graphs; "
        "the last column compares batches."
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=9, help="times each is run (default: %(default)s)")
    chosen = options.parse_args()
    out = Printer("Simulation", chosen.markdown)
    one_core(out, chosen.seed, chosen.repeats)
    scaling(out, chosen.seed, chosen.repeats)
    sizes(out, chosen.seed, chosen.repeats)


if __name__ == "__main__":
    main()
