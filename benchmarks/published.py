"""Published workloads: our values beside the published ones, the lower bound, and the time it took.

    python benchmarks/published.py --workloads DIR [--seed 0] [--budget-s 60] [--files a,b] [--markdown]

DIR holds throughput/*.json and latency/*.json of github.com/msr-fiddle/dnn-partitioning (NeurIPS 2020) and
profiles/*.txt of github.com/msr-fiddle/pipedream (SOSP 2019). Published values are those of the tables of Tarnawski et
al., NeurIPS 2020, computed again with the authors' code.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from experts import expert_device
from table import Printer, parser

import baselines
from baselines.budget import Limits
from env.cluster import Cluster
from env.objectives import LATENCY, THROUGHPUT
from env.plan import Plan
from env.problem import Problem
from env.published import neurips_cluster
from env.simulation.scoring import loads
from graphs.readers.published import read_neurips, read_pipedream
from placement.results.result import Result
from placement.solving.methods import AUTO
from placement.solving.solver import Solver


@dataclass(frozen=True)
class Published:
    """Values in ms; NaN where none is published. `exact` is the best MILP value, `bound` its dual bound."""

    expert: float
    scotch: float
    contiguous: float
    local: float
    exact: float
    bound: float


PUBLISHED = {
    "bert24_inference": Published(20.084, 18.026, 17.790, 17.778, 17.715, 17.713),
    "bert24_training": Published(49.405, 42.008, 41.746, 39.943, 39.790, 39.790),
    "gnmt_inference": Published(46.209, 34.924, 32.911, 31.783, 31.689, 31.189),
    "gnmt_training": Published(137.154, 93.886, 107.004, 90.948, 88.591, 87.722),
    "resnet50_inference": Published(43.918, 34.309, 33.775, 35.889, 33.341, 33.097),
    "resnet50_training": Published(112.108, 79.918, 78.632, 81.605, 76.753, 76.046),
    "bert3_ops_inference": Published(math.nan, 35.935, 27.919, 27.574, 21.908, 21.908),
}


def main() -> None:
    options = _options()
    out = Printer("Published workloads", options.markdown)
    wanted = set(options.files.split(",")) if options.files else None
    folders = {
        name: [p for p in sorted((options.workloads / name).glob("*.*")) if wanted is None or p.stem in wanted]
        for name in ("throughput", "latency", "profiles")
    }
    if not any(folders.values()):
        raise SystemExit(
            f"{options.workloads} holds no throughput/, latency/ or profiles/ with workloads; check the path."
        )
    if folders["throughput"]:
        _throughput(out, folders["throughput"], options.seed, options.budget_s)
    if folders["latency"]:
        _latency(out, folders["latency"], options.seed, options.budget_s)
    if folders["profiles"]:
        _profiles(out, folders["profiles"], options.seed, options.budget_s)
    out.note(f"Peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB.")


def _throughput(out: Printer, files: list[Path], seed: int, budget_s: float) -> None:
    rows, splits = [], []
    for path in files:
        problem = _problem(path, THROUGHPUT)
        known = PUBLISHED.get(path.stem, Published(*[math.nan] * 6))
        began = time.perf_counter()
        best = Solver(problem.graph, problem.cluster, seed, THROUGHPUT, "longest_path").solve(AUTO, Limits(budget_s))
        taken_s = time.perf_counter() - began
        value = _ms(best.objective_s)
        rows.append(
            [
                path.stem,
                f"{value:.3f}",
                _against(value, known.local),
                _against(value, known.exact),
                f"{best.lower_bound_s * 1e3:.3f}",
                _shown(known.bound),
                f"{best.gap or 0.0:.2%}",
                f"{taken_s:.1f}",
            ]
        )
        splits.append(_split_row(path.stem, problem, known, seed))
    out.table(
        "Largest load per step, ms: `auto` against the published local search and the best published value (MILP)",
        ["file", "auto", "local search", "MILP", "our bound", "MILP bound", "gap", "time, s"],
        rows,
    )
    out.table(
        "Splits, ms, ours = published where one is: everything on one accelerator, the human expert's placement, cuts "
        "of linear orders (CPU s) against the contiguous optimum, min-cut (METIS against Scotch)",
        ["file", "one accelerator", "expert", "linear DP", "min-cut"],
        splits,
    )


def _split_row(name: str, problem: Problem, known: Published, seed: int) -> list[str]:
    expert = expert_device(name, problem)
    cells = [name, f"{_load(problem, np.zeros(problem.graph.n_ops, dtype=np.int64)):.3f}"]
    cells.append("-" if expert is None else _against(_load(problem, expert), known.expert))
    for method, published in (("dp_linear", known.contiguous), ("min_cut", known.scotch)):
        for _ in range(2):  # the second time nothing is compiled
            began = time.thread_time()
            plan = baselines.METHODS[method](problem, seed)
            cpu_s = time.thread_time() - began
        value = _against(_load(problem, plan.device), published)
        cells.append(value if method == "min_cut" else f"{value} ({cpu_s:.2f})")
    return cells


def _latency(out: Printer, files: list[Path], seed: int, budget_s: float) -> None:
    rows = []
    for path in files:
        problem = _problem(path, LATENCY)
        solver = Solver(problem.graph, problem.cluster, seed, LATENCY, "longest_path")
        results = [solver.solve("single_device"), solver.solve("heft"), solver.solve(AUTO, Limits(budget_s))]
        rows.append([path.stem, *map(_cell, results), *_bound_cells(results[-1])])
    out.table(
        "Makespan of one step, ms; no values are published to compare with",
        ["file", "one device", "heft", "auto", "bound", "gap", "time, s"],
        rows,
    )


def _profiles(out: Printer, files: list[Path], seed: int, budget_s: float) -> None:
    """PipeDream's own clusters had V100s; here four on PCIe."""
    cluster = Cluster.preset("4xV100-pcie", rates="peak")
    rows = []
    for path in files:
        graph = read_pipedream(path, train=True)
        solver = Solver(graph, cluster, seed, THROUGHPUT, "longest_path")
        results = [solver.solve(name) for name in ("single_device", "pipedream", "dp_linear")]
        results.append(solver.solve(AUTO, Limits(budget_s)))
        rows.append([path.stem, *map(_cell, results), *_bound_cells(results[-1])])
        out.note(f"{path.stem}: {results[1].note or results[1].reason}")
    out.table(
        f"Largest load per training step on {cluster.name}, ms; one copy of every op, so without replication",
        ["profile", "one device", "pipedream", "dp_linear", "auto", "bound", "gap", "time, s"],
        rows,
    )


