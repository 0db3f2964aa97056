"""Measured training runs beside what the shipped presets predict, and beside what one constant would.

    python benchmarks/truth.py --rows DIR [--json] [--only WORD] [--sample N] [--limit SECONDS] [--markdown]

Every CSV or JSON file of DIR whose columns are those of a known format (`truth_rows`) is read. Each row is built as a
user would: a model captured without weights, a strategy text, a preset, a stack. Nothing is fitted, but for the
constant to compare with: one model-FLOPs utilisation for all rows of a file and a kind of GPU, the best there is for
those very rows. Errors are (predicted - measured) / measured.

Each row is printed when it is done, so that what was stopped leaves all rows before. The last lines say how many rows
were not built, by reason.
"""

from __future__ import annotations

import json
import math
import re
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from table import Printer, line, parser
from truth_kernels import Kernels, read_kernels
from truth_rows import runs_in
from truth_runs import Run, Skipped
from truth_scores import Predictions, with_micro_batches

LONG_S = 50e-6  # kernels and collectives that weigh in a step
APART = 0.05  # layouts that differ by less are the same to a stop watch
COLUMNS = "run", "strategy", "stack", "measured s", "predicted s", "error", "constant", "measured GB", "GB", "memory"
Rows = list[Run | Skipped]


@dataclass(frozen=True)
class Judged:
    """A run, and what was predicted of it.

    Attributes:
        run: as measured.
        predicted_s, predicted_bytes: of a step, and of its fullest device.
        constant_s: by the utilisation that suits the file best; NaN where no time was measured.
    """

    run: Run
    predicted_s: float
    predicted_bytes: float
    constant_s: float = math.nan

    @property
    def error(self) -> float:
        return self.predicted_s / self.run.measured_s - 1.0

    @property
    def constant_error(self) -> float:
        return self.constant_s / self.run.measured_s - 1.0

    @property
    def memory_error(self) -> float | None:
        return None if not self.run.measured_bytes else self.predicted_bytes / self.run.measured_bytes - 1.0


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=Path, required=True, help="folder of CSV and JSON files")
    options.add_argument("--json", action="store_true", help="print JSON and nothing else")
    options.add_argument("--only", default="", help="rows and files whose name has this word")
    options.add_argument("--sample", type=int, metavar="N", help="N rows, evenly of all files and strategies")
    options.add_argument(
        "--limit", type=float, default=600.0, metavar="SECONDS", help="of a row (default: %(default)g)"
    )
    given = options.parse_args()
    if not given.rows.is_dir():
        sys.exit(f"--rows {given.rows} is no folder; give one that holds CSV files of measured runs.")
    if given.limit <= 0 or (given.sample is not None and given.sample < 1):
        sys.exit("--limit and --sample are more than 0.")
    files, unread = _files(given.rows, given.only)
    if not files:
        sys.exit(f"no file in {given.rows} has the columns of a known format; see benchmarks/truth_rows.py.")
    if given.sample:
        files = sampled(files, given.sample)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and the process that predicts ends, too
    with Predictions(given.limit) as predictions:
        if given.json:
            _print_json(files, unread, predictions)
        else:
            _print(Printer("Measured runs and predictions", given.markdown), files, unread, predictions)


def _files(folder: Path, word: str) -> tuple[dict[str, Rows | Kernels], list[str]]:
    """Rows of each file that have a word in their or the file's name, and files that cannot be read."""
    files: dict[str, Rows | Kernels] = {}
    unread = []
    for path, rows in runs_in(folder):
        if rows is not None:
            chosen = [row for row in rows if word in path.name or word in row.name]
            files |= {path.name: chosen} if chosen else {}
        elif word in path.name:
            kernels = read_kernels(path)
            files |= {path.name: kernels} if kernels is not None else {}
            unread += [path.name] if kernels is None else []
    return files, unread


