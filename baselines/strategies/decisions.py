"""`Decisions`: what carrying a strategy out chose by costs and simulation, for those who carry it out again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from graphs.arrays import FloatArray, IntArray
from graphs.errors import MismatchError
from graphs.opgraph import OpGraph
from graphs.packed import (
    MOST_NUMBERS,
    pack_real,
    pack_repeated,
    pack_whole,
    unpack_real,
    unpack_repeated,
    unpack_whole,
)
from graphs.transforms.collectives.rounds import is_algorithm
from graphs.transforms.sequencing import BACKWARD, FORWARD, WEIGHTS, WHOLE_BACKWARD, StageBlock
from graphs.transforms.splitting import decided_rows
from graphs.transforms.strategy import Strategy

if TYPE_CHECKING:
    from baselines.strategies.applied import Applied

_BLOCKS = (FORWARD, BACKWARD, WEIGHTS, WHOLE_BACKWARD)
_PLACED = "placed"
_COUNTS = ("ops", "collectives", "rewritten_ops")


@dataclass(frozen=True, eq=False)
class Decisions:
    """Choices among forms of one strategy. Cuts of stages are the strategy's own; what it says itself is not here.

    Letters: n ops after recomputation, c collectives, N ops of the rewritten graph.

    Attributes:
        rows: for each axis of the mesh with several parts, then for several micro-batches, int64 [n]: the number of
            each op's row among its split rows, -1 for an op that stays whole; None where it is to be chosen again.
        algorithms: c names.
        fused_s: float64 [c], seconds of a collective that is fused, NaN of one that is spelt out.
        sequences: of a pipeline order that was searched, the blocks of each row of devices; else none.
        placed: of a strategy that places the ops of each replica, int64 [n], the row of devices of each op; else None.
        turn: int64 [N], when each op starts: 0 for the first, equal numbers for those that start together.
    """

    rows: tuple[IntArray | None, ...]
    algorithms: tuple[str, ...]
    fused_s: FloatArray
    sequences: tuple[tuple[StageBlock, ...], ...]
    turn: IntArray
    placed: IntArray | None = None

    def order_of(self, graph: OpGraph) -> FloatArray:
        """float64 [N]: `turn` as an explicit order of the rewritten graph, for `env.plan.Plan`.

        Raises:
            MismatchError: it has another number of ops.
        """
        if len(self.turn) != graph.n_ops:
            raise MismatchError(
                f"decisions say when {len(self.turn)} ops start, and graph {graph.name!r} has {graph.n_ops}; save the "
                "result again."
            )
        return self.turn.astype(np.float64)

    def check_sequences(self, strategy: Strategy) -> None:
        """Refuse a sequence with blocks that a strategy does not have.

        Raises:
            MismatchError: names one.
        """
        for block in (block for blocks in self.sequences for block in blocks):
            if block.stage >= strategy.virtual_stages or block.micro_batch >= strategy.micro_batches:
                raise MismatchError(f"block {block} was decided for strategy {strategy.text!r}, which has none such.")

    @cached_property
    def document(self) -> dict[str, Any]:
        """JSON-ready, packed; `from_document` gives the decisions back."""
        counts = next((len(rows) for rows in self.rows if rows is not None), 0), len(self.algorithms), len(self.turn)
        return {
            **dict(zip(_COUNTS, counts, strict=True)),
            "rows": [None if rows is None else pack_whole(rows) for rows in self.rows],
            "algorithms": pack_repeated(self.algorithms),
            "fused_s": pack_real(self.fused_s),
            "sequences": [[list(block) for block in blocks] for blocks in self.sequences],
            "turn": pack_whole(self.turn),
            **({} if self.placed is None else {_PLACED: pack_whole(self.placed), "ops": len(self.placed)}),
        }

    @staticmethod
    def from_document(document: Any) -> Decisions:
        """The inverse of `document`.

        Raises:
            GraphFileError: a broken column.
            MismatchError: a missing or unknown field, or a value of another kind.
        """
        known = {*_COUNTS, *(each.name for each in fields(Decisions))} - {_PLACED}
        if not isinstance(document, dict) or document.keys() - {_PLACED} != known:
            raise MismatchError(f"decisions are none; expected an object with {', '.join(sorted(known))}.")
        ops, collectives, rewritten_ops = (_count(document, key) for key in _COUNTS)
        if not isinstance(document["rows"], list):
            raise MismatchError("decisions have rows that are no list; save the result again.")
        fused_s = unpack_real(document["fused_s"], collectives, "fused_s")
        if not (np.isnan(fused_s) | ((fused_s >= 0) & np.isfinite(fused_s))).all():
            raise MismatchError("decisions have a fused_s below 0 or beyond all numbers; save the result again.")
        return Decisions(
            rows=tuple(None if rows is None else unpack_whole(rows, ops, "rows") for rows in document["rows"]),
            algorithms=unpack_repeated(document["algorithms"], collectives, "algorithms", _algorithm),
            fused_s=fused_s,
            sequences=_sequences(document["sequences"]),
            turn=unpack_whole(document["turn"], rewritten_ops, "turn"),
            placed=unpack_whole(document[_PLACED], ops, _PLACED) if _PLACED in document else None,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Decisions) and self.document == other.document

    def __hash__(self) -> int:
        return hash(self.algorithms)


def decisions_of(what: Applied, start_s: FloatArray) -> Decisions:
    """The decisions of a strategy that was carried out.

    Args:
        what: of a strategy, no part of it folded.
        start_s: float64 [N], when each op of its graph starts in the simulated step.
    """
    rewrite = what.rewrite
    assert rewrite is not None
    copies = rewrite.copies
    cuts = () if copies is None else (*copies.mesh, *(() if copies.chunks is None else (copies.chunks,)))
    _, turn = np.unique(start_s, return_inverse=True)
    return Decisions(
        rows=tuple(decided_rows(rewrite.again.graph, sharding) for sharding in cuts),
        algorithms=rewrite.algorithms,
        fused_s=rewrite.fused_s,
        sequences=rewrite.sequences,
        turn=turn.reshape(-1).astype(np.int64),
        placed=rewrite.row if what.strategy.is_placed else None,
    )


def _count(document: Mapping[str, Any], key: str) -> int:
    value = document[key]
    if type(value) is not int or not 0 <= value <= MOST_NUMBERS:
        raise MismatchError(f"decisions have {key} = {value!r:.40}; expected a whole number up to {MOST_NUMBERS:,}.")
    return value


def _algorithm(value: Any) -> str:
    if not isinstance(value, str) or not is_algorithm(value):
        raise TypeError
    return value


def _sequences(value: Any) -> tuple[tuple[StageBlock, ...], ...]:
    lists: list[Any] = value if isinstance(value, list) else [None]
    if not all(isinstance(listed, list) and all(map(_is_block, listed)) for listed in lists):
        raise MismatchError("decisions have sequences that are no lists of [kind, stage, micro-batch]; save it again.")
    return tuple(tuple(StageBlock(*block) for block in listed) for listed in lists)


def _is_block(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 3 or value[0] not in _BLOCKS:
        return False
    return all(type(number) is int and number >= 0 for number in value[1:])
