"""How much memory do chains of convolutions need when the forward pass is recomputed? A part of `parallel_checks.py`.

Published: 10,000 convolutions and their gradients in 173 MiB instead of 15,624 (T. Chen et al., "Training deep nets
with sublinear memory cost", 2016). All is scored by the ordinary simulator, on one device and in the order of the
graph's own numbers, the same for every row.

    .venv/bin/python benchmarks/sublinear.py
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from checks import Found, Row, Summary

from env.cluster import Cluster
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs import OpGraph, Phase
from graphs.generators import convolution_chain
from graphs.transforms.recomputing import recompute_stretches

LAYERS = 10_000
MIB = 2**20
PUBLISHED_MIB = (15_624, 173)


@dataclass(frozen=True)
class MemoryRow:
    """One way to run a chain.

    Attributes:
        chain: ``"bare"``, convolutions alone, or ``"normed"``, each with batch norm and ReLU.
        schedule: in words.
        peak_mib: most memory of the device during the step.
        share: of the peak with everything kept.
        forward_passes: FLOPs of what runs again, in forward passes.
    """

    chain: str
    schedule: str
    peak_mib: float
    share: float
    forward_passes: float


def memory_rows(n_layers: int = LAYERS) -> list[MemoryRow]:
    """Both chains with everything kept, and under each schedule."""
    cube_root = round(n_layers ** (1 / 3))
    schedules: dict[str, tuple[int | None, int]] = {
        "stretches of least memory": (None, 1),
        "equal stretches, square root": (round(n_layers**0.5), 1),
        "two levels, cube root": (cube_root, 2),
        "halves on eight levels": (2, 8),
    }
    rows = []
    for chain, with_norm in (("bare", False), ("normed", True)):
        graph = convolution_chain(n_layers, with_norm)
        everything = _peak_mib(graph)
        forward = graph.flops[graph.phase == Phase.FORWARD].sum()
        rows.append(MemoryRow(chain, "everything kept", everything, 1.0, 0.0))
        for name, (segments, levels) in schedules.items():
            derived = recompute_stretches(graph, segments, levels).graph
            peak = _peak_mib(derived)
            repeated = float((derived.flops.sum() - graph.flops.sum()) / forward)
            rows.append(MemoryRow(chain, name, peak, peak / everything, repeated))
    return rows


def found() -> Found:
    """For `parallel_checks.py`."""
    before, after = PUBLISHED_MIB
    rows = memory_rows()
    listed = [
        Row(f"{row.chain}, {row.schedule}: share at {row.forward_passes:.2f} forward passes more", None, row.share)
        for row in rows
    ]
    share = min(row.share for row in rows if row.forward_passes <= 1)
    summary = Summary("share of the memory of keeping everything, with at most one more forward pass", share, 0.013)
    bare = min(row.share for row in rows if row.forward_passes <= 1 and row.chain == "bare")
    note = (
        "Normed chains have a batch norm and a ReLU after each convolution. Convolutions alone need "
        f"{bare:.2%}; no schedule for them with one more forward pass is below 1.39 % (Griewank and Walther, 2000)."
    )
    published = Row("best share with at most one more forward pass", after / before, share)
    return Found("chain of 10,000 convolutions, T. Chen et al. 2016", [published, *listed], summary, note=note)


def _peak_mib(graph: OpGraph) -> float:
    """On one device, ops in the order of their numbers."""
    order = np.arange(graph.n_ops, dtype=np.float64)
    simulator = Simulator(Problem(graph, Cluster.preset("8xA100-nvswitch", rates="peak")))
    score = simulator.score(Plan(np.zeros(graph.n_ops, dtype=np.int64), order=order))
    return float(score.peak_bytes[0]) / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=LAYERS, help="convolutions in the chain")
    layers = parser.parse_args().layers
    before, after = PUBLISHED_MIB
    print(f"published, {LAYERS} convolutions: {before} MiB to {after} MiB, {after / before:.2%}")
    print(f"{'chain':8}{'schedule':32}{'peak MiB':>10}{'share':>9}{'forward passes more':>22}")
    for row in memory_rows(layers):
        print(f"{row.chain:8}{row.schedule:32}{row.peak_mib:10.1f}{row.share:9.2%}{row.forward_passes:22.3f}")


if __name__ == "__main__":
    main()
