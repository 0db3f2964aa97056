"""Published figures of parallel training beside ours: every file of a folder whose format is known.

    python benchmarks/parallel_checks.py --workloads DIR [--fit DIR2] [--json] [--markdown] [--files-only]

DIR holds any number of files; which check takes a file is told by its content, not by its name. Formats:

* JSON list of settings with `bubble_rate`: Zero Bubble pipelines (Qi et al., ICLR 2024), `benchmarks/zero_bubble.py`.
* JSON with `nodes` that have `TMPCs`: layers of Piper (Tarnawski et al., NeurIPS 2021), `benchmarks/piper.py`.
* CSV of `gpus,bytes,seconds`: a measured all-reduce, `benchmarks/allreduce.py`.
* CSV of `hidden size`, `tensor parallelism`, ... and `iteration time (ms)`: measured iterations of Megatron-DeepSpeed
  (vTrain, MICRO 2024), `benchmarks/megatron.py`. Figures of the machine are fitted to such rows in the files of DIR2;
  without it to those of DIR, by cross-validation that leaves out whole models.

After the files come figures that need none: memory under recompute (`benchmarks/sublinear.py`), memory and times of
transformers under sequence parallelism and selective recompute (`benchmarks/korthikanti.py`), speed-ups of pipelines
and of spatially parallel convolution (`benchmarks/published_speedups.py`).

A file that no check takes is named and left out. Exit code 1 says that a summary figure does not hold.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import allreduce
import korthikanti
import megatron
import piper
import published_speedups
import sublinear
import zero_bubble
from checks import Check, Found, Summary
from megatron_times import Training
from table import Printer

CHECKS: Sequence[Check] = (
    zero_bubble.check,
    piper.check,
    allreduce.check,
)
WITHOUT_FILE = {
    "sublinear memory": sublinear.found,
    "activation memory of transformers": korthikanti.memory,
    "sequence parallelism and selective recompute": korthikanti.times,
    "pipelines of GPipe": published_speedups.gpipe,
    "spatially parallel convolution": published_speedups.spatial_convolution,
}


def main() -> int:
    options = _options()
    files = _files(options.workloads)
    if not files:
        print(f"{options.workloads} holds no files; check the path.", file=sys.stderr)
        return 2
    contents = {path: _content(path) for path in files}
    found: dict[str, Found] = {}
    left_out: dict[str, str] = {}
    if options.fit is None:
        fitting = megatron.Fitting(_trainings(contents, {}), leaves_out=True)  # what is wrong is told below
    else:
        rows = _trainings({path: _content(path) for path in _files(options.fit)}, left_out)
        if not rows:
            print(f"{options.fit} has no rows of {megatron.TIME_COLUMN!r} to fit to; check the path.", file=sys.stderr)
            return 2
        fitting = megatron.Fitting(rows, leaves_out=False)
    checks: Sequence[Check] = (*CHECKS, partial(megatron.check, fitting=fitting))
    for path, content in contents.items():
        name = str(path.relative_to(options.workloads))
        try:
            answer = next((answer for check in checks if (answer := check(path, content)) is not None), None)
        except (KeyError, TypeError, ValueError) as error:
            left_out[name] = _wrong(error)
            continue
        if answer is None:
            left_out[name] = "no check knows its format"
        else:
            found[name] = answer
    found |= {} if options.files_only else {name: make() for name, make in WITHOUT_FILE.items()}
    if options.json:
        print(json.dumps({"files": [_as_json(*item) for item in found.items()], "left_out": left_out}, indent=1))
    else:
        _print(found, left_out, options.markdown)
    return 0 if all(answer.holds for answer in found.values()) else 1


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _trainings(contents: Mapping[Path, Any], left_out: dict[str, str]) -> tuple[Training, ...]:
    """The rows of all files that have some; files that have wrong ones are added to those left out, with the reason."""
    result: list[Training] = []
    for path, content in contents.items():
        try:
            result += megatron.trainings(content)
        except (KeyError, TypeError, ValueError) as error:
            left_out[str(path)] = _wrong(error)
    return tuple(dict.fromkeys(result))


def _wrong(error: Exception) -> str:
    return f"its format is known, but it cannot be checked: {type(error).__name__} {error}"


def _content(path: Path) -> Any:
    """What a file holds: JSON's values, a CSV file's rows as dictionaries, or None."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return list(csv.DictReader(io.StringIO(text))) if path.suffix == ".csv" else json.loads(text)
    except (OSError, ValueError, RecursionError, csv.Error):
        return None


def _as_json(name: str, answer: Found) -> dict[str, Any]:
    return {
        "file": name,
        "what": answer.what,
        "rows": [
            {
                "name": row.name,
                "published": row.published,
                "ours": _finite(row.ours),
                "difference": _finite(answer.difference(row)),
            }
            for row in answer.rows
        ],
        "relative": answer.relative,
        "summary": _summary(answer.summary),
        "further": [_summary(summary) for summary in answer.further],
        "note": answer.note,
    }


def _summary(summary: Summary) -> dict[str, Any]:
    return {
        "what": summary.what,
        "value": _finite(summary.value),
        "limit": _finite(summary.limit),
        "holds": summary.holds,
    }


def _finite(value: float | None) -> float | None:
    """JSON has no infinities."""
    return value if value is not None and math.isfinite(value) else None


def _print(found: dict[str, Found], left_out: dict[str, str], markdown: bool) -> None:
    out = Printer("Published figures of parallel training", markdown)
    for name, answer in found.items():
        rows = []
        for row in answer.rows:
            difference = answer.difference(row)
            shown = "" if difference is None else f"{difference:+.1%}" if answer.relative else f"{difference:+.6f}"
            rows.append((row.name, "" if row.published is None else f"{row.published:.6g}", f"{row.ours:.6g}", shown))
        out.table(f"{name}: {answer.what}", ("", "published", "ours", "difference"), rows)
        for summary in (answer.summary, *answer.further):
            verdict = "holds" if summary.holds else "does NOT hold"
            what = summary.what[:1].upper() + summary.what[1:]
            out.note(f"{what}: {summary.value:.3g}, at most {summary.limit:g}: {verdict}.")
        if answer.note:
            out.note(answer.note)
    for name, reason in left_out.items():
        out.note(f"Left out: {name}, {reason}.")


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--workloads", type=Path, required=True, help="folder with published figures")
    made.add_argument("--fit", type=Path, help="folder with the iterations that figures of the machine are fitted to")
    made.add_argument("--json", action="store_true", help="print JSON and nothing else")
    made.add_argument("--markdown", action="store_true", help="print markdown instead of plain text")
    made.add_argument("--files-only", action="store_true", help="leave out the figures that need no file")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
