"""How long collectives take among the CPU cores of this machine, carried out as ranks of a split step do it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from env.cluster import Cluster
from env.communication.times import lone_collective_s
from env.device import MeasuredCollective
from placement.measuring.machine.figures import MOST_LINK_SPREAD, Figure
from placement.measuring.machine.speeds import Effort
from placement.measuring.machine.workers import Worker, run_workers
from placement.runtime.exchanging.collectives import Collectives
from placement.runtime.exchanging.exchanges import KINDS, Exchange, Member
from placement.runtime.parts.layouts import PartCut, PartLayout, whole
from placement.runtime.ranks.process_group import ProcessGroup

_IN_TURN, _IN_TURN_BYTES = 16, 64 << 20  # tensors that are given by turns, so that they are in no cache
_MOST_BYTES = 256 << 20  # in all exchanges of a size
_COMPUTED_BYTES = 16 << 20  # read and written between two exchanges: a few milliseconds, and more than a core's caches
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class ComparedCollective:
    """A collective as the cost model has it, and as it was measured now.

    Attributes:
        kind, ranks: what it is, and among how many devices.
        size_bytes: of the whole tensor.
        predicted_s, measured_s: seconds.
    """

    kind: str
    ranks: int
    size_bytes: int
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return abs(self.predicted_s / self.measured_s - 1.0)


def compared(cluster: Cluster, cores: Sequence[int], effort: Effort) -> list[ComparedCollective]:
    """Collectives among the cores that are a cluster's devices, of sizes between those that it has figures for.

    Raises:
        ClusterError, RankError: as of `measured_collectives`.
    """
    sizes = [(a + b) // 2 for a, b in pairwise(effort.exchanged)]
    devices = cluster.compute_devices.tolist()
    return [
        ComparedCollective(
            found.kind,
            found.ranks,
            size,
            lone_collective_s(cluster, devices[: found.ranks], found.kind, size, "ring"),
            measured_s,
        )
        for found in measured_collectives(cores, sizes, effort)
        for size, measured_s in zip(found.sizes, found.seconds, strict=True)
    ]


def group_sizes(n_devices: int) -> list[int]:
    """How many ranks collectives are measured among: 2, 3 and 4, then powers of two, and all."""
    return sorted(size for size in {2, 3, 4, 8, 16, n_devices} if size <= n_devices)


def measured_collectives(cores: Sequence[int], sizes: Sequence[int], effort: Effort) -> tuple[MeasuredCollective, ...]:
    """Measure every kind of collective among the first cores, one process pinned to each.

    Args:
        sizes: bytes of the whole tensors, increasing; none to measure nothing.

    Raises:
        ClusterError: a process failed.
        RankError: the processes cannot reach each other.
    """
    if len(cores) < 2 or not sizes:
        return ()
    found = run_workers(partial(_figures, sizes=tuple(sizes), effort=effort), cores)
    means = {
        (kind, ranks): np.mean([[figure.value for figure in part[kind, ranks]] for part in found[:ranks]], axis=0)
        for kind, ranks in found[0]
    }
    return tuple(
        MeasuredCollective(kind, ranks, tuple(sizes), tuple(float(f"{seconds:.4g}") for seconds in column))
        for (kind, ranks), column in means.items()
    )


def _figures(worker: Worker, sizes: tuple[int, ...], effort: Effort) -> dict[tuple[str, int], tuple[Figure, ...]]:
    """Seconds by kind and number of ranks, as this worker sees them; empty where it does not take part."""
    group = ProcessGroup.start(worker.store(), worker.rank, worker.size, is_quiet=True)
    wanted = [(kind, ranks) for ranks in group_sizes(worker.size) for kind in KINDS]
    each = ((kind, ranks, size) for kind, ranks in wanted for size in sizes)
    exchanges = {key: lone_exchange(number, *key) for number, key in enumerate(each)}
    collectives = Collectives(group, list(exchanges.values()), _CPU)
    found = {
        (kind, ranks): tuple(
            figure
            for size in sizes
            if (figure := _settled(worker, collectives, exchanges[kind, ranks, size], effort)) is not None
        )
        for kind, ranks in wanted
    }
    worker.barrier()
    group.leave()
    return found


def _settled(worker: Worker, collectives: Collectives, exchange: Exchange, effort: Effort) -> Figure | None:
    """The figure of least spread, measured again while it is doubtful; None for who does not take part. All call it."""
    best: Figure | None = None
    for _ in range(1 + effort.retries):
        worker.barrier()
        if worker.rank in exchange.ranks:
            figure = exchange_s(collectives, exchange, worker.rank, effort.sends)
            best = figure if best is None else min(best, figure, key=lambda figure: figure.spread)
        if max(worker.all_gather(0.0 if best is None else best.spread)) <= MOST_LINK_SPREAD:
            break
    return best


def lone_exchange(number: int, kind: str, ranks: int, size_bytes: int) -> Exchange:
    """A collective of one float32 tensor of about that many bytes, in parts as even as can be."""
    columns = max(ranks, 64)
    layout = whole((max(ranks, round(size_bytes / 4 / columns)), columns))
    rows, across = (_parts(layout, dim, ranks) for dim in (0, 1))
    member = Member(
        kind,
        layout,
        {"all_gather": rows, "all_to_all": rows}.get(kind, ()),
        {"reduce_scatter": rows, "all_to_all": across}.get(kind, ()),
        in_place=kind == "all_reduce",
    )
    return Exchange(number, tuple(range(ranks)), (member,), f"{kind} of {size_bytes} bytes")


def _parts(layout: PartLayout, dim: int, ranks: int) -> tuple[PartLayout, ...]:
    extent = layout.shape[dim]
    ends = [extent * k // ranks for k in range(ranks + 1)]
    return tuple(PartLayout(layout.shape, (PartCut(dim, 1, extent, ends[k], ends[k + 1]),)) for k in range(ranks))


def exchange_s(collectives: Collectives, exchange: Exchange, rank: int, repeats: int) -> Figure:
    """Seconds of an exchange, on one of its ranks, between stretches of computing as in a step. All ranks call this.

    Computing leaves other data in the caches, and the ranks come to the exchange a little apart: who is there first
    waits, and has to wake up again.
    """
    member = exchange.members[0]
    given = member.given(rank).local_shape
    n_bytes = member.whole.n_elements * 4
    n_tensors = max(2, min(_IN_TURN, _IN_TURN_BYTES // n_bytes))
    tensors = [torch.zeros(given) for _ in range(n_tensors)]
    other_data = torch.zeros(_COMPUTED_BYTES // 4)
    samples = []
    for turn in range(min(repeats, max(5, _MOST_BYTES // n_bytes)) + 2):
        other_data += 1.0
        start = time.perf_counter()
        collectives.finish(collectives.start(exchange.number, (tensors[turn % n_tensors],)))
        samples.append(time.perf_counter() - start)
    return Figure.of(samples[2:])
