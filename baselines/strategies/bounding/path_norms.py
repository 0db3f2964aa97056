"""Stretches of a path from one norm with statistics of the batch to the next, and how their ops may be cut."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from baselines.strategies.bounding.copies import Costs
from baselines.strategies.bounding.serial import beside
from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.op_kinds import op_kind
from graphs.opgraph import OpGraph
from graphs.records import Part, Partial, Shard, SplitRow, parts_statistics
from graphs.transforms.splitting.splitter import BATCH

_WHOLE, _SUM = -2, -1  # of a tensor's forms; others are the dimension along which it is cut


@dataclass(frozen=True, eq=False)
class PathNorms:
    """Stretches of one path, each from a norm to the next (w of them), and blocks of it.

    A block is what comes between two ops of the path of which all other ops come either before or after. A place does
    all of it in between, so that blocks are one after the other. Ops that may come at another time, such as updates,
    are in none.

    Attributes:
        path: its ops, and block of each, int64.
        ops: of all blocks, and block of each, int64.
        read: float64 [w], bytes that the later norm reads a second time.
        moved: float64 [w], of the smallest tensor that could be exchanged.
        extents: w arrays, of the dimensions other than the batch that are cut.
        parts: float64 [w], into which every op may be cut.
        work_s: float64 [2, w], of ops that may be whole instead, and of the norm before.
        is_once: bool [w], whether to exchange one cut tensor for another is enough where no statistics are.
        place: int64 [2, w], places on the path of both norms.
    """

    path: tuple[IntArray, IntArray]
    ops: tuple[IntArray, IntArray]
    read: FloatArray
    moved: FloatArray
    extents: tuple[IntArray, ...]
    parts: FloatArray
    work_s: FloatArray
    is_once: BoolArray
    place: IntArray

    @staticmethod
    def of(graph: OpGraph, path: IntArray, costs: Costs, parts: FloatArray) -> PathNorms:
        """Those of a path, a list of ops each of which reads the one before."""
        of_path, ops, of_op = _blocks(graph, path)
        norms = [i for i, op in enumerate(path.tolist()) if op_kind(graph.kinds[op]).has_statistics]
        all_of_them = [(i, j, _Stretch(graph, path[i : j + 1].tolist())) for i, j in pairwise(norms)]
        closed = [(i, j, each) for i, j, each in all_of_them if each.is_closed()]
        some, places = [each for _, _, each in closed], [(i, j) for i, j, _ in closed]
        whole = [each.whole() for each in some]
        work_s = [[(costs.least_work_s[o] * w).sum(), costs.least_work_s[o[0]] * w[0]] for o, w in whole]
        return PathNorms(
            (path, of_path),
            (ops, of_op),
            np.array([each.read_again() for each in some]),
            np.array([graph.tensor_bytes[each.edges].min() for each in some], dtype=np.float64),
            tuple(each.extents() for each in some),
            np.array([parts[each.ops].min() for each in some]),
            np.array(work_s).reshape(-1, 2).T,
            np.array([each.is_once() for each in some], dtype=np.bool_),
            np.array(places, dtype=np.int64).reshape(-1, 2).T,
        )

    def evenness(self, places: int) -> FloatArray:
        """float64 [w]: the least part of a dimension other than the batch, over an even share, in up to so many."""
        among = np.arange(2, places + 1)
        result = []
        for extents in self.extents:
            least = np.floor(extents[:, None] / among) * among / extents[:, None]
            result.append(least[least > 0].min(initial=1.0))
        return np.array(result)


def _blocks(graph: OpGraph, path: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """``(block of each op of the path, ops of blocks, block of each)``, int64 each. O(n + e)."""
    since, until = beside(graph, path)
    inside = np.flatnonzero((since >= 0) & (until < len(path)) & (since != until))
    covered = np.zeros(len(path) + 1, dtype=np.int64)
    np.add.at(covered, since[inside] + 1, 1)
    np.add.at(covered, until[inside], -1)
    block = np.cumsum(np.cumsum(covered[:-1]) == 0)  # a new one begins at each op that none goes beside
    return block, np.concatenate([path, inside]), np.concatenate([block, block[since[inside]]])


class _Stretch:
    """Ops of a path from one norm to the next, and the tensors between them."""

    def __init__(self, graph: OpGraph, ops: list[int]) -> None:
        self.graph, self.ops = graph, ops
        self.rows = [[row for row in graph.split_rows[op] if row.extent > 1] for op in ops]
        self.edges = [self._edge(before, after) for before, after in pairwise(ops)]

    def _edge(self, before: int, after: int) -> int:
        """The largest tensor of an op that another reads."""
        read = self._read(after)
        own = read[self.graph.tensor_producer[read] == before]
        return int(own[self.graph.tensor_bytes[own].argmax()])

    def _read(self, op: int) -> IntArray:
        ptr, tensors = self.graph.inputs
        return tensors[int(ptr[op]) : int(ptr[op + 1])]

    def read_again(self) -> float:
        """Bytes of which each part of the later norm reads its own again, under any row that parts its statistics."""
        op = self.ops[-1]
        size = self.graph.tensor_bytes[self._read(op)].tolist()
        rows = [row for row in self.rows[-1] if parts_statistics(self.graph.kinds[op], row)]
        cut = ([isinstance(part, Shard) for part in row.inputs[: len(size)]] for row in rows)
        return float(min((sum(b for b, is_cut in zip(size, each, strict=True) if is_cut) for each in cut), default=0))

    def extents(self) -> IntArray:
        """int64 [x]: of the dimensions that rows cut, but for the batch."""
        return np.unique([row.extent for rows in self.rows for row in rows if row.axis != BATCH]).astype(np.int64)

    def is_closed(self) -> bool:
        """Whether cutting all of its ops without exchanging anything always parts the statistics of the later norm."""
        if any(
            isinstance(p, Shard) and not _is_plain(p)
            for rows in self.rows
            for r in rows
            for p in (*r.inputs, *r.outputs)
        ):
            return False
        return self._parts_statistics({self._written(0, row) for row in self.rows[0]}, 1)

    def is_once(self) -> bool:
        """Whether one all-to-all is enough where neither norm puts statistics together."""
        before = [row for row in self.rows[0] if not parts_statistics(self.graph.kinds[self.ops[0]], row)]
        known = {self._written(0, row) for row in before}
        for i in range(1, len(self.ops)):
            read = {_form(row.inputs[k]) for row in self.rows[i] for k in self._at(i)} - {_WHOLE, _SUM}
            is_cut = bool(known - {_WHOLE, _SUM})
            if _WHOLE in known or (is_cut and any(not self._parts_statistics({form}, i) for form in read)):
                return True
            known = {self._written(i, row) for row in self._fitting(i, known)} if i < len(self.ops) - 1 else set()
        return False

    def whole(self) -> tuple[list[int], FloatArray]:
        """Ops that are whole along an axis where nothing is exchanged and the later norm keeps its statistics, and
        weights: a norm may be so for the stretch before it and for the one after.

        Cut tensors would have to be put together for an op that is whole, so all ops before it are whole as well.
        """
        weight = np.array([0.5, *(1.0 for _ in self.ops[1:-1]), 0.5])
        last = next(
            (i for i in range(len(self.ops) - 1) if not self._parts_statistics({_WHOLE}, i + 1)), len(self.ops) - 1
        )
        return self.ops[: last + 1], weight[: last + 1]

    def _parts_statistics(self, known: set[int], first: int) -> bool:
        """Whether cutting all ops from one on, which reads a tensor in known forms, parts the later statistics."""
        for i, op in enumerate(self.ops[first:], start=first):
            if _SUM in known and all(_has_own_figure(self.graph.kinds[each]) for each in self.ops[i - 1 : i + 1]):
                return False  # it may take what is there for its own part
            fitting = self._fitting(i, known)
            if i == len(self.ops) - 1:
                return all(parts_statistics(self.graph.kinds[op], row) for row in fitting)
            known = {self._written(i, row) for row in fitting}
        return True

    def _at(self, i: int) -> list[int]:
        return np.flatnonzero(self._read(self.ops[i]) == self.edges[i - 1]).tolist()

    def _fitting(self, i: int, known: set[int]) -> list[SplitRow]:
        """Rows by which an op reads the tensor before it, there in known forms, without an exchange."""
        return [row for row in self.rows[i] if any(_fits(known, _form(row.inputs[k])) for k in self._at(i))]

    def _written(self, i: int, row: SplitRow) -> int:
        return _form(row.outputs[self.edges[i] - int(self.graph.output_ptr[self.ops[i]])])


def _form(part: Part) -> int:
    """How a tensor is there: whole, a summand in each place, or cut along a dimension."""
    return part.dim if isinstance(part, Shard) else _SUM if isinstance(part, Partial) else _WHOLE


def _fits(known: set[int], need: int) -> bool:
    """Whether a tensor that is there in one of some forms is read in another without an exchange."""
    return need in known or _WHOLE in known


def _is_plain(part: Shard) -> bool:
    """Whether parts are stretches of a dimension, so that with another dimension each has something of each."""
    return part.blocks == 1 and type(part) is Shard


def _has_own_figure(kind: str) -> bool:
    facts = op_kind(kind)
    return facts.has_statistics or facts.is_label_loss
