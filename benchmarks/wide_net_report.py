"""Counts, causes and the page of `wide_net.py`, of its rows."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from tests.helpers.wide_net.runs import CRASHED, EQUAL, REFUSED, STEPS, TOLERANCE, WRONG

KINDS = (EQUAL, REFUSED, CRASHED, WRONG)
Row = dict[str, Any]
_SETS = {
    "alone": "Every piece and every loss by itself, behind and before a layer",
    "drawn": "Models that were drawn",
    "transformers": "Families of transformers",
}


def counts_of(rows: Iterable[Row]) -> dict[tuple[str, str], Counter[str]]:
    """How many runs of each step and strategy ended in which way."""
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        for kind in KINDS:
            for strategy in row[kind]:
                found[row["step"], strategy][kind] += 1
    return found


def summary(rows: Sequence[Row]) -> str:
    """A table of counts, and causes, the worst and the most frequent first."""
    lines = ["| step | strategy | " + " | ".join(KINDS) + " |", "| --- | --- |" + " ---: |" * len(KINDS)]
    counts = counts_of(rows)
    for (step, strategy), found in counts.items():
        cells = " | ".join(str(found[kind]) for kind in KINDS)
        lines.append(f"| {step} | `{strategy.replace('|', chr(92) + '|')}` | {cells} |")
    total = sum(counts.values(), Counter[str]())
    lines.append("| all | | " + " | ".join(str(total[kind]) for kind in KINDS) + " |")
    for kind in (WRONG, CRASHED, REFUSED):
        causes = _causes(rows, kind)
        if causes:
            lines += ["", f"{kind}, by cause:", ""]
        lines += [f"* {len(found)} times: {why} (`{min(found, key=len)}`)" for why, found in causes]
    return "\n".join(lines) + "\n"


def page(rows: Sequence[Row], where: str) -> str:
    """The page of results."""
    commits = Counter(row.get("commit") or "ba04d0e to 2b18874" for row in rows)
    made = ", ".join(f"{count} by {name}" for name, count in commits.most_common())
    models = len({(row["set"], row["model"]) for row in rows})
    runs = sum(sum(found.values()) for found in counts_of(rows).values())
    parts = [
        "# Drawn models under strategies\n",
        "Written by `make net` (`PYTHONPATH=. python benchmarks/wide_net.py`, with `--out docs/results`)  \n"
        + where
        + "\n",
        f"{models} small models, {runs} runs, each beside the plain model: {STEPS} training steps (losses, gradients, "
        "parameters and buffers after steps of SGD with momentum) or one of inference (outputs). Equal: within "
        f"{TOLERANCE:g} of a tensor's largest entry, in double precision (families of transformers, which compute some "
        "things in single precision: 1e-4; those with grouped products for experts: 2e-3). Refused: with a sentence. "
        "Crashed: any other exception. `placement`: ops on three devices at random.\n",
        f"Rows (a model in training or inference) by commits: {made}.\n",
    ]
    for name, title in _SETS.items():
        mine = [row for row in rows if row["set"] == name]
        if mine:
            count = len({row["model"] for row in mine})
            parts += [f"## {title}\n", f"{count} models.\n", summary(mine)]
    return "\n".join(parts)


def one_line(text: str) -> str:
    """The beginning of a text, without line breaks."""
    return " ".join(text.split())[:300]


def _causes(rows: Iterable[Row], kind: str) -> list[tuple[str, list[str]]]:
    """What went wrong without the names and numbers of one model, and the runs that it happened to."""
    found: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        for strategy, (why, smallest) in row[kind].items():
            found[_general(why)].append(f"{strategy} | {smallest}")
    return sorted(found.items(), key=lambda cause: -len(cause[1]))


def _general(why: str) -> str:
    why = re.sub(r"'[^']*'", "'...'", one_line(why))
    why = re.sub(r"gradient of \S+|\S+ in the end|the loss of step \d|output \d", "a number", why)
    why = re.sub(r"has a cycle: .*", "has a cycle: ...", why)
    return re.sub(r"\d[\d.e+-]*", "N", why)
