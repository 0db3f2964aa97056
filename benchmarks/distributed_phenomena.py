"""Do the phenomena that the literature of distributed optimisation reports appear, in virtual time?

    python benchmarks/distributed_phenomena.py --seed 0 [--seeds 3] [--only backup,downpour] [--out docs/results]

Real gradients of a small CNN and a small transformer (examples/fit_models.py), on a simulated star of GPUs. Each row is
one method with one seed; it is appended to OUT/distributed_phenomena.jsonl as soon as it is known, and a run that was
stopped goes on with what is missing. At the end OUT/distributed_phenomena.md and .svg are written, of each phenomenon
whose rows are all there; --render does only that. What does not appear is printed like what does.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from distributed_report import HEAVY, page, plot
from distributed_runs import Case, key, run
from table import machine, parser, read_rows

from graphs.disk import write_atomically

OUT, NAME = Path("docs/results"), "distributed_phenomena"


def main() -> None:
    options = _options()
    torch.set_num_threads(1)  # models this small are slower on several
    file = options.out / f"{NAME}.jsonl"
    rows = read_rows(file, key)
    wanted = [replace(case, seed=options.seed + seed) for seed in range(options.seeds) for case in cases()]
    names = set(options.only.split(",")) if options.only else {case.phenomenon for case in wanted}
    for case in wanted:
        if not options.render and case.phenomenon in names and key(asdict(case)) not in rows:
            row = run(case)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")
            rows[key(row)] = row
            print(f"{case.phenomenon:12} {case.label:44} seed {case.seed}  loss {row['end_loss']}", flush=True)
    missing = {case.phenomenon for case in wanted if key(asdict(case)) not in rows}
    if missing:
        print(f"left out of the page, since not all runs of it are there: {', '.join(sorted(missing))}")
    shown = [rows[key(asdict(case))] for case in wanted if case.phenomenon not in missing]
    command = shlex.join(["python", f"benchmarks/{NAME}.py", *(word for word in sys.argv[1:] if word != "--render")])
    plot(shown, options.out / f"{NAME}.svg")
    write_atomically(options.out / f"{NAME}.md", page(shown, command, machine()))


def cases() -> Iterator[Case]:
    """Of all phenomena, with seed 0."""
    yield from _backup()
    yield from _downpour()
    yield from _averaging()
    yield from _compression()
    yield from _diversity()
    yield from _large_batch()
    yield from _pipeline()


def _backup() -> Iterator[Case]:
    for stragglers in (HEAVY, "none"):
        for extra in (0, 1, 2, 4):
            yield Case(
                "backup", f"{extra} backups", f"parameter_server+linear+first:extra={extra}+lr=0.005",
                workers=16, batch=4, updates=150, stragglers=stragglers, loss=0.55,
            )  # fmt: skip


def _downpour() -> Iterator[Case]:
    for rule, rates in (("sgd", (0.003, 0.01, 0.03, 0.1)), ("adagrad", (0.0025, 0.005, 0.01, 0.02))):
        for rate in rates:
            for workers in (1, 8, 16, 32):
                method = f"downpour+{rule}+lr={rate}"
                yield Case("downpour", f"{rule}, rate {rate:g}", method, workers=workers, batch=16)


def _averaging() -> Iterator[Case]:
    workers, steps = 8, 192
    common = {"workers": workers, "batch": 8}
    yield Case("averaging", "synchronous", "sync+lr=0.05", updates=steps, **common)
    for period in (2, 4, 8, 16):
        yield Case(
            "averaging", f"local SGD, period {period}", f"local_sgd:period={period}+lr=0.05", updates=steps, **common
        )
    for period in (2, 4, 8, 16):
        # An update of the centre is a worker's visit.
        visits = workers * steps // period
        yield Case(
            "averaging", f"elastic, period {period}", f"elastic:period={period}+lr=0.05", updates=visits, **common
        )


def _compression() -> Iterator[Case]:
    parts = {
        "uncompressed": "none",
        "QSGD, 16 levels": "qsgd:s=16",
        "QSGD, 7 levels": "qsgd:s=7",
        "QSGD, 7 levels, buckets of 128": "qsgd:s=7:bucket=128",
        "1-bit": "one_bit",
        "top 1%": "top_k:fraction=0.01",
        "PowerSGD, rank 2": "power_sgd:rank=2",
    }
    for problem, rate in (("cnn", 0.05), ("char_transformer", 0.5)):
        for label, part in parts.items():
            yield Case("compression", label, f"{part}+lr={rate}", batch=8, updates=150, problem=problem)


def _diversity() -> Iterator[Case]:
    for batch in (8, 16, 32, 64, 128, 256, 512):
        for rate in (0.05, 0.1, 0.2, 0.4):
            yield Case(
                "diversity", f"batch {batch}, rate {rate:g}", f"sync+lr={rate}",
                workers=4, batch=batch // 4, updates=400 if batch < 128 else 160, loss=0.55,
            )  # fmt: skip


def _large_batch() -> Iterator[Case]:
    workers, updates = 16, 960
    for rate in (0.003, 0.006):
        yield Case("large_batch", "batch 32", f"sgd:momentum=0.9+lr={rate}", workers=1, updates=updates)
        for label, rule in (
            ("batch 512, same rate", "sgd:momentum=0.9"),
            ("batch 512, linear scaling", "linear:momentum=0.9"),
            ("batch 512, linear scaling, warm-up", "linear:warmup=20:momentum=0.9"),
        ):
            yield Case("large_batch", label, f"{rule}+lr={rate}", workers=workers, updates=updates // workers)
    others = {"batch 512, LARS": "lars:trust=0.02:warmup=20+lr=0.05", "batch 512, LAMB": "lamb:warmup=5+lr=0.01"}
    for label, rule in others.items():
        yield Case("large_batch", label, rule, workers=workers, updates=updates // workers)


def _pipeline() -> Iterator[Case]:
    variants = {
        "no pipeline": "stages=1",
        "stashing": "stages={}",
        "neither": "stages={}:stashing=0",
        "vertical sync": "stages={}:vertical_sync=1",
    }
    for problem, stages, rates in (("cnn", 6, (0.03, 0.05, 0.07, 0.1)), ("char_transformer", 8, (0.2, 0.5))):
        for rate in rates:
            for label, options in variants.items():
                method = f"pipedream:{options.format(stages)}+lr={rate}"
                yield Case("pipeline", f"{label}, rate {rate:g}", method, workers=1, updates=960, problem=problem)


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3, help="how many, from --seed on (default: %(default)s)")
    options.add_argument("--only", default="", help="names of phenomena, by commas (default: all)")
    options.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    options.add_argument("--render", action="store_true", help="only write the page from the rows there are")
    return options.parse_args()


if __name__ == "__main__":
    main()
