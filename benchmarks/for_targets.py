"""What it costs to keep to a tool: `optimize --for torch` beside the recorded best strategies.

    python benchmarks/for_targets.py [--target torch] [--models a,b] [--clusters a,b] [--every 4] [--budget-s 10]

Takes the newest row of each model and cluster of docs/results/strategies.jsonl with a strategy, on GPUs, with models on
`meta`. The recorded strategy is scored again by the code of today; the answer of the search for the target is exported.
A loss says which strategy is faster and what the target lacks of it. Rows are appended to
docs/results/for_targets.jsonl, and a run that was stopped goes on with what is missing; at the end
docs/results/for_targets.md is written. Nothing is run: `benchmarks/exported_scripts.py` and the tests run scripts.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from table import commit, machine, parser, read_rows

import placement
from graphs.errors import PlacementError
from graphs.formatting import format_seconds
from graphs.zoo import build
from graphs.zoo.cache import model_graph
from placement.exporters.targets import arguments, tool_for
from placement.solving.checked import unchecked

OUT = Path(__file__).parent.parent / "docs" / "results"
ROWS, PAGE = OUT / "for_targets.jsonl", OUT / "for_targets.md"
NO_GPUS = ("cpu-gpu", "1xV100")  # presets without several GPUs
EQUAL, SLOW = 1.01, 1.05  # times the recorded best: no loss, and a large one

Row = dict[str, Any]


def main() -> None:
    """Search what is missing, and write the page."""
    made = parser(__doc__)
    made.add_argument("--target", default="torch")
    made.add_argument("--models", default="")
    made.add_argument("--clusters", default="")
    made.add_argument("--every", type=int, default=1, help="take each so many-th row (default: %(default)s)")
    made.add_argument("--budget-s", type=float, default=10.0, help="of each search (default: %(default)s)")
    options = made.parse_args()
    warnings.simplefilter("ignore")
    best = read_rows(OUT / "strategies.jsonl", lambda row: f"{row['model']} {row['cluster']}")
    wanted = [row for row in best.values() if row["strategy"] != "none" and row["cluster"] not in NO_GPUS]
    rows = read_rows(ROWS, _key)
    for row in wanted[:: options.every]:
        new = {**row, "target": options.target}
        asked = options.models or row["model"], options.clusters or row["cluster"]
        if _key(new) in rows or row["model"] not in asked[0].split(",") or row["cluster"] not in asked[1].split(","):
            continue
        with patch("placement.optimization.check", unchecked):  # that it computes the same is checked elsewhere
            rows[_key(new)] = _row({**row, "budget_s": options.budget_s}, options.target, options.seed)
        with ROWS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[_key(new)]) + "\n")
        print(_line(rows[_key(new)]), flush=True)
    PAGE.write_text(_page(list(rows.values())), encoding="utf-8")


def _key(row: Row) -> str:
    return f"{row['target']} {row['model']} {row['cluster']}"


def _row(row: Row, target: str, seed: int) -> Row:
    with torch.device("meta"):
        model = build(row["model"]).model
    graph = model_graph(row["model"], train=True)
    cluster = placement.Cluster.preset(row["cluster"], rates="peak")
    found: Row = {"target": target, "model": row["model"], "cluster": row["cluster"], "recorded": row["strategy"]}
    try:
        found["recorded_s"] = placement.optimize(
            graph, cluster, strategy=row["strategy"], seed=seed, target="any"
        ).step_time_s
    except PlacementError as error:  # the rules of a later release
        found |= {"recorded_s": None, "why": str(error)}
    tool, recorded = tool_for(target, graph, cluster, model), placement.Strategy.parse(row["strategy"])
    refusal = tool.refuses(recorded)
    found["recorded_lacks"] = tool.lacks(recorded) or ("" if refusal is None else refusal.reason)
    began_s = time.process_time()
    try:
        result = placement.optimize(graph, cluster, target=target, model=model, budget_s=row["budget_s"], seed=seed)
        kept = result.kept_to
        assert kept is not None
        found |= {"strategy": result.strategy.text, "step_s": result.step_time_s, "reason": result.reason}
        found |= {"faster": kept.faster, "faster_s": kept.faster_s, "lacks": kept.lacks}
        if not result.strategy.is_none and result.feasible:
            text = placement.export(result, target, **arguments(target, graph, model, "model.py:make"))
            found["lines"] = len(str(text).splitlines())
    except PlacementError as error:
        found |= {"strategy": None, "step_s": None, "reason": str(error)}
    return {**found, "took_s": time.process_time() - began_s, "budget_s": row["budget_s"], "commit": commit()}


def _slower(row: Row) -> float | None:
    """Times the recorded step; None where either is not known."""
    return None if not row.get("step_s") or not row["recorded_s"] else row["step_s"] / row["recorded_s"]


def _line(row: Row) -> str:
    times, slower = f"{format_seconds(row['step_s'])}" if row.get("step_s") else "none", _slower(row)
    beside = "" if slower is None else f", {slower:.3f} times the recorded"
    lacks = row["recorded_lacks"] or row.get("lacks")
    more = f"; {row['recorded']}: {lacks}" if lacks else ""
    return f"{_key(row)}: {row['strategy']} {times}{beside}{more} ({row.get('reason') or 'fits'})"


def _page(rows: list[Row]) -> str:
    lines = ["# What it costs to keep to a tool", "", "`python benchmarks/for_targets.py`", ""]
    lines += [f"{machine()}; commits {', '.join(sorted({str(row['commit']) for row in rows}))}.", ""]
    for target in sorted({row["target"] for row in rows}):
        own = [row for row in rows if row["target"] == target]
        times = [slower for row in own if (slower := _slower(row)) is not None]
        answered = sum(row.get("step_s") is not None for row in own)
        median = statistics.median(times) if times else float("nan")
        lines += [f"## `--for {target}`", ""]
        slow = sum(each > SLOW for each in times)
        lines += [
            f"{answered} of {len(own)} rows have an answer that {target} runs and `placement export` writes.",
            f"{len(times)} of them take {median:.3f} times the recorded best strategies, scored again, in the median,",
            f"{slow} more than {SLOW} times. Losses of more than {EQUAL - 1:.0%}, with what the target lacks of the",
            "recorded strategy, or of the fastest that the search found beyond it:",
            "",
            "| model | cluster | recorded | for the target | times | lacks |",
            "| --- | --- | --- | --- | ---: | --- |",
        ]
        lines += [_loss(row) for row in own if not row.get("step_s") or (_slower(row) or 0.0) > EQUAL]
        lines.append("")
    return "\n".join(lines)


def _loss(row: Row) -> str:
    slower = _slower(row)
    cells = [row["model"], row["cluster"], f"`{_cell(row['recorded'])}`", f"`{_cell(row['strategy'] or 'none')}`"]
    times = "" if slower is None else f"{slower:.3f}"
    lacks = row["recorded_lacks"] or row.get("lacks") or row.get("reason") or ""
    return f"| {' | '.join([*cells, times, _cell(lacks)])} |"


def _cell(text: str) -> str:
    return (text if len(text) <= 200 else f"{text[:100]} ... {text[-90:]}").replace("|", "\\|")


if __name__ == "__main__":
    main()
