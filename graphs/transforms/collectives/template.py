"""`template`: the ops and tensors of one collective, made from its rounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray, frozen
from graphs.transforms.collectives.rounds import Rounds, carried_out_by, own_piece, rounds_of

FUSED = "fused"  # in the place of an algorithm: one op for all of it


@dataclass(frozen=True, eq=False)
class Template:
    """One collective of p ranks as k ops, p last ops and m tensors, whatever its size.

    The ops ``0 .. p - 1`` are the first of their ranks and read what the rank gives; one rank alone has none. The last
    op of rank r has the number k + r and writes what the rank has afterwards. Pieces are equal parts of the
    bytes of the collective; ranges of them go round in a circle.

    Attributes:
        algorithm: that carries it out.
        pieces: into how many the whole tensor is cut.
        op_rank: int64 [k].
        op_length, op_start: int64 [k], the pieces that the op adds up; length 0 if it only passes on.
        op_is_timed: bool [k], whether it takes the time of the whole collective, and holds its buffers.
        tensor_producer, tensor_start, tensor_length: int64 [m], and which pieces it holds.
        tensor_in_place: bool [m], whether it lies in what the rank gave.
        tensor_transfer_s: float64 [m]; 0 where ranks only wait for each other.
        edge_tensor, edge_op: int64 [e], which op reads which tensor.
    """

    algorithm: str
    ranks: int
    pieces: int
    op_rank: IntArray
    op_start: IntArray
    op_length: IntArray
    op_is_timed: BoolArray
    tensor_producer: IntArray
    tensor_start: IntArray
    tensor_length: IntArray
    tensor_in_place: BoolArray
    tensor_transfer_s: FloatArray
    edge_tensor: IntArray
    edge_op: IntArray

    def op_bytes(self, size_bytes: IntArray) -> IntArray:
        """int64 [c, k]: what each op adds up, for collectives of these sizes, int64 [c]."""
        return self._range_bytes(size_bytes, self.op_start, self.op_length)

    def tensor_bytes(self, size_bytes: IntArray) -> IntArray:
        """int64 [c, m]."""
        return self._range_bytes(size_bytes, self.tensor_start, self.tensor_length)

    def _range_bytes(self, size_bytes: IntArray, start: IntArray, length: IntArray) -> IntArray:
        total = size_bytes[:, None]

        def before(piece: IntArray) -> IntArray:
            return piece // self.pieces * total + piece % self.pieces * total // self.pieces

        return before(start + length) - before(start)


@cache
def template(kind: str, algorithm: str, ranks: int) -> Template:
    """The template of a collective.

    Raises:
        UnknownNameError: an unknown kind or algorithm.
    """
    algorithm = carried_out_by(kind, algorithm)
    pieces = {"all_to_all": ranks * ranks}.get(kind) or {"tree": 1, "doubling": 1, "central": 1, "double_tree": 2}.get(
        algorithm, ranks
    )
    own = [own_piece(algorithm, r, ranks) for r in range(ranks)]
    given: list[range | list[int]]
    result: list[range | list[int]]
    everything = range(pieces)
    if kind == "all_to_all":
        given = [range(r * ranks, (r + 1) * ranks) for r in range(ranks)]
        result = [range(r, pieces, ranks) for r in range(ranks)]
    elif kind == "shift":
        given = [[r] for r in range(ranks)]
        result = [[(r - 1) % ranks] for r in range(ranks)]
    else:
        given = [[piece] if kind == "all_gather" else everything for piece in own]
        result = [[piece] if kind == "reduce_scatter" else everything for piece in own]
    if kind == "broadcast":
        given[1:] = [[]] * (ranks - 1)
    if kind == "reduce":
        result[1:] = [[]] * (ranks - 1)
    trees = 2 if algorithm == "double_tree" else 1
    draft = _Draft(given, pieces, trees, in_place=kind in ("all_reduce", "reduce_scatter", "reduce"))
    draft.run(rounds_of(kind, algorithm, ranks))
    return draft.finished(algorithm, result)


@cache
def fused_template(ranks: int) -> Template:
    """One op for each rank, which begins when all ranks have what they give, and takes the time of the collective.

    One rank alone waits for nobody: it stands for others that are ready when it is.
    """
    everyone = np.arange(ranks)
    if ranks == 1:
        rank, edge_tensor, edge_op = everyone, [0], [1]
    else:  # first every rank says that it is ready
        rank = np.concatenate([everyone, everyone])
        edge_tensor = [*np.repeat(everyone, ranks), *(ranks + everyone)]
        edge_op = [*(ranks + np.tile(everyone, ranks)), *(2 * ranks + everyone)]
    k = len(rank)
    none = np.zeros(k, dtype=np.int64)
    return Template(
        algorithm=FUSED,
        ranks=ranks,
        pieces=1,
        op_rank=rank,
        op_start=none,
        op_length=none,
        op_is_timed=np.arange(k) >= k - ranks,
        tensor_producer=np.arange(k),
        tensor_start=none,
        tensor_length=none,
        tensor_in_place=np.zeros(k, dtype=np.bool_),
        tensor_transfer_s=np.zeros(k),
        edge_tensor=np.array(edge_tensor, dtype=np.int64),
        edge_op=np.array(edge_op, dtype=np.int64),
    )


class _Draft:
    """Ops and tensors so far, and for every rank which tensor holds each piece now."""

    def __init__(self, given: list[range | list[int]], pieces: int, trees: int, in_place: bool) -> None:
        ranks = len(given)
        self.ranks, self.pieces, self.trees, self.in_place = ranks, pieces, trees, in_place
        first = ranks if ranks > 1 else 0  # one rank has nothing to pass on
        self.op_rank, self.op_range = list(range(first)), [(0, 0)] * first
        self.tensors: list[tuple[int, int, int, bool]] = []  # producer, start, length, in place
        self.edges: set[tuple[int, int]] = set()  # tensor, op
        # By rank and tree: the op that writes what is sent next, and what was received and not read yet.
        self.current = {(rank, tree): rank for rank in range(ranks) for tree in range(trees)}
        self.pending: dict[tuple[int, int], list[int]] = {key: [] for key in self.current}
        self.sent: set[int] = set()
        self.given = [set(own) for own in given]
        self.holder: list[dict[int, int]] = []
        for rank, own in enumerate(given):
            held = self._tensor(rank, min(own, default=0), len(own), True)
            self.holder.append(dict.fromkeys(own, held))

    def run(self, rounds: Rounds) -> None:
        for part in rounds:
            tensors = [self._send(send.source, send.start, send.length) for send in part.sends]
            for send, tensor in zip(part.sends, tensors, strict=True):
                if part.adds:
                    self._add(send.target, tensor, send.start, send.length)
                else:
                    self.holder[send.target].update(dict.fromkeys(self._pieces(send.start, send.length), tensor))
                    self.pending[send.target, send.start % self.trees].append(tensor)

    def _send(self, rank: int, start: int, length: int) -> int:
        """The tensor that a rank sends of what it holds, by an op that has read all that arrived before."""
        place = rank, start % self.trees
        op = self._op(place, 0, 0) if self.pending[place] else self.current[place]
        pieces = self._pieces(start, length)
        held = {self.holder[rank][piece] for piece in pieces}
        one = min(held)
        if len(held) == 1 and self.tensors[one][:3] == (op, start, length) and one not in self.sent:
            tensor = one
        else:
            self._read(held, op)
            tensor = self._tensor(op, start, length, self.in_place or self.given[rank].issuperset(pieces))
            self.holder[rank].update(dict.fromkeys(pieces, tensor))
        self.sent.add(tensor)
        return tensor

    def _add(self, rank: int, received: int, start: int, length: int) -> None:
        """An op that adds what arrived to what the rank holds."""
        op, pieces = self._op((rank, start % self.trees), start, length), self._pieces(start, length)
        self._read({received, *(self.holder[rank][piece] for piece in pieces)}, op)
        self.holder[rank].update(dict.fromkeys(pieces, self._tensor(op, start, length, self.in_place)))

    def _op(self, place: tuple[int, int], start: int, length: int) -> int:
        op = self.current[place] = len(self.op_rank)
        self.op_rank.append(place[0])
        self.op_range.append((start, length))
        self._read(set(self.pending[place]), op)
        if self.in_place:  # what arrived is put where it belongs, and needs no buffer any more
            for tensor in self.pending[place]:
                _, first, count, _ = self.tensors[tensor]
                kept = self._tensor(op, first, count, True)
                self.holder[place[0]].update(dict.fromkeys(self._pieces(first, count), kept))
        self.pending[place] = []
        return op

    def _read(self, tensors: set[int], op: int) -> None:
        self.edges.update((tensor, op) for tensor in tensors if self.tensors[tensor][0] != op)

    def _tensor(self, op: int, start: int, length: int, in_place: bool) -> int:
        self.tensors.append((op, start, length, in_place))
        return len(self.tensors) - 1

    def _pieces(self, start: int, length: int) -> list[int]:
        return [(start + k) % self.pieces for k in range(length)]

    def finished(self, algorithm: str, result: list[range | list[int]]) -> Template:
        k = len(self.op_rank)
        for rank, pieces in enumerate(result):
            self._read({self.holder[rank][piece] for piece in pieces}, k + rank)
        # Tensors that nobody reads are none; the others keep their order, which is that of the rounds.
        used = sorted({tensor for tensor, _ in self.edges})
        number = {tensor: t for t, tensor in enumerate(used)}
        edges = sorted((number[tensor], op) for tensor, op in self.edges)
        start, length = np.array(self.op_range, dtype=np.int64).reshape(-1, 2).T
        producer, first, count, in_place = np.array([self.tensors[t] for t in used], dtype=np.int64).reshape(-1, 4).T
        edge_tensor, edge_op = np.array(edges, dtype=np.int64).reshape(-1, 2).T
        return Template(
            algorithm=algorithm,
            ranks=self.ranks,
            pieces=self.pieces,
            op_rank=frozen(np.array(self.op_rank, dtype=np.int64)),
            op_start=start,
            op_length=length,
            op_is_timed=frozen(np.zeros(k, dtype=np.bool_)),
            tensor_producer=producer,
            tensor_start=first,
            tensor_length=count,
            tensor_in_place=in_place.astype(np.bool_),
            tensor_transfer_s=np.full(len(used), np.nan),
            edge_tensor=edge_tensor,
            edge_op=edge_op,
        )
