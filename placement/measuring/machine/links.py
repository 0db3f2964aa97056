"""Links between devices: a self-test of their copies, and how fast they are.

Ranks are those of torch's default process group, by which tensors go from one to the other.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from graphs.errors import ClusterError
from placement.measuring.machine.figures import Figure

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
