"""`RankGroup`: the processes that run one placement together, one for each device, as one of them sees them.

What they say to each other beside tensors goes through a gloo group of their own, as plain data. A process that ends
closes its connections, by which those that wait for it know; before that it leaves its sentence in the store by which
all have met, so that they can say why.
"""

from __future__ import annotations

import atexit
import errno
import functools
import os
import re
import socket
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.rendezvous import rendezvous

from graphs import errors
from graphs.errors import MismatchError, PlacementError, RankError
from graphs.formatting import show_line
from placement.processes.processes import keep_to_loopback

if TYPE_CHECKING:
    from placement.runtime.program.routines import Routine


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
        """The value of each rank, by rank: plain data. All ranks call it.

        Args:
            what: for the message if others have ended.
        """
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.size
        with self.waiting(None, what):
            dist.all_gather_object(found, value, group=self.group)
        return found

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


# -- how they meet -----------------------------------------------------------------------------------------------------


LOOPBACK = "127.0.0.1"
RankT = TypeVar("RankT")
START = timedelta(seconds=300)  # until all processes are there
_ROUND = "placement/round"
_LOOK_S = 0.01


def alone() -> None:
    """Make a process group of this process alone, for torch's parts that want one."""
    start: Any = dist.HashStore  # type: ignore[attr-defined]
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo", store=start(), rank=0, world_size=1
    )


def check_environment(size: int) -> None:
    """Raises: MismatchError: nothing says which of several processes this is, or there are fewer or more of them."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise MismatchError(
            f"{missing[0]} is not set: a placement on several processes is started by torchrun, which sets it."
        )
    check_size(int(os.environ["WORLD_SIZE"]), size)
    if os.environ["MASTER_PORT"] == "0":
        raise MismatchError("MASTER_PORT is 0; start torchrun with --standalone, or give it a --master-port.")


def keep_to_host() -> None:
    """Where all processes are on this host, as ``torchrun`` says, let them listen on the loopback interface alone."""
    if os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ["WORLD_SIZE"]:
        keep_to_loopback()


def environment_store() -> tuple[Any, int, int]:
    """``(store, rank, number of processes)``, from what torchrun, or another start, has set.

    Where rank 0 has to keep the store, and the others meet it by the loopback interface, it listens on that alone;
    torch's own would listen on all.

    Raises:
        RankError: the others cannot be met.
    """
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    start: Any = dist.TCPStore  # type: ignore[attr-defined]
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    try:
        if is_kept or os.environ["RANK"] != "0" or host not in (LOOPBACK, "localhost"):
            store, rank, size = next(iter(rendezvous("env://", timeout=START)))
            return store, rank, size
        rank, size = 0, int(os.environ["WORLD_SIZE"])
        listening = socket.create_server((LOOPBACK, int(port))).detach()
        alike = {"timeout": START, "multi_tenant": True}  # as of torch
        return start(LOOPBACK, int(port), size, True, master_listen_fd=listening, **alike), rank, size
    except (RuntimeError, ValueError, OSError) as error:
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            raise RankError(f"{host}:{port} is in use by another process; take another MASTER_PORT.") from None
        raise RankError(f"cannot meet the other processes at {host}:{port}: {first_line(error)}") from None


def check_size(found: int, needed: int) -> None:
    """Raises: MismatchError: another number of processes than devices."""
    if found != needed:
        raise MismatchError(
            f"every device of a placement is a process, and there are devices: {needed}, processes: {found}; start it "
            f"with torchrun --nproc-per-node={needed}, or on several hosts with --nnodes so that it is {needed} in all."
        )


def of_this_host(by_rank: Sequence[RankT]) -> list[RankT] | None:
    """Those of the ranks, by number, that ``torchrun`` has started on this host; None where it has only one."""
    try:
        rank, size, local_rank, local_size = (
            int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
    except (KeyError, ValueError):
        return None
    first = rank - local_rank
    return None if local_size >= size else list(by_rank[first : first + local_size])


def fresh_store(store: Any, rank: int, size: int, limit: timedelta) -> Any:
    """The part of a store that is for this start alone. All processes call it.

    Rank 0 names a round; the others greet it by a name of their own and wait until it repeats that, which no process
    of an earlier start can have done.

    Raises:
        RankError: some process does not come.
    """
    try:
        own = uuid.uuid4().hex
        name = _met(store, own, rank, limit) if rank else _greeted(store, own, size)
        return PrefixStore(f"placement/{name}", store)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise RankError(f"rank {rank} has not met all the others: {reason}; start {size} processes.") from None


def _greeted(store: Any, own: str, size: int) -> str:
    store.set(_ROUND, own)
    for rank in range(1, size):
        store.set(_answer(rank), store.get(_greeting(own, rank)))  # waits for it
    return own


def _met(store: Any, own: str, rank: int, limit: timedelta) -> str:
    greeted, deadline = "", time.monotonic() + limit.total_seconds()
    while time.monotonic() < deadline:
        name = store.get(_ROUND).decode()
        if name != greeted:  # the first one may be of an earlier start
            greeted = name
            store.set(_greeting(name, rank), own)
        if store.check([_answer(rank)]) and store.get(_answer(rank)).decode() == own:
            return greeted
        time.sleep(_LOOK_S)
    raise RankError(f"rank {rank} has not met rank 0 in {limit.total_seconds():.0f} s; start all processes.")


def _greeting(name: str, rank: int) -> str:
    return f"placement/greeting/{name}/{rank}"


def _answer(rank: int) -> str:
    return f"placement/answer/{rank}"


# -- errors of other libraries -----------------------------------------------------------------------------------------


_GLOO_ADVICE = " This is typically caused"


def first_line(error: BaseException) -> str:
    """An error's message in a line, without the words that gloo and torch put before and behind it."""
    if isinstance(error, PlacementError):
        return str(error)
    text = re.sub(r"^\[\S+:\d+\] ", "", str(error).strip())  # gloo's source line
    text = re.sub(r"^\[enforce fail at [^]]*\] .*?(?=DefaultCPUAllocator)", "", text)
    text = text.partition(_GLOO_ADVICE)[0].partition("\n")[0].removesuffix(".")
    return text[:200] + "." if text else "no reason given."


