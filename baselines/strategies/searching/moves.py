"""`neighbours`: strategies that differ from a given one in a single decision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from env.cluster import Cluster
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy


def neighbours(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """``(what is moved, strategy)``: e.g. one more micro-batch, a stage cut one block later, another order.

    Not all are legal; `Estimator.estimate` says which.
    """
    yield "micro-batches", replace(strategy, micro_batches=strategy.micro_batches * 2)
    if strategy.micro_batches > 1:
        yield "micro-batches", replace(strategy, micro_batches=strategy.micro_batches // 2)
