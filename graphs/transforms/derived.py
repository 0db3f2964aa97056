"""`Derived`: a graph that a transform made of another graph, and the way back.

Every op of the new graph knows which ops it comes from, which part of them it is and for which micro-batch it works.
Coarsening is the many-to-one case: several origins, no parts. Splitting and chunking are one-to-many: one origin each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from graphs.arrays import BoolArray, IntArray, distinct, frozen, pointers
from graphs.errors import MismatchError
from graphs.opgraph import OpGraph

STORED = "parameter"  # kind of an op that writes nothing but the part of a parameter that its place keeps


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a mesh: a name of the strategy (``"dp"``, ``"tp"``, ...) and how many parts there are along it."""

    name: str
    size: int


@dataclass(frozen=True)
class Exchanged:
    """A tensor that a collective exchanges, for those who carry it out.

    Attributes:
        what: ``"tensor"`` of the graph that was split; ``"gradient"``: such a tensor as a flat vector; ``"parameter"``:
            a state as a flat vector; ``"statistics"`` of the batch that an op reads;
            ``"sums"`` of the classes that an op reads.
        number: of the tensor, the state or the op.
        before, after: codes of the tensor along each axis of the mesh (`graphs.transforms.splitting.sharding`).
        is_summed: whether the micro-batches' copies were added up first.
        is_again: it was gathered once before, and is gathered again for the backward pass.
        phase: in which it is needed.
        cast: of a parameter, the op that casts what is stored of it before it travels; -1 for none.
        turn: of a tensor in a ring, how many parts it has gone on before; -1 where it goes round none.
    """

    what: str
    number: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    is_summed: bool = False
    is_again: bool = False
    phase: int = 0
    cast: int = -1
    turn: int = -1


@dataclass(frozen=True)
class Collective:
    """Ops that exchange tensors with each other, one for each rank of a group, before they are spelt out.

    The op of a rank reads the tensor of every rank and writes what this rank has afterwards; `graphs.transforms.reduce`
    puts an algorithm in the place of all of them.

    Attributes:
        kind: ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"``, ``"all_to_all"`` or ``"shift"``, by
            which each rank sends to the next one.
        axis: name of the mesh axis along which the ranks lie.
        ops: number of each rank's op in the derived graph, by rank.
        bytes: of the whole tensor: what a rank gives to an all-reduce or a reduce-scatter, has after an all-gather, or
            all ranks together give to an all-to-all or a shift.
        members: what is exchanged; several where collectives share a bucket.
        copies: rows of an all-to-all that are of one token, of which a host is sent one (DeepEP); 1 sends each.
    """

    kind: str
    axis: str
    ops: tuple[int, ...]
    bytes: int
    members: tuple[Exchanged, ...] = ()
    copies: float = 1.0


@dataclass(frozen=True, eq=False)
class Derived:
    """A derived graph (n ops) and where each of its ops comes from in the source graph.

    Attributes:
        graph: the derived graph.
        source: the graph it was made from, through however many transforms.
        origin_ptr, origins: int64 [n + 1] and [e]: op i comes from ``origins[origin_ptr[i]:origin_ptr[i + 1]]``,
            numbers of `source`. A collective comes from the op whose tensor it exchanges.
        part: int64 [n], number of the op's place in `mesh` (the last axis counts fastest); 0 without a mesh.
        micro_batch: int64 [n]; -1 for an op that works for the whole step.
        along: int64 [n], number of the axis of `mesh` along which an op exchanges; -1 for all others.
        mesh: the axes along which ops were split.
        n_micro_batches: into which the step was chunked.
        collectives: exchanges that are not spelt out yet.
    """

    graph: OpGraph
    source: OpGraph
    origin_ptr: IntArray
    origins: IntArray
    part: IntArray
    micro_batch: IntArray
    along: IntArray
    mesh: tuple[MeshAxis, ...] = ()
    n_micro_batches: int = 1
    collectives: tuple[Collective, ...] = ()

    @staticmethod
    def identity(graph: OpGraph) -> Derived:
        """The graph as derived from itself by nothing."""
        n = graph.n_ops
        no_part, none = np.zeros(n, np.int64), np.full(n, -1, np.int64)
        return Derived(graph, graph, np.arange(n + 1), np.arange(n), no_part, none, none)

    def with_more(self, graph: OpGraph, beside: IntArray) -> Derived:
        """A graph with one op more beside each of some, int64 [k], of this one's ops [n], and with their first origin.

        Args:
            graph: its first n ops are those of this one, the others stand beside them in their order.
        """
        of = np.concatenate([np.arange(self.graph.n_ops), beside])
        return replace(
            self,
            graph=graph,
            origin_ptr=np.concatenate([self.origin_ptr, self.origin_ptr[-1] + 1 + np.arange(len(beside))]),
            origins=np.concatenate([self.origins, self.origin[beside]]),
            part=self.part[of],
            micro_batch=self.micro_batch[of],
            along=self.along[of],
        )

    @staticmethod
    def merged(graph: OpGraph, source: OpGraph, group_of: IntArray) -> Derived:
        """The many-to-one case: each op of the source, int64 [source.n_ops], became part of one op of `graph`."""
        n = graph.n_ops
        origins = np.argsort(group_of, kind="stable").astype(np.int64)
        none = np.full(n, -1, np.int64)
        return Derived(graph, source, pointers(group_of, n), origins, np.zeros(n, np.int64), none, none)

    @cached_property
    def origin(self) -> IntArray:
        """int64 [n]: the first origin of each op; its only one unless ops were merged."""
        return frozen(self.origins[self.origin_ptr[:-1]])

    @property
    def group_of(self) -> IntArray:
        """int64 [source.n_ops]: the derived op of each op of the source.

        Raises:
            MismatchError: an op of the source became several, or none.
        """
        if not np.array_equal(np.sort(self.origins), np.arange(self.source.n_ops)):
            raise MismatchError("ops of this graph were split, so an op of its source has no one place; merge instead.")
        result = np.empty(self.source.n_ops, dtype=np.int64)
        result[self.origins] = np.repeat(np.arange(self.graph.n_ops), np.diff(self.origin_ptr))
        return frozen(result)

    def expand(self, assignment: IntArray) -> IntArray:
        """Values per derived op, e.g. device numbers, as values per op of the source.

        Raises:
            MismatchError: not one value for each derived op, or ops were split.
        """
        values = np.asarray(assignment)
        if values.shape != (self.graph.n_ops,):
            raise MismatchError(f"expected one value for each of {self.graph.n_ops} groups, got shape {values.shape}.")
        return values[self.group_of]

    def then(self, coarsen: Callable[[OpGraph], Derived]) -> Derived:
        """Coarsen further, e.g. ``fuse_chains(graph).then(lambda g: to_size(g, 64))``; `source` stays the same."""
        further = coarsen(self.graph)
        return Derived.merged(further.graph, self.source, further.group_of[self.group_of])


