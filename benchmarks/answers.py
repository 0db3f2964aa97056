"""Answers that depend on no clock, kept in a file and compared with it: a change of structure must not change them.

    python benchmarks/answers.py --seed 0 --write answers.json    # before
    python benchmarks/answers.py --seed 0 --check answers.json    # after: prints every row that differs, exit 1 if any

Rows: zoo models on preset clusters, inference under latency and, on the first cluster, training under throughput.
Methods: every heuristic to its end, and the searches with a number of evaluations instead of a time. A row is the
objective and the lower bound, bit for bit, and a hash of the placement, the order of ops and the peak memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from table import parser

from baselines.budget import Limits
from env.cluster import Cluster
from env.objectives import LATENCY, THROUGHPUT
from graphs.disk import write_atomically
from placement.inputs.sources import read_source
from placement.solving.methods import AUTO, HEURISTICS, SEARCHES, supports
from placement.solving.solver import Solver

MODELS = "inception_v3,resnet50,nasnet_large,rnnlm,nmt4,bert_base,transformer_moe,two_tower"
CLUSTERS = "4xV100-pcie,8xV100-nvlink,8xH100-nvswitch"
# Left out: minutes for some rows, and what is searched with a budget is in the other rows.
SLOW = ("pipedream_hierarchical",)


def main() -> None:
    options = _options()
    if options.write is not None:
        found = dict(_rows(options))
        write_atomically(options.write, json.dumps(found, indent=0, sort_keys=True) + "\n")
        print(f"{len(found)} answers: {options.write}")
        return
    kept: dict[str, str] = json.loads(options.check.read_text(encoding="utf-8"))
    compared = other = 0
    for key, answer in _rows(options):
        if key in kept:
            compared += 1
            if answer != kept[key]:
                other += 1
                print(f"{key}: {kept[key]} before, {answer} now", flush=True)
    print(f"{compared} answers compared, {other} differ; {len(kept) - compared} were not made again")
    sys.exit(bool(other) or not compared)


def _rows(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for objective in options.objectives.split(","):
        for model in options.models.split(","):
            graph = read_source(model, train=objective == THROUGHPUT).graph
            clusters = options.clusters.split(",")
            for name in clusters if objective == LATENCY else clusters[:1]:
                solver = Solver(graph, Cluster.preset(name, rates="peak"), options.seed, objective, "longest_path")
                began = time.monotonic()
                for method in (*HEURISTICS, *SEARCHES, AUTO):
                    if not supports(method, objective) or method in SLOW or (method == AUTO and objective != LATENCY):
                        continue
                    evaluations = None if method in HEURISTICS else options.evaluations
                    result = solver.solve(method, Limits(evaluations=evaluations))
                    answer = [result.placement, result.order, result.peak_bytes]
                    digest = hashlib.sha256(json.dumps(answer, sort_keys=True).encode()).hexdigest()[:16]
                    value = "-" if result.objective_s is None else result.objective_s.hex()
                    yield f"{model} {name} {objective} {method}", f"{value} {result.lower_bound_s.hex()} {digest}"
                print(f"{model} on {name}, {objective}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--models", default=MODELS, help="default: %(default)s")
    options.add_argument("--clusters", default=CLUSTERS, help="default: %(default)s")
    options.add_argument("--objectives", default="latency,throughput", help="default: %(default)s")
    options.add_argument("--evaluations", type=int, default=400, help="of each search (default: %(default)s)")
    file = options.add_mutually_exclusive_group(required=True)
    file.add_argument("--write", type=Path, help="keep the answers")
    file.add_argument("--check", type=Path, help="compare with what was kept")
    return options.parse_args()


if __name__ == "__main__":
    main()
