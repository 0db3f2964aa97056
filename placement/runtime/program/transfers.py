"""Tensors that go from one device to another, and what the code of a device calls to send and to get them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from graphs.capture.trace import TensorInfo


class Endpoint(Protocol):
    """A device's end of its transfers, as a routine sees it; `Transfer` says what each tag stands for."""

    def expect(self, tag: int) -> None:
        """A transfer will be wanted soon."""

    def receive(self, tag: int) -> torch.Tensor:
        """Wait for a transfer."""

    def send(self, tag: int, tensor: torch.Tensor) -> None:
        """Send a transfer, without waiting for it to arrive; the tensor will not be changed."""


@dataclass(frozen=True)
class Transfer:
    """A tensor that goes from one device to another once a step.

    Attributes:
        tag: its number, unique in a step.
        source, target: device numbers.
        op: number of the op that makes it.
        info: its layout.
    """

    tag: int
    source: int
    target: int
    op: int
    info: TensorInfo


def send(endpoint: Endpoint, tag: int, tensor: Any) -> None:
    endpoint.send(tag, tensor)


def receive(endpoint: Endpoint, tag: int) -> Any:
    return endpoint.receive(tag)


def expect(endpoint: Endpoint, tag: int) -> None:
    endpoint.expect(tag)
