"""Common parts of quantised gradients: an all-reduce of quantised messages with error feedback, and packed codes."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from placement.fitting.compressions.error_feedback import Residual
from placement.fitting.requests import AllGather, Message, Post, Receive, Request
from placement.fitting.role import Compressor

_PIECE = "quantised piece"


class Quantizer(Compressor, ABC):
    """A sender whose entries become codes of a few bits. Sub-classes write `quantised` and `restored`.

    Such messages cannot be summed. So a mean goes as in section 2.3 of Seide et al. 2014: each member is given its
    piece of all others' values, quantised; it sums them up, and hands out the mean, quantised once more. That is as
    many messages as a ring all-reduce has, each as much smaller as the codes are.
    """

    def __init__(self, size: int, number: int, has_error_feedback: bool) -> None:
        self._size, self._number = size, number
        self._left_out = Residual(has_error_feedback)
        self._left_out_of_means = defaultdict[tuple[int, ...], Residual](lambda: Residual(has_error_feedback))

    @abstractmethod
    def quantised(self, values: Tensor, part: slice) -> tuple[Tensor, ...]:
        """The message for values, float32, that are this part of the flat vector."""

    @abstractmethod
    def restored(self, tensors: tuple[Tensor, ...], part: slice) -> Tensor:
        """The values of a message of `quantised`, float32."""

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """As `Compressor.encode`."""
        wanted = self._left_out.added_to(values)
        message = self.quantised(wanted, slice(0, self._size))
        self._left_out.keep(wanted, self.decode(message))
        return message

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """As `Compressor.decode`."""
        return self.restored(tensors, slice(0, self._size))

    def mean(self, values: Tensor, group: tuple[int, ...]) -> Generator[Request, Any, Tensor]:
        """As `Compressor.mean`."""
        if len(group) == 1:
            return values
        parts = _equal_parts(self._size, len(group))
        wanted = self._left_out.added_to(values)
        pieces = [self.quantised(wanted[part], part) for part in parts]
        self._left_out.keep(wanted, self._joined(pieces, parts))
        mine = parts[group.index(self._number)]
        for member, piece in zip(group, pieces, strict=True):
            if member != self._number:
                yield Post(member, _PIECE, piece)
        total = self.restored(pieces[group.index(self._number)], mine)
        for member in group:
            if member != self._number:
                message: Message = yield Receive(_PIECE, member)
                total += self.restored(message.tensors, mine)
        left_out = self._left_out_of_means[group]
        wanted = left_out.added_to(total / len(group))
        piece = self.quantised(wanted, mine)
        left_out.keep(wanted, self.restored(piece, mine))
        pieces = yield AllGather(piece, group)
        return self._joined(pieces, parts)

    def _joined(self, pieces: list[tuple[Tensor, ...]], parts: list[slice]) -> Tensor:
        return torch.cat([self.restored(piece, part) for piece, part in zip(pieces, parts, strict=True)])


def _equal_parts(size: int, count: int) -> list[slice]:
    ends = [size * k // count for k in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 [ceil(n * bits / 8)]: integers [n] from 0 to 2**bits - 1, the low bits first."""
    spread = torch.stack([(codes >> k & 1).to(torch.uint8) for k in range(bits)], 1).view(-1)
    padded = torch.nn.functional.pad(spread, (0, -len(spread) % 8)).view(-1, 8)
    return torch.stack([padded[:, k] << k for k in range(8)]).sum(0, dtype=torch.uint8)


def unpacked(data: Tensor, bits: int, n: int) -> Tensor:
    """int64 [n]: the codes of `packed`."""
    spread = torch.stack([data >> k & 1 for k in range(8)], 1).view(-1)[: n * bits].view(n, bits)
    return torch.stack([spread[:, k].long() << k for k in range(bits)]).sum(0)
