"""Links between devices: a self-test of their copies, and how fast they are.

Ranks are those of torch's default process group, by which tensors go from one to the other.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from env.cluster import Cluster
from env.communication.times import lone_collective_s
from env.device import MeasuredCollective
from graphs.errors import ClusterError
from placement.measuring.machine.figures import MOST_LINK_SPREAD, Figure
from placement.measuring.machine.speeds import Effort
from placement.measuring.machine.workers import Worker, run_workers

_PATTERN_BYTES = (1, 255, 4096, 1 << 20)
_LEAST_COMPUTING_S = 2e-3
_IN_TURN, _IN_TURN_BYTES = 32, 64 << 20  # tensors that are sent by turns


# -- self-test -------------------------------------------------------------------------------------------------------


def patterns(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, bytes) of what a link must carry unchanged."""
    random = np.random.default_rng(seed)
    for size in _PATTERN_BYTES:
        yield f"{size} bytes counting up", (torch.arange(size) % 251).to(torch.uint8)
        yield f"{size} bytes of ones", torch.full((size,), 255, dtype=torch.uint8)
        yield f"{size} random bytes", torch.from_numpy(random.integers(0, 256, size, dtype=np.uint8))


def check_link(rank: int, other: int, seed: int) -> None:
    """Send known patterns to another rank and have them sent by it; both ranks call this.

    Raises:
        ClusterError: what arrived is not what was sent.
    """
    for name, pattern in patterns(seed):
        for source, target in ((min(rank, other), max(rank, other)), (max(rank, other), min(rank, other))):
            if rank == source:
                dist.send(pattern, target)
            else:
                arrived = torch.empty_like(pattern)
                dist.recv(arrived, source)
                _compare(f"worker {source} to worker {target}", name, pattern, arrived)


def check_moves(move: Callable[[torch.Tensor], torch.Tensor], link: str, seed: int) -> None:
    """Move known patterns by `move` and fetch them back; ``link`` names it in the error.

    Raises:
        ClusterError: what came back is not what was sent.
    """
    for name, pattern in patterns(seed):
        _compare(link, name, pattern, move(pattern).cpu())


def _compare(link: str, name: str, sent: torch.Tensor, arrived: torch.Tensor) -> None:
    expected, found = (zlib.crc32(tensor.contiguous().numpy().tobytes()) for tensor in (sent, arrived))
    if expected != found:
        raise ClusterError(
            f"copies from {link} arrive corrupted: {name} have checksum {found:08x} instead of {expected:08x}; check "
            "memory, driver and peer-to-peer settings, nothing computed over this link can be trusted."
        )


