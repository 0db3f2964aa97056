"""Compressions: how gradients become smaller on the wire, with error feedback where a message leaves something out."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphs.errors import FitError
from placement.fitting.participants import AllGather, AllReduce, Compressor, Message, Post, Receive, Request

if TYPE_CHECKING:
    from placement.fitting.task import WeightLayout


@dataclass(frozen=True)
class Uncompressed:
    """float32, summed by an all-reduce."""

    def compressor(self, layout: WeightLayout, generator: torch.Generator, number: int) -> Compressor:
        """One without a state."""
        return _Whole()


class _Whole(Compressor):
    def mean(self, values: Tensor, group: tuple[int, ...]) -> Generator[Request, Any, Tensor]:
        total: Tensor
        (total,) = yield AllReduce((values,), group)
        return total / len(group)


@dataclass(eq=False)
class Residual:
    """The sum of all values so far, less the sum of all that was sent for them.

    Attributes:
        is_kept: without it nothing is added: for messages that are right in the mean.
        left_out: None before the first message.
    """

    is_kept: bool = True
    left_out: Tensor | None = None

    def added_to(self, values: Tensor) -> Tensor:
        """Values to send now: the given ones and the part left out before."""
        return values if self.left_out is None else values + self.left_out

    def keep(self, wanted: Tensor, sent: Tensor) -> None:
        """Take into account that of `added_to`'s values only these were sent."""
        if self.is_kept:
            self.left_out = wanted - sent


