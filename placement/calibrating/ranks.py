"""Measuring under torchrun: one process for each device, on one host or several, and what they exchange."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from env.device import MeasuredCollective
from graphs.errors import ClusterError
from placement.calibrating.clock import TimeLeft
from placement.measuring.machine.links import KINDS, exchange

SIZES = tuple(1 << k for k in (10, 14, 16, 18, 20, 22, 24, 26, 27, 28, 30))  # bytes of the whole tensor
_REPEATS, _WARM_UP = 10, 3
_POINT_SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)  # sent from one process to another


@dataclass(frozen=True)
class Launched:
    """The processes that torchrun started.

    Attributes:
        rank: of this one.
        hosts: the host of each process by rank, numbered in order of appearance.
        place: the device of this process.
    """

    rank: int
    hosts: tuple[int, ...]
    place: torch.device

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self.hosts)

    @property
    def n_hosts(self) -> int:
        """How many hosts they are on."""
        return max(self.hosts) + 1

    def on_host(self, host: int) -> list[int]:
        """Launched of the processes on a host."""
        return [rank for rank, own in enumerate(self.hosts) if own == host]


def is_launched() -> bool:
    """Whether torchrun, or a launcher like it, has started more than this process."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined() -> Iterator[Launched]:
    """Join the other processes, over NCCL on GPUs and gloo on CPUs, and leave them in the end.

    Raises:
        ClusterError: they cannot be reached, or hosts have unlike numbers of devices.
    """
    has_gpus = torch.cuda.device_count() > 0
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(place)
    try:
        # Tensors of the CPU go over gloo: who waits there leaves the GPUs alone.
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo")
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, socket.gethostname())
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ClusterError(
            f"the processes cannot reach each other ({reason:.200}); check torchrun's options."
        ) from None
    order = list(dict.fromkeys(names))
    hosts = tuple(order.index(name) for name in names)
    counts = {hosts.count(host) for host in range(len(order))}
    try:
        if len(counts) > 1:
            raise ClusterError(f"hosts have {sorted(counts)} processes; start as many on each.")
        yield Launched(dist.get_rank(), hosts, place)
    finally:
        dist.destroy_process_group()


def groups_of(hosts: Sequence[int]) -> list[tuple[int, ...]]:
    """Launched that are measured together: 2, 4, 8, ... and all of the first host, all there are.

    On several hosts, one process of each makes a group too, as data parallelism beside tensor parallelism does.
    """
    first = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
    counts = sorted({*(1 << k for k in range(1, 12)), len(first)})
    found = [tuple(first[:n]) for n in counts if 2 <= n <= len(first)]
    if len(first) < len(hosts):
        across = tuple(hosts.index(host) for host in range(max(hosts) + 1))
        found += [across, tuple(range(len(hosts)))]
    return list(dict.fromkeys(found))


def collectives(ranks: Launched, deadline: TimeLeft, sizes: Sequence[int] = SIZES) -> tuple[MeasuredCollective, ...]:
    """Measure every kind among every group of `groups_of`; all processes call it, and all are given the answer.

    The mean over the ranks of each one's median is what a collective takes. Groups that would begin after the deadline
    are left out, and sizes that have no room in memory.
    """
    found: list[MeasuredCollective] = []
    for members in groups_of(ranks.hosts):
        group = dist.new_group(list(members))
        for kind in KINDS:
            if any_rank(deadline.left_s <= 0):
                return tuple(found)
            seconds = _seconds(ranks, members, group, kind, sizes)
            if seconds:
                hosts = len({ranks.hosts[rank] for rank in members})
                whole = tuple(sizes[: len(seconds)])
                found.append(MeasuredCollective(kind, len(members), whole, tuple(seconds), hosts))
    return tuple(found)


def any_rank(here: bool) -> bool:
    """Whether it is so on any rank; all call it."""
    flag = torch.tensor([float(here)])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item() > 0)


def mean_over(own_s: float, n_ranks: int) -> float:
    """The mean of what some ranks give, the others giving 0; all call it."""
    total = torch.tensor([own_s], dtype=torch.float64)
    dist.all_reduce(total)
    return float(f"{float(total.item()) / n_ranks:.4g}")


def _seconds(ranks: Launched, members: tuple[int, ...], group: Any, kind: str, sizes: Sequence[int]) -> list[float]:
    found: list[float] = []
    for size in sizes:
        work, own_s, refused = None, 0.0, False
        try:
            work = (
                exchange(kind, size, len(members), group, ranks.place, torch.bfloat16)
                if ranks.rank in members
                else None
            )
        except RuntimeError:  # no memory: nobody may enter the collective then
            refused = True
        if any_rank(refused):
            break
        try:
            own_s = timed(work, ranks.place) if work is not None else 0.0
        except (RuntimeError, NotImplementedError):  # no such collective in this backend, on any rank
            refused = True
        if any_rank(refused):
            break
        found.append(mean_over(own_s, len(members)))
    return found


def timed(work: Callable[[], object], place: torch.device) -> float:
    """The median seconds of a collective that all members enter together."""
    for _ in range(_WARM_UP):
        work()
    samples = []
    for _ in range(_REPEATS):
        if place.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            end.synchronize()
            samples.append(float(start.elapsed_time(end)) * 1e-3)
        else:
            began = time.perf_counter()
            work()
            samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def points(ranks: Launched, first: int, second: int) -> tuple[list[int], list[float]]:
    """Seconds of one way of tensors of some sizes from each process of one host to its counterpart on another.

    All processes of both hosts send at the same time, each to one, so that ports which they share are shared.

    Args:
        first, second: numbers of the hosts, or of one: then its first two processes send to each other.
    """
    pairs = list(zip(ranks.on_host(first), ranks.on_host(second), strict=True))
    if first == second:
        a, b = ranks.on_host(first)[:2]
        pairs = [(a, b)]
    mine = next((pair for pair in pairs if ranks.rank in pair), None)
    found = []
    for size in _POINT_SIZES:
        any_rank(False)  # all begin together
        own_s = 0.0
        if mine is not None:
            tensor = torch.zeros(size, dtype=torch.uint8, device=ranks.place)
            own_s = timed(partial(_back_and_forth, tensor, mine, ranks.rank), ranks.place) / 2
        found.append(mean_over(own_s, 2 * len(pairs)))
    return list(_POINT_SIZES), found


def _back_and_forth(tensor: torch.Tensor, pair: tuple[int, int], rank: int) -> None:
    for source in pair:
        if rank == source:
            dist.send(tensor, sum(pair) - rank)
        else:
            dist.recv(tensor, source)
