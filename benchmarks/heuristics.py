"""Every heuristic on zoo models and clusters: speed-up over one device, and how far the best is from the bound.

    python benchmarks/heuristics.py [--seed 0] [--markdown] [--models a,b] [--clusters a,b] [--train]

Losses are printed like wins: below 1.00x a method is slower than one device. A dash means it found no placement that
fits; where one device itself does not fit, step times stand instead of speed-ups.
"""

from __future__ import annotations

import argparse

from table import Printer, parser

import placement
from env.cluster import Cluster
from graphs.opgraph import OpGraph
from graphs.units import format_seconds
from placement.comparison import Comparison
from placement.sources import read_source

MODELS = "inception_v3,resnet50,nasnet_large,rnnlm,nmt4,bert_base,transformer_moe,two_tower"
CLUSTERS = "4xV100-pcie,8xV100-nvlink,8xH100-nvswitch"
METHODS = ("single_device", "sequential_fill", "expert", "hash", "critical_path", "mite", "heft")


def main() -> None:
    options = _options()
    out = Printer("Heuristics on zoo models", options.markdown)
    rows = []
    for model in options.models.split(","):
        graph = read_source(model, train=options.train).graph
        rows += [_row(graph, Cluster.preset(name), options.seed) for name in options.clusters.split(",")]
    out.table(
        "Speed-up over the best single device; best: of all twelve methods; gap: of the best to the lower bound.",
        ["model on cluster", *METHODS, "best", "gap"],
        rows,
    )


def _row(graph: OpGraph, cluster: Cluster, seed: int) -> list[str]:
    comparison = placement.compare(graph, cluster, seed=seed)
    by_method = {result.method: result for result in comparison.results}
    best = comparison.best
    return [
        f"{graph.name} on {cluster.name}",
        *(_cell(comparison, by_method[method]) for method in METHODS),
        "-" if best is None else f"{_cell(comparison, best)} {best.method}",
        "-" if best is None or best.gap is None else f"{best.gap:.0%}",
    ]


def _cell(comparison: Comparison, result: placement.Result) -> str:
    if result.step_time_s is None:
        return "-"
    speedup = comparison.speedup(result)
    return format_seconds(result.step_time_s) if speedup is None else f"{speedup:.2f}x"


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--models", default=MODELS, help="default: %(default)s")
    options.add_argument("--clusters", default=CLUSTERS, help="default: %(default)s")
    options.add_argument("--train", action="store_true", help="training steps instead of inference")
    return options.parse_args()


if __name__ == "__main__":
    main()
