"""What learning is worth: the papers' six tasks, learning curves over ten seeds, ablations, time to pass HEFT.

    python benchmarks/learning.py --seed 0 [--parts tasks,curves,ablations] [--jobs 2] [--out docs/results]

The tasks are those of Mirhoseini et al., ICLR 2018: training steps of six models on K40s and their host CPU. Every run
is one row of OUT/learning.jsonl, appended as soon as it is known; a run that was stopped goes on with what is missing.
At the end OUT/learning.md (tables) and its plots are written from all rows; --render does only that.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from learning_report import curve_plots, page
from table import machine, parser, read_rows

from graphs.disk import write_atomically

Row = dict[str, Any]
Case = dict[str, Any]

OUT = Path("docs/results")
TASKS = {
    "inception_v3": "2xK40-pcie",
    "resnet152": "2xK40-pcie",
    "rnnlm": "2xK40-pcie",
    "nmt2": "2xK40-pcie",
    "nmt4": "4xK40-pcie",
    "nmt8": "8xK40-pcie",
}
SCRATCH = "hierarchical, from scratch"
SEARCHING = ("auto", "hierarchical", "hierarchical+local_search", "seq2seq", "graph", "ppo", "pretrained+local_search")
# What is drawn: policy, preset and whether it begins by imitation; `random` is what all are held against.
CURVES = {
    "hierarchical": ("hierarchical", "default", True),
    SCRATCH: ("hierarchical", "default", False),
    "hierarchical, as published": ("hierarchical", "paper", False),
    "seq2seq": ("seq2seq", "default", False),
    "graph": ("graph", "default", False),
    "ppo": ("ppo", "default", False),
}
ABLATIONS = ("everything", "no grouper", "random groups", "no warm start", "no priorities", "no elites")
CURVE_POINTS = 40


def main() -> None:
    options = _options()
    rows_file = options.out / "learning.jsonl"
    rows = read_rows(rows_file, lambda row: _key(row["case"]))
    if not options.render:
        _run(options, rows, rows_file)
    shown = [row for row in rows.values() if row["part"] in options.parts.split(",")]
    command = shlex.join(["python", "benchmarks/learning.py", *(word for word in sys.argv[1:] if word != "--render")])
    curve_plots(shown, options.out)
    missing = sum(_key(case) not in rows for case in _cases(options))
    write_atomically(options.out / "learning.md", page(shown, command, machine(), missing))
    print(f"{len(shown)} rows: {options.out / 'learning.md'}")


def _run(options: argparse.Namespace, rows: dict[str, Row], rows_file: Path) -> None:
    from rich.progress import Progress

    left = [case for case in _cases(options) if _key(case) not in rows]
    with (
        ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool,
        Progress(disable=not sys.stderr.isatty()) as progress,
    ):
        bar = progress.add_task("runs", total=len(left))
        for future in as_completed([pool.submit(run, case) for case in left]):
            row = future.result()
            rows[_key(row["case"])] = row
            with rows_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            progress.advance(bar)
            print(f"{row['part']}: {row['case']}: {row['best_s'] and row['best_s'] * 1e3:.2f} ms", flush=True)


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    parts, tasks = options.parts.split(","), options.tasks.split(",")
    seeds = range(options.seed, options.seed + options.seeds)
    for task in tasks if "tasks" in parts else ():
        base = {"part": "tasks", "task": task, "seed": options.seed}
        yield base | {"method": "heuristics", "budget_s": None}
        for method in options.methods.split(";"):
            yield base | {"method": method, "budget_s": options.budget_s}
    for seed in seeds if "ablations" in parts else ():
        for method in ABLATIONS:
            yield {
                "part": "ablations",
                "task": options.ablation_task,
                "seed": seed,
                "method": method,
                "samples": options.samples["hierarchical"],
            }
    for seed in seeds if "curves" in parts else ():
        for task in tasks:
            for method in ("random", *CURVES):
                yield {
                    "part": "curves",
                    "task": task,
                    "seed": seed,
                    "method": method,
                    "samples": options.samples[method],
                }


def run(case: Case) -> Row:
    """One run: `best_s` and, where something is learned, the curve [samples, seconds, best_s, mean_s]."""
    from env.bounds.bounds import lower_bound

    problem = _problem(case["task"])
    row: Row = {
        "part": case["part"],
        "case": case,
        "bound_s": lower_bound(problem).value_s,
        "graph_hash": problem.graph.hash,
        "cluster_hash": problem.cluster.hash,
        "ops": problem.graph.n_ops,
        "heft_s": _heft_s(problem),
    }
    if case["part"] == "tasks":
        return row | _task_row(case, problem)
    if case["method"] == "random":
        return row | _random_curve(problem, case["seed"], case["samples"])
    learner = _learner(case, problem)
    return row | _curve(learner, lambda: learner.samples >= case["samples"])


@functools.cache
def _problem(task: str) -> Any:
    import placement
    from env.problem import Problem
    from placement.inputs.sources import read_source

    return Problem(read_source(task, train=True).graph, placement.Cluster.preset(TASKS[task], rates="peak"))


def _heft_s(problem: Any) -> float:
    import baselines
    from env.simulation.scoring import Scorer

    plan = baselines.METHODS["heft"](problem, 0)
    return Scorer(problem).value(plan)


def _task_row(case: Case, problem: Any) -> Row:
    from baselines.budget import Limits
    from placement.solving.methods import HEURISTICS, supports
    from placement.solving.solver import Solver

    if case["method"] == SCRATCH:
        from placement.learning.learners.registry import make_learner

        learner = make_learner("hierarchical", [problem], case["seed"], warm_start=False)
        began = time.monotonic()
        return _curve(learner, lambda: time.monotonic() - began > case["budget_s"])
    solver = Solver(problem.graph, problem.cluster, case["seed"], "latency", "longest_path")
    if case["method"] != "heuristics":
        found = solver.solve(case["method"], Limits(case["budget_s"]))
        return {"best_s": found.objective_s, "samples": found.evaluations, "seconds": found.solve_time_s}
    values = {name: solver.solve(name).objective_s for name in HEURISTICS if supports(name, "latency")}
    return {"best_s": min(value for value in values.values() if value is not None), "heuristics": values}


def _learner(case: Case, problem: Any) -> Any:
    from placement.learning.learners.registry import make_learner

    if case["part"] == "curves":
        policy, preset, warm_start = CURVES[case["method"]]
        return make_learner(policy, [problem], case["seed"], preset=preset, warm_start=warm_start)
    return _without(case["method"], problem, case["seed"])


def _without(what: str, problem: Any, seed: int) -> Any:
    """The hierarchical policy with one idea taken out."""
    import numpy as np
    import torch

    from placement.learning.learners.registry import ReinforceOptions
    from placement.learning.learners.reinforce import Reinforce, best_starts
    from placement.learning.networks.units import coarse_groups
    from placement.learning.policies.hierarchical import LEVELS, Hierarchical

    class Fixed(Hierarchical):
        """Groups that never change."""

        def refocus(self, *_: Any) -> bool:
            return False

        def _group_logits(self, problem: Any) -> Any:
            logits = super()._group_logits(problem)
            return torch.cat([logits[:, :1], torch.full_like(logits[:, 1:], -math.inf)], dim=1)

    torch.manual_seed(seed)
    devices = problem.cluster.n_devices
    grouped = what not in ("no grouper", "random groups")
    policy = (Hierarchical if grouped else Fixed)(devices, max(64, 12 * devices))
    if what == "random groups":
        policy.regroup(problem, np.random.default_rng(seed).integers(policy.groups, size=problem.n_units))
    elif what == "no grouper":
        policy.regroup(problem, coarse_groups(problem, policy.groups))
    if what == "no priorities":
        with torch.no_grad():
            policy.placer.to_level.bias[LEVELS // 2] = 50.0
    starts = [None] if what == "no warm start" else best_starts([problem], seed)
    options = ReinforceOptions(elites=0, imitation=0.0) if what == "no elites" else ReinforceOptions()
    return Reinforce(policy, [problem], seed, options, starts)


def _curve(learner: Any, over: Callable[[], bool]) -> Row:
    began, points = time.process_time(), []
    start = learner.best[0]
    while not over():
        update = learner.update()
        mean_s = None if math.isnan(update.mean_s) else update.mean_s
        best_s = update.best_s if math.isfinite(update.best_s) else None
        points.append([update.samples, round(time.process_time() - began, 3), best_s, mean_s])
    best = learner.best[0]
    return {
        "best_s": None if best is None else best.value_s,
        "start_s": None if start is None else start.value_s,
        "samples": learner.samples,
        "seconds": time.process_time() - began,
        "curve": _thinned(points),
    }


def _random_curve(problem: Any, seed: int, samples: int) -> Row:
    """Every unit on any device it may run on."""
    import numpy as np

    from env.simulation.simulator import Simulator
    from env.units import Units

    rng, simulator = np.random.default_rng(seed), Simulator(problem)
    allowed = Units.of(problem).allowed
    choices, by_use = allowed.sum(axis=1), np.argsort(~allowed, axis=1, kind="stable")
    best_s, points, began = math.inf, [], time.process_time()
    for done in range(0, samples, 32):
        chosen = (rng.random((32, len(choices))) * choices).astype(int)
        scores = simulator.batch(by_use[np.arange(len(choices)), chosen][:, problem.unit_of])
        fits = scores.step_time_s[scores.feasible]
        best_s = min([best_s, *fits.tolist()])
        mean_s = float(fits.mean()) if len(fits) else None
        points.append([done + 32, time.process_time() - began, best_s if math.isfinite(best_s) else None, mean_s])
    return {"best_s": points[-1][2], "samples": samples, "seconds": points[-1][1], "curve": _thinned(points)}


def _thinned(points: list[list[Any]]) -> list[list[Any]]:
    """At most about `CURVE_POINTS` of them, the last one with them; means are over what is left out."""
    step = max(1, len(points) // CURVE_POINTS)
    kept = []
    for end in sorted({*range(step, len(points) + 1, step), len(points)}):
        means = [point[3] for point in points[max(0, end - step) : end] if point[3] is not None]
        kept.append([*points[end - 1][:3], sum(means) / len(means) if means else None])
    return kept


def _key(case: Case) -> str:
    return json.dumps(case, sort_keys=True)


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--parts", default="tasks,curves,ablations", help="default: %(default)s")
    options.add_argument("--tasks", default=",".join(TASKS), help="default: %(default)s")
    options.add_argument("--ablation-task", default="nmt4", help="default: %(default)s")
    options.add_argument("--seeds", type=int, default=10, help="of curves and ablations (default: %(default)s)")
    options.add_argument(
        "--budget-s", type=float, default=600.0, help="of each method on each task (default: %(default)s)"
    )
    options.add_argument(
        "--methods", default=";".join((*SEARCHING, SCRATCH)), help="that search the tasks (default: %(default)s)"
    )
    options.add_argument("--curve-samples", type=int, default=960, help="placements a curve (default: %(default)s)")
    options.add_argument(
        "--paper-samples",
        type=int,
        default=480,
        help="placements a curve of the published model (default: %(default)s)",
    )
    options.add_argument("--jobs", type=int, default=2, help="runs at once, one core each (default: %(default)s)")
    options.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    options.add_argument("--render", action="store_true", help="only write tables and plots from the rows there are")
    made = options.parse_args()
    made.samples = dict.fromkeys(("random", *CURVES), made.curve_samples)
    made.samples["hierarchical, as published"] = made.paper_samples
    made.samples["random"] = max(made.curve_samples, made.paper_samples)
    return made


if __name__ == "__main__":
    main()
