"""What local search for the makespan adds to the heuristics, and what its guided moves add to annealing.

    python benchmarks/local_search.py [--seed 0] [--models a,b] [--clusters a,b] [--budget-s 30] [--evaluations 20000]

The search starts from HEFT's plan and the best plan of all heuristics. Besides --budget-s of wall-clock time it is run
for --evaluations, from the same plan as an annealing that moves a random op to a random device and scores each
placement with the simulator, with the same temperatures. Ties are printed like wins.
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np
from table import Printer, parser

from baselines import METHODS, Plan
from baselines.budget import Budget
from baselines.local_search.makespan_chain import COOLING, HOT
from baselines.local_search.makespan_search import makespan_search
from env.bounds.bounds import lower_bound
from env.cluster import Cluster
from env.problem import Problem
from env.simulation.scoring import Scorer
from graphs.errors import InfeasibleError
from graphs.formatting import format_seconds
from graphs.opgraph import OpGraph
from placement.inputs.sources import read_source

MODELS = "inception_v3,nasnet_large,rnnlm,transformer_moe,two_tower,bert_base"
CLUSTERS = "4xV100-pcie,8xH100-nvswitch"
COLUMNS = ["model on cluster", "HEFT", "best heuristic", "search", "of HEFT", "of best", "gap", "moves/s"]


def main() -> None:
    options = _options()
    out = Printer("Local search for the makespan", options.markdown)
    searched, compared = [], []
    for model in options.models.split(","):
        graph = read_source(model).graph
        for name in options.clusters.split(","):
            problem = Problem(graph, Cluster.preset(name, rates="peak"))
            plans = _heuristics(problem, options.seed)
            searched.append(_searched(problem, plans, options))
            compared.append(_compared(problem, plans, options))
    out.table(f"Step times; the search had {options.budget_s:g} s; gap: to the lower bound.", COLUMNS, searched)
    out.table(
        f"Step times of annealing with {options.evaluations:,} evaluations, from the best heuristic's plan.",
        ["model on cluster", "start", "random moves", "guided moves", "guided of random"],
        compared,
    )


def _heuristics(problem: Problem, seed: int) -> dict[str, tuple[float, Plan]]:
    """Step time and plan of every heuristic that finds one, the better of its own order and the default priority."""
    scorer, found = Scorer(problem), {}
    for name, method in METHODS.items():
        try:
            plan = method(problem, seed)
        except InfeasibleError:
            continue
        runs = [(scorer.value(p), k, p) for k, p in enumerate((plan, Plan(plan.device)))]
        value_s, _, best = min(runs)
        if value_s < math.inf:
            found[name] = value_s, best
    return found


def _searched(problem: Problem, plans: dict[str, tuple[float, Plan]], options: argparse.Namespace) -> list[str]:
    heft_s = plans["heft"][0] if "heft" in plans else math.nan
    best = min(plans, key=lambda name: plans[name][0])
    best_s = plans[best][0]
    starts = [plan for name, (_, plan) in plans.items() if name in (best, "heft")]
    makespan_search(problem, options.seed, starts, Budget(evaluations=2))  # compiles
    budget, began_s = Budget(seconds=options.budget_s), time.monotonic()
    found = makespan_search(problem, options.seed, starts, budget)
    seconds = time.monotonic() - began_s
    value_s = Scorer(problem).value(found.plan)
    return [
        _name(problem.graph, problem.cluster),
        format_seconds(heft_s),
        f"{format_seconds(best_s)} {best}",
        format_seconds(value_s),
        f"{value_s / heft_s:.3f}",
        f"{value_s / best_s:.3f}",
        f"{lower_bound(problem).gap(value_s):.1%}",
        f"{found.evaluations / seconds:,.0f}",
    ]


def _compared(problem: Problem, plans: dict[str, tuple[float, Plan]], options: argparse.Namespace) -> list[str]:
    scorer = Scorer(problem)
    start = Plan(min(plans.values(), key=lambda pair: pair[0])[1].device)
    start_s = scorer.value(start)
    naive_s = _random_annealing(problem, start, start_s, options.seed, options.evaluations)
    found = makespan_search(problem, options.seed, [start], Budget(evaluations=options.evaluations)).plan
    guided_s = scorer.value(found)
    times = [format_seconds(seconds) for seconds in (start_s, naive_s, guided_s)]
    return [_name(problem.graph, problem.cluster), *times, f"{guided_s / naive_s:.3f}"]


def _random_annealing(problem: Problem, start: Plan, start_s: float, seed: int, evaluations: int) -> float:
    """The best step time of annealing without any guidance, in seconds."""
    rng, scorer = np.random.default_rng(seed), Scorer(problem)
    device, now_s, best_s = start.device.copy(), start_s, start_s
    temperature_s = HOT * start_s
    for _ in range(evaluations):
        temperature_s *= COOLING ** (1 / evaluations)
        members = problem.units[rng.integers(problem.n_units)]
        old = int(device[members[0]])
        device[members] = rng.choice(np.flatnonzero(problem.allowed[members[0]]))
        value_s = scorer.value(Plan(device))
        if value_s <= now_s - temperature_s * math.log(1 - rng.random()):
            now_s = value_s
        else:
            device[members] = old
        best_s = min(best_s, now_s)
    return best_s


def _name(graph: OpGraph, cluster: Cluster) -> str:
    return f"{graph.name} on {cluster.name}"


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--models", default=MODELS, help="default: %(default)s")
    options.add_argument("--clusters", default=CLUSTERS, help="default: %(default)s")
    options.add_argument("--budget-s", type=float, default=30.0, help="seconds of each search (default: %(default)s)")
    options.add_argument(
        "--evaluations", type=int, default=20_000, help="of guided and of random annealing (default: %(default)s)"
    )
    return options.parse_args()


if __name__ == "__main__":
    main()
