"""`Use`: one call that the ranks of a stage make on parts, with what is where: the thing that is computed and compared.

A summand of a tensor is told by its number along every axis that adds up, micro-batches last.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx
from torch._ops import OpOverload

from graphs.capture.costs import signature
from graphs.capture.trace import flat, layouts, value_of
from graphs.op_kinds import op_kind
from graphs.transforms.splitting.sharding import SUM, WHOLE
from placement.runtime.parts.layouts import PartLayout, whole
from placement.runtime.planning.forms import Form, Wanted, info_of
from placement.runtime.planning.strategy_plan import StrategyPlan
from placement.runtime.program.functional import draws_by_data
from placement.runtime.writing.rank_parts import Parts, RankParts
from placement.runtime.writing.writer import Writer


class ReadPart(NamedTuple):
    """The part of an argument that one place reads.

    Attributes:
        part: of it, that is here.
        summand: its number along the axes that add up; -1 along those that do not.
        is_zero: another part adds all of it to the sum.
        is_dense: it has been sent as a vector, so that its entries lie row by row.
    """

    part: PartLayout
    summand: tuple[int, ...] = ()
    is_zero: bool = False
    is_dense: bool = False


@dataclass(frozen=True)
class UsePart:
    """One part's share of a call.

    Attributes:
        operands: of each tensor argument.
        outputs: the part of each flat result that is to be made; None for what nobody reads.
        groups: of each flat result, the parts with the same one add it up.
        halo: the arguments of which it also reads what lies beside its part, and along which dimensions.
    """

    operands: dict[fx.Node, ReadPart]
    outputs: tuple[PartLayout | None, ...]
    groups: tuple[tuple[int, ...], ...]
    halo: tuple[tuple[fx.Node, int], ...] = ()


@dataclass(frozen=True, eq=False)
class Use:
    """A call on parts.

    Attributes:
        node: of the functional program.
        places: every part of it, by rank of the stage and micro-batch.
        puts_together: a batch norm reads the statistics of all parts.
        is_of_lists: it reads lists of tokens, of which each part has sorted its own.
    """

    node: fx.Node
    places: tuple[UsePart, ...]
    puts_together: bool = False
    is_of_lists: bool = False


class KindOfUse(NamedTuple):
    """A kind of use.

    Attributes:
        signature: equal for those that compute the same of the same parts.
        name: of its operator and module, for people.
        use: makes the use itself.
    """

    signature: str
    name: str
    use: Callable[[], Use]


def uses_of(plan: StrategyPlan) -> Iterator[KindOfUse]:
    """Each kind of use that the ranks make of an operator, once; programs are written for it.

    The program of each stage's first rank is written; calls of the others show where uses are computed.

    Raises:
        StrategyError: a program cannot be written.
    """
    met: set[str] = set()
    for row in range(plan.values.split.n_rows):
        writer = Writer(plan, plan.values.split.rank(row, 0))
        writer.write()
        found = _Uses(plan, row, writer)
        for node, op, batch in writer.ops.calls:
            if batch <= 0:
                yield from found.of_call(node, op, met)
        for node, wanted, _ in writer.arguments.views:
            yield from found.of_view(node, wanted, met)


def _name(node: fx.Node) -> str:
    """Name of an operator and its module, for people."""
    module = str(node.meta.get("module") or "")
    return f"{node.target} of module {module!r}" if module else str(node.target)


class _Uses:
    """The uses of the ranks of a stage."""

    def __init__(self, plan: StrategyPlan, row: int, writer: Writer) -> None:
        self._plan, self._values, self._writer = plan, plan.values, writer
        self._at = [RankParts(plan, plan.values.split.rank(row, place)) for place in range(plan.places)]

    def of_call(self, node: fx.Node, op: int, met: set[str]) -> Iterator[KindOfUse]:
        """The call of an op."""
        if not isinstance(node.target, OpOverload) or node in self._values.step.random or draws_by_data(node):
            return
        is_local = self._values.applied.strategy.statistics == "local"
        if is_local and op_kind(self._values.split.graph.kinds[op]).has_statistics:
            return  # its parts make other numbers on purpose
        batches, last = self._plan.batches(op), self._plan.places - 1
        puts_together = self._writer.sums.has_statistics(op)
        is_of_lists = bool(self._writer.parts.lists(node, op, batches[0]))
        ends = [self._place(node, op, place, batch) for place, batch in ((0, batches[0]), (last, batches[-1]))]
        key = self._signature(node, ends, puts_together, is_of_lists, len(batches))
        if key not in met:
            met.add(key)
            every = tuple(itertools.product(range(self._plan.places), batches))

            def use() -> Use:
                places = tuple(self._place(node, op, place, batch) for place, batch in every)
                return Use(node, places, puts_together, is_of_lists)

            yield KindOfUse(key, _name(node), use)

    def of_view(self, node: fx.Node, wanted: Wanted, met: set[str]) -> Iterator[KindOfUse]:
        """A view that readers make of a part."""
        if not isinstance(node.target, OpOverload) or len(node.all_input_nodes) != 1:
            return
        (base,) = node.all_input_nodes
        if info_of(base) is None:
            return
        ends = [self._viewed(node, base, wanted, place) for place in (0, self._plan.places - 1)]
        key = self._signature(node, ends)
        if key not in met:
            met.add(key)
            places = range(self._plan.places)
            every = lambda: Use(node, tuple(self._viewed(node, base, wanted, place) for place in places))  # noqa: E731
            yield KindOfUse(key, _name(node), every)

    def _signature(self, node: fx.Node, ends: list[UsePart], *others: object) -> str:
        """Equal for calls that compute the same of the same parts."""
        number = {argument: k for k, argument in enumerate(node.all_input_nodes)}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        of_ends = [([*end.operands.values()], end.outputs, end.groups, [dim for _, dim in end.halo]) for end in ends]
        mesh = self._values.split.sizes, self._values.split.micro_batches
        what = str(node.target), args, kwargs, [layouts(argument) for argument in number], of_ends, mesh, others
        return hashlib.sha256(repr(what).encode()).hexdigest()[:24]

    def _viewed(self, node: fx.Node, base: fx.Node, wanted: Wanted, place: int) -> UsePart:
        part, outputs = self._at[place].of_node(base, wanted)[0], self._at[place].of_node(node, wanted)
        assert part is not None
        return UsePart({base: ReadPart(part)}, outputs, ((place,),) * len(outputs))

    def _place(self, node: fx.Node, op: int, place: int, batch: int) -> UsePart:
        """One rank's part of a call for a micro-batch."""
        at, puts_together = self._at[place], self._writer.sums.has_statistics(op)
        outputs, operands, halo = at.made(node, op, batch), {}, []
        for argument in node.all_input_nodes:
            part, wanted = _read(at, argument, op, batch, outputs)
            if part is None:
                continue
            operands[argument] = ReadPart(part)
            if wanted is not None:
                is_zero = self._values.is_zero_at(wanted, place)
                is_dense = self._plan.storage.is_gathered(wanted.have)
                # Statistics that parts put together are whole in each of them, though rows call them sums.
                summand = () if puts_together else self._summand(wanted, place)
                operands[argument] = ReadPart(part, summand, is_zero, is_dense)
                borders = at.borders(node, argument, op, batch)
                halo += [(argument, border.dim) for border in borders if any(border.counts)]
        return UsePart(operands, outputs, self._groups(node, op, place, batch), tuple(halo))

    def _summand(self, wanted: Wanted, place: int) -> tuple[int, ...]:
        values, (codes, want) = self._values, (wanted.have.codes, wanted.want.codes)
        along = zip(codes, want, values.split.coordinates(place), strict=True)
        found = [coordinate if have == code == SUM else -1 for have, code, coordinate in along]
        found.append(wanted.have.batch if self._adds_up_in_time(wanted.have) else -1)
        return tuple(found) if max(found) >= 0 else ()

    def _adds_up_in_time(self, form: Form) -> bool:
        """Whether a tensor is the summand of one micro-batch."""
        chunks = self._values.split.chunks
        return form.tensor >= 0 and form.batch >= 0 and chunks is not None and int(chunks.written[form.tensor]) == SUM

    def _groups(self, node: fx.Node, op: int, place: int, batch: int) -> tuple[tuple[int, ...], ...]:
        """Coordinates of a place for each flat result, without those along which places add it up."""
        values = self._values
        infos, first = flat(value_of(node)), values.nodes.anchors[node]
        own = (*values.split.coordinates(place), max(batch, 0))
        has_own = self._writer.sums.has_statistics(op) and signature(node.target).statistics
        found = []
        for slot in range(len(infos)):
            tensor = None if first.state >= 0 else values.nodes.result(op, first.slot if len(infos) == 1 else slot)
            if tensor is None or (has_own and slot):
                found.append(own)
                continue
            form = values.written(tensor, batch)
            codes = (*form.codes, SUM if self._adds_up_in_time(form) else WHOLE)
            found.append(tuple(-1 if code == SUM else c for code, c in zip(codes, own, strict=True)))
        return tuple(found)


def _read(
    at: RankParts, argument: fx.Node, op: int, batch: int, outputs: Parts
) -> tuple[PartLayout | None, Wanted | None]:
    """The part of an argument that a call reads, and the form it is in; None for what is no tensor of the graph."""
    info = info_of(argument)
    if info is None:
        return None, None
    anchor = at.values.nodes.anchors.get(argument)
    if anchor is None or at.is_drawn(argument):
        return whole(info.layout.shape), None
    shape_read = at.shape_read(argument, op, outputs)
    if shape_read is not None:
        return shape_read, None
    wanted = at.values.wanted(anchor, op, batch)
    return at.of_node(argument, wanted)[0], wanted
