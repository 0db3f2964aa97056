"""`least_s`: what a collective takes at least, for choosing among algorithms without scoring all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from env.cluster import Cluster
from graphs.arrays import FloatArray, IntArray
from graphs.transforms.collectives.rounds import carried_out_by
from graphs.transforms.collectives.template import template

_ROUNDING = 1e-9  # times that differ by less are equal


class _Sends(NamedTuple):
    """Tensors that an algorithm sends from rank to rank, and its steps, each of which needs the one before."""

    source: IntArray
    target: IntArray
    share: FloatArray  # of the bytes of the collective
    steps: int


@cache
def _sends(kind: str, algorithm: str, ranks: int) -> _Sends:
    form = template(kind, algorithm, ranks)
    rank = np.concatenate([form.op_rank, np.arange(ranks)])
    made_by, read_by = form.tensor_producer[form.edge_tensor], form.edge_op
    crosses = rank[made_by] != rank[read_by]
    steps = np.zeros(len(rank), dtype=np.int64)
    for op, reader, adds in sorted(zip(made_by.tolist(), read_by.tolist(), crosses.tolist(), strict=True)):
        steps[reader] = max(steps[reader], steps[op] + adds)
    # Two ops of one rank that read the same tensor receive it once.
    sent = np.unique(np.stack([form.edge_tensor, rank[read_by]])[:, crosses], axis=1)
    share = form.tensor_length[sent[0]] / form.pieces
    return _Sends(rank[form.tensor_producer[sent[0]]], sent[1], share, int(steps.max(initial=0)))


def different(kind: str, algorithms: Iterable[str]) -> list[str]:
    """Algorithms without those that are carried out, for this kind of collective, as one before them is."""
    found: dict[str, str] = {}
    for name in algorithms:
        found.setdefault(carried_out_by(kind, name), name)
    return list(found.values())


def least_s(
    cluster: Cluster, groups: Sequence[Sequence[int]], kind: str, algorithm: str, sizes: Iterable[int]
) -> FloatArray:
    """float64 [sizes]: seconds that equal collectives side by side, spelt out, take at least.

    No link that carries one transfer at a time is done before the sum of its transfers, and no step is quicker than the
    quickest route.
    """
    size, sends = np.array(list(sizes), dtype=np.float64), _sends(kind, algorithm, len(groups[0]))
    members, routes = np.array(groups, dtype=np.int64), cluster.routes
    source, target = members[:, sends.source].reshape(-1), members[:, sends.target].reshape(-1)
    latency, bandwidth = routes.figures_of(source, target)
    share = np.tile(sends.share, len(members))
    transfer, link = routes.links_of(source, target)
    exclusive = np.array([each.exclusive for each in cluster.links], dtype=np.bool_)[link]
    transfer, link = transfer[exclusive], link[exclusive]
    # Pieces are whole bytes: a transfer may have one less than its share.
    fixed = latency - 1.0 / bandwidth
    held, per_byte = (
        np.bincount(link, each[transfer], minlength=len(cluster.links)) for each in (fixed, share / bandwidth)
    )
    busiest = np.max(held[:, None] + per_byte[:, None] * size, axis=0, initial=0.0)
    return np.asarray(np.maximum(busiest, sends.steps * latency.min()), dtype=np.float64)


def first_quickest(names: Sequence[str], least: Callable[[str], float], seconds: Callable[[str], float]) -> str:
    """The name of least seconds, of equal ones the first.

    Args:
        least: seconds that it takes at least.
        seconds: that it takes; asked only where `least` leaves the answer open.
    """
    bound = {name: least(name) for name in names}
    found: dict[str, float] = {}
    for name in sorted(bound, key=bound.__getitem__):
        if bound[name] <= min(found.values(), default=np.inf) * (1 + _ROUNDING):
            # Times that differ by rounding alone are equal.
            found[name] = float(f"{seconds(name):.9e}")
    return min((name for name in names if name in found), key=found.__getitem__)
