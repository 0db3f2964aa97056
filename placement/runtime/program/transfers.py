"""Tensors that go from one device to another, and what the code of a device calls to send and to get them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from graphs.capture.trace import TensorInfo


class Link(Protocol):
    """The way from one device to the others, as a routine sees it; `Parcel` says what each tag stands for."""

    def expect(self, tag: int) -> None:
        """A parcel will be wanted soon."""

    def receive(self, tag: int) -> torch.Tensor:
        """Wait for a parcel."""

    def send(self, tag: int, tensor: torch.Tensor) -> None:
        """Send a parcel, without waiting for it to arrive; the tensor will not be changed."""


@dataclass(frozen=True)
class Parcel:
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


def send(link: Link, tag: int, tensor: Any) -> None:
    link.send(tag, tensor)


def receive(link: Link, tag: int) -> Any:
    return link.receive(tag)


def expect(link: Link, tag: int) -> None:
    link.expect(tag)
