"""Ways between devices: the transport itself, a self-test of its copies, and how fast it is."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch._C._distributed_c10d import FileStore

from graphs.errors import ClusterError
from placement.measuring.figures import Figure
from placement.runtime.transport.gloo import LOOPBACK, gloo_group
from placement.runtime.transport.mailbox import Mailbox

_PATTERN_BYTES = (1, 255, 4096, 1 << 20)
_LEAST_COMPUTING_S = 2e-3
_IN_TURN, _IN_TURN_BYTES = 32, 64 << 20  # tensors that are sent by turns


@dataclass(frozen=True)
class Incoming:
    """A tensor on its way; ``wait`` waits for it, uint8 of one dimension."""

    wait: Callable[[], torch.Tensor]


class Peers(Protocol):
    """The way to other processes."""

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        """Send to a rank; ``wait()`` of what is returned waits until the tensor may be changed."""

    def receive(self, n_bytes: int, source: int) -> Incoming:
        """Ask for what a rank sends."""


class Gloo:
    """`Peers` by torch.distributed's gloo, in a group of its own, over this host's loopback."""

    def __init__(self, rank: int, size: int, store: str, limit_s: float) -> None:
        self._group = gloo_group(FileStore(store, size), rank, size, timedelta(seconds=limit_s), LOOPBACK)

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        return self._group.send([tensor], to, 0)

    def receive(self, n_bytes: int, source: int) -> Incoming:
        memory = torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
        work = self._group.recv([memory], source, 0)

        def wait() -> torch.Tensor:
            work.wait()
            return memory

        return Incoming(wait)


class Mail:
    """`Peers` by a mailbox, for processes of one host."""

    def __init__(self, rank: int, size: int, folder: Path, meet: Callable[[], None]) -> None:
        self._mailbox = Mailbox(rank)
        (folder / f"mailbox-{rank}").write_text(self._mailbox.address, encoding="utf-8")
        meet()
        for other in range(size):
            address = (folder / f"mailbox-{other}").read_text(encoding="utf-8")
            if other != rank and not self._mailbox.connect(other, address):
                raise ClusterError(
                    "the worker processes cannot open each other's memory under /proc; set PLACEMENT_SHARED_MEMORY=0 "
                    "to have tensors sent by gloo."
                )

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        sent = tensor.view(torch.uint8)
        block = self._mailbox.block(sent.numel())
        block.memory[: sent.numel()].copy_(sent)
        self._mailbox.post(to, 0, block, sent.numel())
        return _Done()

    def receive(self, n_bytes: int, source: int) -> Incoming:
        coming = self._mailbox.expect(source, 0)
        return Incoming(lambda: self._mailbox.receive(coming, n_bytes))


class _Done:
    """A tensor that was copied when it was sent."""

    def wait(self) -> None:
        """It may be changed already."""


# -- self-test -------------------------------------------------------------------------------------------------------


def patterns(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, bytes) of what a way must carry unchanged."""
    random = np.random.default_rng(seed)
    for size in _PATTERN_BYTES:
        yield f"{size} bytes counting up", (torch.arange(size) % 251).to(torch.uint8)
        yield f"{size} bytes of ones", torch.full((size,), 255, dtype=torch.uint8)
        yield f"{size} random bytes", torch.from_numpy(random.integers(0, 256, size, dtype=np.uint8))


def check_peers(peers: Peers, rank: int, other: int, seed: int) -> None:
    """Send known patterns to another rank and have them sent by it; both ranks call this.

    Raises:
        ClusterError: what arrived is not what was sent.
    """
    for name, pattern in patterns(seed):
        for source, target in ((min(rank, other), max(rank, other)), (max(rank, other), min(rank, other))):
            if rank == source:
                peers.send(pattern, target).wait()
            else:
                arrived = peers.receive(pattern.numel(), source).wait()
                _compare(f"worker {source} to worker {target}", name, pattern, arrived)


def check_moves(move: Callable[[torch.Tensor], torch.Tensor], way: str, seed: int) -> None:
    """Move known patterns by `move` and fetch them back; ``way`` names it in the error.

    Raises:
        ClusterError: what came back is not what was sent.
    """
    for name, pattern in patterns(seed):
        _compare(way, name, pattern, move(pattern).cpu())


def _compare(way: str, name: str, sent: torch.Tensor, arrived: torch.Tensor) -> None:
    expected, found = (zlib.crc32(tensor.contiguous().numpy().tobytes()) for tensor in (sent, arrived))
    if expected != found:
        raise ClusterError(
            f"copies from {way} arrive corrupted: {name} have checksum {found:08x} instead of {expected:08x}; check "
            "memory, driver and peer-to-peer settings, nothing computed over this way can be trusted."
        )


# -- speed -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WaySpeed:
    """How fast one direction is.

    Attributes:
        latency_s, bandwidth_bytes_per_s: of the straight line through the times of all sizes.
        spread: that a size has, the median over the sizes.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    spread: float = 0.0


def way_speed(sizes: Sequence[int], times_s: Sequence[Figure]) -> WaySpeed:
    """How fast a way is, by the times of some sizes."""
    spread = float(np.median([time_s.spread for time_s in times_s]))
    return replace(fitted(sizes, [time_s.value for time_s in times_s]), spread=spread)


def fitted(sizes: Sequence[int], times_s: Sequence[float]) -> WaySpeed:
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
    return WaySpeed(float(latency_s), float(1 / per_byte_s))


def idle_times_s(peers: Peers, rank: int, other: int, sizes: Sequence[int], repeats: int) -> list[Figure]:
    """Half of a round trip of each size, where neither end computes. Both ranks call this."""
    found = []
    for size in sizes:
        buffer, samples = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            for source in sorted((rank, other)):
                if rank == source:
                    peers.send(buffer, other).wait()
                else:
                    peers.receive(size, source).wait()
            samples.append((time.perf_counter() - start) / 2)
        found.append(Figure.of(samples[1:]))
    return found


def busy_times_s(
    peers: Peers, rank: int, source: int, target: int, sizes: Sequence[int], repeats: int
) -> list[Figure] | None:
    """One way of each size while the sender goes on computing and the receiver waits; None at the sender.

    That is how a transfer on the critical path goes. Both ends read one clock, as processes of one host do.
    """
    found, work = [], torch.rand(64, 64)
    for size in sizes:
        # As many as a step sends, so that neither they nor where they go are in the caches nearest to the core.
        tensors = [torch.zeros(size, dtype=torch.uint8) for _ in range(max(2, min(_IN_TURN, _IN_TURN_BYTES // size)))]
        held: deque[torch.Tensor] = deque(maxlen=len(tensors))
        samples = []
        stamp = torch.zeros(1, dtype=torch.float64)
        computing_s = _LEAST_COMPUTING_S + size / 1e9
        for number in range(len(tensors) + repeats):
            if rank == target:
                coming = peers.receive(size, source)  # as a routine does: before it is sent
                peers.send(stamp, source).wait()
                held.append(coming.wait())
                arrived = time.perf_counter()
                sent = float(peers.receive(stamp.nbytes, source).wait().view(torch.float64))
                samples.append(arrived - sent)
                continue
            peers.receive(stamp.nbytes, target).wait()
            sent = time.perf_counter()
            sending = peers.send(tensors[number % len(tensors)], target)
            while time.perf_counter() - sent < computing_s:
                work @ work
            sending.wait()
            peers.send(torch.tensor([sent], dtype=torch.float64), target).wait()
        if rank == target:
            found.append(Figure.of(samples[-repeats:]))
    return found if rank == target else None


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