# -- columns of a graph whose ops are others --------------------------------------------------------------------------

_TEXTS = ("op_names", "kinds", "dtypes", "modules", "pins", "split_rows")
_NUMBERS = (
    *("flops", "bytes_moved", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "workspace_bytes", "kernels"),
    *("colocation", "phase", "forward_of", "time_s", "fixed_s", "work", "extents", "stream"),
)
# Of an op that computes nothing and keeps nothing, and takes no time by itself.
_NOTHING = dict.fromkeys(_NUMBERS[:7], 0) | {"forward_of": -1, "time_s": np.nan, "fixed_s": 0, "work": 0, "extents": 0}


def columns_of(graph: OpGraph, ops: IntArray) -> dict[str, Any]:
    """The columns of an `OpGraph` with an entry for each op, for some of its ops in any order.

    Mirrored ops and colocation groups have the numbers that they have in the graph.
    """
    listed = ops.tolist()
    texts = {key: tuple([values[op] for op in listed]) for key in _TEXTS for values in [getattr(graph, key)]}
    return texts | {key: getattr(graph, key)[ops] for key in _NUMBERS}


def columns_with(graph: OpGraph, beside: IntArray, is_empty: bool | BoolArray = True) -> dict[str, Any]:
    """`columns_of` all ops, and of one op more beside each of some: a copy, or one that computes and keeps nothing."""
    n = graph.n_ops
    columns = columns_of(graph, np.concatenate([np.arange(n), beside]))
    for key, none in _NOTHING.items():
        columns[key][n:][np.broadcast_to(is_empty, len(beside))] = none
    return columns


def rewired(
    tensors: Sequence[Sequence[Any]], edges: Sequence[tuple[IntArray, IntArray]], number: IntArray
) -> dict[str, Any]:
    """The tensor arrays of an `OpGraph`.

    Args:
        tensors: producer, bytes, in place and transfer_s, four arrays for each batch of tensors.
        edges: (tensor, op) pairs, two arrays for each batch; the same pair may come twice.
        number: int64, the new number of each op; several may have the same.
    """
    producer, size, in_place, transfer_s = (np.concatenate(part) for part in zip(*tensors, strict=True))
    order = np.argsort(number[producer], kind="stable")
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    tensor, consumer = (np.concatenate(part) for part in zip(*edges, strict=True))
    pairs = distinct(rank[tensor] * len(number) + number[consumer])
    read = pairs // len(number)
    return {
        "tensor_producer": number[producer][order],
        "tensor_bytes": size[order],
        "tensor_in_place": in_place[order],
        "tensor_transfer_s": transfer_s[order],
        "consumer_ptr": pointers(read, len(order)),
        "consumers": pairs % len(number),
    }


def taken(ptr: IntArray, values: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Rows of a table in CSR form, in a new order and some of them several times."""
    length = np.diff(ptr)[rows]
    starts = np.concatenate([[0], np.cumsum(length)]).astype(np.int64)
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], length)
    return starts, values[np.repeat(ptr[rows], length) + within]
