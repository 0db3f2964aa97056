"""`RankGroup`: the processes that run one placement together, one for each device, as one of them sees them.

What they say to each other beside tensors goes through a gloo group of their own, as plain data. A process that ends
closes its connections, by which those that wait for it know; before that it leaves its sentence in the store by which
all have met, so that they can say why.
"""

from __future__ import annotations

import atexit
import functools
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from graphs import errors
from graphs.errors import MismatchError, PlacementError, RankError
from graphs.formatting import show_line
from placement.runtime.ranks.failures import first_line
from placement.runtime.ranks.meeting import (
    START,
    check_environment,
    check_size,
    environment_store,
    fresh_store,
    keep_to_host,
)

FoundT = TypeVar("FoundT")
_REASON = "placement/reason"
_N_FACTS = 4  # that a call may have


class LostRankError(RankError):
    """Another rank has ended, or does not answer: it knows better why than the one that misses it."""


@dataclass(frozen=True, eq=False)
class RankGroup:
    """This process as one of several.

    Attributes:
        rank: its number, that of its device.
        size: how many there are.
        group: of torch.distributed, gloo; None where there is one process.
        limit_s: how long one waits for another.
    """

    rank: int
    size: int
    group: Any
    limit_s: float

    @classmethod
    def of(cls, members: Sequence[int] | None = None) -> RankGroup:
        """Processes of the default process group, or all of them; each member calls this. Without one, this alone.

        Raises:
            RankError: they cannot reach each other.
        """
        limit = _limit()
        size = dist.get_world_size() if dist.is_initialized() else 1
        chosen = list(range(size)) if members is None else list(members)
        if len(chosen) == 1:
            return cls(0, 1, None, limit.total_seconds())
        try:
            group = dist.new_group(chosen, timeout=limit, backend="gloo", use_local_synchronization=True)
            found = cls(dist.get_group_rank(group, dist.get_rank()), len(chosen), group, limit.total_seconds())
            found.barrier()
        except RuntimeError as error:
            raise RankError(
                f"rank {dist.get_rank()} cannot connect to the others by gloo: {first_line(error)}; GLOO_SOCKET_IFNAME "
                "names the network interface to use."
            ) from None
        return found

    # -- talking ----------------------------------------------------------------------------------------------

    def told(self, value: Any, what: str = "") -> list[Any]:
        """The value of each rank, by rank: plain data, as JSON has it. All ranks call it.

        Args:
            what: for the message if others have ended.
        """
        if self.group is None:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self._gathered(torch.tensor([own.numel()]), what)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: own.numel()] = own
        texts = self._gathered(padded, what)
        return [json.loads(bytes(text[:size].numpy())) for text, size in zip(texts, sizes, strict=True)]

    def meet(self, call: str, *facts: int) -> list[list[int]]:
        """The facts of each rank, once all of them make the same call.

        Args:
            call: its name.
            facts: up to four numbers.

        Raises:
            MismatchError: others make another call.
        """
        if self.group is None:
            return [list(facts)]
        mine = torch.tensor([zlib.crc32(call.encode()), *facts, *[0] * (_N_FACTS - len(facts))])
        rows = [row.tolist() for row in self._gathered(mine, call)]
        other = next((rank for rank, row in enumerate(rows) if row[0] != int(mine[0])), None)
        if other is not None or any(row[0] != rows[0][0] for row in rows):
            raise MismatchError(self._crossed(call))
        return [row[1 : 1 + len(facts)] for row in rows]

    def _crossed(self, call: str) -> str:
        """What the ranks do instead of one and the same."""
        calls = self.told(call)
        other = next(rank for rank, each in enumerate(calls) if each != calls[0])
        return (
            f"rank 0 is at {calls[0]} and rank {other} at {calls[other]}: all processes must make the same calls of "
            "the model, in the same order."
        )

    def agreed(self, act: Callable[[], FoundT]) -> FoundT:
        """What an action gives, where it succeeds on all ranks; all call it.

        Raises:
            PlacementError: of the first rank on which it did not, on all of them.
        """
        found, error = None, None
        try:
            found = act()
        except PlacementError as raised:
            error = raised
        told = self.told(None if error is None else [type(error).__name__, str(error)], "whether all have succeeded")
        failed = next(((rank, each) for rank, each in enumerate(told) if each is not None), None)
        if failed is None:
            return found  # type: ignore[return-value]
        rank, (kind, sentence) = failed
        if error is not None and rank == self.rank:
            raise error
        raise getattr(errors, kind, MismatchError)(f"rank {rank}: {sentence}")

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.meet("a barrier")

    def spread(self, tensor: torch.Tensor, source: int, what: str) -> torch.Tensor:
        """The tensor of one rank, on the CPU of all; the others give memory for it."""
        if self.group is not None:
            with self.waiting(source, what):
                dist.broadcast(_as_bytes(tensor), group_src=source, group=self.group)
        return tensor

    def pass_on(self, tensor: torch.Tensor, source: int, target: int, what: str) -> torch.Tensor:
        """The tensor of one rank, on the CPU of another one; both call it."""
        if source != target:
            with self.waiting(source + target - self.rank, what):
                if self.rank == source:
                    dist.send(_as_bytes(tensor), group_dst=target, group=self.group)
                else:
                    dist.recv(_as_bytes(tensor), group_src=source, group=self.group)
        return tensor

    def _gathered(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with self.waiting(None, what):
            dist.all_gather(found, tensor, group=self.group)
        return found

    # -- failures ---------------------------------------------------------------------------------------------

    @contextmanager
    def waiting(self, rank: int | None, what: str) -> Iterator[None]:
        """While something is wanted of another rank, or of all of them.

        Raises:
            LostRankError: it will not come; says why.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PlacementError):
                raise
            self.lost(rank, what, error)

    def lost(self, rank: int | None, what: str, error: Exception) -> NoReturn:
        """Raises: LostRankError: what another rank was to give will not come."""
        who = "another rank" if rank is None else f"rank {rank}"
        if "timed out" in str(error).lower():
            sentence = f"{who} has not answered rank {self.rank}, which waits for {what}, for {self.limit_s:.0f} s."
        else:
            sentence = f"{who} has ended while rank {self.rank} waited for {what}: {first_line(error)}"
        raise LostRankError(self.claimed(sentence)) from None

    def claimed(self, sentence: str) -> str:
        """Why the run has failed: this, unless another rank has said why before."""
        with suppress(Exception):  # the store may have gone with the rank that kept it
            found = _get_default_store().compare_set(_REASON, "", sentence)
            return str(found.decode())
        return sentence


def joined(size: int) -> RankGroup:
    """The processes of ``torchrun``, of `launch`, or of the caller's own ``init_process_group``.

    Args:
        size: how many are needed.

    Raises:
        MismatchError: there are fewer or more, or nothing says which they are.
        RankError: they cannot reach each other.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        raise RankError("this build of PyTorch has no gloo, by which processes reach each other; install one that has.")
    if not dist.is_initialized():
        check_environment(size)
        keep_to_host()
        store, rank, found = environment_store()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        fresh = fresh_store(store, rank, found, START)
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=found, timeout=START)
        atexit.register(_leave)
    if not isinstance(sys.excepthook, _LastWords):
        sys.excepthook = _LastWords(sys.excepthook)  # torch has one of its own by now
    check_size(dist.get_world_size(), size)
    return _all_ranks(dist.group.WORLD)


