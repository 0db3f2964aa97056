"""Transports, each by itself: the end of another process has one name, and NCCL asks in the order of sending."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphs.capture.trace import Layout, TensorInfo
from placement.runtime.program.transfers import Transfer
from placement.runtime.transport.channels import Channel, PeerEndedError, Pending, channels_of
from placement.runtime.transport.gloo import GlooTransport
from placement.runtime.transport.nccl import NcclTransport
from placement.runtime.transport.packing import Packing

CPU = torch.device("cpu")


def channel(tag: int = 0) -> Channel:
    return Channel(Packing.flat(3, torch.float32), 0, 1, tag)


def broken(*message: Any) -> Any:
    raise RuntimeError("[gloo/tcp.cc:81] Connection closed by peer")


@pytest.mark.parametrize(
    "act",
    [
        lambda gloo: gloo.send(channel(), torch.ones(3)),
        lambda gloo: gloo.expect(channel()),
        lambda gloo: gloo.receive(channel(), Pending(SimpleNamespace(wait=broken), torch.ones(3))),
    ],
    ids=["send", "expect", "receive"],
)
def test_a_connection_that_is_closed_is_a_process_that_has_ended(act: Callable[[GlooTransport], Any]) -> None:
    with pytest.raises(PeerEndedError, match="Connection closed by peer"):
        act(GlooTransport(SimpleNamespace(send=broken, recv=broken)))


class Incoming:
    """The end of a pair that receives: fills memory with the number of what it was asked for."""

    def __init__(self) -> None:
        self.n_asked = 0

    def receive(self, memory: torch.Tensor) -> Any:
        memory.fill_(self.n_asked)
        self.n_asked += 1
        return SimpleNamespace(wait=lambda timeout: None)


def test_tensors_without_tags_are_asked_for_in_the_order_of_sending() -> None:
    pair = Incoming()
    nccl = NcclTransport({0: pair}, CPU)  # type: ignore[dict-item]
    channels = [channel(tag) for tag in range(4)]
    nccl.begin(channels)
    nccl.expect(channels[1])
    assert pair.n_asked == 0  # the first one must be asked for before it
    nccl.expect(channels[0])
    assert pair.n_asked == 2
    assert nccl.receive(channels[1], None).tolist() == [1.0] * 3
    assert nccl.receive(channels[3], None).tolist() == [3.0] * 3  # with all that comes before it
    dropped = nccl.drop(channels[2], None)
    assert dropped is not None
    assert dropped.memory.tolist() == [2.0] * 3
    assert nccl.drop(channels[2], None) is None
    assert nccl.receive(channels[0], None).tolist() == [0.0] * 3


def test_who_waits_is_told_what_for() -> None:
    info = TensorInfo(Layout((3,), (1,), torch.float32), 0, 0)
    found = channels_of({4: Transfer(4, 0, 1, 1, info), 5: Transfer(5, 1, 0, -1, info)}, ("first", "second"), 100)
    assert [(one.source, one.target, one.tag, one.what) for one in found.values()] == [
        (0, 1, 104, "op 'second'"),
        (1, 0, 105, "a parameter or buffer"),
    ]
