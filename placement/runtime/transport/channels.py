"""`Channel`: how one tensor gets from rank to rank, and `Transport`: what carries tensors through channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import torch

from placement.runtime.program.transfers import Transfer
from placement.runtime.transport.packing import Packing

ALWAYS = timedelta(days=30)  # how long to wait is for the watchdog to say


class PeerEndedError(Exception):
    """Another process has ended, and what is waited for will not come."""


@dataclass(frozen=True)
class Channel:
    """How one tensor of a step gets from rank to rank.

    Attributes:
        packing: the memory that travels.
        source, target: ranks.
        tag: the number it travels under.
        what: it is, for whoever waits for it: ``"op 'layer.0.linear'"``, ``"a message"``.
    """

    packing: Packing
    source: int
    target: int
    tag: int = 0
    what: str = "a message"

    @cached_property
    def n_bytes(self) -> int:
        return self.packing.n_bytes


@dataclass(frozen=True, eq=False)
class Pending:
    """A transfer out of or into memory of this process, which must be left alone until `wait` returns."""

    work: Any
    memory: torch.Tensor

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            PeerEndedError: the other process has ended.
        """
        try:
            self.work.wait(ALWAYS)
        except RuntimeError as error:
            raise PeerEndedError(str(error)) from None


class Transport(Protocol):
    """Carries tensors to and from other processes; `receive` and `drop` take what `expect` returned.

    All of it raises `PeerEndedError` where the process at the other end has ended.
    """

    @property
    def is_near(self) -> bool:
        """Whether a tensor is here as soon as it is sent."""

    def send(self, channel: Channel, tensor: torch.Tensor) -> Pending | None:
        """Send a tensor without waiting for it to arrive; None where the tensor may be changed at once."""

    def expect(self, channel: Channel) -> Any:
        """Let a tensor come in as soon as it is sent."""

    def receive(self, channel: Channel, coming: Any) -> torch.Tensor:
        """Wait for a tensor; the memory it is in."""

    def drop(self, channel: Channel, coming: Any) -> Pending | None:
        """Discard a tensor that will still arrive. Safe to call from any thread and from finalizers."""


def channels_of(transfers: Mapping[int, Transfer], op_names: tuple[str, ...], first_tag: int) -> dict[int, Channel]:
    """The channel of each transfer of a step, under tags from ``first_tag`` on."""
    found = {}
    for tag, transfer in transfers.items():
        what = f"op {op_names[transfer.op]!r}" if transfer.op >= 0 else "a parameter or buffer"
        found[tag] = Channel(Packing.of(transfer.info), transfer.source, transfer.target, first_tag + tag, what)
    return found
