"""Are two answers to one question equal to the last bit? Alone and beside busy processes, with one worker and two.

    python benchmarks/repeatable.py --seed 0 [--budget-s 2] [--only a,b] [--out docs/results]

Each problem, a training step of a built-in model on a preset cluster, is answered four times within the same budget:
twice without workers, the second time beside as many busy processes as there are cores, and once each with one and two
workers. All four have to be equal (docs/methods.md, "How a budget is spent").
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import multiprocessing
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from table import machine, parser

from env.cluster import Cluster
from graphs.disk import write_atomically
from graphs.formatting import format_seconds
from placement.inputs.sources import read_source
from placement.optimization import optimize
from placement.results.result import Result
from placement.results.result_json import result_to_json

MODELS = "alexnet,vgg16,inception_v3,resnet50,vit_b16,unet,bert_base,gpt2,two_tower,rnnlm"
CLUSTERS = ("4xV100-pcie", "8xH100-nvswitch", "2x8xH100-ib", "mixed-gpus")


def main() -> None:
    options = _options()
    lines, equal, total = [], 0, 0
    for model in options.only.split(","):
        graph = read_source(model, train=True).graph
        for name in CLUSTERS:
            cluster = Cluster.preset(name)

            answer = partial(optimize, graph, cluster, seed=options.seed, budget_s=options.budget_s)
            alone = answer()
            with busy():
                beside = answer()
            others = beside, answer(workers=1), answer(workers=2)
            same = [_digest(each) == _digest(alone) for each in others]
            equal, total = equal + all(same), total + 1
            words = " | ".join("equal" if each else "NOT equal" for each in same)
            shown = "-" if alone.step_time_s is None else format_seconds(alone.step_time_s)
            strategy = alone.strategy.text.replace("|", r"\|")
            lines.append(f"| {model} on {name} | `{strategy}` | {shown} | {words} |")
            print(lines[-1], flush=True)
    command = shlex.join(["python", "benchmarks/repeatable.py", *sys.argv[1:]])
    head = [
        "# Answers that repeat",
        "",
        f"Written by `{command}`, {machine()}. {equal} of {total} problems had equal answers, to the last bit.",
        "",
        "| problem | strategy | step | beside busy processes | with 1 worker | with 2 workers |",
        "| --- | --- | ---: | --- | --- | --- |",
    ]
    write_atomically(options.out / "repeatable.md", "\n".join([*head, *lines]) + "\n")
    sys.exit(equal != total)


@contextmanager
def busy() -> Iterator[None]:
    """As many processes that compute as there are cores."""
    processes = [multiprocessing.Process(target=_compute, daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def _compute() -> None:
    while True:
        sum(range(100_000))


def _digest(result: Result) -> str:
    """A hash of all that is in an answer but how long it took."""
    return hashlib.sha256(result_to_json(dataclasses.replace(result, solve_time_s=0.0)).encode()).hexdigest()


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--budget-s", type=float, default=2.0, help="of each answer (default: %(default)s)")
    options.add_argument("--only", default=MODELS, help="models (default: %(default)s)")
    options.add_argument("--out", type=Path, default=Path("docs/results"), help="default: %(default)s")
    return options.parse_args()


if __name__ == "__main__":
    main()