def failed_in(rank: int, op: str, error: Exception) -> str:
    """The sentence for an error that arose in an op, or in a step where that is not known."""
    what = f"op {op!r}" if op else "a step"
    if is_out_of_memory(error):
        return f"rank {rank} ran out of memory in {what}: {first_line(error)}"
    return f"rank {rank} failed in {what}: {type(error).__name__}: {first_line(error)}"


def is_out_of_memory(error: Exception) -> bool:
    """True if the memory of the host or of a device did not suffice."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def failed_op(routine: Routine, op_names: tuple[str, ...], trace: TracebackType | None) -> str:
    """Name of the op in whose line of a routine an error arose; empty for none."""
    code, line = type(routine.module).forward.__code__, 0
    while trace is not None:
        if trace.tb_frame.f_code is code:
            line = trace.tb_lineno
        trace = trace.tb_next
    # One op a line; views and the like belong to the op after them.
    after = _by_line(routine)[line - code.co_firstlineno :] if line >= code.co_firstlineno else []
    found = next((op for op in after if op >= 0), -1)
    return op_names[found] if found >= 0 else ""


def _by_line(routine: Routine) -> list[int]:
    """The op of each line of a routine's code from ``def forward`` on, -1 for lines without."""
    lines = str(routine.module.code).splitlines()
    op_of = {node.name: int(node.meta["op"]) for node in routine.module.graph.nodes if "op" in node.meta}
    first = next(i for i, text in enumerate(lines) if text.startswith("def forward"))
    return [op_of.get(text.split("=")[0].split(":")[0].strip(), -1) for text in lines[first:]]
