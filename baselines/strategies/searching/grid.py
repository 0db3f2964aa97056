"""`hand_grid`: the strategies that people try by hand, all powers of two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from baselines.strategies.searching.space import Space, sharded
from env.cluster import Cluster
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy

ORDERS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")


def hand_grid(graph: OpGraph, cluster: Cluster) -> Iterator[Strategy]:
    """Every mesh of data, tensor and pipeline parallelism of powers of two, with ZeRO 0 to 3, every order, every
    number of micro-batches, and no, selective or full recomputation.

    Not all are legal: the graph may not allow as many parts or stages.
    """
    space = Space(graph, cluster)
    sizes = [1 << i for i in range(space.n_devices.bit_length())]
    for dp in sizes:
        for tp in sizes:
            for pp in sizes:
                if 1 < dp * tp * pp <= space.n_devices and dp <= space.limit("dp") and tp <= space.limit("tp"):
                    yield from _with_options(space, dp, tp, pp)


def _with_options(space: Space, dp: int, tp: int, pp: int) -> Iterator[Strategy]:
    plain = space.strategy({"dp": dp, "tp": tp}, pp)
    for zero in range(4) if dp > 1 and space.graph.is_training else (0,):
        for order in ORDERS if pp > 1 else ("1f1b",):
            for m in space.micro_batches(dp):
                if pp > 1 and order == "interleaved" and m % pp:
                    continue
                for recompute in space.recomputations:
                    made = replace(plain, order=order, micro_batches=m, recompute=recompute)
                    yield from sharded(space.cluster, made, zero)
