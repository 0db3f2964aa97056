"""Is a model whose best strategy is a hybrid faster under it than under each pure one, really run?

    python benchmarks/hybrids.py --seed 0 [--rounds 5] --markdown

A network of convolutions with a wide head is profiled on two cores of this machine; the search says the best of each
family, and each is run by two processes with a core and a thread each, by turns, beside one device. Of the rounds the
median counts. Let the machine do nothing else.
"""

from __future__ import annotations

import statistics
import sys
from itertools import pairwise

import torch
from predictions import with_cuts
from speed_models import WithLoss
from table import Printer, parser
from torch import nn

from graphs.formatting import format_seconds
from placement.measuring.machine.local_machine import local_cluster
from placement.measuring.models.profiling import profile
from placement.measuring.runs.executor import Executor
from placement.optimization import optimize
from placement.results.alternatives import best_of_each
from placement.results.strategy_words import family_in_words

BATCH, SIDE, CHANNELS, WIDE, CLASSES = 64, 32, 32, 2048, 100


class WideHead(nn.Module):
    """Convolutions do most of the work, three linear layers hold nearly all weights, as in AlexNet and VGG."""

    def __init__(self) -> None:
        super().__init__()
        channels = (3, CHANNELS, CHANNELS, 2 * CHANNELS, 2 * CHANNELS)
        layers = [(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in pairwise(channels)]
        self.features = nn.Sequential(*(part for layer in layers for part in layer), nn.AdaptiveAvgPool2d(4))
        wide = (nn.Linear(32 * CHANNELS, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, CLASSES))
        self.head = nn.Sequential(*wide)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.features(images).flatten(1))
        return out


def main() -> None:
    """Print a row for each family."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    made.add_argument("--budget-s", type=float, default=20.0, help="seconds of the search (default: %(default)s)")
    options = made.parse_args()
    torch.manual_seed(options.seed)
    model = WithLoss(WideHead())  # type: ignore[arg-type]
    batch = (torch.randn(BATCH, 3, SIDE, SIDE), torch.randint(CLASSES, (BATCH,)))
    cluster = local_cluster(2, anew=True)
    graph = profile(model, batch, cluster=cluster, train=True, name="wide_head")
    found = optimize(graph, cluster, seed=options.seed, budget_s=options.budget_s)
    ways = {one.name: one for one in best_of_each(found.alternatives) if one.strategy.devices == 2}
    texts = {"one device": "none", **{name: with_cuts(graph, cluster, one.strategy.text) for name, one in ways.items()}}
    measured: dict[str, list[float]] = {name: [] for name in texts}
    for number in range(options.rounds):  # an executor remembers what it has run
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        with Executor(model, batch, cluster=cluster, train=True, steps=10, dropped=3, limit_s=300) as executor:
            for name, text in texts.items():
                run = executor.run_strategy(text)
                if run.reason is None:
                    measured[name].append(run.step_time_s)
    one_s = statistics.median(measured["one device"])
    rows = []
    for name, seconds in sorted(measured.items(), key=lambda item: statistics.median(item[1] or [float("inf")])):
        predicted_s = ways[name].step_time_s if name in ways else None
        took_s = statistics.median(seconds) if seconds else None
        times = ["-" if value is None else format_seconds(value) for value in (predicted_s, took_s)]
        gain = "-" if took_s is None else f"{one_s / took_s:.2f}"
        shown = ways[name].strategy.text if name in ways else "none"
        rows.append([family_in_words(name), f"`{shown}`", *times, gain])
    printer = Printer("Hybrids and pure strategies", options.markdown)
    printer.table(
        f"Step times, medians of {options.rounds} rounds; the search says {found.strategy.text!r}.",
        ["family", "best of it by the search", "predicted", "measured", "one device / it"],
        rows,
    )


if __name__ == "__main__":
    main()
