"""The search over strategies beside one device, pure placement, and the best of what people try by hand.

    python benchmarks/strategies.py --seed 0 [--models a,b] [--clusters a,b] [--budget-s 5] [--out docs/results]

Each row is one training graph on one cluster: one device, `auto` without strategies and the search with the same
budget, and the best of the full hand grid (`baselines.strategies.searching.grid`): all of it is estimated, and scored
by the simulator from the best estimate on, until what is left is estimated at more than MARGIN times the best scored;
with --whole-grid all of it is scored. A row is appended to OUT/strategies.jsonl as soon as it is known, and a run that
was stopped goes on with what is missing: rows that are not there, or that had a smaller budget (`--losses` takes
only rows that are worse than the grid, to tell whether time was the cause). At the end OUT/strategies.md is written;
--render does only that, and --bounds before it works out the bounds of all rows anew, and what their strategies take
today, and writes OUT/strategies.jsonl with these alone changed. Losses and ties are printed like wins.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shlex
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from table import commit, machine, parser, read_rows

from baselines.strategies.estimating.estimate import Estimate
from baselines.strategies.estimating.estimator import Estimator
from baselines.strategies.searching.bound import ALL, strategy_bounds
from baselines.strategies.searching.grid import hand_grid
from baselines.strategies.searching.records import Scored
from baselines.strategies.searching.scoring import scored
from env.cluster import Cluster
from graphs.disk import write_atomically
from graphs.errors import InfeasibleError, StrategyError
from graphs.formatting import format_bytes, format_seconds
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from graphs.zoo import MODELS
from placement.inputs.sources import read_source
from placement.optimization import optimize

OUT = Path("docs/results")
CLUSTERS = (  # at the rates of data sheets, as all presets were when the page was begun
    *("1xV100", "2xK40-pcie", "4xK40-pcie", "8xK40-pcie", "4xV100-pcie", "8xV100-nvlink", "8xA100-nvswitch"),
    *("8xH100-nvswitch", "2x8xH100-ib", "16xV100-10gbe", "mixed-gpus", "cpu-gpu"),
)
MARGIN = 1.25  # an estimate so much above the best score is not worth scoring
GRID_S = 15.0  # most seconds of processor time for scoring what is left of the grid
NOTHING_FITS_S = 60.0  # the same where none has fitted so far
EQUAL = 1e-6  # times that differ by less are a tie

Row = dict[str, Any]


def main() -> None:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    rows_file, page = options.out / "strategies.jsonl", options.out / "strategies.md"
    rows = read_rows(rows_file, _key)
    if options.bounds:
        for model in options.models.split(","):
            rows = _with_bounds(rows, model)
            write_atomically(rows_file, "".join(json.dumps(row) + "\n" for row in rows.values()))
    for model in options.models.split(",") if not (options.render or options.bounds) else ():
        graph: OpGraph | None = None
        for name in options.clusters.split(","):
            key = f"{model} {name} {options.seed}"
            known = rows.get(key)
            if (known and known["budget_s"] >= options.budget_s) or (options.losses and not _lost(known)):
                continue
            graph = graph or read_source(model, train=True).graph
            row = _row(model, graph, Cluster.preset(name, rates="peak"), options)
            rows[key] = row
            with rows_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(_line(row), flush=True)
    wanted = [row for row in rows.values() if row["seed"] == options.seed]
    given = [word for word in sys.argv[1:] if word not in ("--render", "--bounds")]
    command = shlex.join(["python", "benchmarks/strategies.py", *given])
    write_atomically(page, _page(wanted, command))
    print(f"{len(wanted)} rows: {page}")


def _options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--models", default=",".join(MODELS), help="some of the zoo's, by commas (default: all)")
    made.add_argument("--clusters", default=",".join(CLUSTERS), help="some presets, by commas (default: %(default)s)")
    made.add_argument("--budget-s", type=float, default=5.0, help="seconds of each search (default: %(default)s)")
    made.add_argument("--losses", action="store_true", help="only rows that are worse than the grid or placement")
    made.add_argument("--out", type=Path, default=OUT)
    made.add_argument("--whole-grid", action="store_true", help="score all of the grid, which takes hours")
    made.add_argument("--render", action="store_true", help="write the page from the rows that are there")
    made.add_argument("--bounds", action="store_true", help="work out the bounds of the rows anew, and write the page")
    return made.parse_args()


def _with_bounds(rows: dict[str, Row], model: str) -> dict[str, Row]:
    """The rows, those of a model with bounds of this commit, and steps of their strategies; placements are not kept."""
    graph: OpGraph | None = None
    found = dict(rows)
    for key, row in rows.items():
        if row["model"] != model or row["search_s"] is None or row.get("bound_commit") == commit():
            continue
        graph = graph or read_source(model, train=True).graph
        cluster = Cluster.preset(row["cluster"], rates="peak")
        bound_s = strategy_bounds(graph, cluster)[ALL]
        again_s = None if row["strategy"] == "none" else _again_s(graph, cluster, row["strategy"])
        found[key] = row | {"bound_s": bound_s, "bound_commit": commit(), "again_s": again_s}
        print(f"{key}: {_gap(row):.1%} before, {_gap(found[key]):.1%} now", flush=True)
    return found


def _again_s(graph: OpGraph, cluster: Cluster, strategy: str) -> float | None:
    """The step of a recorded strategy by this commit; None where it does not fit."""
    try:
        found = scored(graph, cluster, Strategy.parse(strategy))
    except (StrategyError, InfeasibleError):
        return None
    return found.step_time_s if found.fits else None


def _gap(row: Row) -> float:
    """(step time - bound) / step time, both of one commit where they are known."""
    return float(max(0.0, 1 - row["bound_s"] / (row.get("again_s") or row["search_s"])))


def _key(row: Row) -> str:
    return f"{row['model']} {row['cluster']} {row['seed']}"


def _lost(row: Row | None) -> bool:
    return row is not None and (_outcome(row) == "loss" or _worse_than_placement(row))


def _row(model: str, graph: OpGraph, cluster: Cluster, options: argparse.Namespace) -> Row:
    row: Row = {"model": model, "cluster": cluster.name, "seed": options.seed, "budget_s": options.budget_s}
    row |= {
        "commit": commit(),
        "graph_hash": graph.hash,
        "cluster_hash": cluster.hash,
        "ops": graph.n_ops,
        "one_s": _one_device(graph, cluster),
    }
    row["auto_s"] = _placement(graph, cluster, options)
    row |= _search(graph, cluster, options)
    return row | _grid(graph, cluster, options.whole_grid) | {"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def _placement(graph: OpGraph, cluster: Cluster, options: argparse.Namespace) -> float | None:
    """What `auto` finds without strategies; None where the graph fits nowhere."""
    try:
        found = optimize(graph, cluster, seed=options.seed, budget_s=options.budget_s, strategy="none")
    except InfeasibleError:
        return None
    return found.objective_s


def _search(graph: OpGraph, cluster: Cluster, options: argparse.Namespace) -> Row:
    """What `optimize` answers, or why it has no answer."""
    began_s = time.monotonic()
    try:
        found = optimize(graph, cluster, seed=options.seed, budget_s=options.budget_s)
    except InfeasibleError as error:
        none = dict.fromkeys(("search_s", "strategy", "peak", "bound_s"))
        return none | {"took_s": time.monotonic() - began_s, "note": str(error)}
    return {
        "search_s": found.objective_s,
        "strategy": found.strategy.text,
        "peak": None if found.peak_bytes is None else max(found.peak_bytes.values(), default=0),
        "bound_s": found.lower_bound_s,
        "took_s": time.monotonic() - began_s,
        "note": found.note,
    }


def _one_device(graph: OpGraph, cluster: Cluster) -> float | None:
    try:
        return optimize(graph, cluster, "single_device").objective_s
    except InfeasibleError:
        return None


def _grid(graph: OpGraph, cluster: Cluster, whole: bool) -> Row:
    """The best of the hand grid."""
    estimator, began_s = Estimator(graph, cluster), time.process_time()
    estimates: list[Estimate] = []
    for strategy in hand_grid(graph, cluster):
        try:
            estimates.append(estimator.estimate(strategy))
        except StrategyError:
            continue
    estimated_s = time.process_time() - began_s
    estimates.sort(key=lambda e: (e.missing_bytes > 0.15 * max(e.peak_bytes, 1), e.step_time_s))
    best: Scored | None = None
    count = 0
    for estimate in estimates:
        if not whole and best is not None and estimate.step_time_s > MARGIN * best.step_time_s:
            break
        if not whole and time.process_time() - began_s - estimated_s > (NOTHING_FITS_S if best is None else GRID_S):
            break
        try:
            found = scored(graph, cluster, estimate.strategy)
        except (StrategyError, InfeasibleError):
            continue
        count += 1
        if found.fits and (best is None or found.step_time_s < best.step_time_s):
            best = found
    return {
        "grid_s": None if best is None else best.step_time_s,
        "grid_strategy": None if best is None else best.strategy.text,
        "grid_estimated": len(estimates),
        "grid_scored": count,
    }


def _outcome(row: Row) -> str:
    """Win, tie or loss against the grid; a single device has none."""
    ours, grid = row["search_s"], row["grid_s"]
    if not row["grid_estimated"]:
        return "no grid"
    if ours is None or grid is None:
        return "tie" if ours == grid else "win" if grid is None else "loss"
    return "tie" if abs(ours - grid) <= EQUAL * grid else "win" if ours < grid else "loss"


def _worse_than_placement(row: Row) -> bool:
    return row["auto_s"] is not None and (row["search_s"] or math.inf) > row["auto_s"] * (1 + EQUAL)


def _line(row: Row) -> str:
    return (
        f"{row['model']} on {row['cluster']}: {_time(row['search_s'])} {row.get('strategy', '')}; grid "
        f"{_time(row['grid_s'])} {row['grid_strategy']}; placement {_time(row['auto_s'])}; one {_time(row['one_s'])}: "
        f"{_outcome(row)}, {row.get('took_s', 0):.0f} s"
    )


def _time(seconds: float | None) -> str:
    return "does not fit" if seconds is None else format_seconds(seconds)


def _page(rows: list[Row], command: str) -> str:
    counts = {word: sum(_outcome(row) == word for row in rows) for word in ("win", "tie", "loss")}
    against = [row for row in rows if row["auto_s"] is not None and row["search_s"] is not None]
    behind = [row["search_s"] / row["auto_s"] - 1 for row in against if _worse_than_placement(row)]
    extent = (
        f", by at most {max(behind):.1%}, on {sum(each < 0.01 for each in behind)} by less than 1 %" if behind else ""
    )
    commits = ", ".join(f"{n} by {name or 'older code'}" for name, n in Counter(map(_commit, rows)).most_common())
    lines = [
        "# The search over strategies",
        "",
        f"`{command}` on {machine()}.",
        "",
        f"Against the best of the hand grid: better on {counts['win']} of {sum(counts.values())} rows, "
        f"equal on {counts['tie']}, worse on {counts['loss']}. "
        f"Worse than pure placement with the same budget on {len(behind)} of {len(against)}{extent}.",
        "",
        "x: times as fast as one device. Budget: seconds of the search, and of the placement. "
        "Gap: so much of the step is not proved, among all strategies. Grid: "
        f"all of it estimated, scored from the best on, until the rest is estimated at {MARGIN:g} times the best, or "
        f"for {GRID_S:g} s of processor time ({NOTHING_FITS_S:g} s where none fits); its "
        "replicas fuse updates like those of the search.",
        "",
        f"Rows were made at commits: {commits}.",
        "",
        *_gaps([row for row in rows if row["search_s"] and row.get("bound_s")]),
        "",
        "| model | cluster | budget | one device | placement | strategy found | time | x | peak | gap | grid's best "
        "| time | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["cluster"], row["model"])):
        ours, one = row["search_s"], row["one_s"]
        times = f"{one / ours:.2f}" if ours and one else "–"
        gap = f"{_gap(row):.1%}" if ours and row.get("bound_s") else "–"
        peak = format_bytes(row["peak"]) if row.get("peak") else "–"
        cells = [row["model"], row["cluster"], f"{row['budget_s']:g} s", _time(one), _time(row["auto_s"])]
        cells.append(f"`{_cell(row.get('strategy'))}`")
        cells += [
            _time(ours),
            times,
            peak,
            gap,
            f"`{_cell(row['grid_strategy'])}`",
            _time(row["grid_s"]),
            _outcome(row),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _gaps(rows: list[Row]) -> list[str]:
    """The gaps, (step time - bound) / step time, by cluster."""
    made = Counter(row.get("bound_commit") for row in rows)
    commits = ", ".join(f"{n} by {name or 'the code of their rows'}" for name, n in made.most_common())
    lines = [
        "How much of a step is not proved, (step time - bound) / step time; bounds, and the steps of strategies beside "
        f"them, were worked out {commits}:",
        "",
        "| cluster | answers | median | proved within 3 % | within 10 % |",
        "|---|---|---|---|---|",
    ]
    clusters = dict.fromkeys(row["cluster"] for row in rows)
    for name in (*sorted(clusters), None):
        gaps = [_gap(row) for row in rows if name in (None, row["cluster"])]
        near = [sum(gap <= most for gap in gaps) for most in (0.03, 0.1)]
        lines.append(f"| {name or 'all'} | {len(gaps)} | {median(gaps):.1%} | {near[0]} | {near[1]} |")
    return lines


def _commit(row: Row) -> str | None:
    return row.get("commit")


def _cell(strategy: str | None) -> str:
    return (strategy or "–").replace("|", "\\|")


if __name__ == "__main__":
    main()
