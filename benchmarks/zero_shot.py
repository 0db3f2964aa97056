"""The policy that comes with the package, on graphs and clusters that its training left out.

    python benchmarks/zero_shot.py --seed 0 [--budget-s 60] [--searched 6] [--out docs/results/zero_shot.md]

Every graph here, every cluster, or both were held out of `benchmarks/pretrain.py`. Heuristics count with the faster of
their own order and the default priority, like every method of `placement.optimize`; the best one is that of HEURISTICS.
With --budget-s, methods pretrained+local_search and auto also get that many seconds each, on --searched of the held-out
pairs of the zoo, and on one of each captured model.
Losses are printed like wins.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from captured import MODELS as CAPTURED
from captured import captured
from pretrain import (
    CLUSTERS,
    HELD_OUT_CLUSTERS,
    HELD_OUT_MODELS,
    HELD_OUT_SEEDS,
    generated,
    random_cluster,
    random_hosts,
)
from table import machine, parser

import baselines
from baselines.budget import Budget, Limits
from env.bounds.bounds import lower_bound
from env.cluster import Cluster
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from graphs.disk import write_atomically
from graphs.errors import InfeasibleError
from graphs.formatting import format_seconds
from graphs.opgraph import OpGraph
from graphs.zoo.cache import model_graph
from placement.learning.learners.pretrained import PRETRAINED, load_pretrained, propose_pretrained
from placement.learning.policies.policy_file import load_policy
from placement.solving.solver import Solver

SEEN_MODELS = ("inception_v3", "rnnlm", "two_tower")  # on clusters held out
UNSEEN_ON_SEEN = CLUSTERS[:4]
GENERATED = 24
HOSTS = 2  # clusters of 64 devices
# The better half in docs/results/suite.md, but for those that take seconds.
HEURISTICS = ("single_device", "expert", "min_cut", "heft", "cpop", "peft", "m_etf", "m_sct", "mite", "dfs")
COLUMNS = (
    "| problem | ops | devices | one device | HEFT | m_etf | best heuristic | greedy | zero-shot | seconds | gap |"
)


@dataclass(frozen=True)
class Row:
    """Step times of one problem, in seconds; infinite where a method found nothing that fits."""

    what: str
    graph: OpGraph
    cluster: Cluster
    values: dict[str, float]
    best: str  # of the heuristics
    solve_s: float
    gap: float


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    rows = []
    for what, graph, cluster in _cases(options):
        try:
            row = _row(what, graph, cluster, options.seed)
        except InfeasibleError as error:
            print(f"{graph.name} on {cluster.name}: {error}", flush=True)
            continue
        rows.append(row)
        print(_line(row), flush=True)
    searched = []
    if options.budget_s:
        chosen = [row for row in rows if row.what == "zoo"][:: max(1, options.spread)][: options.searched]
        chosen += {row.graph.name: row for row in rows if row.what == "captured"}.values()  # each on its last cluster
        for row in chosen:
            searched.append(_searched(row, options))
            print(searched[-1], flush=True)
    command = shlex.join(["python", "benchmarks/zero_shot.py", *sys.argv[1:]])
    write_atomically(options.out, _page(rows, searched, command, options))
    print(options.out)


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, OpGraph, Cluster]]:
    """Kind of the case, graph and cluster."""
    for model in options.models.split(","):
        for train in (False, True):
            graph = model_graph(model, train)
            for name in (*HELD_OUT_CLUSTERS, *UNSEEN_ON_SEEN):
                yield "zoo", graph, Cluster.preset(name, rates="peak")
    for model in SEEN_MODELS:
        for name in HELD_OUT_CLUSTERS:
            yield "cluster", model_graph(model, False), Cluster.preset(name, rates="peak")
    for model in CAPTURED:
        graph = captured(model)
        for name in HELD_OUT_CLUSTERS:
            yield "captured", graph, Cluster.preset(name, rates="peak")
    rng = np.random.default_rng(HELD_OUT_SEEDS - options.seed - 1)
    for number in range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + HOSTS):
        cluster = random_hosts(rng, number)
        for model in options.models.split(","):
            yield "hosts", model_graph(model, True), cluster
    rng = np.random.default_rng(HELD_OUT_SEEDS + options.seed)
    for number in range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + GENERATED):
        cluster = random_cluster(rng, number)
        yield "generated", generated(rng, number, cluster), cluster


def _row(what: str, graph: OpGraph, cluster: Cluster, seed: int) -> Row:
    problem = Problem(graph, cluster)
    scorer = Scorer(problem)

    def value(plan: Plan) -> float:
        own = scorer.value(plan)
        return min(own, scorer.value(Plan(plan.device)))

    heuristics = {}
    for name in HEURISTICS:
        try:
            heuristics[name] = value(baselines.METHODS[name](problem, seed))
        except InfeasibleError:
            heuristics[name] = math.inf
    best = min(heuristics, key=lambda name: heuristics[name])
    greedy = load_pretrained().propose(problem, 1, torch.Generator().manual_seed(seed), greedy=True).plan(0)
    fresh, began = Problem(graph, cluster), time.thread_time()
    plan = propose_pretrained(fresh, seed, Budget(seconds=0))
    solve_s = time.thread_time() - began
    values = {
        "one device": heuristics["single_device"],
        "heft": heuristics["heft"],
        "m_etf": heuristics["m_etf"],
        "best": heuristics[best],
        "greedy": value(greedy),
        "zero-shot": value(plan),
    }
    return Row(what, graph, cluster, values, best, solve_s, lower_bound(problem).gap(values["zero-shot"]))


def _searched(row: Row, options: argparse.Namespace) -> tuple[str, float, float]:
    """Name of a problem, and the step times of methods pretrained+local_search and auto with the same seconds."""
    solver = Solver(row.graph, row.cluster, options.seed, "latency", "longest_path")
    learned_s, auto_s = (
        solver.solve(method, Limits(options.budget_s)).objective_s for method in ("pretrained+local_search", "auto")
    )
    assert learned_s is not None
    assert auto_s is not None
    return f"{row.graph.name} on {row.cluster.name}", learned_s, auto_s


def _name(row: Row) -> str:
    return f"{row.graph.name}{', training' if row.graph.phase.any() else ''} on {row.cluster.name}"


def _line(row: Row) -> str:
    times = [
        format_seconds(value) + (f" {row.best}" if name == "best" else "") if math.isfinite(value) else "-"
        for name, value in row.values.items()
    ]
    cells = [_name(row), str(row.graph.n_ops), str(row.cluster.n_devices), *times]
    return "| " + " | ".join([*cells, f"{row.solve_s:.2f}", f"{row.gap:.1%}"]) + " |"


def _page(rows: list[Row], searched: list[tuple[str, float, float]], command: str, options: argparse.Namespace) -> str:
    titles = {
        "zoo": "Zoo models that training left out, on clusters it left out and (the last four of each) on others",
        "cluster": "Other zoo models, on clusters that training left out",
        "captured": "Training steps of configurations of transformers, on clusters that training left out",
        "hosts": "Training steps of zoo models that training left out, on 64 devices of eight hosts",
        "generated": "Generated graphs and clusters that training left out",
    }
    lines = [
        "# Zero-shot placement",
        "",
        f"Written by `{command}`  ",
        machine(),
        "",
        f"The policy was trained by `{load_policy(PRETRAINED).origin.command}`. Greedy: its likeliest placement.",
        'Zero-shot: what `method="pretrained"` answers. Seconds: CPU time of that, all included.',
        f"Best heuristic: of {', '.join(HEURISTICS)}.",
        "Gap: of zero-shot to the lower bound. A dash: found no placement that fits.",
    ]
    lines += ["", "Geometric means of step times; below 1: faster.", ""]
    lines += [
        "| problems | greedy / HEFT | zero-shot / HEFT | zero-shot / m_etf | zero-shot / best heuristic | losses |"
    ]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for what in (*titles, "all"):
        chosen = [row for row in rows if what in (row.what, "all")]
        pairs = (("greedy", "heft"), ("zero-shot", "heft"), ("zero-shot", "m_etf"), ("zero-shot", "best"))
        means = [f"{_mean(chosen, *pair):.3f}" for pair in pairs]
        lost = sum(row.values["zero-shot"] > row.values["heft"] * 1.001 for row in chosen)
        cells = [f"{what} ({len(chosen)})", *means, f"{lost} of {len(chosen)} to HEFT"]
        lines.append("| " + " | ".join(cells) + " |")
    worst, where = max(
        ((row.values["zero-shot"] / row.values["best"], row) for row in rows if _is_answered(row)),
        key=lambda pair: pair[0],
    )
    lines += ["", f"Zero-shot / best heuristic is {worst:.3f} at most: {_name(where)}."]
    if searched:
        ratio = math.exp(np.mean([math.log(ours / auto) for _, ours, auto in searched]))
        lines += [
            "",
            f"With {options.budget_s:g} s each; pretrained+local_search / auto in geometric mean: {ratio:.4f}.",
            "",
        ]
        lines += ["| problem | pretrained+local_search | auto | ratio |", "| --- | ---: | ---: | ---: |"]
        lines += [
            f"| {name} | {format_seconds(ours)} | {format_seconds(auto)} | {ours / auto:.4f} |"
            for name, ours, auto in searched
        ]
    for what, title in titles.items():
        lines += ["", f"## {title}", "", COLUMNS, "| --- |" + " ---: |" * 10]
        lines += [_line(row) for row in rows if row.what == what]
    return "\n".join(lines) + "\n"


def _is_answered(row: Row) -> bool:
    return math.isfinite(row.values["best"]) and math.isfinite(row.values["zero-shot"])


def _mean(rows: list[Row], ours: str, other: str) -> float:
    """Geometric mean of the ratio, over problems where both found something."""
    logs = [
        math.log(row.values[ours] / row.values[other])
        for row in rows
        if math.isfinite(row.values[ours] + row.values[other])
    ]
    return math.exp(np.mean(logs)) if logs else math.nan


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--models", default=",".join(HELD_OUT_MODELS), help="default: %(default)s")
    options.add_argument(
        "--budget-s", type=float, default=0.0, help="of pretrained+local_search and of auto (default: neither runs)"
    )
    options.add_argument("--searched", type=int, default=6, help="problems that get it (default: %(default)s)")
    options.add_argument("--spread", type=int, default=7, help="every so many zoo rows (default: %(default)s)")
    options.add_argument("--out", type=Path, default=Path("docs/results/zero_shot.md"), help="default: %(default)s")
    return options.parse_args()


if __name__ == "__main__":
    main()
