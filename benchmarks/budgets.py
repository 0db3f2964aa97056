"""What `auto` makes of a budget: against local search with the same one, and how long both take for it.

    python benchmarks/budgets.py --seed 0 [--seeds 1] [--budgets 1,4,10,30] [--only a,b] [--out docs/results]

Rows: zoo graphs on preset clusters, and generated graphs on 50 devices no two of which are alike. The methods run one
after the other. Each row is appended to OUT/budgets.jsonl as soon as it is known, and a run that was stopped goes on
with what is missing; at the end OUT/budgets.md is written from all rows of the study; --render does only that.
A budget is work, so the answers are the same on every machine; the times are of this one, and tell how good the prices
of work are (`baselines.prices`). A row counts as worse beyond 0.2 %, and the page tells how many evaluations each run
got.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from table import machine, parser, read_rows

from baselines.budget import Limits
from env.cluster import Cluster, Device, both_ways
from graphs.disk import write_atomically
from graphs.formatting import format_seconds
from graphs.generators import fork_join, layered
from graphs.opgraph import OpGraph
from placement.inputs.sources import read_source
from placement.solving.solver import Solver

METHODS = ("local_search", "auto")
ZOO = (
    ("nmt4", "8xV100-nvlink"),
    ("nmt4", "4xV100-pcie"),
    ("inception_v3", "4xV100-pcie"),
    ("nasnet_large", "8xH100-nvswitch"),
    ("transformer_moe", "8xV100-nvlink"),
    ("bert_base", "8xV100-nvlink"),
    ("two_tower", "4xV100-pcie"),
)
GENERATED: dict[str, Callable[[int, int], OpGraph]] = {"layered": layered, "fork_join": fork_join}
SIZES = (346, 1_000, 3_000)
N_UNEQUAL = 50
NOISE = 2e-3  # relative
_LEAST_OVERRUN_S, _OVERRUN = 0.5, 0.05  # the larger of the two is allowed

Row = dict[str, Any]


def main() -> None:
    options = _options()
    rows_file = options.out / "budgets.jsonl"
    rows, cases = read_rows(rows_file, _key), [*_cases(options)]
    if not options.render:
        for case in cases:
            _run(case, [float(word) for word in options.budgets.split(",")], rows, rows_file)
    names = [case.columns for case in cases]
    shown = [row for row in rows.values() if {key: row[key] for key in names[0]} in names]
    command = shlex.join(["python", "benchmarks/budgets.py", *(word for word in sys.argv[1:] if word != "--render")])
    write_atomically(options.out / "budgets.md", _page(shown, command))
    print(f"{len(shown)} rows: {options.out / 'budgets.md'}")


def unequal(seed: int) -> Cluster:
    """50 devices around a switch, each with a speed, a memory and a link of its own."""
    rng = np.random.default_rng(seed)
    devices, links = [], []
    for i in range(N_UNEQUAL):
        flops, bandwidth, memory = 1e13 * rng.uniform(0.3, 3), 1e12 * rng.uniform(0.3, 3), 16e9 * rng.uniform(0.5, 2)
        devices.append(Device(f"d{i}", f"kind{i}", int(memory), {"float32": flops}, bandwidth))
        links += both_ways(f"d{i}", "switch", 1e10 * rng.uniform(0.5, 2), 5e-6)
    return Cluster("50-unequal", tuple(devices), tuple(links))


@dataclass(frozen=True)
class Case:
    """A problem by its name; graph and cluster are made only if a row is missing."""

    name: str
    seed: int
    objective: str
    graph: Callable[[], OpGraph]
    cluster: Callable[[], Cluster]

    @property
    def columns(self) -> Row:
        return {"problem": self.name, "objective": self.objective, "seed": self.seed}


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    only = options.only.split(",") if options.only else [""]
    for seed in range(options.seed, options.seed + options.seeds):
        for objective in options.objectives.split(","):
            zoo = [
                Case(
                    f"{model} on {preset}",
                    seed,
                    objective,
                    partial(_zoo, model),
                    partial(Cluster.preset, preset, rates="peak"),
                )
                for model, preset in ZOO
            ]
            generated = [
                Case(f"{kind}-{n} on 50-unequal", seed, objective, partial(make, n, seed), partial(unequal, seed))
                for kind, make in GENERATED.items()
                for n in SIZES
            ]
            yield from (case for case in (*zoo, *generated) if any(word in case.name for word in only))


def _zoo(model: str) -> OpGraph:
    return read_source(model).graph


def _run(case: Case, budgets_s: Sequence[float], rows: dict[str, Row], rows_file: Path) -> None:
    """Add the rows that are missing."""
    solver = None
    for budget_s, method in itertools.product(budgets_s, METHODS):
        row: Row = case.columns | {"budget_s": budget_s, "method": method}
        if _key(row) in rows:
            continue
        solver = solver or Solver(case.graph(), case.cluster(), case.seed, case.objective, "longest_path")
        result = solver.solve(method, Limits(budget_s))
        if result.interrupted:
            raise KeyboardInterrupt
        rows[_key(row)] = row | {
            "ops": solver.problem.graph.n_ops,
            "objective_s": result.objective_s,
            "gap": result.gap,
            "evaluations": result.evaluations,
            "chosen": result.chosen,
            "solve_time_s": result.solve_time_s,
        }
        rows_file.parent.mkdir(parents=True, exist_ok=True)
        with rows_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[_key(row)]) + "\n")
        value = "-" if result.objective_s is None else f"{result.objective_s * 1e3:.4g} ms"
        took = f"{method} {value} in {result.solve_time_s:.2f} s"
        print(f"{case.name}, {case.objective}, {budget_s:g} s: {took}", flush=True)


def _key(row: Row) -> str:
    return json.dumps([row[name] for name in ("problem", "objective", "seed", "budget_s", "method")])


def _page(rows: list[Row], command: str) -> str:
    pairs: dict[str, dict[str, Row]] = {}
    for row in rows:
        pairs.setdefault(_key(row | {"method": ""}), {})[row["method"]] = row
    whole = [pair for pair in pairs.values() if len(pair) == len(METHODS)]
    ratios = [_ratio(pair) for pair in whole]
    late = [row for pair in whole for row in pair.values() if _overrun_s(row) > _allowed_s(row)]
    behind = [
        pair
        for pair, ratio in zip(whole, ratios, strict=True)
        if ratio > 1 + NOISE and pair["auto"]["evaluations"] < pair["local_search"]["evaluations"]
    ]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
    lines = [
        "# `auto` and `local_search` with the same budget",
        "",
        f"Written by `{command}`  ",
        machine(),
        "",
        f"Of {len(whole)} rows `auto` is worse on {sum(r > 1 + NOISE for r in ratios)} ({len(behind)} of them with "
        f"fewer evaluations than `local_search`), better on {sum(r < 1 - NOISE for r in ratios)} and within "
        f"{NOISE:.1%} on the others; in geometric mean it takes {mean:.4f} of the time. Budgets were overrun by more "
        f"than 5 % and 0.5 s in {len(late)} of {2 * len(whole)} runs.",
        "",
        "| problem | ops | objective | seed | budget | local_search | auto | auto / local_search | evaluations "
        "| chosen | took |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for pair in whole:
        local, auto = pair["local_search"], pair["auto"]
        cells = (
            f"{auto['problem']} | {auto['ops']} | {auto['objective']} | {auto['seed']} | {auto['budget_s']:g} s",
            f"{_seconds(local)} | {_seconds(auto)} | {_ratio(pair):.4f}",
            f"{local['evaluations']:,}, {auto['evaluations']:,} | {auto['chosen']}",
            f"{local['solve_time_s']:.2f} s, {auto['solve_time_s']:.2f} s",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _seconds(row: Row) -> str:
    return "-" if row["objective_s"] is None else format_seconds(row["objective_s"])


def _ratio(pair: dict[str, Row]) -> float:
    """Of objectives, auto by local search; what was not found counts as infinite, both not found as 1."""
    local_s, auto_s = (math.inf if pair[m]["objective_s"] is None else pair[m]["objective_s"] for m in METHODS)
    return 1.0 if local_s == auto_s else auto_s / local_s


def _overrun_s(row: Row) -> float:
    return float(row["solve_time_s"] - row["budget_s"])


def _allowed_s(row: Row) -> float:
    return max(_LEAST_OVERRUN_S, _OVERRUN * row["budget_s"])


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=1, help="from --seed on (default: %(default)s)")
    options.add_argument("--budgets", default="1,4,10,30", help="seconds (default: %(default)s)")
    options.add_argument("--objectives", default="latency", help="latency, throughput or both (default: %(default)s)")
    options.add_argument("--only", default="", help="problems in whose name one of these words is")
    options.add_argument("--out", type=Path, default=Path("docs/results"), help="default: %(default)s")
    options.add_argument("--render", action="store_true", help="only write the page from the rows that are there")
    return options.parse_args()


if __name__ == "__main__":
    main()
