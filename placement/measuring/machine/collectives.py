"""How long torch's collectives take among the CPU cores of this machine, by gloo, as a split step has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from env.cluster import Cluster
from env.communication.times import lone_collective_s
from env.device import MeasuredCollective
from placement.measuring.machine.figures import MOST_LINK_SPREAD, Figure
from placement.measuring.machine.speeds import Effort
from placement.measuring.machine.workers import Worker, run_workers

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
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
        ClusterError: as of `measured_collectives`.
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
    found = {}
    with worker.joined():
        for ranks in group_sizes(worker.size):
            group = dist.new_group(list(range(ranks)))
            for kind in KINDS:
                figures = [_settled(worker, kind, size, ranks, group, effort) for size in sizes]
                found[kind, ranks] = tuple(figure for figure in figures if figure is not None)
    return found


def _settled(worker: Worker, kind: str, size: int, ranks: int, group: Any, effort: Effort) -> Figure | None:
    """The figure of least spread, measured again while it is doubtful; None for who does not take part. All call it."""
    best: Figure | None = None
    for _ in range(1 + effort.retries):
        worker.barrier()
        if worker.rank < ranks:
            figure = exchange_s(kind, size, ranks, group, effort.sends)
            best = figure if best is None else min(best, figure, key=lambda figure: figure.spread)
        if max(worker.all_gather(0.0 if best is None else best.spread)) <= MOST_LINK_SPREAD:
            break
    return best


def exchange_s(kind: str, size_bytes: int, ranks: int, group: Any, repeats: int) -> Figure:
    """Seconds of a collective, on one of its ranks, between stretches of computing as in a step. All ranks call this.

    Computing leaves other data in the caches, and the ranks come to the collective a little apart: who is there first
    waits, and has to wake up again.
    """
    n_tensors = max(2, min(_IN_TURN, _IN_TURN_BYTES // size_bytes))
    begin = [exchange(kind, size_bytes, ranks, group, _CPU, torch.float32) for _ in range(n_tensors)]
    other_data = torch.zeros(_COMPUTED_BYTES // 4)
    samples = []
    for turn in range(min(repeats, max(5, _MOST_BYTES // size_bytes)) + 2):
        other_data += 1.0
        start = time.perf_counter()
        begin[turn % n_tensors]()
        samples.append(time.perf_counter() - start)
    return Figure.of(samples[2:])


def exchange(
    kind: str, size_bytes: int, n_ranks: int, group: Any, place: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    """A collective of new tensors, in equal parts as torch's own parallel modules have it.

    Args:
        size_bytes: of the whole tensor, as `graphs.transforms.derived.Collective.bytes`.
    """
    part = max(1, size_bytes // dtype.itemsize // n_ranks)
    if kind == "all_to_all":  # what all ranks give together is the whole
        part = max(1, part // n_ranks)
    whole = torch.zeros(part * n_ranks, dtype=dtype, device=place)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all_to_all":
        other = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(other, whole, group=group)
    own = torch.zeros(part, dtype=dtype, device=place)
    if kind == "all_gather":
        return lambda: _newest("all_gather_single", "all_gather_into_tensor")(whole, own, group=group)
    return lambda: _newest("reduce_scatter_single", "reduce_scatter_tensor")(own, whole, group=group)


def _newest(*names: str) -> Callable[..., object]:
    """The first of these functions that this torch has; the later ones are deprecated."""
    found: Callable[..., object] = next(getattr(dist, name) for name in names if hasattr(dist, name))
    return found
