"""Cuts along one axis of a mesh: `Axis`, `Sharding`, the codes of tensors along an axis, and shares of its parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.records import OWN_FAMILY, SEQUENCE, ByGroups, Part, Partial, Replicate, Shard, SplitRow

EXPERTS, HEADS = "experts", "heads"
WHOLE, SUM = 0, 1  # codes of a tensor along an axis: all of it everywhere, or a summand each; larger ones are `_cut`
IN_TIME = "mb"  # name of the axis along which micro-batches are cut
_MOST_CODES = 1 << 10  # of cuts with equally many blocks, of more dimensions than tensors have
_BY_GROUPS = 1 << 40  # code of a cut by groups, beyond those of all others


@dataclass(frozen=True)
class Axis:
    """The cut along one axis of a mesh.

    Attributes:
        name: of the mesh axis, ``"dp"``, ``"tp"`` ...
        size: number of parts.
        words: axis words of the rows to take, where an op has rows of several those of the first; empty for a tensor
            axis.
        sequence: on a tensor axis, cut along the sequence what would be whole.
        modules: patterns of module paths; ops elsewhere stay whole. Empty is everywhere.
        tensor_modules: of a named axis, patterns of module paths where it cuts weights, as a tensor axis does.
        parts: into which a row is cut along this and earlier axes of the same words; of a tensor axis those along all
            axes and micro-batches, for rows of a dimension with an axis of its own; 0 for `size`.
        shares: of the batch, in proportion, one for each part; empty for parts as even as can be.
        by_heads: of the axis of a sequence: attention is cut by its heads, between two all-to-alls (Jacobs et al. 2023,
            "DeepSpeed Ulysses").
        is_ring: of the axis of a sequence: keys and values of attention go round, a block at a time
            (`graphs.transforms.splitting.rings`).
        has_experts: ops are cut by experts where they have rows of these, as along the axis of experts.
        once_a_host: of the axis of experts: a token goes to a host once, not once for each of its experts there.
        in_stages: of the axis of time: micro-batches go through a pipeline, so gradients of a table that is used twice
            come from two stages, and are added to each other once in the step.
        expert_parts: into which experts are cut along all axes together; 0 for `size`.
    """

    name: str
    size: int
    words: tuple[str, ...] = ()
    sequence: bool = False
    modules: tuple[str, ...] = ()
    tensor_modules: tuple[str, ...] = ()
    parts: int = 0
    shares: tuple[int, ...] = ()
    by_heads: bool = False
    is_ring: bool = False
    has_experts: bool = False
    once_a_host: bool = False
    in_stages: bool = False
    expert_parts: int = 0

    @property
    def cuts_weights(self) -> bool:
        """Whether it cuts weights, everywhere or in some modules."""
        return not self.words or bool(self.tensor_modules)


@dataclass(frozen=True, eq=False)
class Sharding:
    """A graph cut along one axis (n ops, m tensors, e (consumer, tensor) pairs as in `OpGraph.inputs`, s states).

    Attributes:
        axis: along which.
        row: n rows, None for an op that every part does as a whole.
        written: int64 [m], code of each tensor as its producer writes it: WHOLE, SUM, or a cut of a dimension.
        read: int64 [e], code of each tensor as its consumer reads it.
        state: int64 [s], code of each state as it is kept.
        share: float64 [n, size], FLOPs of each part of what is divided; all 1 for a whole op. More than 1 together
            where each part is taken to have as much as the one with the largest groups.
        written_share: float64 [m, size], bytes of each part of a tensor as written; all 1 for a whole one.
        halo: float64 [e], share of the tensor that a part reads of each neighbour's part.
    """

    axis: Axis
    row: tuple[SplitRow | None, ...]
    written: IntArray
    read: IntArray
    state: IntArray
    share: FloatArray
    written_share: FloatArray
    halo: FloatArray

    @cached_property
    def load(self) -> float:
        """Tokens of the part with the largest groups, over an even share: at most all of them."""
        return min(max((row.load for row in self.row if row is not None), default=1.0), float(self.axis.size))

    @property
    def first(self) -> Sharding:
        """The first part alone, which is as large as any; `axis` still says how many there are."""
        return replace(self, share=self.share[:, :1], written_share=self.written_share[:, :1])


def shares(extent: int, size: int, weights: tuple[int, ...] = ()) -> FloatArray:
    """float64 [size]: of an extent, the share of each part, in whole units and of each at least one.

    Args:
        weights: one for each part, to which shares are in proportion. Without them parts are even; where the extent
            does not divide, the first have one unit more.
    """
    if weights:
        wanted = extent * np.array(weights) / sum(weights)
        units = np.maximum(np.floor(wanted).astype(np.int64), 1)
        while units.sum() != extent:  # those who lack most get one more, those who have most too much one less
            lack = wanted - units
            if units.sum() < extent:
                units[np.argmax(lack)] += 1
            else:
                units[np.argmin(np.where(units > 1, lack, np.inf))] -= 1
        return units / extent
    units = np.full(size, extent // size)
    units[: extent % size] += 1
    return units / extent


def with_whole_tables(row: SplitRow, n_read: int) -> SplitRow:
    """A row that cuts a slice of a table, and so the table again and again, or a table by words, reads all of it.

    An update is not cut so.
    """
    parts = row.inputs[n_read:]
    if row.axis not in OWN_FAMILY:
        return row
    whole = tuple(
        Replicate() if isinstance(part, Shard) and (part.blocks > 1 or row.axis == SEQUENCE) else part for part in parts
    )
    return row if whole == parts else replace(row, inputs=(*row.inputs[:n_read], *whole))


def code(part: Part, word: str) -> int:
    """WHOLE, SUM or the number of a cut: parts of one number fit together.

    Heads are stretches of the features of a tensor, halves of each head are not: these have as many blocks as heads.
    """
    if isinstance(part, ByGroups):
        return _BY_GROUPS + part.dim
    if isinstance(part, Shard):
        family = OWN_FAMILY.index(word) if word in OWN_FAMILY else len(OWN_FAMILY)
        return 2 + part.dim * (len(OWN_FAMILY) + 1) + family + (part.blocks - 1) * _MOST_CODES
    return SUM if isinstance(part, Partial) else WHOLE


def is_by_groups(code: int) -> bool:
    """Whether a code is that of a cut by groups, whose sizes the data says."""
    return code >= _BY_GROUPS


def differs(written: int, read: int) -> bool:
    """Whether it takes an exchange to read what is written so."""
    return (written == SUM and read != SUM) or (written > SUM and read != written)


def differing(written: IntArray, read: IntArray) -> BoolArray:
    """bool [e]: `differs` of each pair."""
    found: BoolArray = ((written == SUM) & (read != SUM)) | ((written > SUM) & (read != written))
    return found