def sampled(files: dict[str, Rows | Kernels], number: int) -> dict[str, Rows | Kernels]:
    """So many rows of all, as equally many of each file as it has, and of each file of all its strategies."""
    quotas = dict.fromkeys(files, 0)
    sizes = {name: len(rows.names) if isinstance(rows, Kernels) else len(rows) for name, rows in files.items()}
    while sum(quotas.values()) < min(number, sum(sizes.values())):
        for name in [name for name in files if quotas[name] < sizes[name]][: number - sum(quotas.values())]:
            quotas[name] += 1
    return {
        name: rows.picked(_even(range(sizes[name]), n)) if isinstance(rows, Kernels) else _spread(rows, n)
        for (name, rows), n in zip(files.items(), quotas.values(), strict=True)
        if n
    }


def _spread(rows: Rows, number: int) -> Rows:
    """So many rows: the first of each strategy, the second of each, ...; of a round that is too many, evenly."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        groups[row.reason if isinstance(row, Skipped) else re.sub(r" \| cuts=\S*", "", row.strategy)].append(i)
    chosen: list[int] = []
    for each in zip_longest(*groups.values()):
        here = [i for i in each if i is not None]
        chosen += _even(here, min(number - len(chosen), len(here)))
    return [rows[i] for i in sorted(chosen)]


def _even(places: Sequence[int], number: int) -> list[int]:
    return [places[i * len(places) // number] for i in range(number)]


# -- predictions ----------------------------------------------------------------------------------------------------


def judged(rows: Rows, predictions: Predictions) -> Iterator[Judged | Skipped]:
    """Each row predicted, when it is done, beside the best constant of all."""
    constants = _constants(rows)
    for row in rows:
        if isinstance(row, Skipped):
            yield row
            continue
        found = predictions(row)
        if isinstance(found, str):
            yield Skipped(row.name, found)
        else:
            yield Judged(row, *found, _work(row) / constants[_kind(row)] if row.is_timed else math.nan)


def _constants(rows: Rows) -> dict[str, float]:
    """Of each kind of cluster, the FLOP/s of a GPU that suit its rows best."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for row in rows:
        if isinstance(row, Run) and row.is_timed:
            groups[_kind(row)].append(row)
    return {kind: _best_rate(several) for kind, several in groups.items()}


def _kind(run: Run) -> str:
    return next(word for word in run.cluster.split("x") if word and not word.isdigit()).split("-")[0]


def _work(run: Run) -> float:
    return run.shape.model_flops(run.batch) / run.gpus


def _best_rate(runs: Sequence[Run]) -> float:
    """FLOP/s with the least mean of absolute errors: it is that of one of the rows."""
    rates = np.array([_work(run) / run.measured_s for run in runs])
    errors = np.abs(rates[None, :] / rates[:, None] - 1.0).mean(axis=1)
    return float(rates[errors.argmin()])


# -- what comes of it -----------------------------------------------------------------------------------------------


def pairs_in_order(rows: Sequence[Judged | Skipped]) -> tuple[int, int]:
    """``(right, all)`` pairs of layouts of one workload that differ by `APART` or more."""
    right = several = 0
    for group in layouts(rows):
        for i, a in enumerate(group):
            for b in group[:i]:
                ratio = a.run.measured_s / b.run.measured_s
                if max(ratio, 1 / ratio) >= 1 + APART:
                    several += 1
                    right += (a.predicted_s > b.predicted_s) == (ratio > 1)
    return right, several


def layouts(rows: Sequence[Judged | Skipped]) -> list[list[Judged]]:
    """Runs of one workload, where there are several."""
    groups: dict[tuple[object, ...], list[Judged]] = defaultdict(list)
    for row in rows:
        if isinstance(row, Judged) and row.run.is_timed:
            groups[row.run.workload].append(row)
    return [group for group in groups.values() if len(group) > 1]


