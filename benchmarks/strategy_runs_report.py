"""The page of `strategy_runs.py`: models against strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def page(models: Sequence[str], rows: Sequence[Row], machine: str, tolerance: str, rounded: str) -> str:
    """The markdown page.

    Args:
        models: in the order in which they are shown.
        rows: with ``model``, ``pass``, ``strategy``, ``found``, ``off``, ``why`` and perhaps ``commit``.
        tolerance: up to which numbers are called equal.
        rounded: the same of runs in bfloat16.
    """
    rows = [row for row in rows if row["model"] in models]
    reasons = _reasons(rows)
    counts = Counter(row["found"] for row in rows)
    training = [row for row in rows if row["pass"] == "train" and ": " not in row["strategy"]]
    precise = [row for row in rows if ": " in row["strategy"]]
    pipelines = [row for row in training if row["strategy"].startswith("pp") and "|" not in row["strategy"]]
    mixed = [row for row in training if "pp" in row["strategy"] and "|" in row["strategy"]]
    others = [row for row in training if "pp" not in row["strategy"]]
    return "\n".join(
        [
            "# Models under strategies",
            "",
            "Written by `PYTHONPATH=.:tests/helpers python benchmarks/strategy_runs.py --seed 0`  ",
            f"{machine} (of the newest runs)",
            "",
            f"{len(rows)} runs of {len(models)} small models, a batch of 8: {counts['equal']} equal,",
            f"{counts['refused']} refused, {counts['fails']} fail. Every rank is a process. A number: how much loss,",
            "gradients, states or outputs differ from those of the model as it is, relative to the largest entry of",
            f"the same tensor; below {tolerance} that is called equal (float32). With a star: float32 rounds more than",
            "that, and the number is that of float64. R: refused, listed below. FAILS:",
            "wrong numbers or an error, listed below too. Empty: was not run. Models with batch norms run under",
            "`statistics=sync`; with micro-batches, which come one after the other, under `statistics=local`, compared",
            "with one device that trains on one part of the batch after the other. In a precision (`mixed: dp2 zero3`)",
            f"the whole model computes in it, too, and numbers below {rounded}, some roundings of bfloat16, are called",
            "equal; with a star: below twice what the whole model is off from float32 in the same tensor.",
            "",
            f"Runs by commits: {_commits(rows)}.",
            "",
            *_table("Training, without stages", models, others, reasons),
            *_table("Training, pipelines; in brackets the numbers of micro-batches", models, pipelines, reasons),
            *_table("Training, pipelines with other axes", models, mixed, reasons),
            *_table("Training in a precision", models, precise, reasons),
            *_table("Inference", models, [row for row in rows if row["pass"] == "eval"], reasons),
            "## Reasons",
            "",
            *_listed(rows, reasons),
        ]
    )


def _commits(rows: Sequence[Row]) -> str:
    made: dict[str, list[Row]] = {}
    for row in rows:
        made.setdefault(row.get("commit") or "older code", []).append(row)
    return "; ".join(
        f"{len(runs)} by {name} ({', '.join(sorted({row['model'] for row in runs}))})"
        if name != "older code"
        else f"{len(runs)} by {name}"
        for name, runs in sorted(made.items(), key=lambda item: -len(item[1]))
    )


def _reasons(rows: Sequence[Row]) -> dict[str, str]:
    """Sentence -> its sign, in the order of the rows."""
    found: dict[str, str] = {}
    for row in rows:
        if row["found"] != "equal":
            key = _reason(row)
            found.setdefault(key, f"{'R' if row['found'] == 'refused' else 'FAILS '}{len(found) + 1}")
    return found


def _reason(row: Row) -> str:
    """The sentence without the strategy that it names, which would make every one another."""
    return str(row["why"]).replace(f"'{row['strategy']}'", "...").replace("\n", " ")


def _table(caption: str, models: Sequence[str], rows: Sequence[Row], reasons: dict[str, str]) -> list[str]:
    """Models against strategies; micro-batches of one order share a column."""
    columns: dict[str, None] = dict.fromkeys(_column(row) for row in rows)
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["model"], _column(row)), []).append(row)
    lines = [
        "| " + " | ".join(["model", *(column.replace("|", "\\|") for column in columns)]) + " |",
        "| --- |" + " ---: |" * len(columns),
    ]
    for model in models:
        shown = [_cell(cells.get((model, column), []), reasons) for column in columns]
        lines.append("| " + " | ".join([model, *shown]) + " |")
    return [f"## {caption}", "", *lines, ""] if columns else []


def _column(row: Row) -> str:
    """The strategy; of a pipeline alone without its micro-batches."""
    return str(row["strategy"]).rpartition(" mb")[0] if _is_pipeline(row) else str(row["strategy"])


def _is_pipeline(row: Row) -> bool:
    return row["strategy"].startswith("pp") and "|" not in row["strategy"] and row["pass"] == "train"


def _cell(rows: Sequence[Row], reasons: dict[str, str]) -> str:
    """The largest difference, then what is refused or fails; of a pipeline, for which micro-batches."""
    offs: dict[str, float] = {}
    batches: dict[str, list[str]] = {}
    for row in rows:
        sign = "" if row["found"] == "equal" else reasons[_reason(row)]
        sign = sign or "*" * bool(row["why"])  # equal in float64
        offs[sign] = max(offs.get(sign, 0.0), row["off"] or 0.0)
        batches.setdefault(sign, []).append(row["strategy"].rpartition(" mb")[2])
    shown = []
    for sign, numbers in batches.items():
        text = sign if sign.strip("*") else f"{offs[sign]:.0e}{sign}".replace("e-0", "e-").replace("0e+00", "0")
        shown.append(f"{text} ({' '.join(numbers)})" if _is_pipeline(rows[0]) else text)
    return ", ".join(shown)


def _listed(rows: Sequence[Row], reasons: dict[str, str]) -> list[str]:
    counts = Counter(reasons[_reason(row)] for row in rows if row["found"] != "equal")
    lines = [f"* {sign}, {counts[sign]} runs: {reason}" for reason, sign in reasons.items()]
    return [*(lines or ["Nothing was refused, and nothing failed."]), ""]
