"""Values of a captured step under a strategy: the part of each at every place, and the parts that its readers want.

A captured step is made of nodes; the graph of a strategy is made of ops, tensors and states. `Values` ties them
together: of every node the tensor or state that it is, or is a view of, and of every tensor, place and micro-batch the
part that is there.

Letters: op j of the graph after recomputation is a run of op i of the captured graph. Codes are those of
`graphs.transforms.splitting.sharding`, one for each axis of the mesh.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import fx

from graphs.arrays import BoolArray
from graphs.capture.trace import TensorInfo, value_of
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph, Phase
from graphs.rows import Partial, Shard, SplitRow
from graphs.transforms.splitting.copies import Copies
from graphs.transforms.splitting.masks import of_integer_inputs
from graphs.transforms.splitting.op_states import states_of
from graphs.transforms.splitting.sharding import SUM, WHOLE, Sharding, differs
from placement.runtime.parts.layouts import PartLayout, whole
from placement.runtime.program.functional import Functional, after

if TYPE_CHECKING:
    from baselines.strategies.applied import Applied, Rewrite

ONCE, SUMMED, ALL = -1, -2, -3  # instead of a micro-batch: for the whole step, added up, side by side


class Anchor(NamedTuple):
    """The value that a node is, or is a view of: result ``slot`` of captured op ``op``, or ``state`` of the program."""

    op: int = -1
    slot: int = -1
    state: int = -1


class Form(NamedTuple):
    """One of the forms in which a tensor or state is needed.

    Attributes:
        tensor: of the graph after recomputation; -1 for a state.
        state: of the program; -1 for a tensor.
        codes: along the axes of the mesh.
        batch: number of the micro-batch, or ``ONCE``, ``SUMMED``, ``ALL``.
        is_again: gathered a second time, for the backward pass.
        phase: of a parameter that is gathered for use: which pass; else -1.
        taken: code of the stretch that a micro-batch takes of a tensor that is there for all of them; else WHOLE.
    """

    tensor: int
    state: int
    codes: tuple[int, ...]
    batch: int = ONCE
    is_again: bool = False
    phase: int = -1
    taken: int = WHOLE


class Wanted(NamedTuple):
    """An input as an op reads it.

    Attributes:
        have: the form in which exchanges leave the tensor.
        want: the part of it that the op works on, which takes no exchange.
        is_zero: the op adds this tensor to a sum that another part adds it to: here it is nothing.
    """

    have: Form
    want: Form
    is_zero: bool = False


@dataclass(frozen=True, eq=False)
class Values:
    """A functional program under a strategy (n ops after recomputation, K places, M micro-batches)."""

    step: Functional
    applied: Applied

    @cached_property
    def rewrite(self) -> Rewrite:
        assert self.applied.rewrite is not None
        return self.applied.rewrite

    @cached_property
    def graph(self) -> OpGraph:
        """After recomputation."""
        return self.rewrite.again.graph

    @cached_property
    def source(self) -> list[int]:
        """The captured op i of each op j."""
        found: list[int] = self.rewrite.again.origin.tolist()
        return found

    @cached_property
    def first_run(self) -> Mapping[int, int]:
        """The op j that runs each captured op i first."""
        found: dict[int, int] = {}
        for op, source in enumerate(self.source):
            found.setdefault(source, op)
        return found

    def is_again(self, op: int) -> bool:
        """Whether op j is a later run of an op that has run before."""
        return self.first_run[self.source[op]] != op

    @cached_property
    def run_twice(self) -> frozenset[int]:
        """The captured ops i that run more than once."""
        return frozenset(source for op, source in enumerate(self.source) if self.is_again(op))

    @cached_property
    def mesh(self) -> tuple[Sharding, ...]:
        return () if self.copies is None else tuple(self.copies.mesh)

    @property
    def copies(self) -> Copies | None:
        return self.rewrite.copies

    @cached_property
    def chunks(self) -> Sharding | None:
        return None if self.copies is None else self.copies.chunks

    @cached_property
    def micro_batches(self) -> int:
        return 1 if self.chunks is None else self.chunks.axis.size

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sharding.axis.size for sharding in self.mesh)

    @cached_property
    def places(self) -> int:
        return int(np.prod(self.sizes, dtype=np.int64))

    def coordinates(self, place: int) -> tuple[int, ...]:
        return tuple(int(c) for c in np.unravel_index(place, self.sizes)) if self.sizes else ()

    @cached_property
    def rows(self) -> list[int]:
        """The row of devices, its stage's rank, where each op j runs."""
        found: list[int] = self.rewrite.row.tolist()
        return found

    def is_chunked(self, op: int) -> bool:
        """Whether each micro-batch has its own copy of op j."""
        return self.chunks is not None and self.chunks.row[op] is not None

    # -- nodes and tensors ------------------------------------------------------------------------------------

    @cached_property
    def anchors(self) -> Mapping[fx.Node, Anchor]:
        """Anchor of each node: the value that it is or views; literals and sizes have none."""
        found: dict[fx.Node, Anchor] = {}
        for node in self.step.graph.nodes:
            state = self.step.state_of.get(node)
            op = self.step.made_by.get(node)
            if state is None and node in self.step.state_writes:
                state = self.step.state_writes[node]
            if state is not None:
                found[node] = Anchor(state=state)
            elif op is None:
                before = next((found[n] for n in node.all_input_nodes if n in found), None)
                if node in self._copied and not self._reads(self._copied[node].op, before):
                    before = self._copied[node]
                if before is not None:
                    found[node] = before
            elif node.target is operator.getitem and node.args[0] in self.step.made_by:
                index = node.args[1]
                assert isinstance(index, int)
                found[node] = Anchor(op, index)
            elif node.target is after:
                found[node] = self._written[node]
            else:
                found[node] = Anchor(op, 0)
        return found

    def _reads(self, op: int, anchor: Anchor | None) -> bool:
        """Whether captured op i reads what an anchor is; what it overwrites as a whole it does not read."""
        if anchor is None or anchor.state >= 0:
            return anchor is not None
        return self.captured_tensor(anchor) in self._inputs[self.first_run[op]]

    @cached_property
    def blanks(self) -> frozenset[fx.Node]:
        """Copies of memory that an op writes without a look at what was in it."""
        return frozenset(copy for copy, anchor in self._copied.items() if self.anchors.get(copy) == anchor)

    @cached_property
    def _copied(self) -> Mapping[fx.Node, Anchor]:
        """Value of each copy that an op writes into through a view, once that is done."""
        return {node.all_input_nodes[0]: anchor for node, anchor in self._written.items()}

    @cached_property
    def _written(self) -> Mapping[fx.Node, Anchor]:
        """Value of each argument that an op has written in place: a result of that op, or beyond its results."""
        found: dict[fx.Node, Anchor] = {}
        counts: dict[int, int] = {}
        for node in self.step.graph.nodes:
            op = self.step.made_by.get(node)
            if op is None or node.target is not after:
                continue
            number = counts[op] = counts.get(op, -1) + 1
            call = self.step.program.call_tensors[op]
            tensor = call.written[number]
            slot = next((k for k, result in enumerate(call.results) if result == tensor and tensor is not None), None)
            found[node] = Anchor(op, len(call.results) + number if slot is None else slot)
        return found

    def captured_tensor(self, anchor: Anchor) -> int | None:
        """Number in the captured graph of a result; None for one that nobody reads."""
        call = self.step.program.call_tensors.get(anchor.op)
        if call is None:
            return None
        results = (*call.results, *call.written)
        return results[anchor.slot] if anchor.slot < len(results) else None

    @cached_property
    def table_of(self) -> Mapping[int, int]:
        """State of the program -> the tensor of the captured graph that hands it out."""
        return {state: tensor for tensor, state in self.step.program.tables.items()}

    @cached_property
    def _table_states(self) -> Mapping[int, int]:
        """Tensor of the captured graph -> the state that it hands out."""
        return {tensor: state for state, tensor in self.table_of.items()}

    def table(self, tensor: int) -> int | None:
        """The state of the program that a tensor after recomputation hands out, which every rank has as a whole."""
        return self._table_states.get(self.captured(tensor))

    def kept(self, state: int) -> Form:
        """A state of the program as it is kept."""
        return Form(-1, state, self.state_codes(state))

    def root(self, variant: Form) -> TensorInfo:
        """The tensor or state as its producer writes it."""
        if variant.state >= 0:
            return self.step.program.state_infos[variant.state]
        return self.step.program.tensor_infos[self.captured(variant.tensor)]

    def captured(self, tensor: int) -> int:
        """The tensor of the captured graph that a tensor after recomputation is made as."""
        producer = int(self.graph.tensor_producer[tensor])
        source = self.rewrite.again.source
        slot = tensor - int(self.graph.output_ptr[producer])
        return int(source.output_ptr[self.source[producer]]) + slot

    @cached_property
    def _inputs(self) -> list[dict[int, int]]:
        """For each op j: captured tensor -> place among its inputs, in ``graph.inputs``."""
        ptr, tensors = self.graph.inputs
        counts = np.diff(self.rewrite.again.source.output_ptr).tolist()
        found: list[dict[int, int]] = []
        for op in range(self.graph.n_ops):
            mine: dict[int, int] = {}
            for e in range(int(ptr[op]), int(ptr[op + 1])):
                tensor = int(tensors[e])
                producer = int(self.graph.tensor_producer[tensor])
                slot = tensor - int(self.graph.output_ptr[producer])
                if slot < counts[self.source[producer]]:  # else a gate, which carries nothing
                    mine[self.captured(tensor)] = e
            found.append(mine)
        return found

    def entry(self, op: int, anchor: Anchor) -> int:
        """Place in ``graph.inputs`` at which op j reads an anchor.

        Raises:
            StrategyError: it does not.
        """
        captured = self.captured_tensor(anchor) if anchor.state < 0 else self.table_of.get(anchor.state)
        entry = None if captured is None else self._inputs[op].get(captured)
        if entry is None:
            name = self.graph.op_names[op]
            raise StrategyError(f"op {name!r} reads a value that no tensor of its graph carries; use strategy 'none'.")
        return entry

    def is_gate(self, entry: int) -> bool:
        """Whether a tensor says only that its producer is done."""
        tensor = int(self.graph.inputs[1][entry])
        producer = int(self.graph.tensor_producer[tensor])
        slot = tensor - int(self.graph.output_ptr[producer])
        source, origin = self.rewrite.again.source, self.source[producer]
        return slot >= int(source.output_ptr[origin + 1] - source.output_ptr[origin])

    def is_own_part(self, entry: int, axis: int) -> bool:
        """Whether an op reads a tensor along an axis as it is cut."""
        tensor = int(self.graph.inputs[1][entry])
        return int(self.mesh[axis].written[tensor]) == int(self.mesh[axis].read[entry]) > SUM

    def result(self, op: int, slot: int) -> int | None:
        """Tensor after recomputation that op j writes as result ``slot`` of its call; None for one nobody reads."""
        captured = self.captured_tensor(Anchor(self.source[op], slot))
        if captured is None:
            return None
        source = self.rewrite.again.source
        return int(self.graph.output_ptr[op]) + captured - int(source.output_ptr[self.source[op]])

    # -- states -----------------------------------------------------------------------------------------------

    @cached_property
    def state_number(self) -> Mapping[int, int]:
        """State of the program -> its number in the graph, of those that the graph counts."""
        named = {state.name: s for s, state in enumerate(self.graph.states)}
        return {
            number: named[state.names[0]]
            for number, state in enumerate(self.step.program.states)
            if state.names[0] in named
        }

    @cached_property
    def _states_of(self) -> list[list[int]]:
        return states_of(self.graph)

    @cached_property
    def _n_read(self) -> list[int]:
        found: list[int] = np.diff(self.graph.inputs[0]).tolist()
        return found

    def state_codes(self, state: int) -> tuple[int, ...]:
        """How a state of the program is kept."""
        number = None if state in self.table_of else self.state_number.get(state)
        return tuple(WHOLE if number is None else int(sharding.state[number]) for sharding in self.mesh)

    @cached_property
    def _state_shards(self) -> Mapping[tuple[int, int], Shard]:
        """(axis, state of the graph) -> the stretch along which it is kept in parts, or read by micro-batches."""
        found: dict[tuple[int, int], Shard] = {}
        for a, sharding in enumerate([*self.mesh, *([self.chunks] if self.chunks is not None else [])]):
            for op, row in enumerate(sharding.row):
                if row is None:
                    continue
                for state, part in zip(self._states_of[op], row.inputs[self._n_read[op] :], strict=False):
                    if isinstance(part, Shard) and sharding.state[state] > SUM:
                        found.setdefault((a, state), part)
        return found

    # -- which part is where ----------------------------------------------------------------------------------

    @cached_property
    def _shards(self) -> Mapping[tuple[int, int, int], tuple[Shard, str]]:
        """(axis, tensor, code) -> the stretch that is cut, and its word; the axis of micro-batches comes last."""
        found: dict[tuple[int, int, int], tuple[Shard, str]] = {}
        ptr, tensors = self.graph.inputs
        shardings = [*self.mesh, *([self.chunks] if self.chunks is not None else [])]
        for a, sharding in enumerate(shardings):
            for op, row in enumerate(sharding.row):
                for t, part in zip(
                    range(int(self.graph.output_ptr[op]), int(self.graph.output_ptr[op + 1])),
                    _outputs(row),
                    strict=False,
                ):
                    if isinstance(part, Shard) and row is not None:
                        found[a, t, int(sharding.written[t])] = part, row.axis
            for op, row in enumerate(sharding.row):
                if row is None:
                    continue
                for e, part in zip(range(int(ptr[op]), int(ptr[op + 1])), row.inputs, strict=False):
                    if isinstance(part, Shard):
                        found.setdefault((a, int(tensors[e]), int(sharding.read[e])), (part, row.axis))
        return found

    def layout(self, variant: Form, place: int) -> PartLayout:
        """The part of a tensor or state that a variant is at a place.

        Raises:
            StrategyError: stretches that do not fall together.
        """
        key = variant, place
        if key not in self._layouts:
            self._layouts[key] = self._layout(variant, place)
        return self._layouts[key]

    @cached_property
    def _layouts(self) -> dict[tuple[Form, int], PartLayout]:
        """Results of `layout`: writers ask for the same parts again and again."""
        return {}

    def _layout(self, variant: Form, place: int) -> PartLayout:
        found = whole(self.root(variant).layout.shape)
        cuts = list(enumerate(zip(variant.codes, self.coordinates(place), strict=True)))
        for a, (code, coordinate) in cuts:
            if a in self.of_samples and code > SUM:
                found = self._cut(found, variant, a, code, coordinate)
        in_time = self._shard_in_time(variant)
        if in_time is not None:
            found = found.cut_by(self._dealt(in_time), self.micro_batches, variant.batch)
        for a, (code, coordinate) in cuts:
            if a not in self.of_samples and code > SUM:
                found = self._cut(found, variant, a, code, coordinate)
        return found

    def _shard_in_time(self, variant: Form) -> Shard | None:
        """The stretch of which a variant is the part of a micro-batch; None where it is no such part."""
        if self.chunks is None or variant.batch < 0:
            return None
        if variant.tensor < 0:
            return self._state_shards[len(self.mesh), self.state_number[variant.state]] if variant.taken else None
        code = variant.taken or int(self.chunks.written[variant.tensor])
        return self._shards[len(self.mesh), variant.tensor, code][0] if code > SUM else None

    def _dealt(self, shard: Shard) -> Shard:
        """The stretch of samples that is cut into micro-batches: each replica cuts its own.

        So of all samples together the first micro-batch has the first ones of every replica.
        """
        axes = [self.mesh[a].axis for a in self.of_samples]
        replicas = math.prod(axis.size for axis in axes)
        if any(axis.shares for axis in axes) or shard.extent % replicas:
            return shard
        return Shard(shard.dim, shard.extent // replicas, shard.halo, shard.blocks * replicas)

    @cached_property
    def of_samples(self) -> frozenset[int]:
        """The axes of the mesh along which samples are dealt out before they are cut into micro-batches.

        Along the others, one that cuts weights or experts, it is the samples of a micro-batch that are cut.
        """
        axes = [sharding.axis for sharding in self.mesh]
        return frozenset(a for a, axis in enumerate(axes) if axis.words == ("batch",) and not axis.cuts_weights)

    def dim_cut(self, variant: Form, axis: int) -> int:
        """The dimension of a tensor that an axis of the mesh cuts."""
        return self._shards[axis, variant.tensor, variant.codes[axis]][0].dim

    def _cut(self, part: PartLayout, variant: Form, a: int, code: int, coordinate: int) -> PartLayout:
        axis = self.mesh[a].axis
        if variant.state >= 0:
            return part.cut_by(self._state_shards[a, self.state_number[variant.state]], axis.size, coordinate)
        shard, word = self._shards[a, variant.tensor, code]
        return part.cut_by(shard, axis.size, coordinate, axis.shares if word == "batch" else ())

    # -- what is written and read -----------------------------------------------------------------------------

    def written(self, tensor: int, batch: int = ONCE) -> Form:
        """A tensor as its producer writes it."""
        return Form(tensor, -1, tuple(int(sharding.written[tensor]) for sharding in self.mesh), batch)

    def final(self, tensor: int) -> Form:
        """A tensor as it is at the end of the step, of all micro-batches."""
        variant = self.written(tensor)
        if self.chunks is None or not self.is_chunked(int(self.graph.tensor_producer[tensor])):
            return variant
        written = int(self.chunks.written[tensor])
        return variant._replace(batch=SUMMED if written == SUM else ALL if written > SUM else 0)

    def given(self, tensor: int) -> Form:
        """An argument of the step as a rank is given it.

        With micro-batches that is cut along the axes of samples alone: parts of micro-batches do not lie side by side.
        """
        variant = self.written(tensor)
        if self.chunks is None:
            return variant
        codes = (code if a in self.of_samples else WHOLE for a, code in enumerate(variant.codes))
        return variant._replace(codes=tuple(codes))

    def wanted(self, anchor: Anchor, op: int, batch: int) -> Wanted:
        """Part of an anchor that the copy of op j for a micro-batch reads.

        Raises:
            StrategyError: an exchange of states that no transform plans.
        """
        if anchor.state >= 0:
            table = self.table_of.get(anchor.state)
            if table is None:
                return self._wanted_state(anchor.state, op, batch)
            entry = self._inputs[op].get(table)
            if entry is None:
                return self._wanted_state(anchor.state, op, batch)
            want = Form(int(self.graph.inputs[1][entry]), -1, tuple(int(s.read[entry]) for s in self.mesh))
            codes = tuple(code if code > SUM else WHOLE for code in want.codes)
            want = self._taken(want._replace(codes=codes), entry, batch)
            return Wanted(Form(-1, anchor.state, (WHOLE,) * len(self.mesh)), want)
        if anchor.op == self.source[op] and (tensor := self.result(op, anchor.slot)) is not None:
            own = self.written(tensor, batch)  # as it is once the op has written it
            return Wanted(own, own)
        return self.wanted_by_edge(self.entry(op, anchor), op, batch)

    def wanted_by_edge(self, entry: int, op: int, batch: int) -> Wanted:
        """As `wanted`, of entry ``entry`` of ``graph.inputs``, which op j reads."""
        tensor = int(self.graph.inputs[1][entry])
        have, want = [], []
        for sharding in self.mesh:
            written, read = int(sharding.written[tensor]), int(sharding.read[entry])
            have.append(read if differs(written, read) else written)
            want.append(read)
        number = self._batch_read(tensor, entry, op, batch)
        is_first = True
        if self.chunks is not None and batch > 0 and int(self.chunks.read[entry]) == SUM:
            is_first = int(self.chunks.written[tensor]) == SUM
        is_again = self._is_again(tensor, entry, op)
        left = Form(tensor, -1, tuple(have), number, is_again)
        right = self._taken(Form(tensor, -1, tuple(want), number), entry, batch)
        return Wanted(left, right, not is_first)

    def _taken(self, whole_step: Form, entry: int, batch: int) -> Form:
        """The stretch that one micro-batch reads of a tensor that is there for all of them, as its row says."""
        if self.chunks is None or whole_step.batch not in (ONCE, ALL) or int(self.chunks.read[entry]) <= SUM:
            return whole_step
        return whole_step._replace(batch=batch, taken=int(self.chunks.read[entry]))

    def is_zero_at(self, wanted: Wanted, place: int) -> bool:
        """Whether a part reads nothing of a tensor because another one adds it to the sum."""
        return wanted.is_zero or any(
            have == WHOLE and want == SUM and coordinate > 0
            for have, want, coordinate in zip(
                wanted.have.codes, wanted.want.codes, self.coordinates(place), strict=True
            )
        )

    def _batch_read(self, tensor: int, entry: int, op: int, batch: int) -> int:
        chunks = self.chunks
        producer = int(self.graph.tensor_producer[tensor])
        if chunks is None or not self.is_chunked(producer):
            return ONCE
        written, read = int(chunks.written[tensor]), int(chunks.read[entry])
        if written == SUM:
            return batch if read == SUM and self.is_chunked(op) else SUMMED
        if not self.is_chunked(op):
            return ALL if written > SUM else 0
        return ALL if written > SUM and read != written else batch

    def _is_again(self, tensor: int, entry: int, op: int) -> bool:
        """Whether an op of the backward pass reads what was gathered for it a second time."""
        if Phase(int(self.graph.phase[op])) is Phase.FORWARD:
            return False
        for sharding in self.mesh:
            axis = sharding.axis
            written, read = int(sharding.written[tensor]), int(sharding.read[entry])
            if written > SUM and read == WHOLE and (axis.words or axis.sequence):
                return True
        return False

    def _wanted_state(self, state: int, op: int, batch: int) -> Wanted:
        number = self.state_number.get(state)
        have = Form(-1, state, self.state_codes(state))
        if number is None or number not in self._states_of[op]:
            if any(code > SUM for code in have.codes):
                raise self._unplanned(state, op)
            return Wanted(have, have)
        place = self._n_read[op] + self._states_of[op].index(number)
        codes = []
        for sharding, kept in zip(self.mesh, have.codes, strict=True):
            part = _input(sharding.row[op], place)
            if isinstance(part, Shard) and kept <= SUM:
                raise self._unplanned(state, op)
            if kept > SUM and not isinstance(part, Shard):
                raise self._unplanned(state, op)
            codes.append(kept if isinstance(part, Shard) else SUM if isinstance(part, Partial) else WHOLE)
        want, in_time = Form(-1, state, tuple(codes)), None
        if self.chunks is not None:
            in_time = _input(self.chunks.row[op], place)
            if isinstance(in_time, Shard):
                want = want._replace(batch=batch, taken=int(self.chunks.state[number]))
        return Wanted(have, want, batch > 0 and isinstance(in_time, Partial))

    def _unplanned(self, state: int, op: int) -> StrategyError:
        name = self.step.program.states[state].names[0]
        return StrategyError(
            f"op {self.graph.op_names[op]!r} needs {name!r} in another form than it is kept in, and the strategy plans "
            "no exchange for that; take another strategy."
        )

    # -- what needs only inputs -------------------------------------------------------------------------------

    @cached_property
    def from_inputs(self) -> frozenset[int]:
        """Ops j whose integer results depend on inputs alone: labels, masks, positions. Any rank can make its own."""
        graph = self.graph
        ptr, tensors = graph.inputs
        found: set[int] = set()
        tables = self.step.program.tables
        for op in graph.topological_order.tolist():
            if graph.kinds[op] == "input":
                found.add(op)
                continue
            captured = range(int(graph.output_ptr[op]), int(graph.output_ptr[op + 1]))
            if any(self.captured(t) in tables for t in captured):
                found.add(op)
                continue
            is_plain = not self._states_of[op] and not self._exchanges(op)
            is_plain &= not graph.dtypes[op].startswith(("float", "bfloat", "complex"))
            if is_plain and all(int(graph.tensor_producer[t]) in found for t in tensors[ptr[op] : ptr[op + 1]]):
                found.add(op)
        return frozenset(found)

    @cached_property
    def of_integers(self) -> BoolArray:
        """bool [n]: ops j that make integers of integer arguments, perhaps of other parts' as well."""
        return of_integer_inputs(self.graph)

    def _exchanges(self, op: int) -> bool:
        """Whether something that an op reads must be exchanged first."""
        ptr, tensors = self.graph.inputs
        return any(
            differs(int(sharding.written[tensors[e]]), int(sharding.read[e]))
            for sharding in self.mesh
            for e in range(int(ptr[op]), int(ptr[op + 1]))
        )


def _outputs(row: SplitRow | None) -> tuple[object, ...]:
    return () if row is None else row.outputs


def _input(row: SplitRow | None, place: int) -> object:
    return None if row is None or place >= len(row.inputs) else row.inputs[place]


def info_of(node: fx.Node) -> TensorInfo | None:
    info = value_of(node)
    return info if isinstance(info, TensorInfo) else None