def _leave() -> None:
    """End the group that `joined` made: a thread of gloo that outlives the interpreter aborts the process.

    After an error others may never answer what such a thread waits for, and the process ends with that error.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
        _all_ranks.cache_clear()


@functools.lru_cache(1)
def _all_ranks(world: Any) -> RankGroup:
    """Those of a default process group, which a script may end and make anew."""
    return RankGroup.of()


def _limit() -> timedelta:
    """How long the default process group waits for a process."""
    with suppress(RuntimeError, AttributeError, ValueError):  # of a GPU's group alone, or there is none
        world: Any = dist.group.WORLD
        found: timedelta = world._get_backend(torch.device("cpu")).options._timeout
        return found
    return START


@dataclass(frozen=True)
class _LastWords:
    """Tells an error that ends this process to those who will miss it; of a sentence, that is all there is to say."""

    before: Callable[[type[BaseException], BaseException, TracebackType | None], Any]

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_sentence = isinstance(error, PlacementError) and error.__cause__ is None
        if isinstance(error, Exception) and dist.is_initialized():
            what = "" if isinstance(error, PlacementError) else f" failed with {kind.__name__}"
            with suppress(Exception):
                _get_default_store().compare_set(_REASON, "", f"rank {dist.get_rank()}{what}: {first_line(error)}")
        if is_sentence:
            print(f"{show_line(str(error))}\n", end="", file=sys.stderr, flush=True)  # in one go: others write too
        else:
            self.before(kind, error, trace)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor without gaps: gloo has no collectives of some formats."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
