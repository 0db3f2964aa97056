"""The recorded best strategies as scripts of plain PyTorch: how many `placement export --to torch` writes, and run.

    python benchmarks/exported_strategies.py [--models a,b]      # writes docs/results/exported_strategies.md

Takes the newest row of each model and cluster of docs/results/strategies.jsonl. Each is scored and exported at its own
size, with models on `meta`; and scaled down, under torchrun on processes of this machine: the model's small
configuration, and the strategy as the check before an answer has it. Nothing is random in it: dropout is of nothing,
and statistics of batch norms are fixed. Gradients and weights after two steps are those of the model in one piece, or
the row says by how much they are not. A run that was stopped goes on with what is missing, or failed, in
docs/results/exported_strategies.jsonl.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from exported_scripts import differences
from table import commit, read_rows

import placement
from graphs.errors import PlacementError
from graphs.transforms.strategy import Strategy
from graphs.zoo import MODELS, build
from graphs.zoo.cache import model_graph
from placement.runtime.checking.strategy_check import scaled_down
from placement.solving.checked import unchecked

OUT = Path(__file__).parent.parent / "docs" / "results"
ROWS, PAGE = OUT / "exported_strategies.jsonl", OUT / "exported_strategies.md"
# The file that scripts import: a function for each model, which gives it small and without random numbers.
SMALL = """
import torch
from torch import nn

from graphs.zoo import MODELS, build


def small(name, batch):
    torch.manual_seed(0)
    zoo = build(name, device="cpu", small=True, batch_size=batch)
    for module in zoo.model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return zoo.model, zoo.train_args


def __getattr__(name):
    return lambda batch: small(name, batch)
"""

Row = dict[str, Any]


def main() -> None:
    """Export and run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", default="")
    models = parser.parse_args().models.split(",")
    warnings.simplefilter("ignore")
    best = read_rows(OUT / "strategies.jsonl", _key)
    wanted = {key: row for key, row in best.items() if row["strategy"] != "none"}
    rows = read_rows(ROWS, _key)
    for model in dict.fromkeys(row["model"] for row in wanted.values() if models == [""] or row["model"] in models):
        for key in [key for key, row in rows.items() if row["model"] == model and row.get("ran", "")[:6] == "FAILED"]:
            del rows[key]
        todo = {key: row for key, row in wanted.items() if row["model"] == model and "ran" not in rows.get(key, {})}
        ran = _ran(model, todo)
        for key, row in todo.items():
            with patch("placement.optimization.check", unchecked):  # that it computes the same is checked elsewhere
                rows[key] = {**(rows.get(key) or _row(row)), **ran[key]}
            with ROWS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[key]) + "\n")
            print(key, "|", rows[key]["came"], "|", rows[key]["scaled"], "|", rows[key]["ran"], flush=True)
    PAGE.write_text(_page([rows[key] for key in wanted if key in rows]), encoding="utf-8")


def _key(row: Row) -> str:
    return f"{row['model']} {row['cluster']}"


def _row(row: Row) -> Row:
    with torch.device("meta"):
        model = build(row["model"]).model
    graph = model_graph(row["model"], train=True)
    cluster = placement.Cluster.preset(row["cluster"], rates="peak")
    try:
        result = placement.optimize(graph, cluster, strategy=row["strategy"], seed=0, target="any")
        text = placement.export(result, "torch", model=model, graph=graph, source="model.py:make")
        came = f"{len(text.splitlines())} lines"
    except PlacementError as error:
        came = f"refused: {error}"
    return {**{key: row[key] for key in ("model", "cluster", "strategy")}, "came": came, "commit": commit()}