def _behind(rows: Sequence[Judged | Skipped]) -> list[float]:
    """Of each workload, how much longer than the fastest layout the one took that is predicted to be the fastest."""
    return [
        min(group, key=lambda row: row.predicted_s).run.measured_s / min(row.run.measured_s for row in group) - 1.0
        for group in layouts(rows)
    ]


def summary(rows: Sequence[Judged | Skipped]) -> dict[str, Any]:
    """What ``--json`` says of one file beside its rows."""
    built = [row for row in rows if isinstance(row, Judged)]
    right, several = pairs_in_order(rows)
    timed = [row for row in built if row.run.is_timed]
    memory = [abs(error) for row in built if (error := row.memory_error) is not None]
    return {
        **_counts(rows),
        "mean_error": _mean([abs(row.error) for row in timed]),
        "constant_mean_error": _mean([abs(row.constant_error) for row in timed]),
        "memory_mean_error": _mean(memory),
        "memory_median_error": float(np.median(memory)) if memory else None,
        "memory_within_a_tenth": _mean([error <= 0.1 for error in memory]),
        "pairs_in_order": right / several if several else None,
    }


def _counts(rows: Sequence[Judged | Skipped]) -> dict[str, Any]:
    reasons = Counter(row.reason for row in rows if isinstance(row, Skipped))
    return {"of": len(rows), "built": len(rows) - reasons.total(), "not_built": dict(reasons.most_common())}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _print_json(files: dict[str, Rows | Kernels], unread: list[str], predictions: Predictions) -> None:
    """One document, of which each row is a line that is written when the row is done."""
    done: list[Judged | Skipped] = []
    print('{"files": [')
    for i, (name, rows) in enumerate(files.items()):
        print(f'{"," * (i > 0)}{{"file": {json.dumps(name)}, "rows": [')
        if isinstance(rows, Kernels):
            lines = _kernel_lines(rows)
            end = {"mean_error": _mean([abs(each["error"]) for each in lines if "error" in each])}
            end["constant_mean_error"] = _mean([abs(each["constant_error"]) for each in lines if "error" in each])
            print(",\n".join(map(json.dumps, lines)))
        else:
            here: list[Judged | Skipped] = []
            for row in judged(rows, predictions):
                print("," * bool(here) + json.dumps(_row_json(row)), flush=True)
                here.append(row)
            done += here
            end = summary(here)
        print("], " + json.dumps(end)[1:], flush=True)
    print("], " + json.dumps({**_counts(done), "unread": unread})[1:])


def _row_json(row: Judged | Skipped) -> dict[str, Any]:
    if isinstance(row, Skipped):
        return {"run": row.name, "skipped": row.reason}
    return {
        **_figures(row.run.name, row.run.measured_s, row.predicted_s, row.constant_s),
        "strategy": with_micro_batches(row.run.strategy, row.run.micro_batches),
        "cluster": row.run.cluster,
        "stack": row.run.stack,
        "measured_bytes": row.run.measured_bytes,
        "predicted_bytes": row.predicted_bytes,
        "memory_error": row.memory_error,
    }


def _figures(name: str, measured_s: float, predicted_s: float, constant_s: float) -> dict[str, Any]:
    """What every row says, a step's or a kernel's."""
    if math.isnan(measured_s):
        return {"run": name, "measured_s": None, "predicted_s": predicted_s, "error": None, "constant_error": None}
    return {
        "run": name,
        "measured_s": measured_s,
        "predicted_s": predicted_s,
        "error": predicted_s / measured_s - 1.0,
        "constant_error": constant_s / measured_s - 1.0,
    }


def _kernel_lines(found: Kernels) -> list[dict[str, Any]]:
    several = zip(found.names, found.measured_s, found.predicted_s, found.constant_s, strict=True)
    rows = [{**_figures(*each), "measured_bytes": None, "predicted_bytes": None} for each in several]
    return [*rows, *({"run": f"{n} rows", "skipped": why} for why, n in found.unknown.items())]