@dataclass(frozen=True)
class TopK:
    """Aji and Heafield 2017; with the memory of Stich et al. 2018. A sent entry takes 8 bytes: its value and its place.

    Attributes:
        fraction: of all entries that is sent, at least one.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise FitError(f"top_k has fraction={self.fraction:g}; expected one above 0, at most 1.")

    def compressor(self, layout: WeightLayout, generator: torch.Generator, number: int) -> Compressor:
        """A sender; nothing in it is random."""
        return _Largest(layout.size, math.ceil(self.fraction * layout.size))


class _Largest(Compressor):
    def __init__(self, size: int, count: int) -> None:
        self._size, self._count = size, count
        self._left_out = Residual()

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """(values float32 [k], places int32 [k])."""
        wanted = self._left_out.added_to(values)
        places = wanted.abs().topk(self._count, sorted=False).indices
        message = (wanted[places], places.int())
        self._left_out.keep(wanted, self.decode(message))
        return message

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        values, places = tensors
        return torch.zeros(self._size, device=values.device).index_add_(0, places, values)


@dataclass(frozen=True)
class PowerSgd:
    """Vogels et al. 2019, with warm start and error feedback. Vectors, and matrices that gain nothing, go as they are.

    Both factors are summed by all-reduces, which other compressions cannot use.

    Attributes:
        rank: columns of the thin matrices.
    """

    rank: int = 2

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise FitError(f"power_sgd has rank={self.rank}; expected 1 or more.")

    def compressor(self, layout: WeightLayout, generator: torch.Generator, number: int) -> Compressor:
        """A sender; all begin with the same factors, as their sums ask for."""
        return _Factors(layout, self.rank)


class _Factors(Compressor):
    """Thin matrices of a parameter as a matrix M: `left`, orthogonal, and `right`, with M ~ left right^T."""

    def __init__(self, layout: WeightLayout, rank: int) -> None:
        self._layout = layout
        self._left_out = Residual()
        same = torch.Generator().manual_seed(0)
        shapes = [(shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel()) for shape in layout.shapes]
        self._is_thin = [rank * (a + b) < a * b for a, b in shapes]
        # The right matrices of the last update, of the thin ones only.
        self._right: list[Tensor] = [
            torch.randn(b, rank, generator=same)
            for (_, b), is_thin in zip(shapes, self._is_thin, strict=True)
            if is_thin
        ]

    def mean(self, values: Tensor, group: tuple[int, ...]) -> Generator[Request, Any, Tensor]:
        if len(group) == 1:
            return values
        wanted = self._left_out.added_to(values)
        left: Sequence[Tensor] = yield AllReduce(self._times_right(wanted), group)
        left = self._orthogonal([each / len(group) for each in left])
        if self._right:
            right: Sequence[Tensor] = yield AllReduce(self._times_left(wanted, left), group)
            self._right = [each / len(group) for each in right]
        found = self.decode((*left, *self._right))
        self._left_out.keep(wanted, found)
        return found

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """(left of each parameter, the whole of it where it is not thin; right of each thin one)."""
        wanted = self._left_out.added_to(values)
        left = self._orthogonal(self._times_right(wanted))
        self._right = list(self._times_left(wanted, left))
        message = (*left, *self._right)
        self._left_out.keep(wanted, self.decode(message))
        return message

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        right = iter(tensors[len(self._is_thin) :])
        left = zip(tensors, self._is_thin, strict=False)
        return torch.cat([(each @ next(right).T if is_thin else each).reshape(-1) for each, is_thin in left])

    def _times_right(self, flat: Tensor) -> tuple[Tensor, ...]:
        """M right of each thin parameter; of another one, its values."""
        right = iter(self._right)
        return tuple(
            value.flatten(1) @ next(right).to(flat.device) if is_thin else value.clone()
            for value, is_thin in self._parameters(flat)
        )

    def _times_left(self, flat: Tensor, left: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """M^T left of each thin parameter."""
        parameters = zip(self._parameters(flat), left, strict=True)
        return tuple(value.flatten(1).T @ each for (value, is_thin), each in parameters if is_thin)

    def _orthogonal(self, left: Sequence[Tensor]) -> list[Tensor]:
        thin = zip(left, self._is_thin, strict=True)
        return [torch.linalg.qr(each).Q if is_thin else each for each, is_thin in thin]

    def _parameters(self, flat: Tensor) -> Iterator[tuple[Tensor, bool]]:
        return zip(self._layout.views(flat), self._is_thin, strict=True)


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
        wanted = self._left_out.added_to(values)
        message = self.quantised(wanted, slice(0, self._size))
        self._left_out.keep(wanted, self.decode(message))
        return message

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return self.restored(tensors, slice(0, self._size))

    def mean(self, values: Tensor, group: tuple[int, ...]) -> Generator[Request, Any, Tensor]:
        if len(group) == 1:
            return values
        ends = [self._size * k // len(group) for k in range(len(group) + 1)]
        parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
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


def packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 [ceil(n * bits / 8)]: integers [n] from 0 to 2**bits - 1, the low bits first."""
    spread = torch.stack([(codes >> k & 1).to(torch.uint8) for k in range(bits)], 1).view(-1)
    padded = torch.nn.functional.pad(spread, (0, -len(spread) % 8)).view(-1, 8)
    return torch.stack([padded[:, k] << k for k in range(8)]).sum(0, dtype=torch.uint8)


def unpacked(data: Tensor, bits: int, n: int) -> Tensor:
    """int64 [n]: the codes of `packed`."""
    spread = torch.stack([data >> k & 1 for k in range(8)], 1).view(-1)[: n * bits].view(n, bits)
    return torch.stack([spread[:, k].long() << k for k in range(bits)]).sum(0)


_MOST_LEVELS = 2**15 - 1


@dataclass(frozen=True)
class Qsgd:
    """Alistarh et al. 2017, sections 3.1 and 4. Right in the mean, so error feedback is off unless asked for.

    An entry takes the bits that 2 s + 1 signed levels need: 4 with s = 7, 6 with s = 16. A bucket's variance is at most
    min(n / s^2, sqrt(n) / s) of its squared norm, with n = `bucket` entries.

    Attributes:
        s: levels above 0.
        bucket: entries that share a norm.
        feedback: 1 for error feedback.
    """

    s: int = 16
    bucket: int = 512
    feedback: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.s <= _MOST_LEVELS:
            raise FitError(f"qsgd has s={self.s} levels; expected 1 to {_MOST_LEVELS}.")
        if self.bucket < 1:
            raise FitError(f"qsgd has buckets of {self.bucket} entries; expected 1 or more.")
        if self.feedback not in (0, 1):
            raise FitError(f"qsgd has feedback={self.feedback}; expected 0 or 1.")

    def compressor(self, layout: WeightLayout, generator: torch.Generator, number: int) -> Compressor:
        """A sender that draws its rounding from `generator`."""
        return _Rounding(self, layout.size, generator, number)


