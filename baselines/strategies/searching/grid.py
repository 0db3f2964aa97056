"""`hand_grid`: the strategies that people try by hand, all powers of two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from env.cluster import Cluster
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import MeshRule, Strategy

ORDERS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")
SELECTIVE = "selective"


def hand_grid(graph: OpGraph, cluster: Cluster) -> Iterator[Strategy]:
    """Every mesh of data, tensor and pipeline parallelism of powers of two, with ZeRO 0 to 3, every order, every
    number of micro-batches, and no or full recomputation.
    """
    n = len(cluster.compute_devices)
    batch = graph.origin.batch_size or 1
    sizes = [1 << i for i in range(n.bit_length())]
    for dp in sizes:
        for tp in sizes:
            for pp in sizes:
                if 1 < dp * tp * pp <= n:
                    yield from _with_options(graph, dp, tp, pp, batch)


def _with_options(graph: OpGraph, dp: int, tp: int, pp: int, batch: int) -> Iterator[Strategy]:
    mesh = tuple(MeshRule(name, size) for name, size in (("dp", dp), ("tp", tp)) if size > 1)
    micro = [1 << i for i in range(max(1, batch // dp).bit_length())]
    for zero in range(4) if dp > 1 and graph.is_training else (0,):
        for order in ORDERS if pp > 1 else ("1f1b",):
            for m in micro:
                if pp > 1 and order == "interleaved" and m % pp:
                    continue
                plain = Strategy(mesh, pp, order, micro_batches=m, zero=zero)
                yield plain
                if graph.is_training:
                    yield replace(plain, recompute=("*",))
