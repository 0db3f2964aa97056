"""`Ring`: attention of a rank's queries to keys and values that go round, turn by turn (`graphs` calls it a ring)."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._ops import OpOverload

from graphs.errors import StrategyError
from graphs.records import Work
from graphs.transforms.splitting.ring_rows import turned
from placement.runtime.calls.ring_calls import RingBlock, RingBlockBackward, RingResult, pieces_of
from placement.runtime.planning.forms import Form, Wanted, info_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from placement.runtime.writing.arguments import Arguments
    from placement.runtime.writing.code import Code
    from placement.runtime.writing.rank_forms import RankForms
    from placement.runtime.writing.rank_parts import RankParts

_KEYS = ("key", "value")
_GRADIENTS = (1, 2)  # places of theirs among the results
_ALIGNED = 32  # words to which log-sum-exps of memory-efficient attention are padded


class Ring:
    """Blocks, sums and results of all attention in a ring, in the order in which the strategy's graph has them."""

    def __init__(self, code: Code, parts: RankParts, forms: RankForms, arguments: Arguments) -> None:
        self._code, self._parts, self._forms, self._arguments = code, parts, forms, arguments
        self._values, self._graph = parts.values, parts.graph
        self._turn: dict[tuple[int, int], int] = {}  # of op j and micro-batch, how many blocks are done
        self._summed: dict[tuple[int, int], int] = {}
        self._blocks: dict[tuple[int, int], list[fx.Node]] = {}  # backward: gradients of each block
        self._so_far: dict[tuple[int, int], fx.Node] = {}  # forward: what is put together; backward: of queries

    def has(self, op: int) -> bool:
        """Whether keys and values of op j go round."""
        return any(turned(self._graph, op, sharding.row[op]) is not None for sharding in self._values.split.mesh)

    def block(self, op: int, batch: int) -> None:
        """Attention to the next block, or its gradients."""
        key = op, batch
        turn = self._turn[key] = self._turn.get(key, -1) + 1
        node = self._node(op)
        names = tuple(one.name for one in node.target._schema.arguments)  # type: ignore[union-attr]
        lines, pieces = self._given(node, op, batch, turn, names)
        if self._is_forward(op):
            call = RingBlock(node.target, names, pieces)  # type: ignore[arg-type]
            self._so_far[key] = self._code.call(call, self._so_far.get(key), *lines)
            return
        made = self._code.call(RingBlockBackward(node.target, names, pieces), *lines)  # type: ignore[arg-type]
        self._blocks.setdefault(key, []).append(made)

    def merge(self, op: int, batch: int) -> None:
        """Gradients of one more block: those of queries are added up, those of keys and values go on with it."""
        if self._is_forward(op):
            return
        key = op, batch
        turn = self._summed[key] = self._summed.get(key, 0) + 1
        blocks = self._blocks[key]
        so_far = self._so_far.get(key)
        so_far = self._item(blocks[0], 0) if so_far is None else so_far
        self._so_far[key] = self._code.call(torch.add, so_far, self._item(blocks[turn], 0))
        for slot, form in self._sums(op, batch):
            own = self._item(blocks[turn], slot)
            if turn > 1:
                own = self._code.call(torch.add, self._forms.get(form._replace(turn=turn)), own)
            self._forms.made[form._replace(turn=turn)] = own

    def result(self, node: fx.Node, op: int, batch: int) -> fx.Node:
        """All that the call of op j gives."""
        key = op, batch
        if self._is_forward(op):
            query = info_of(self._named(node, "query"))
            assert query is not None
            return self._code.call(RingResult(query.layout.dtype), self._so_far[key])
        turns, own = len(self._blocks[key]), self._blocks[key][0]
        made = [self._so_far[key], *(self._item(own, slot) for slot in _GRADIENTS)]
        for slot, form in self._sums(op, batch):
            made[slot] = self._code.call(torch.add, made[slot], self._forms.get(form._replace(turn=turns)))
        return self._code.call(_together, *made)

    def _item(self, value: fx.Node, slot: int) -> fx.Node:
        return self._code.call(operator.getitem, value, slot)

    def _node(self, op: int) -> fx.Node:
        nodes = self._parts.nodes_of[self._values.split.source[op]]
        return next(node for node in nodes if isinstance(node.target, OpOverload))

    def _is_forward(self, op: int) -> bool:
        return bool(self._graph.work[op] == Work.ATTENTION)

    def _sums(self, op: int, batch: int) -> Iterator[tuple[int, Form]]:
        """Places of the gradients of keys and values among the results, and their forms."""
        for slot in _GRADIENTS:
            tensor = self._values.nodes.result(op, slot)
            if tensor is not None:
                yield slot, self._values.written(tensor, batch)._replace(is_again=True)

    def _given(
        self, node: fx.Node, op: int, batch: int, turn: int, names: tuple[str, ...]
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """The operator's arguments, with the keys and values of a turn, and the pieces in which they are used.

        Raises:
            StrategyError: a mask or dropout, or a kernel that pads its results.
        """
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        if given.get("dropout_p") or any(isinstance(given.get(name), fx.Node) for name in ("attn_mask", "attn_bias")):
            raise self._refused(op, "it has a mask or dropout, of which a block would need its own stretch")
        lines: dict[str, Any] = {}
        runs: dict[str, Any] = {}
        for name, value in given.items():
            if not isinstance(value, fx.Node):
                lines[name] = value
                continue
            if name in (*_KEYS, "query"):
                wanted = self._wanted(value, op, batch, turn if name in _KEYS else 0)
                part = self._parts.of_node(value, wanted)[0]
                assert part is not None
                lines[name], runs[name] = self._arguments.view(value, wanted), part.runs(2)
            else:
                lines[name] = self._arguments.get(value, op, batch)[0]
        if "efficient" in str(node.target) and any((stop - start) % _ALIGNED for start, stop in runs["query"]):
            raise self._refused(op, f"its kernel pads log-sum-exps to {_ALIGNED} words")
        try:
            pieces = pieces_of(runs["query"], runs["key"], bool(given.get("is_causal")))
        except ValueError as error:
            raise self._refused(op, str(error)) from None
        ordered = [lines.get(name, _default(node, name)) for name in names]
        return ordered, pieces

    def _wanted(self, node: fx.Node, op: int, batch: int, turn: int) -> Wanted:
        wanted = self._values.wanted(self._values.nodes.anchors[node], op, batch)
        if not turn:
            return wanted
        is_again = not self._is_forward(op)
        have, want = (form._replace(turn=turn, is_again=is_again) for form in (wanted.have, wanted.want))
        return wanted._replace(have=have, want=want)

    def _named(self, node: fx.Node, name: str) -> fx.Node:
        names = [one.name for one in node.target._schema.arguments]  # type: ignore[union-attr]
        found = (dict(zip(names, node.args, strict=False)) | dict(node.kwargs))[name]
        assert isinstance(found, fx.Node)
        return found

    def _refused(self, op: int, why: str) -> StrategyError:
        return StrategyError(
            f"op {self._graph.op_names[op]!r} cannot take keys and values from a ring: {why}; leave out 'ring', which "
            "gathers them, or say 'ulysses'."
        )


def _default(node: fx.Node, name: str) -> Any:
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return next(one.default_value for one in schema if one.name == name)


def _together(*values: Any) -> tuple[Any, ...]:
    return values
