"""What the processes of test_collectives.py do: exchanges of every kind, in buckets, and with a rank that ends."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from placement.runtime.exchanging.collectives import Collectives
from placement.runtime.exchanging.exchanges import Exchange, Member
from placement.runtime.parts.layouts import whole
from placement.runtime.ranks import watchdog
from placement.runtime.ranks.process_group import ProcessGroup
from tests.helpers.parallel import exchange_cases

_CPU = torch.device("cpu")


def everything(description: None, group: ProcessGroup) -> dict[str, Any]:
    """Every kind of exchange of all ranks and of some, all begun before any is finished, twice."""
    ranks = tuple(range(group.size))
    some = [
        *exchange_cases.every_kind(ranks),
        *exchange_cases.every_kind(ranks[-2:], 10),
        *exchange_cases.every_kind((0,), 20),
    ]
    some.append(_large(30, ranks))
    mine = [exchange for exchange in some if group.rank in exchange.ranks]
    collectives, equal = Collectives(group, some, _CPU), {}
    for step in range(2):
        begun = [(each, collectives.start(each.number, exchange_cases.given(each, group.rank, step))) for each in mine]
        for exchange, handle in reversed(begun) if step else begun:
            found, expected = collectives.finish(handle), exchange_cases.expected(exchange, group.rank, step)
            equal[f"{exchange.what}, step {step}"] = all(
                torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True)
            )
    return {"equal": equal, "same_host": sorted(group.same_host)}


def _large(number: int, ranks: tuple[int, ...]) -> Exchange:
    """More than goes in shared memory among three."""
    return Exchange(number, ranks, (Member("all_reduce", whole((300, 1000))),), "a large sum")


def failing(how: str, group: ProcessGroup) -> None:
    """The last rank ends, or never joins, while the others wait for it in a collective."""
    ranks = tuple(range(group.size))
    gathered = exchange_cases.member("all_gather", (300, 1000), ranks, torch.float32)
    exchange = Exchange(0, ranks, (gathered,), "a large tensor")
    collectives = Collectives(group, [exchange], _CPU)
    tensors = exchange_cases.given(exchange, group.rank)
    collectives.finish(collectives.start(0, tensors))  # a first exchange connects, which may take its time
    watchdog.PATIENCE_S = 2.0
    if group.rank == group.size - 1:
        if how == "killed":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "silent":
            time.sleep(600)
        if how == "left":
            return
    collectives.finish(collectives.start(0, tensors))
