"""Why this strategy? Where its time and memory go, what the others take, and what another network would change.

    python examples/why_this_strategy.py

`placement compare ... --strategies "dp2,dp4,..." --html report.html` draws each timeline; `--sweep figures` finds
the figure of the hardware that would help most.
"""

import dataclasses
from pathlib import Path

from classifier import make

import placement
from graphs.formatting import format_bytes, format_seconds

STRATEGIES = ["dp2", "dp4", "dp4 zero3", "dp2 | pp2 1f1b mb4", "tp4", "dp32"]

model, args = make()
graph = placement.capture(model, args, train=True)
cluster = placement.Cluster.from_toml(Path(__file__).with_name("my_cluster.toml"))
faster_ports = [
    dataclasses.replace(link, bandwidth_bytes_per_s=12e9) if "ethernet" in (link.src, link.dst) else link
    for link in cluster.links
]
upgraded = dataclasses.replace(cluster, name="my cluster with 100 Gbit/s ports", links=tuple(faster_ports))

for where in (cluster, upgraded):
    found = placement.compare_strategies(graph, where, STRATEGIES)
    print(f"\n{where.name}: {found.headline()}")
    for row in found.rows:
        answer, figures = row.result.answer, row.figures
        if answer is None or figures is None:  # not allowed here, or it does not fit: the reason is one sentence
            print(f"  {row.strategy.text:19} {row.result.reason}")
            continue
        print(
            f"  {row.strategy.text:19} {format_seconds(answer.step_time_s):>7} a step, gap {answer.gap:.0%}, "
            f"{format_bytes(sum(figures.peak_bytes.values()))} at the peak"
        )
    print("\n".join(f"  {line}" for line in found.reasons()))
