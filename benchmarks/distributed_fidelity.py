"""Does an update take as long for real as in virtual time? `python benchmarks/distributed_fidelity.py --seed 0`

A character-level transformer of examples/fit_models.py is fitted by each method with each number of workers and each
straggler, on the cores of this machine: in virtual time on cluster `local`, where gradients are timed, and in real
processes. Compared is the time per update, between the first evaluation after the start and the last one: meeting is
not counted. Each row is appended to OUT/distributed_fidelity.jsonl as soon as it is known, and a run that was stopped
goes on there; OUT/distributed_fidelity.md is written from all rows. Let the machine do nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

from table import machine, parser, read_rows

import placement
from graphs.disk import write_atomically
from graphs.formatting import format_seconds
from placement.fitting.log import FitRun

METHODS = ("sync", "qsgd:s=16", "local_sgd:period=4", "gossip:topology=random", "downpour", "elastic:period=2",
           "parameter_server", "power_sgd", "sandblaster")  # fmt: skip
STRAGGLERS = (
    "none",
    "exponential:mean=0.5",
)
WORKERS = (1, 2)
ALONE = ("gossip:topology=random",)  # which takes two workers or more
UPDATES, EVERY, BATCH = 120, 60, 128  # an evaluation takes the time of a gradient, on the core of a worker
WHOLE, LESS = ("sandblaster",), 10  # methods whose batch is all samples, and how many times fewer updates they make
MODELS = Path(__file__).resolve().parents[1] / "examples" / "fit_models.py"

Row = dict[str, Any]


def main() -> None:
    """Measure what is missing, and write the page."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    rows_file = options.out / "distributed_fidelity.jsonl"
    rows = read_rows(rows_file, _key)
    cases = [case for case in product(METHODS, WORKERS, STRAGGLERS) if not (case[0] in ALONE and case[1] == 1)]
    cluster = placement.Cluster.local()
    for method, workers, stragglers in cases if not options.render else ():
        row: Row = {"method": method, "workers": workers, "stragglers": stragglers, "seed": options.seed}
        if _key(row) in rows:
            continue
        row |= _measured(row, cluster)
        rows[_key(row)] = row
        with rows_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(_line(row), file=sys.stderr, flush=True)
    write_atomically(options.out / "distributed_fidelity.md", _page(list(rows.values())))


def _measured(row: Row, cluster: placement.Cluster) -> Row:
    """Seconds per update, virtual and real."""
    model, data = _model_and_data()
    found, less = {}, LESS if row["method"] in WHOLE else 1
    for name, is_real in (("virtual_s", False), ("real_s", True)):
        compared = placement.fit(
            model, data, cluster, row["method"], workers=row["workers"], stragglers=row["stragglers"], lr=0.05,
            batch=BATCH, updates=UPDATES // less, every=EVERY // less, seed=row["seed"], real=is_real,
        )  # fmt: skip
        found[name] = _per_update_s(compared.runs[0])
    return found


def _model_and_data() -> Any:
    spec = importlib.util.spec_from_file_location("fit_models", MODELS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.char_transformer()


def _per_update_s(run: FitRun) -> float:
    """From the first evaluation after the start on."""
    first, last = run.points[1], run.points[-1]
    return (last.seconds - first.seconds) / (last.updates - first.updates)


def _page(rows: list[Row]) -> str:
    errors = [abs(row["virtual_s"] / row["real_s"] - 1.0) for row in rows]
    lines = ["# Virtual time and real processes", ""]
    command = shlex.join(["python", "benchmarks/distributed_fidelity.py", *sys.argv[1:]]).replace(" --render", "")
    lines += [f"Written by `{command}`  ", machine(), ""]
    if errors:
        lines += [
            f"{len(rows)} runs of {UPDATES} updates of the transformer, {BATCH} samples a worker "
            f"({UPDATES // LESS} with all samples of {' and '.join(WHOLE)}): the time per update is off by "
            f"{statistics.median(errors):.1%} in the median and {max(errors):.1%} at most.",
            "",
        ]
    lines += ["| method | workers | stragglers | virtual | real | error |", "| --- | ---: | --- | ---: | ---: | ---: |"]
    return "\n".join([*lines, *(_line(row) for row in rows), ""])


def _line(row: Row) -> str:
    times = " | ".join(format_seconds(row[name]) for name in ("virtual_s", "real_s"))
    error = row["virtual_s"] / row["real_s"] - 1.0
    return f"| {row['method']} | {row['workers']} | {row['stragglers']} | {times} | {error:+.1%} |"


def _key(row: Row) -> str:
    return repr([row[name] for name in ("method", "workers", "stragglers", "seed")])


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=Path("docs/results"), help="default: %(default)s")
    options.add_argument("--render", action="store_true", help="only write the page from the rows there are")
    return options.parse_args()


if __name__ == "__main__":
    main()
