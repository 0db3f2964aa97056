"""`Values`: the form of each tensor and state that an op of a strategy reads and writes.

A captured step is made of nodes; the graph of a strategy is made of ops, tensors and states. Four records tie them
together, each made of those above it:

    `SplitStep`     op j           the captured op that it runs, its row of devices, its micro-batches; the mesh
    `Nodes`         node           the tensor or state that it is, or is a view of
    `FormParts`     form, place    the part that is there
    `Values`        op j, tensor   the forms in which it is read, written, given and kept

A table is computed when it is first asked for, once for all ranks (n ops, e entries that ops read, t tensors):

    while the plan is made    rows, inputs, anchors, state_number              O(n + e)
    with the first layout     stretches that are cut: by tensor, by state      O(axes x (e + t))
    while code is written     layouts, one for each form and place             O(forms x places)
                              from_inputs, of_integers: ops on integers        O(n + e)

Letters: op j of the graph after recomputation is a run of op i of the captured graph. Codes are those of
`graphs.transforms.splitting.sharding`, one for each axis of the mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from graphs.arrays import BoolArray
from graphs.errors import StrategyError
from graphs.op_kinds import op_kind
from graphs.opgraph import Phase
from graphs.rows import Partial, Shard, SplitRow
from graphs.transforms.splitting.exchange import through_whole
from graphs.transforms.splitting.masks import of_integer_inputs
from graphs.transforms.splitting.sharding import SUM, WHOLE, differs, is_by_groups
from placement.runtime.planning.form_parts import FormParts
from placement.runtime.planning.forms import ALL, ONCE, SUMMED, Anchor, Form, Wanted
from placement.runtime.planning.nodes import Nodes
from placement.runtime.planning.split_step import SplitStep

if TYPE_CHECKING:
    from baselines.strategies.applied import Applied
    from placement.runtime.program.functional import Functional


@dataclass(frozen=True, eq=False)
class Values:
    """A functional program under a strategy.

    Attributes:
        step: the program.
        applied: the strategy on its graph.
    """

    step: Functional
    applied: Applied

    @cached_property
    def split(self) -> SplitStep:
        return SplitStep(self.step, self.applied)

    @cached_property
    def nodes(self) -> Nodes:
        return Nodes(self.split)

    @cached_property
    def parts(self) -> FormParts:
        return FormParts(self.split, self.nodes)

    def kept(self, state: int) -> Form:
        """A state of the program as it is kept."""
        return Form(-1, state, self.state_codes(state))

    def state_codes(self, state: int) -> tuple[int, ...]:
        """How a state of the program is kept."""
        number = None if state in self.nodes.table_of else self.split.state_number.get(state)
        return tuple(WHOLE if number is None else int(sharding.state[number]) for sharding in self.split.mesh)

    def is_own_part(self, entry: int, axis: int) -> bool:
        """Whether an op reads a tensor along an axis as it is cut."""
        tensor = int(self.split.graph.inputs[1][entry])
        return int(self.split.mesh[axis].written[tensor]) == int(self.split.mesh[axis].read[entry]) > SUM

    def producer(self, anchor: Anchor) -> int:
        """The op after recomputation whose first run makes an anchor."""
        return self.split.first_run[anchor.op]

    def written(self, tensor: int, batch: int = ONCE) -> Form:
        """A tensor as its producer writes it."""
        return Form(tensor, -1, tuple(int(sharding.written[tensor]) for sharding in self.split.mesh), batch)

    def final(self, tensor: int) -> Form:
        """A tensor as it is at the end of the step, of all micro-batches."""
        form = self.written(tensor)
        if self.split.chunks is None or not self.split.is_chunked(int(self.split.graph.tensor_producer[tensor])):
            return form
        written = int(self.split.chunks.written[tensor])
        return form._replace(batch=SUMMED if written == SUM else ALL if written > SUM else 0)

    def given(self, tensor: int) -> Form:
        """An argument of the step as a rank is given it.

        With micro-batches that is cut along the axes of samples alone: parts of micro-batches do not lie side by side.
        """
        form = self.written(tensor)
        if self.split.chunks is None:
            return form
        codes = (code if a in self.parts.batch_axes else WHOLE for a, code in enumerate(form.codes))
        return form._replace(codes=tuple(codes))

    def wanted(self, anchor: Anchor, op: int, batch: int) -> Wanted:
        """Part of an anchor that the copy of op j for a micro-batch reads.

        Raises:
            StrategyError: an exchange of states that no transform plans.
        """
        if anchor.state >= 0:
            table = self.nodes.table_of.get(anchor.state)
            if table is None:
                return self._wanted_state(anchor.state, op, batch)
            entry = self.nodes.inputs[op].get(table)
            if entry is None:
                return self._wanted_state(anchor.state, op, batch)
            want = Form(int(self.split.graph.inputs[1][entry]), -1, tuple(int(s.read[entry]) for s in self.split.mesh))
            codes = tuple(code if code > SUM else WHOLE for code in want.codes)
            want = self._taken(want._replace(codes=codes), entry, batch)
            return Wanted(Form(-1, anchor.state, (WHOLE,) * len(self.split.mesh)), want)
        if anchor.op == self.split.source[op] and (tensor := self.nodes.result(op, anchor.slot)) is not None:
            own = self.written(tensor, batch)  # as it is once the op has written it
            return Wanted(own, own)
        return self.wanted_by_edge(self.nodes.entry(op, anchor), op, batch)

    def wanted_by_edge(self, entry: int, op: int, batch: int) -> Wanted:
        """As `wanted`, of entry ``entry`` of ``graph.inputs``, which op j reads."""
        tensor = int(self.split.graph.inputs[1][entry])
        codes, want = [], []
        for sharding in self.split.mesh:
            written, read = int(sharding.written[tensor]), int(sharding.read[entry])
            if is_by_groups(read) and written == WHOLE:
                raise StrategyError(
                    f"op {self.split.graph.op_names[op]!r} reads the tokens of its experts of a list that all parts "
                    "have, and nothing takes them out; leave out ep."
                )
            codes.append(written)
            want.append(read)
        targets = [read if differs(written, read) else None for written, read in zip(codes, want, strict=True)]
        reached = zip(codes, through_whole(codes, targets), strict=True)
        have = [written if target is None else target for written, target in reached]
        number = self._batch_read(tensor, entry, op, batch)
        is_first = True
        if self.split.chunks is not None and batch > 0 and int(self.split.chunks.read[entry]) == SUM:
            is_first = int(self.split.chunks.written[tensor]) == SUM
        is_again = self._is_again(codes, have, op)
        left = Form(tensor, -1, tuple(have), number, is_again)
        right = self._taken(Form(tensor, -1, tuple(want), number), entry, batch)
        return Wanted(left, right, not is_first)

    def _taken(self, whole_step: Form, entry: int, batch: int) -> Form:
        """The stretch that one micro-batch reads of a tensor that is there for all of them, as its row says."""
        read = WHOLE if self.split.chunks is None else int(self.split.chunks.read[entry])
        is_cut = whole_step.batch in (ONCE, ALL) and read > SUM
        return whole_step._replace(batch=batch, taken=read) if is_cut else whole_step

    def is_zero_at(self, wanted: Wanted, place: int) -> bool:
        """Whether a part reads nothing of a tensor because another one adds it to the sum."""
        along = zip(wanted.have.codes, wanted.want.codes, self.split.coordinates(place), strict=True)
        return wanted.is_zero or any(have == WHOLE and want == SUM and c > 0 for have, want, c in along)

    def _batch_read(self, tensor: int, entry: int, op: int, batch: int) -> int:
        chunks = self.split.chunks
        producer = int(self.split.graph.tensor_producer[tensor])
        if chunks is None or not self.split.is_chunked(producer):
            return ONCE
        written, read = int(chunks.written[tensor]), int(chunks.read[entry])
        if written == SUM:
            return batch if read == SUM and self.split.is_chunked(op) else SUMMED
        if not self.split.is_chunked(op):
            return ALL if written > SUM else 0
        return ALL if written > SUM and read != written else batch

    def _is_again(self, codes: list[int], have: list[int], op: int) -> bool:
        """Whether an op of the backward pass reads what was gathered for it a second time.

        Args:
            codes, have: of a tensor, along each axis: as it was written, and as exchanges leave it.
        """
        if Phase(int(self.split.graph.phase[op])) is Phase.FORWARD:
            return False
        axes = (sharding.axis for sharding in self.split.mesh)
        return any(
            written > SUM and left == WHOLE and bool(axis.words or axis.sequence)
            for axis, written, left in zip(axes, codes, have, strict=True)
        )

    def _wanted_state(self, state: int, op: int, batch: int) -> Wanted:
        number = self.split.state_number.get(state)
        have = self.kept(state)
        if number is None or number not in self.split.states_of_ops[op]:
            if any(code > SUM for code in have.codes):
                raise self._unplanned(state, op)
            return Wanted(have, have)
        place = self.split.n_read[op] + self.split.states_of_ops[op].index(number)
        codes = []
        for sharding, kept in zip(self.split.mesh, have.codes, strict=True):
            part = _input(sharding.row[op], place)
            if isinstance(part, Shard) and kept <= SUM:
                raise self._unplanned(state, op)
            if kept > SUM and not isinstance(part, Shard):
                raise self._unplanned(state, op)
            codes.append(kept if isinstance(part, Shard) else SUM if isinstance(part, Partial) else WHOLE)
        want, in_time = Form(-1, state, tuple(codes)), None
        if self.split.chunks is not None:
            in_time = _input(self.split.chunks.row[op], place)
            if isinstance(in_time, Shard):
                want = want._replace(batch=batch, taken=int(self.split.chunks.state[number]))
        return Wanted(have, want, batch > 0 and isinstance(in_time, Partial))

    def _unplanned(self, state: int, op: int) -> StrategyError:
        name = self.step.program.states[state].names[0]
        return StrategyError(
            f"op {self.split.graph.op_names[op]!r} needs {name!r} in another form than it is kept in, and the strategy "
            "plans no exchange for that; take another strategy."
        )

    @cached_property
    def from_inputs(self) -> frozenset[int]:
        """Ops j whose integer results depend on inputs alone: labels, masks, positions. Any rank can make its own."""
        graph = self.split.graph
        ptr, tensors = graph.inputs
        found: set[int] = set()
        tables = self.step.program.tables
        for op in graph.topological_order.tolist():
            if graph.kinds[op] == "input":
                found.add(op)
                continue
            captured = range(int(graph.output_ptr[op]), int(graph.output_ptr[op + 1]))
            if any(self.nodes.captured(t) in tables for t in captured):
                found.add(op)
                continue
            is_plain = not self.split.states_of_ops[op] and not self._exchanges(op)
            is_plain &= not graph.dtypes[op].startswith(("float", "bfloat", "complex"))
            is_plain &= not op_kind(graph.kinds[op]).is_drawn
            if is_plain and all(int(graph.tensor_producer[t]) in found for t in tensors[ptr[op] : ptr[op + 1]]):
                found.add(op)
        return frozenset(found)

    @cached_property
    def of_integers(self) -> BoolArray:
        """bool [n]: ops j that make integers of integer arguments, perhaps of other parts' as well."""
        return of_integer_inputs(self.split.graph)

    def _exchanges(self, op: int) -> bool:
        """Whether something that an op reads must be exchanged first."""
        ptr, tensors = self.split.graph.inputs
        return any(
            differs(int(sharding.written[tensors[e]]), int(sharding.read[e]))
            for sharding in self.split.mesh
            for e in range(int(ptr[op]), int(ptr[op + 1]))
        )


def _input(row: SplitRow | None, place: int) -> object:
    return None if row is None or place >= len(row.inputs) else row.inputs[place]
