"""Figures in README.md and docs that repeat a results file, drawn from it by name.

    PYTHONPATH=. python tests/helpers/figures.py

writes them anew. A page has ``<!--name-->value<!---->``; `FIGURES` says where the value of a name comes from, and
`tests/test_docs.py` holds every page to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

from baselines.registry import HEURISTICS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
MARK = re.compile(r"(<!--([a-z0-9_.]+)-->).*?(<!---->)", re.DOTALL)


@cache
def rows(file: str) -> list[dict[str, Any]]:
    """Rows of a results file of JSON lines."""
    return [json.loads(line) for line in (RESULTS / file).read_text(encoding="utf-8").splitlines()]


def found(page: str, pattern: str) -> str:
    """First group of a pattern in a results page, in which any white space is one space."""
    text = " ".join((RESULTS / page).read_text(encoding="utf-8").split())
    match = re.search(pattern, text)
    assert match is not None, f"docs/results/{page} has nothing like {pattern}"
    return match[1]


def percent(share: float) -> str:
    """Whole percent, as prose has it."""
    return f"{100 * share:.0f} %"


def rounded(page: str, pattern: str) -> str:
    """A percentage of a page in whole percent."""
    return percent(float(found(page, pattern)) / 100)


# Rows of FSDP and Megatron-LM in bfloat16: what they are of, in the section "By GPU" of truth.md -> (rows, mean error).
_DENSE = {
    "H100": (r"(\d+) in bfloat16 [\d.]+ %", r"\d+ in bfloat16 ([\d.]+) %"),
    "H100 of 500 W": (r"500 W \| (\d+) \|", r"500 W \| \d+ \| ([\d.]+) %"),
    "B200": (r"\| B200 \| (\d+) \|", r"\| B200 \| \d+ \| ([\d.]+) %"),
    "A100": (r"(\d+) of FSDP", r"\d+ of FSDP ([\d.]+) %"),
}


def dense() -> tuple[int, float]:
    """How many public dense runs there are, but for BLOOM's, and the mean of their errors as a share."""
    each = [(int(found("truth.md", n)), float(found("truth.md", off))) for n, off in _DENSE.values()]
    runs = sum(n for n, _ in each)
    return runs, sum(n * off for n, off in each) / runs / 100


def ran(outcome: str) -> str:
    """How many of the best strategies found ended so as scripts."""
    return str(sum(row["ran"].startswith(outcome) for row in rows("exported_strategies.jsonl")))


def _none(count: int) -> str:
    return str(count) if count else "none"


def off(file: str) -> list[float]:
    """Errors of predicted step times, as shares of the measured ones."""
    known = (row for row in rows(file) if row["measured_s"])
    return [abs(row["predicted_s"] / row["measured_s"] - 1) for row in known]


def drawn(outcome: str) -> int:
    """Runs of models of transformers under strategies that ended so."""
    return sum(len(row[outcome]) for row in rows("wide_net.jsonl") if row["set"] == "transformers")


def families() -> int:
    return len({row["model"] for row in rows("wide_net.jsonl") if row["set"] == "transformers"})


def method(name: str, column: int) -> str:
    """A cell of the table of methods in suite.md."""
    cells = found("suite.md", rf"\| {name} \| (\d\.\d+ \| .*?) \|(?: \||$)").split(" | ")
    return cells[column].split(",")[0]


FIGURES: dict[str, Callable[[], str]] = {
    "truth.runs": lambda: str(dense()[0]),
    "truth.off": lambda: percent(dense()[1]),
    "truth.bloom_runs": partial(found, "truth.md", r"(\d+) of BLOOM"),
    "truth.bloom_off": partial(rounded, "truth.md", r"\d+ of BLOOM ([\d.]+) %"),
    "truth.b200_off": partial(rounded, "truth.md", r"\| B200 \| \d+ \| ([\d.]+) %"),
    "truth.b200_memory": partial(found, "truth.md", r"Memory of B200 is ([\d.]+ %) off"),
    "gpu.off": partial(rounded, "gpu.md", r"before the calibration ([\d.]+)% off"),
    "gpu.memory": lambda: found("gpu.md", r"memory ([\d.]+)% off") + " %",
    "gpu.rows": partial(found, "gpu.md", r"memory [\d.]+% off in the mean of (\d+) rows"),
    "strategy_fidelity.runs": lambda: str(len(off("strategy_fidelity.jsonl"))),
    "strategy_fidelity.off": lambda: percent(median(off("strategy_fidelity.jsonl"))),
    "fidelity.runs": lambda: str(len(off("fidelity.jsonl"))),
    "fidelity.off": lambda: percent(median(off("fidelity.jsonl"))),
    "exported.all": lambda: str(len(rows("exported_strategies.jsonl"))),
    "exported.equal": partial(ran, "equal"),
    "exported.refused": partial(ran, "refused"),
    "exported.wrong": lambda: _none(len(rows("exported_strategies.jsonl")) - int(ran("equal")) - int(ran("refused"))),
    "strategies.better": partial(found, "strategies.md", r"better on (\d+) of \d+ rows"),
    "strategies.rows": partial(found, "strategies.md", r"better on \d+ of (\d+) rows"),
    "strategies.equal": partial(found, "strategies.md", r"equal on (\d+)"),
    "strategies.worse": partial(found, "strategies.md", r"equal on \d+, worse on (\d+)"),
    "for_targets.rows": lambda: str(len(rows("for_targets.jsonl"))),
    "for_targets.off": lambda: percent(median(r["step_s"] / r["recorded_s"] - 1 for r in rows("for_targets.jsonl"))),
    "wide_net.families": lambda: str(families()),
    "wide_net.runs": lambda: str(sum(drawn(each) for each in ("equal", "refused", "crashed", "WRONG"))),
    "wide_net.equal": lambda: str(drawn("equal")),
    "wide_net.refused": lambda: str(drawn("refused")),
    "wide_net.crashed": lambda: str(drawn("crashed")),
    "wide_net.wrong": lambda: str(drawn("WRONG")),
    "suite.heft_s": partial(method, "heft", 3),
    "suite.heft": partial(method, "heft", 0),
    "suite.auto": partial(method, "auto", 0),
    "suite.rows": partial(found, "suite.md", r"worse than HEFT on \d+ of (\d+) rows"),
    "zero_shot.pretrained": partial(found, "zero_shot.md", r"\| all \(\d+\) \|(?: [\d.]+ \|){3} ([\d.]+) \|"),
    "zero_shot.problems": partial(found, "zero_shot.md", r"\| all \((\d+)\) \|"),
    "registry.heuristics": lambda: str(len(HEURISTICS)),
    "distributed_fidelity.runs": lambda: str(len(rows("distributed_fidelity.jsonl"))),
    "distributed_fidelity.off": partial(rounded, "distributed_fidelity.md", r"off by ([\d.]+)% in the median"),
    "distributed_fidelity.most": partial(rounded, "distributed_fidelity.md", r"median and ([\d.]+)% at most"),
}


def pages() -> list[Path]:
    """README and the pages of docs, without the results themselves."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def with_figures(page: str) -> str:
    """The page with the figures of today between its markers."""
    return MARK.sub(lambda match: f"{match[1]}{FIGURES[match[2]]()}{match[3]}", page)


if __name__ == "__main__":
    for path in pages():
        path.write_text(with_figures(path.read_text(encoding="utf-8")), encoding="utf-8")