# -- speed -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinkSpeed:
    """How fast one direction is.

    Attributes:
        latency_s, bandwidth_bytes_per_s: of the straight line through the times of all sizes.
        spread: that a size has, the median over the sizes.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    spread: float = 0.0


def link_speed(sizes: Sequence[int], times_s: Sequence[Figure]) -> LinkSpeed:
    """How fast a link is, by the times of some sizes."""
    spread = float(np.median([time_s.spread for time_s in times_s]))
    return replace(fitted(sizes, [time_s.value for time_s in times_s]), spread=spread)


def fitted(sizes: Sequence[int], times_s: Sequence[float]) -> LinkSpeed:
    """The straight line time = latency + bytes / bandwidth by least squares of the relative errors.

    Relative: in absolute terms the largest size alone would decide, and small tensors are the many.
    """
    x, t = np.array(sizes, dtype=np.float64), np.array(times_s, dtype=np.float64)
    columns = np.stack([1 / t, x / t], axis=1)
    (latency_s, per_byte_s), *_ = np.linalg.lstsq(columns, np.ones(len(x)), rcond=None)
    if latency_s <= 0:
        latency_s, per_byte_s = 0.0, 1 / float((x / t).max())
    if per_byte_s <= 0:
        per_byte_s = float(t.max() / x.max())
    return LinkSpeed(float(latency_s), float(1 / per_byte_s))


def idle_times_s(rank: int, other: int, sizes: Sequence[int], repeats: int) -> list[Figure]:
    """Half of a round trip of each size, where neither end computes. Both ranks call this."""
    found = []
    for size in sizes:
        buffer, samples = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            for source in sorted((rank, other)):
                if rank == source:
                    dist.send(buffer, other)
                else:
                    dist.recv(buffer, other)
            samples.append((time.perf_counter() - start) / 2)
        found.append(Figure.of(samples[1:]))
    return found


def busy_times_s(rank: int, source: int, target: int, sizes: Sequence[int], repeats: int) -> list[Figure] | None:
    """One way of each size while the sender goes on computing and the receiver waits; None at the sender.

    That is how a transfer on the critical path goes. Both ends read one clock, as processes of one host do.
    """
    found = []
    for size in sizes:
        # As many as a step sends, so that neither they nor where they go are in the caches nearest to the core.
        n_tensors = max(2, min(_IN_TURN, _IN_TURN_BYTES // size))
        tensors = [torch.zeros(size, dtype=torch.uint8) for _ in range(n_tensors)]
        if rank == source:
            _send_while_busy(target, tensors, repeats)
        else:
            found.append(Figure.of(_received_s(source, tensors, repeats)[-repeats:]))
    return found if rank == target else None


def _send_while_busy(target: int, tensors: Sequence[torch.Tensor], repeats: int) -> None:
    """The sender's part of `busy_times_s`: each of the tensors once, and so many more."""
    work, clock = torch.rand(64, 64), torch.zeros(1, dtype=torch.float64)
    computing_s = _LEAST_COMPUTING_S + tensors[0].nbytes / 1e9
    for number in range(len(tensors) + repeats):
        dist.recv(clock, target)  # it is ready
        sent = time.perf_counter()
        pending: Any = dist.isend(tensors[number % len(tensors)], target)
        while time.perf_counter() - sent < computing_s:
            work @ work
        pending.wait()
        dist.send(torch.tensor([sent], dtype=torch.float64), target)


def _received_s(source: int, tensors: Sequence[torch.Tensor], repeats: int) -> list[float]:
    """The receiver's part of `busy_times_s`: from sending to receiving, each time."""
    clock = torch.zeros(1, dtype=torch.float64)
    samples = []
    for number in range(len(tensors) + repeats):
        coming: Any = dist.irecv(tensors[number % len(tensors)], source)  # before it is sent, as in a step
        dist.send(clock, source)
        coming.wait()
        arrived = time.perf_counter()
        dist.recv(clock, source)
        samples.append(arrived - float(clock))
    return samples


def move_times_s(
    move: Callable[[torch.Tensor], torch.Tensor], source: torch.device, sizes: Sequence[int], repeats: int
) -> list[Figure]:
    """How long `move`, which returns when the copy is there, takes for tensors of each size."""
    found = []
    for size in sizes:
        tensor, samples = torch.zeros(size, dtype=torch.uint8, device=source), []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            move(tensor)
            samples.append(time.perf_counter() - start)
        found.append(Figure.of(samples[1:]))
    return found


def rounds(size: int) -> list[list[tuple[int, int]]]:
    """Every pair of that many ranks once, in rounds of pairs that share no rank."""
    ranks = list(range(size + size % 2))  # the last one pauses where the number is odd
    found = []
    for _ in range(len(ranks) - 1):
        pairs = zip(ranks[: len(ranks) // 2], reversed(ranks[len(ranks) // 2 :]), strict=True)
        found.append([(min(p), max(p)) for p in pairs if max(p) < size])
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]
    return found


# -- collectives -------------------------------------------------------------------------------------------------------


KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
_GIVEN, _GIVEN_BYTES = 16, 64 << 20  # tensors that are given by turns, so that they are in no cache
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
    n_tensors = max(2, min(_GIVEN, _GIVEN_BYTES // size_bytes))
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