def _problem(path: Path, objective: str) -> Problem:
    graph, devices = read_neurips(path)
    cluster: Cluster = neurips_cluster(devices.accelerators, devices.cpus, devices.accelerator_memory_bytes)
    return Problem(graph, cluster, objective)


def _load(problem: Problem, device: np.ndarray) -> float:
    return loads(problem, Plan(device)).value_s * 1e3


def _ms(seconds: float | None) -> float:
    return math.nan if seconds is None else seconds * 1e3


def _cell(result: Result) -> str:
    return "does not fit" if result.objective_s is None else f"{result.objective_s * 1e3:.3f}"


def _bound_cells(result: Result) -> list[str]:
    gap = "-" if result.gap is None else f"{result.gap:.1%}"
    return [f"{result.lower_bound_s * 1e3:.3f}", gap, f"{result.solve_time_s:.1f}"]


def _shown(published: float) -> str:
    return "-" if math.isnan(published) else f"{published:.3f}"


def _against(value: float, published: float) -> str:
    """The value, and how it compares with the published one."""
    if math.isnan(published):
        return f"{value:.3f}"
    if abs(value - published) < 1e-3:  # the published values have three decimals
        return f"{value:.3f} = {published:.3f}"
    return f"{value:.3f} / {published:.3f} ({value / published - 1:+.2%})"


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--workloads", type=Path, required=True, metavar="DIR", help="the folder of workloads")
    options.add_argument("--budget-s", type=float, default=60.0, help="of auto for each file (default: %(default)s)")
    options.add_argument("--files", default="", metavar="A,B", help="only these, by name without ending")
    return options.parse_args()


if __name__ == "__main__":
    main()
