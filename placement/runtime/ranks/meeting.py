"""How the processes of one start find each other: a store, keys that an earlier start does not have, connections.

``torchrun --max-restarts`` starts all processes again and leaves them the store of the first ones, full of addresses at
which nobody answers any more.
"""

from __future__ import annotations

import errno
import os
import socket
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from graphs.errors import MismatchError, RankError
from placement.processes.loopback import keep_to_loopback
from placement.runtime.ranks.failures import first_line

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
