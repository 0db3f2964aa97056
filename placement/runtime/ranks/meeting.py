"""Keys of a store that the processes of one start have in common, and those of an earlier start do not.

``torchrun --max-restarts`` starts all processes again and leaves them the store of the first ones, full of addresses at
which nobody answers any more.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

from graphs.errors import RankError

RankT = TypeVar("RankT")
START = timedelta(seconds=300)  # until all processes are there
_ROUND = "placement/round"
_LOOK_S = 0.01


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
