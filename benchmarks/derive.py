"""How long does it take to rewrite a graph by a strategy, and to score what comes out?

    python benchmarks/derive.py [--strategies "dp8 | mb8,dp8 | mb208"] [--repeats 5]

The training step of gpt2 on eight A100, with a batch that has a sample for every part. Deriving is everything from the
captured graph to the plan: recomputing, splitting, bucketing, collectives, stages and order; scoring is one call of the
simulator on it. Minima over the repeats; peak memory is that of the whole process so far.
"""

from __future__ import annotations

import resource

from table import Printer, parser, timed

from baselines.strategies.applied import applied
from env.cluster import Cluster
from env.simulation.simulator import Simulator
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.inputs.sources import read_source

CLUSTER = "8xA100-nvswitch"
MANY_OPS = 100_000  # from here on, deriving is timed once


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--strategies", default="dp8 | mb8,dp8 | mb208", help="default: %(default)s")
    options.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    given = options.parse_args()
    show = Printer(f"Deriving and scoring the training step of gpt2 on {CLUSTER}", given.markdown)
    rows = []
    for text in given.strategies.split(","):
        strategy = Strategy.parse(text)
        batch = max(strategy.devices * strategy.micro_batches, 64)
        rows.append(_row(read_source("gpt2", train=True, dims={"batch": batch}).graph, strategy, given.repeats))
    show.table("Least times", ["strategy", "ops", "edges", "derived in", "scored in", "peak memory"], rows)


def _row(graph: OpGraph, strategy: Strategy, repeats: int) -> list[str]:
    cluster = Cluster.preset(CLUSTER, rates="peak")
    what = applied(graph, cluster, strategy)
    many = what.derived.graph.n_ops >= MANY_OPS
    derive_s = timed(lambda: applied(graph, cluster, strategy), 1 if many else repeats)[0]
    simulator = Simulator(what.problem)
    simulator.score(what.plan)  # compiles
    score_s = timed(lambda: simulator.score(what.plan), repeats)[0]
    made = what.derived.graph
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [
        strategy.text,
        f"{made.n_ops:,}",
        f"{made.n_edges:,}",
        f"{derive_s:.2f} s",
        f"{score_s * 1e3:.1f} ms",
        f"{peak / 1e9:.2f} GB",
    ]


if __name__ == "__main__":
    main()
