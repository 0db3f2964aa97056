"""Attention of a part's queries to one block of keys and values after another, as they go round a ring.

Results of blocks are put together by their log-sum-exps; each block's gradients are the operator's own, given the
attention and log-sum-exps of all blocks (Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite
Context", section 3). A call of causal attention takes no more than what its queries see: of balanced parts half of the
keys of a part before, and half of the queries for those of a part behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from placement.runtime.calls.attention_calls import block, of_queries

Runs = tuple[tuple[int, int], ...]


class RingPiece(NamedTuple):
    """A call on some queries, ``low`` to ``high`` of those that are here, and the first keys of a block."""

    low: int
    high: int
    keys: int
    is_causal: bool


def pieces_of(queries: Runs, keys: Runs, is_causal: bool) -> tuple[RingPiece, ...]:
    """The calls by which queries see a block of keys; none where they see nothing of it.

    Args:
        queries, keys: the stretches of the sequence that are here, and of the block, increasing.

    Raises:
        ValueError: stretches that overlap and are not the same.
    """
    counts = [sum(stop - start for start, stop in runs) for runs in (queries, keys)]
    if not is_causal or queries == keys:
        return (RingPiece(0, counts[0], counts[1], is_causal),)
    found: list[RingPiece] = []
    here = 0
    for start, stop in queries:
        if any(low < stop and start < high for low, high in keys):
            raise ValueError("stretches of queries and of keys overlap")
        seen = sum(high - low for low, high in keys if high <= start)
        if found and found[-1].keys == seen and found[-1].high == here:
            found[-1] = found[-1]._replace(high=here + stop - start)
        elif seen:
            found.append(RingPiece(here, here + stop - start, seen, False))
        here += stop - start
    return tuple(found)


@dataclass(frozen=True)
class RingBlock:
    """Attention to one more block: ``call(before, *arguments of the operator)``, with what is put together so far.

    Attention is put together in float32 or wider, as ``(attention, log-sum-exps, *other results of the first call)``.

    Attributes:
        target: the operator; the first two of its results are the attention and the log-sum-exps of its scores.
        names: of its arguments.
        pieces: of `pieces_of`.
    """

    target: Callable[..., Any]
    names: tuple[str, ...]
    pieces: tuple[RingPiece, ...]
    __name__ = "ring_block"

    def __call__(self, before: Any, *args: Any) -> Any:
        given = dict(zip(self.names, args, strict=False))
        if "compute_log_sumexp" in self.names:
            given["compute_log_sumexp"] = True
        if before is None:  # its own block, which all of its queries see
            (piece,) = self.pieces
            made = self.target(**_part(given, piece))
            return made[0].to(torch.promote_types(made[0].dtype, torch.float32)), *made[1:]
        attention, scores, *rest = before
        for piece in self.pieces:
            here = slice(piece.low, piece.high)
            made = self.target(**_part(given, piece))
            _add(attention[:, :, here], scores[:, :, here], made[0], made[1])
        return attention, scores, *rest


@dataclass(frozen=True)
class RingResult:
    """The results of all blocks put together, as the operator gives them."""

    dtype: torch.dtype
    __name__ = "ring_result"

    def __call__(self, whole: Any) -> Any:
        return whole[0].to(self.dtype), *whole[1:]


@dataclass(frozen=True)
class RingBlockBackward:
    """Gradients of attention to one block: of all queries that are here, and of the keys and values of the block.

    Attributes: as of `RingBlock`.
    """

    target: Callable[..., Any]
    names: tuple[str, ...]
    pieces: tuple[RingPiece, ...]
    __name__ = "ring_block_backward"

    def __call__(self, *args: Any) -> Any:
        given = dict(zip(self.names, args, strict=False))
        lengths = [given[name].shape[2] for name in ("query", "key")]
        if [(0, lengths[0], lengths[1])] == [piece[:3] for piece in self.pieces]:
            return tuple(self.target(**_part(given, self.pieces[0])))
        made = [torch.zeros_like(given[name]) for name in ("query", "key", "value")]
        rest: Sequence[Any] = ()
        for piece in self.pieces:
            of_query, *others = self.target(**_part(given, piece))
            made[0][:, :, piece.low : piece.high] += of_query
            for total, one in zip(made[1:], others, strict=False):
                total[:, :, : piece.keys] += one
            rest = others[2:]
        return *made, *rest


def _add(attention: torch.Tensor, scores: torch.Tensor, made: torch.Tensor, of_made: torch.Tensor) -> None:
    """Put attention [B, H, L, D] to another block to what is there, in its place; log-sum-exps [B, H, L] or [..., 1].

    As `put_together`, which makes a new tensor.
    """
    total = torch.logaddexp(scores, of_made)
    shares = [(one - total).exp_() for one in (scores, of_made)]
    kept, added = (share if share.ndim == attention.ndim else share[..., None] for share in shares)
    attention.mul_(kept).addcmul_(made, added)
    scores.copy_(total)


def _part(given: dict[str, Any], piece: RingPiece) -> dict[str, Any]:
    return block(of_queries(given, piece.low, piece.high), 0, piece.keys, piece.is_causal)