def _ran(model: str, rows: dict[str, Row]) -> dict[str, Row]:
    """Of each row: what its strategy is scaled down, and what came of it under torchrun."""
    samples = MODELS[model].batch_size
    scaled = {key: scaled_down(Strategy.parse(row["strategy"]), samples) for key, row in rows.items()}
    clusters = {given: rows[key]["cluster"] for key, given in reversed(scaled.items())}  # the first that has it
    found: dict[tuple[Strategy, int], str] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "small_zoo.py").write_text(SMALL)
        scripts: dict[int, dict[str, tuple[Strategy, int]]] = {}
        for number, given in enumerate(dict.fromkeys(scaled.values())):
            name = f"{model}_{number}"
            try:
                (folder / f"{name}.py").write_text(_small_script(model, *given, clusters[given]))
                scripts.setdefault(given[0].devices, {})[name] = given
            except PlacementError as error:
                found[given] = f"refused: {error}"
        for processes, named in scripts.items():
            came = differences(list(named), processes, folder)
            found.update({given: came[name] for name, given in named.items()})
    return {
        key: {"scaled": given[0].text, "ran": found[given], "ran_commit": commit()} for key, given in scaled.items()
    }


def _small_script(model: str, strategy: Strategy, batch: int, cluster: str) -> str:
    space: dict[str, Any] = {}
    exec(SMALL, space)
    module, args = space["small"](model, batch)
    graph = placement.capture(module, args, train=True, optimizer="momentum")
    devices = placement.Cluster.preset(cluster, rates="peak")
    result = placement.optimize(graph, devices, strategy=strategy.text, seed=0, target="any")
    return placement.export(result, "torch", model=module, graph=graph, source=f"small_zoo.py:{model}(batch={batch})")


def _page(rows: list[Row]) -> str:
    refused = [row for row in rows if row["came"].startswith("refused")]
    share = (len(rows) - len(refused)) / max(len(rows), 1)
    commits = ", ".join(f"{count} by {name}" for name, count in Counter(row["commit"] for row in rows).most_common())
    ran = Counter(row.get("ran", "not").partition(" ")[0].rstrip(":") for row in rows)
    return "\n".join(
        [
            "# Recorded best strategies as scripts of PyTorch",
            "",
            f"`python benchmarks/exported_strategies.py`, torch {torch.__version__}, on processes of CPUs",
            "",
            f"{len(rows) - len(refused)} of {len(rows)} ({share:.0%}) of the strategies in strategies.jsonl are",
            "written by `placement export --to torch`; placements without a strategy are not among them. Rows",
            f"were made at commits: {commits}. Scaled down (the model's small configuration, 2 ranks for each axis), "
            f"{ran['equal']} ran under torchrun with the gradients and weights of the model in one piece,",
            f"{ran['refused']} were refused, {ran['FAILED']} failed, {ran['DIFFERENT']} were different and",
            f"{ran['not']} were not run.",
            "",
            "## Refused",
            "",
            "| model | cluster | strategy | reason |",
            "| --- | --- | --- | --- |",
            *(
                f"| {row['model']} | {row['cluster']} | `{_cell(row['strategy'])}` | {_cell(row['came'])} |"
                for row in refused
            ),
            "",
            "## All",
            "",
            "| model | cluster | strategy | script | scaled down | ran |",
            "| --- | --- | --- | --- | --- | --- |",
            *(_line(row) for row in rows),
            "",
        ]
    )


def _line(row: Row) -> str:
    came = "refused" if row["came"].startswith("refused") else row["came"]
    ran = row.get("ran", "not run")
    shown = ("refused: " if ran.startswith("refused") else "") + _cell(ran)
    scaled = f"`{_cell(row['scaled'])}`" if "scaled" in row else ""
    texts = f"`{_cell(row['strategy'])}`", came, scaled, shown
    return f"| {row['model']} | {row['cluster']} | {' | '.join(texts)} |"


def _cell(text: str) -> str:
    short = text.removeprefix("refused: ")
    return (short if len(short) <= 300 else f"{short[:140]} ... {short[-150:]}").replace("|", "\\|")


if __name__ == "__main__":
    main()