class _Rounding(Quantizer):
    def __init__(self, options: Qsgd, size: int, generator: torch.Generator, number: int) -> None:
        super().__init__(size, number, bool(options.feedback))
        self._levels, self._bucket, self._generator = options.s, options.bucket, generator
        self._bits = (2 * options.s).bit_length()

    def quantised(self, values: Tensor, part: slice) -> tuple[Tensor, ...]:
        """(norms float32 [buckets], levels packed)."""
        buckets = self._in_buckets(values)
        norms = buckets.norm(dim=1)
        scaled = self._levels * (buckets / norms.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).reshape(-1)
        up = torch.rand(values.shape, generator=self._generator).to(values.device)
        # A level's floor, and one more with the probability of what is left: right in the mean.
        signed = torch.floor(scaled[: len(values)] + up).clamp(-self._levels, self._levels)
        return norms, packed(signed.long() + self._levels, self._bits)

    def restored(self, tensors: tuple[Tensor, ...], part: slice) -> Tensor:
        norms, codes = tensors
        n = part.stop - part.start
        levels = unpacked(codes, self._bits, n) - self._levels
        scaled = norms.repeat_interleave(self._bucket)[:n] / self._levels
        return levels * scaled

    def _in_buckets(self, values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, -len(values) % self._bucket)).view(-1, self._bucket)


@dataclass(frozen=True)
class OneBit:
    """Seide et al. 2014, with error feedback, without which it does not converge.

    The means of a row's entries above and below 0 stand for their signs. A row is what leads to one output unit (a
    column in the paper, whose weights are transposed): weight[k] of a matrix or convolution; a vector is one row.
    """

    def compressor(self, layout: WeightLayout, generator: torch.Generator, number: int) -> Compressor:
        """A sender; nothing in it is random."""
        return _Signs(layout, number)


class _Signs(Quantizer):
    def __init__(self, layout: WeightLayout, number: int) -> None:
        super().__init__(layout.size, number, has_error_feedback=True)
        rows = [shape[0] if len(shape) > 1 else 1 for shape in layout.shapes]
        lengths = [shape.numel() // max(count, 1) for shape, count in zip(layout.shapes, rows, strict=True)]
        lengths_of_rows = torch.tensor(lengths).repeat_interleave(torch.tensor(rows))
        self._row = torch.arange(len(lengths_of_rows)).repeat_interleave(lengths_of_rows)  # of each entry

    def quantised(self, values: Tensor, part: slice) -> tuple[Tensor, ...]:
        """(means float32 [rows x 2], of entries below 0 and of the others; signs packed)."""
        is_up = (values >= 0).long()
        side = self._sides(is_up, part)
        n_sides = 2 * int(side[-1] // 2 + 1) if len(side) else 0
        sums = torch.zeros(n_sides, device=values.device).index_add_(0, side, values)
        means = sums / torch.bincount(side, minlength=n_sides).clamp(min=1)
        return means, packed(is_up, 1)

    def restored(self, tensors: tuple[Tensor, ...], part: slice) -> Tensor:
        means, signs = tensors
        return means[self._sides(unpacked(signs, 1, part.stop - part.start), part)]

    def _sides(self, is_up: Tensor, part: slice) -> Tensor:
        """int64 [n]: of each entry, 2 x its row within the part, and 1 more where it is up."""
        row = self._row[part].to(is_up.device)
        return 2 * (row - row[:1]) + is_up
