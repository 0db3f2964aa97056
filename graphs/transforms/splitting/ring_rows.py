"""Rows of attention whose keys and values go round a ring (Liu et al. 2023, "Ring Attention").

The row of a sequence has keys and values in full, and of their gradients a summand each. In a ring each part reads and
writes its own, and a block of all others after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from graphs.records import ATTENTIONS, SEQUENCE, Part, Partial, Replicate, Shard, SplitRow, Work

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph

_RESULTS = 2  # of the forward pass, that are cut: attention, and the log-sum-exps of its scores


def in_ring(graph: OpGraph, op: int, row: SplitRow, written: Sequence[Shard | None], parts: int) -> SplitRow | None:
    """The row by which an op reads keys and values as they are cut; None where it cannot.

    It can where it is attention in one call, without a mask, of a training step, with equal parts.

    Args:
        row: of the sequence.
        written: of each tensor that it reads, the stretch of the sequence along which that is cut; None for none.
    """
    if graph.work[op] not in ATTENTIONS or not graph.is_training:
        return None
    read = row.inputs[: len(written)]
    if graph.work[op] == Work.ATTENTION and (_has_mask(read) or len(row.outputs) < _RESULTS):
        return None
    own = next((part for part in row.outputs if isinstance(part, Shard)), None)
    if own is None:
        return None
    inputs: list[Part] = [
        made if isinstance(part, Replicate) and made is not None else part
        for part, made in zip(read, written, strict=True)
    ]
    if inputs == list(read):
        return None
    outputs = [Shard(own.dim, own.extent) if isinstance(part, Partial) else part for part in row.outputs]
    shards = [part for part in (*inputs, *outputs) if isinstance(part, Shard)]
    if any(part.extent % parts for part in shards) or len({part.extent for part in shards}) > 1:
        return None
    return replace(row, inputs=(*inputs, *row.inputs[len(written) :]), outputs=tuple(outputs))


def _has_mask(read: Sequence[Part]) -> bool:
    """Whether attention reads a mask: behind keys, which it has in full, nothing else is cut, and nothing else read."""
    first = next((k for k, part in enumerate(read) if isinstance(part, Replicate)), len(read))
    return any(isinstance(part, Shard) for part in read[first:]) or len(read) > 3


def turned(graph: OpGraph, op: int, row: SplitRow | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """``(inputs, outputs)``: places of an op's tensors that go round; None where its row is of no ring."""
    if row is None or row.axis != SEQUENCE or graph.work[op] not in ATTENTIONS or row in graph.split_rows[op]:
        return None
    plain = next(each for each in graph.split_rows[op] if each.axis == SEQUENCE)
    changed = [
        tuple(k for k, (now, before) in enumerate(zip(one, other, strict=True)) if now != before)
        for one, other in ((row.inputs, plain.inputs), (row.outputs, plain.outputs))
    ]
    return changed[0], changed[1]
