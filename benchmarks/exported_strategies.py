"""The recorded best strategies as scripts of plain PyTorch: how many `placement export --to torch` writes.

    python benchmarks/exported_strategies.py [--models a,b]      # writes docs/results/exported_strategies.md

Takes the newest row of each model and cluster of docs/results/strategies.jsonl, with models on `meta`. Each is scored
and exported; none is run: `benchmarks/exported_scripts.py` and the tests run scripts of small models. A run that was
stopped goes on with what is missing in docs/results/exported_strategies.jsonl.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from table import commit, read_rows

import placement
from graphs.errors import PlacementError
from graphs.zoo import build
from graphs.zoo.cache import model_graph
from placement.solving.checked import unchecked

OUT = Path(__file__).parent.parent / "docs" / "results"
ROWS, PAGE = OUT / "exported_strategies.jsonl", OUT / "exported_strategies.md"

Row = dict[str, Any]


def main() -> None:
    """Export what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", default="")
    models = parser.parse_args().models.split(",")
    warnings.simplefilter("ignore")
    best = read_rows(OUT / "strategies.jsonl", _key)
    wanted = {key: row for key, row in best.items() if row["strategy"] != "none"}
    rows = read_rows(ROWS, _key)
    for key, row in sorted(wanted.items()):
        if key not in rows and models in ([""], [row["model"]]):
            with patch("placement.optimization.check", unchecked):  # that it computes the same is checked elsewhere
                rows[key] = _row(row)
            with ROWS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[key]) + "\n")
            print(key, rows[key]["came"], flush=True)
    PAGE.write_text(_page([rows[key] for key in wanted if key in rows]), encoding="utf-8")


def _key(row: Row) -> str:
    return f"{row['model']} {row['cluster']}"


def _row(row: Row) -> Row:
    with torch.device("meta"):
        model = build(row["model"]).model
    graph = model_graph(row["model"], train=True)
    cluster = placement.Cluster.preset(row["cluster"], rates="peak")
    try:
        result = placement.optimize(graph, cluster, strategy=row["strategy"], seed=0)
        text = placement.export(result, "torch", model=model, graph=graph, source="model.py:make")
        came = f"{len(text.splitlines())} lines"
    except PlacementError as error:
        came = f"refused: {error}"
    return {**{key: row[key] for key in ("model", "cluster", "strategy")}, "came": came, "commit": commit()}


def _page(rows: list[Row]) -> str:
    refused = [row for row in rows if row["came"].startswith("refused")]
    share = (len(rows) - len(refused)) / max(len(rows), 1)
    commits = ", ".join(f"{count} by {name}" for name, count in Counter(row["commit"] for row in rows).most_common())
    lines = [
        f"| {row['model']} | {row['cluster']} | `{_cell(row['strategy'])}` | {_cell(row['came'])} |" for row in refused
    ]
    return "\n".join(
        [
            "# Recorded best strategies as scripts of PyTorch",
            "",
            "`python benchmarks/exported_strategies.py`",
            "",
            f"{len(rows) - len(refused)} of {len(rows)} ({share:.0%}) of the strategies in strategies.jsonl are",
            "written by `placement export --to torch`; placements without a strategy are not among them. Rows",
            f"were made at commits: {commits}. Those refused, with the reason:",
            "",
            "| model | cluster | strategy | reason |",
            "| --- | --- | --- | --- |",
            *lines,
            "",
        ]
    )


def _cell(text: str) -> str:
    short = text.removeprefix("refused: ")
    return (short if len(short) <= 300 else f"{short[:140]} ... {short[-150:]}").replace("|", "\\|")


if __name__ == "__main__":
    main()
