"""Products of tokens in groups, one group for each expert: how many tokens a group has, the data says.

Parts of a batch sort their own tokens. Where a product reads the tokens of several parts, or has some of the experts
alone, it takes the tokens of its experts from all of the lists, expert by expert, and puts the results back in their
places. That is a summand: the tokens of experts that are elsewhere are 0 in it. Where tokens have gone to their experts
before, it has no others.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from placement.runtime.calls.part_calls import Handlers, LocalCall, PartCall

GROUPS = Handlers()
Lists = tuple[tuple[tuple[int, int], ...], ...]
_ALIGNED_BYTES = 16  # of rows, for torch's grouped products


@dataclass(frozen=True)
class InGroups:
    """A product by groups of tokens of several sorted lists with the matrices of the experts that are here.

    Attributes:
        lists: of each list its stretches among the tokens, as ``(start, stop)``.
        low, high: the experts that are here.
    """

    lists: Lists
    low: int
    high: int
    __name__ = "in_groups"

    def __call__(self, x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Tokens [T, K] with matrices [E, K, N] make [T, N]; tokens [K, T] with tokens [T, N] make [E, K, N].

        Args:
            offsets: int [L * E], where the groups of each of L lists end in it.
        """
        if y.ndim == 3:
            rows, ends = self._groups(offsets, x.shape[0])
            made = one_by_one(x[rows], y, ends)
            return made.new_zeros(x.shape[0], made.shape[1]).index_copy_(0, rows, made)
        rows, ends = self._groups(offsets, y.shape[0])
        return one_by_one(x.t()[rows].t(), y[rows], ends)

    def rows(self, offsets: torch.Tensor, n_tokens: int) -> torch.Tensor:
        """int64 [t]: places of the tokens of the experts that are here, expert by expert."""
        return self._groups(offsets, n_tokens)[0]

    def _groups(self, offsets: torch.Tensor, n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [t]: the tokens of the experts that are here, expert by expert; and where each expert's end."""
        ends = offsets.view(len(self.lists), -1)
        expert = torch.empty(n_tokens, dtype=torch.int64, device=offsets.device)
        for its_ends, stretches in zip(ends, self.lists, strict=True):
            first = 0
            for start, stop in stretches:
                places = torch.arange(first, first + stop - start, dtype=offsets.dtype, device=offsets.device)
                expert[start:stop] = torch.bucketize(places, its_ends, right=True)
                first += stop - start
        in_order, rows = torch.sort(expert, stable=True)
        bounds = torch.arange(self.low, self.high + 1, device=offsets.device)
        found = torch.searchsorted(in_order, bounds)
        here = rows[int(found[0]) : int(found[-1])]
        return here, (found[1:] - found[0]).to(offsets.dtype)


@dataclass(frozen=True)
class ToExperts:
    """The tokens of the experts that are here, expert by expert, of those of several sorted lists.

    Attributes:
        lists, low, high: as of `InGroups`.
    """

    lists: Lists
    low: int
    high: int
    __name__ = "to_experts"

    def __call__(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Tokens [T, ...] to [t, ...]; `offsets` as of `InGroups`."""
        return x[InGroups(self.lists, self.low, self.high).rows(offsets, x.shape[0])]


@dataclass(frozen=True)
class FromExperts:
    """Tokens back in their places in several sorted lists: 0 at those of experts that are elsewhere."""

    lists: Lists
    low: int
    high: int
    __name__ = "from_experts"

    def __call__(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Tokens [t, ...] to [T, ...]; `offsets` as of `InGroups`."""
        n_tokens = sum(stop - start for stretches in self.lists for start, stop in stretches)
        rows = InGroups(self.lists, self.low, self.high).rows(offsets, n_tokens)
        return x.new_zeros(n_tokens, *x.shape[1:]).index_copy_(0, rows, x)


@dataclass(frozen=True)
class OfOwnTokens:
    """A product by groups of the tokens of the experts that are here, expert by expert, and no others.

    Attributes:
        n_lists: from which they came.
        low, high: the experts that are here.
    """

    n_lists: int
    low: int
    high: int
    __name__ = "of_own_tokens"

    def __call__(self, x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """As of `InGroups`, with t tokens for T."""
        counts = offsets.view(self.n_lists, -1).diff(dim=1, prepend=offsets.new_zeros(self.n_lists, 1))
        return one_by_one(x, y, counts[:, self.low : self.high].sum(0).cumsum(0))


@dataclass(frozen=True)
class InGroupsBackward:
    """The two gradients of a product by groups, where both are made by one call."""

    product: InGroups | OfOwnTokens
    __name__ = "in_groups_backward"

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_x = self.product(gradient, weights.transpose(1, 2), offsets)
        return of_x, self.product(x.t(), gradient, offsets)


def one_by_one(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A product by groups as one product for each: of any width, and of no tokens as well."""
    starts = [0, *ends.tolist()]
    pairs = list(itertools.pairwise(starts))
    if y.ndim == 3:
        made = x.new_zeros(x.shape[0], y.shape[2])
        for matrix, (start, stop) in zip(y, pairs, strict=True):
            torch.mm(x[start:stop], matrix, out=made[start:stop])
        return made
    return torch.stack([x[:, start:stop] @ y[start:stop] for start, stop in pairs])


@GROUPS.on("_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward")
def _grouped_product(call: PartCall) -> LocalCall:
    is_odd = call.name == "_grouped_mm" and _is_odd(call)
    low, high = _experts(call)
    n_experts = call["offs"].layout.shape[0]
    if not call.extras.lists and (low, high) == (0, n_experts) and not is_odd:
        return call.plain()
    if call.name == "_grouped_mm" and (call["bias"] is not None or call["out_dtype"] is not None):
        raise call.refused("its bias, or its other number format, has no place in a product of some groups")
    lists = call.extras.lists or (((0, _n_tokens(call)),),)
    product = OfOwnTokens(len(lists), low, high) if call.extras.is_by_groups else InGroups(lists, low, high)
    if call.name == "grouped_mm_fallback_backward":
        operands = call["input"], call["weight"], call["offs"], call["grad_output"]
        return LocalCall(InGroupsBackward(product), operands, {})
    return LocalCall(product, (*call.operands[:2], call["offs"]), {})


def _is_odd(call: PartCall) -> bool:
    """Whether rows, as they lie in memory, have a width that torch's kernel does not take."""
    return any(
        size * operand.layout.dtype.itemsize % _ALIGNED_BYTES
        for operand in call.operands
        if operand.layout.dtype.is_floating_point
        for size, stride in zip(operand.part.local_shape, operand.layout.stride, strict=True)
        if stride == 1
    )


def _experts(call: PartCall) -> tuple[int, int]:
    """The experts whose matrices are here, from the first to before the last."""
    parts = [operand.part for operand in call.operands] + [part for part in call.outputs if part is not None]
    found = {part.runs(0) for part in parts if len(part.shape) == 3}
    if len(found) != 1 or len(next(iter(found))) != 1:
        raise call.refused("the experts that are here do not lie side by side")
    ((low, high),) = found.pop()
    return low, high


def _n_tokens(call: PartCall) -> int:
    """Number of the tokens that are here."""
    is_of_weights = len(call.operands[1].layout.shape) == 2
    return call.operands[is_of_weights].part.local_shape[0]