def _print(show: Printer, files: dict[str, Rows | Kernels], unread: list[str], predictions: Predictions) -> None:
    """A table of each file, of which each row is printed when it is done."""
    done: list[Judged | Skipped] = []
    for name, rows in files.items():
        if isinstance(rows, Kernels):
            continue
        print(f"{name}\n\n{line(COLUMNS)}\n| --- | --- | --- |{' ---: |' * 7}")
        here: list[Judged | Skipped] = []
        for row in judged(rows, predictions):
            print(line(_cells(row)), flush=True)
            here.append(row)
        done += here
        print()
        show.note(_note(here))
    kernels = {name: rows for name, rows in files.items() if isinstance(rows, Kernels)}
    if kernels:
        _print_kernels(show, kernels)
    for name in unread:
        show.note(f"{name} was not read: its columns are those of no known format.")
    if done:
        counts = _counts(done)
        show.note(f"{counts['built']} of {counts['of']} rows were built ({counts['built'] / counts['of']:.0%}).")
        for reason, number in counts["not_built"].items():
            show.note(f"Not built, {number} rows: {reason}")


def _cells(row: Judged | Skipped) -> list[str]:
    if isinstance(row, Skipped):
        return [row.name, f"not built: {row.reason}", *[""] * 8]
    run, memory = row.run, row.memory_error
    times = ["", f"{row.predicted_s:.4g}", "", ""]
    if row.run.is_timed:
        times = [f"{run.measured_s:.4g}", times[1], f"{row.error:+.1%}", f"{row.constant_error:+.1%}"]
    sizes = ["", f"{row.predicted_bytes / 1e9:.4g}", ""]
    if memory is not None and run.measured_bytes:
        sizes = [f"{run.measured_bytes / 1e9:.4g}", sizes[1], f"{memory:+.1%}"]
    return [run.name, with_micro_batches(run.strategy, run.micro_batches), run.stack, *times, *sizes]


def _note(rows: Sequence[Judged | Skipped]) -> str:
    """A sentence on the rows of one file."""
    found, built = summary(rows), [row for row in rows if isinstance(row, Judged)]
    note = f"{found['built']} of {found['of']} rows built"
    if found["mean_error"] is not None:
        far = sum(abs(row.error) > 0.2 for row in built if row.run.is_timed)
        note += f": {found['mean_error']:.1%} off in the mean, {far} beyond 20 %; "
        note += f"one constant {found['constant_mean_error']:.1%}"
    if found["memory_mean_error"] is not None:
        note += f"; memory {found['memory_mean_error']:.1%} off in the mean, {found['memory_median_error']:.1%} in the "
        note += f"median, {found['memory_within_a_tenth']:.0%} within a tenth"
    if found["pairs_in_order"] is not None:
        right, several = pairs_in_order(rows)
        note += f"; {right} of {several} pairs of layouts in order, "
        note += f"the one to choose {max(_behind(rows)):.1%} behind at most"
    return note + "."


def _print_kernels(show: Printer, kernels: dict[str, Kernels]) -> None:
    lines = []
    for name, found in kernels.items():
        measured = np.array(found.measured_s)
        errors = [np.abs(np.array(each) / measured - 1.0) for each in (found.predicted_s, found.constant_s)]
        kinds = np.array([each.split(" ")[0] for each in found.names])
        for kind in dict.fromkeys(kinds.tolist()):
            here = kinds == kind
            long = here & (measured > LONG_S)
            figures = [f"{np.median(each[at]):.1%}" for each in errors for at in (here, long) if at.any()]
            lines.append([f"{name}, {kind}", str(here.sum()), str(long.sum()), *figures])
    columns = ["kernels", "rows", f"over {LONG_S * 1e6:.0f} us", "median error", "of long", "constant", "of long"]
    show.table("Kernels and collectives in short runs", columns, lines)


if __name__ == "__main__":
    main()
