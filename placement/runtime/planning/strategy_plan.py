"""`StrategyPlan`: what every rank does under a strategy: its ops in order, exchanges, transfers, and what it stores.

All ranks make the same plan of the same captured step, and so agree without a message on the numbers of exchanges and
the tags of transfers. Rank ``row * K + place``: stage ``row`` of the pipeline, place of the mesh of K places.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from graphs.arrays import IntArray
from graphs.capture.trace import Layout, TensorInfo, row_major
from graphs.errors import StrategyError
from graphs.op_kinds import op_kind
from graphs.opgraph import Phase
from graphs.rows import Shard
from graphs.transforms.derived import Collective, Exchanged
from graphs.transforms.splitting.sharding import SUM, WHOLE
from graphs.transforms.splitting.storage_ops import cast_tensor
from placement.runtime.exchanging.exchanges import Exchange, Member
from placement.runtime.parts.layouts import PartCut, PartLayout, whole
from placement.runtime.planning.grouped_lists import are_ends_of_groups
from placement.runtime.planning.order import sequence
from placement.runtime.planning.values import ALL, ONCE, SUMMED, Anchor, Form, Values, info_of
from placement.runtime.program.consistent_order import state_edges
from placement.runtime.program.transfers import Transfer
from placement.runtime.states.state_parts import StatePart, StateTable


class Crossing(NamedTuple):
    """A value that goes from one stage to another at the same place of the mesh.

    Attributes:
        variant: which value.
        source, target: rows.
        op: of the graph after recomputation, that makes it.
    """

    variant: Form
    source: int
    target: int
    op: int


class Border(NamedTuple):
    """Entries at the edge of a part that the neighbour along an axis reads.

    Attributes:
        op: that reads them, of the graph after recomputation.
        entry: of its ``graph.inputs``.
        axis: of the mesh.
        batch: number of the micro-batch, or ``ONCE``.
        is_before: whether they lie before the reader's own part.
    """

    op: int
    entry: int
    axis: int
    batch: int
    is_before: bool


@dataclass(frozen=True, eq=False)
class StrategyPlan:
    """The program of all ranks under a strategy.

    Attributes:
        values: the captured step under the strategy.
        start_s: when each op of the strategy's graph starts, by name; None: as the simulator has it.
    """

    values: Values
    start_s: Mapping[str, float] | None = None

    @property
    def places(self) -> int:
        return self.values.places

    @cached_property
    def n_rows(self) -> int:
        return len(self.values.rewrite.devices)

    @property
    def is_placement(self) -> bool:
        """Whether stages are devices and nothing is cut: a placement of single ops."""
        return self.values.applied.strategy.is_none

    @property
    def n_ranks(self) -> int:
        return self.n_rows * self.places

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """Name of each rank's device."""
        devices = self.values.applied.problem.cluster.devices
        return tuple(devices[d].name for d in self.values.rewrite.devices.reshape(-1).tolist())

    def rank(self, row: int, place: int) -> int:
        return row * self.places + place

    @cached_property
    def sequence(self) -> IntArray:
        """int64 [n]: ops of ``applied.exchanged`` in one order for all ranks."""
        return sequence(self.values.applied, self.start_s, self._by_states())

    def _by_states(self) -> Iterator[tuple[int, int]]:
        """(op, later op) of ``applied.exchanged`` at one place, of which one writes a state that the other uses.

        Micro-batches that both run for keep to the order of each of them.
        """
        edges = sorted({(a, b) for a, b, _ in state_edges(self.values.step) if a != b})
        involved, exchanged = {op for edge in edges for op in edge}, self.values.applied.exchanged
        part, batch = exchanged.part.tolist(), exchanged.micro_batch.tolist()
        runs: dict[tuple[int, int], dict[int, int]] = {}  # (captured op, place) -> micro-batch -> its run
        for op, (origin, kind) in enumerate(zip(exchanged.origin.tolist(), exchanged.graph.kinds, strict=True)):
            source = self.values.source[origin]
            if source in involved and kind == self.values.graph.kinds[origin] and not self.values.is_again(origin):
                runs.setdefault((source, part[op]), {})[batch[op]] = op
        for (before, after), place in itertools.product(edges, range(self.places)):
            firsts, seconds = runs.get((before, place), {}), runs.get((after, place), {})
            for number, op in firsts.items():
                later = seconds.values() if number < 0 else [seconds[b] for b in (number, ONCE) if b in seconds]
                yield from ((op, other) for other in later)

    @cached_property
    def overwriting(self) -> Mapping[int, int]:
        """Captured op -> one that later writes a state that it uses."""
        return {a: b for a, b, writes in state_edges(self.values.step) if writes and a != b}

    def ops(self, rank: int) -> list[int]:
        """The ops of ``applied.exchanged`` that a rank runs, in order."""
        exchanged = self.values.applied.exchanged
        row, place = divmod(rank, self.places)
        rows = self.values.rewrite.row[exchanged.origin[self.sequence]]
        mine = (rows == row) & (exchanged.part[self.sequence] == place)
        found: list[int] = self.sequence[mine].tolist()
        return found

    @cached_property
    def input_paths(self) -> tuple[str, ...]:
        """Paths of the arguments that ops read."""
        step = self.values.step
        return tuple(name for node, name in step.names.items() if node in step.made_by)

    def input_layout(self, path: str, rank: int) -> PartLayout:
        """The part of an argument, by its path, that is a rank's own: its samples, of all micro-batches."""
        values = self.values
        node = next(node for node, name in values.step.names.items() if name == path and node in values.step.made_by)
        anchor = values.anchors[node]
        tensor = values.result(self.producer_of(anchor), 0)
        assert tensor is not None
        return values.layout(values.given(tensor), rank % self.places)

    # -- transfers --------------------------------------------------------------------------------------------

    @cached_property
    def crossings(self) -> Mapping[Crossing, int]:
        """The first of the tags, one for each place, of every value that goes from stage to stage."""
        values, graph = self.values, self.values.graph
        rows = np.array(values.rows)
        ptr, tensors = graph.inputs
        consumers = np.repeat(np.arange(graph.n_ops), np.diff(ptr))
        producers = graph.tensor_producer[tensors]
        found: dict[Crossing, int] = {}
        for e in np.flatnonzero(rows[consumers] != rows[producers]).tolist():
            op, producer = int(consumers[e]), int(producers[e])
            if producer in values.from_inputs or values.is_gate(e) or self._reads_no_data(op):
                continue
            for batch in self.batches(op):
                variant = values.wanted_by_edge(e, op, batch).have
                every = range(values.micro_batches) if variant.batch == ALL else (variant.batch,)
                for one in every:
                    crossing = Crossing(variant._replace(batch=one), int(rows[producer]), int(rows[op]), producer)
                    found.setdefault(crossing, len(found) * self.places)
        return found

    def _reads_no_data(self, op: int) -> bool:
        """Whether op j looks at the shape of what it reads alone: memory like another's, or random numbers."""
        return op_kind(self.values.graph.kinds[op]).reads_shape_only or self.values.source[op] in self._random_ops

    @cached_property
    def _random_ops(self) -> frozenset[int]:
        """The captured ops of which all that they make is drawn before the step."""
        step = self.values.step
        return frozenset(step.made_by[node] for node in step.random if node in step.made_by) - frozenset(
            op for node, op in step.made_by.items() if node not in step.random
        )

    def batches(self, op: int) -> tuple[int, ...]:
        """The micro-batches for which op j runs apart."""
        return tuple(range(self.values.micro_batches)) if self.values.is_chunked(op) else (ONCE,)

    @cached_property
    def has_borders(self) -> bool:
        """Whether any op reads entries beside its part."""
        return any(sharding.halo.any() for sharding in self.values.mesh)

    @cached_property
    def borders(self) -> Mapping[Border, int]:
        """The first of the tags, one for each place that reads it, of every border."""
        values = self.values
        ptr = values.graph.inputs[0]
        consumers = np.repeat(np.arange(values.graph.n_ops), np.diff(ptr))
        first = len(self.crossings) * self.places
        found: dict[Border, int] = {}
        for a, sharding in enumerate(values.mesh):
            for e in np.flatnonzero(sharding.halo).tolist():
                op = int(consumers[e])
                if not values.is_own_part(e, a):
                    continue
                for batch in self.batches(op):
                    for is_before in (True, False):
                        found[Border(op, e, a, batch, is_before)] = first + len(found) * self.places
        return found

    def transfer(self, crossing: Crossing, place: int) -> Transfer:
        """A crossing at a place. A whole tensor travels as it was captured, strides and all."""
        root, part = self.values.root(crossing.variant), self.values.layout(crossing.variant, place)
        info = root if self.places == 1 and part.is_whole else dense(part.local_shape, root.layout.dtype)
        ends = self.rank(crossing.source, place), self.rank(crossing.target, place)
        tag = self.crossings[crossing] + place
        return Transfer(tag, *ends, self.values.source[crossing.op], info)

    # -- exchanges --------------------------------------------------------------------------------------------

    @cached_property
    def collective_of(self) -> Mapping[int, int]:
        """Op of ``applied.exchanged`` -> number of its collective."""
        return {op: c for c, one in enumerate(self.values.applied.exchanged.collectives) for op in one.ops}

    def exchange(self, number: int, sums_shape: Mapping[int, tuple[int, ...]]) -> Exchange:
        """A collective as ranks carry it out.

        Args:
            sums_shape: of the statistics of each op that has some.
        """
        exchanged = self.values.applied.exchanged
        collective = exchanged.collectives[number]
        first = collective.ops[0]
        row = self.values.rows[int(exchanged.origin[first])]
        places = [int(exchanged.part[op]) for op in collective.ops]
        batch = int(exchanged.micro_batch[first])
        members = tuple(self._member(collective, member, places, batch, sums_shape) for member in collective.members)
        ranks = tuple(self.rank(row, place) for place in places)
        return Exchange(number, ranks, members, exchanged.graph.op_names[first])

    def _member(
        self,
        collective: Collective,
        member: Exchanged,
        places: list[int],
        batch: int,
        sums_shape: Mapping[int, tuple[int, ...]],
    ) -> Member:
        kind, values = collective.kind, self.values
        if member.what == "statistics":
            return Member(kind, whole(sums_shape[member.number]), dtype=torch.float64)
        if member.what in ("gradient", "parameter"):
            state, variant = self.flat_state(member)
            n = values.layout(variant, places[0]).n_elements
            parts = tuple(self.flat(n, place) for place in places)
            if kind == "all_gather":
                info = values.step.program.state_infos[state]
                dtype = (info if member.cast < 0 else values.root(self.cast_form(member))).layout.dtype
                # Below level 3 a rank has the memory of the whole for good, and its own entries lie in it.
                has_room = member.phase == Phase.UPDATE
                return Member(kind, whole((n,)), before=parts, dtype=dtype, is_flat=True, in_place=has_room)
            # Level 1 keeps gradients whole: the sum of a part goes where it was, and nothing is copied.
            dtype = values.root(values.written(member.number)).layout.dtype
            if kind == "all_reduce":  # of the parts of a gradient, which are a reduce-scatter's results
                return Member(kind, whole(parts[0].local_shape), dtype=dtype, is_flat=True)
            return Member(kind, whole((n,)), after=parts, dtype=dtype, is_flat=True, in_place=self.keeps_gradients)
        if any(b > SUM and a == SUM for b, a in zip(member.before, member.after, strict=True)):
            name = values.graph.op_names[int(values.graph.tensor_producer[member.number])]
            raise StrategyError(
                f"what op {name!r} makes is cut, and is to be added to a sum of all of it; take another strategy."
            )
        number = SUMMED if member.is_summed else batch
        before = Form(member.number, -1, member.before, number)
        after = before._replace(codes=member.after)
        dtype = values.root(before).layout.dtype
        of_before, of_after = ([values.layout(one, place) for place in places] for one in (before, after))
        if kind == "all_reduce":
            if are_ends_of_groups(values, member.number):
                return self._ends_of_lists(member.number, len(places), dtype)
            return Member(kind, of_before[0], dtype=dtype)
        if kind == "all_gather":
            self._check_held(before, of_after[0], of_before)
            return Member(kind, of_after[0], before=tuple(of_before), dtype=dtype)
        if kind == "reduce_scatter":
            self._check_held(before, of_before[0], of_after)
            return Member(kind, of_before[0], after=tuple(of_after), dtype=dtype)
        together = before._replace(
            codes=tuple(b if b == a else WHOLE for b, a in zip(member.before, member.after, strict=True))
        )
        return Member(kind, values.layout(together, places[0]), tuple(of_before), tuple(of_after), dtype)

    def _ends_of_lists(self, tensor: int, n_parts: int, dtype: torch.dtype) -> Member:
        """Where the groups of tokens end in the list of each part, one list after the other.

        Where they would end in one list of all parts, which the strategy's graph has, no rank needs: there is none.

        Raises:
            StrategyError: an op that is no product by groups reads the numbers.
        """
        graph = self.values.graph
        readers = graph.consumers_of(tensor).tolist()
        for op in readers:
            if not op_kind(graph.kinds[op]).is_grouped:
                raise StrategyError(
                    f"op {graph.op_names[op]!r} reads where groups of tokens end in a list of all parts, but each part "
                    "has sorted its own; leave out ep, or sp."
                )
        together = whole((n_parts * self.values.root(self.values.written(tensor)).layout.shape[0],))
        shard = Shard(0, n_parts)
        before = tuple(together.cut_by(shard, n_parts, number) for number in range(n_parts))
        return Member("all_gather", together, before=before, dtype=dtype)

    def _check_held(self, variant: Form, together: PartLayout, parts: list[PartLayout]) -> None:
        """Refuse what ranks would gather of a micro-batch that is no stretch of all samples.

        Raises:
            StrategyError: a part is no part of the whole.
        """
        if not all(map(together.holds, parts)):
            name = self.values.graph.op_names[int(self.values.graph.tensor_producer[variant.tensor])]
            raise StrategyError(
                f"what op {name!r} makes of a micro-batch does not lie side by side in the parts of dp, and is needed "
                "whole; leave out the micro-batches, or dp."
            )

    def flat_state(self, member: Exchanged) -> tuple[int, Form]:
        """The state of the program that a flat vector belongs to, as it is kept."""
        values = self.values
        if member.what == "gradient":
            state = self.state_of_gradient[member.number]
        else:
            state = next(s for s, number in values.state_number.items() if number == member.number)
        return state, Form(-1, state, values.state_codes(state))

    def cast_form(self, member: Exchanged) -> Form:
        """The result of a cast of a parameter, whose stored parts are cast and then gathered."""
        return self.values.written(cast_tensor(self.values.graph, member.cast))

    @cached_property
    def casts_of_parts(self) -> frozenset[int]:
        """Ops after recomputation that cast the stored parts of parameters, which are gathered then."""
        collectives = self.values.applied.exchanged.collectives
        return frozenset(member.cast for one in collectives for member in one.members if member.cast >= 0)

    @cached_property
    def gathered_casts(self) -> frozenset[int]:
        """The tensors that `casts_of_parts` write."""
        return frozenset(cast_tensor(self.values.graph, op) for op in self.casts_of_parts)

    @property
    def keeps_gradients(self) -> bool:
        """Whether a rank keeps whole gradients of which it updates a part: ZeRO-1."""
        return self.values.applied.strategy.zero == 1

    @cached_property
    def zero_axis(self) -> int | None:
        """The axis of the mesh along which storage is split."""
        if not self.values.applied.strategy.zero:
            return None
        return next((a for a, sharding in enumerate(self.values.mesh) if sharding.axis.name == "dp"), None)

    @cached_property
    def flattened(self) -> frozenset[int]:
        """States of the program of which each rank stores a stretch of the flat vector; weights cut there are not."""
        axis = self.zero_axis
        if axis is None:
            return frozenset()
        split = {gradient.state for gradient in self.gradients}
        if self.values.applied.strategy.zero == 3:
            split |= {s for s, n in self.values.state_number.items() if self.values.graph.states[n].frozen}
        return frozenset(state for state in split if self.values.state_codes(state)[axis] <= SUM)

    @cached_property
    def gathered(self) -> frozenset[int]:
        """States of the program that are stored in parts, and gathered for every use."""
        return self.flattened if self.values.applied.strategy.zero == 3 else frozenset()

    def flat(self, n_elements: int, place: int) -> PartLayout:
        """The entries of a vector that are stored at a place."""
        assert self.zero_axis is not None
        coordinate = self.values.coordinates(place)[self.zero_axis]
        vector = whole((n_elements,))
        if not n_elements:
            return vector
        return vector.cut_by(Shard(0, n_elements), self.values.sizes[self.zero_axis], coordinate)

    # -- gradients and states ---------------------------------------------------------------------------------

    @cached_property
    def state_named(self) -> Mapping[str, int]:
        return {name: s for s, state in enumerate(self.values.step.program.states) for name in state.names}

    @cached_property
    def gradients(self) -> tuple[Gradient, ...]:
        """Gradients of all parameters that have one: the parameter, its node, and where an update reads it."""
        values = self.values
        step, graph = values.step, values.graph
        index = {name: op for op, name in enumerate(graph.op_names)}
        named = {state.name: state for state in graph.states}
        found = []
        for parameter, node in step.program.trace.gradients:
            state = self.state_named[step.program.trace.states[parameter].name]
            users = named[step.program.states[state].names[0]].users
            update = next(index[user] for user in users if graph.phase[index[user]] == Phase.UPDATE)
            anchor = values.anchors[step.new[node]]
            found.append(Gradient(state, node, update, values.entry(update, anchor)))
        return tuple(found)

    @cached_property
    def gradient_of(self) -> Mapping[int, Gradient]:
        """By the state it is of."""
        return {gradient.state: gradient for gradient in self.gradients}

    @cached_property
    def results(self) -> frozenset[int]:
        """Tensors after recomputation that leave the step."""
        values, step = self.values, self.values.step
        found = {int(values.graph.inputs[1][gradient.entry]) for gradient in self.gradients}
        for node in step.program.trace.results:
            anchor = values.anchors.get(step.new[node])
            if anchor is not None and anchor.state < 0:
                op = self.producer_of(anchor)
                tensor = values.result(op, anchor.slot)
                found |= set() if tensor is None else {tensor}
        return frozenset(found)

    @cached_property
    def outputs(self) -> tuple[OutputParts, ...]:
        """Outputs of a step that is no training step, each tensor with the part that every rank has."""
        if self.values.step.program.train:
            return ()
        return tuple(self._output(self.values.step.new[node]) for node in self.values.step.program.trace.results)

    def _output(self, node: torch.fx.Node) -> OutputParts:
        values, info = self.values, info_of(node)
        anchor = values.anchors.get(node)
        if anchor is None or info is None:
            part = None if info is None else whole(info.layout.shape)
            return OutputParts(node, None, (part,) * self.n_ranks)
        rows: frozenset[int] = frozenset([0])
        if anchor.state >= 0:
            variant, rows = values.kept(anchor.state), self.state_rows[anchor.state]
        else:
            op = self.producer_of(anchor)
            tensor = values.result(op, anchor.slot)
            assert tensor is not None
            variant, rows = values.final(tensor), frozenset([values.rows[op]])
        root = values.root(variant)
        parts = [values.layout(variant, place).viewed(info, root) for place in range(self.places)]
        return OutputParts(
            node, variant, tuple(part if row in rows else None for row in range(self.n_rows) for part in parts)
        )

    def sender_of(self, number: int) -> int | None:
        """The first rank that has all of an output, where every rank has all of it or nothing; else None."""
        output = self.outputs[number]
        held = [rank for rank, part in enumerate(output.parts) if part is not None]
        is_summed = output.variant is not None and SUM in output.variant.codes
        is_all = all(part is None or part.is_whole for part in output.parts)
        return held[0] if is_all and held and not is_summed else None

    def output_transfers(self, number: int) -> dict[int, Transfer]:
        """How an output that `sender_of` a rank has gets to those that have nothing of it: by their ranks."""
        source, output = self.sender_of(number), self.outputs[number]
        if source is None:
            return {}
        info = info_of(output.node)
        assert info is not None
        assert output.variant is not None
        first = len(self.crossings) * self.places + len(self.borders) * self.places + number * self.n_ranks
        op = -1
        if output.variant.tensor >= 0:
            op = self.values.source[int(self.values.graph.tensor_producer[output.variant.tensor])]
        return {
            rank: Transfer(first + rank, source, rank, op, info)
            for rank, part in enumerate(output.parts)
            if part is None
        }

    def gives_output(self, number: int, rank: int) -> bool:
        """Whether a rank is the first of those that have its part of an output."""
        parts = self.outputs[number].parts
        return parts[rank] is not None and parts.index(parts[rank]) == rank

    def output_exchange(self, number: int) -> Exchange:
        """The exchange that gives every rank a whole output: of ranks that have the same part the first gives it."""
        output = self.outputs[number]
        given = [part if self.gives_output(number, rank) else None for rank, part in enumerate(output.parts)]
        shape = next(part.shape for part in output.parts if part is not None)
        dtype = output.dtype
        name = self.first_of_outputs + len(self.outputs) * self.n_ranks + number
        ranks = tuple(range(self.n_ranks))
        if not shape:  # a number: all others give 0
            return Exchange(name, ranks, (Member("all_reduce", whole(()), dtype=dtype),), "an output")
        empty = PartLayout(shape, (PartCut(0, 1, shape[0], 0, 0),))
        parts = tuple(part or empty for part in given)
        return Exchange(name, ranks, (Member("all_gather", whole(shape), before=parts, dtype=dtype),), "an output")

    def ranks_of_sum(self, variant: Form, rank: int) -> tuple[int, ...]:
        """The ranks whose summands make what this rank has of a variant, and this one."""
        row, place = divmod(rank, self.places)
        sizes, mine = self.values.sizes, self.values.coordinates(place)
        free = [range(n) if code == SUM else (c,) for code, n, c in zip(variant.codes, sizes, mine, strict=True)]
        return tuple(
            self.rank(row, int(np.ravel_multi_index(coordinates, sizes)) if sizes else 0)
            for coordinates in itertools.product(*free)
        )

    def producer_of(self, anchor: Anchor) -> int:
        """The op after recomputation whose first run makes an anchor."""
        return self.values.first_run[anchor.op]

    @cached_property
    def summed(self) -> frozenset[int]:
        """Tensors after recomputation that are added up over micro-batches."""
        values = self.values
        if values.chunks is None:
            return frozenset()
        ptr, tensors = values.graph.inputs
        consumers = np.repeat(np.arange(values.graph.n_ops), np.diff(ptr))
        written, read = values.chunks.written[tensors], values.chunks.read
        chunked = np.array([row is not None for row in values.chunks.row])
        is_sum = (written == SUM) & ((read != SUM) | ~chunked[consumers])
        is_sum &= chunked[values.graph.tensor_producer[tensors]]
        results = {
            t for t in self.results if chunked[values.graph.tensor_producer[t]] and values.chunks.written[t] == SUM
        }
        return frozenset(np.unique(tensors[is_sum]).tolist()) | results

    @cached_property
    def losses(self) -> tuple[tuple[int, torch.fx.Node], ...]:
        """Ops after recomputation that compare with labels, each captured op once, and their calls."""
        values = self.values
        kinds = values.rewrite.again.source.kinds
        found = []
        for node, source in values.step.made_by.items():
            is_forward = "backward" not in kinds[source] and node.target is not operator.getitem
            if op_kind(kinds[source]).is_label_loss and is_forward:
                found.append((values.first_run[source], node))
        return tuple(found)

    def ranks_sharing_labels(self, op: int, rank: int) -> tuple[int, ...]:
        """The ranks that have other samples of a loss, op j, than this one, and this one."""
        row, place = divmod(rank, self.places)
        sizes = self.values.sizes
        free = [
            range(size) if sharding.row[op] is not None and self._cuts_input(a, op) else (coordinate,)
            for a, (sharding, size, coordinate) in enumerate(
                zip(self.values.mesh, sizes, self.values.coordinates(place), strict=True)
            )
        ]
        return tuple(
            self.rank(row, int(np.ravel_multi_index(coordinates, sizes)) if sizes else 0)
            for coordinates in itertools.product(*free)
        )

    def _cuts_input(self, axis: int, op: int) -> bool:
        """Whether op j reads a part of any tensor along an axis."""
        ptr = self.values.graph.inputs[0]
        return bool((self.values.mesh[axis].read[ptr[op] : ptr[op + 1]] > SUM).any())

    @property
    def first_own_exchange(self) -> int:
        """The first number of exchanges that are none of the strategy's graph: of the loss, then of labels' weights."""
        return len(self.values.applied.exchanged.collectives)

    @property
    def first_of_outputs(self) -> int:
        """The first number of exchanges of outputs, of summands and then of whole ones."""
        return self.first_own_exchange + 1 + len(self.losses)

    @cached_property
    def state_of_gradient(self) -> Mapping[int, int]:
        """Tensor after recomputation that is a gradient -> the state it is of."""
        tensors = self.values.graph.inputs[1]
        return {int(tensors[gradient.entry]): gradient.state for gradient in self.gradients}

    @cached_property
    def state_rows(self) -> tuple[frozenset[int], ...]:
        """The stages that use each state of the program; of one that none uses the first."""
        values = self.values
        runs: dict[int, set[int]] = {}
        for op, source in enumerate(values.source):
            runs.setdefault(source, set()).add(values.rows[op])
        found = []
        for state in values.step.program.states:
            rows = {row for user in state.users for row in runs.get(user, ())}
            found.append(frozenset(rows or {0}))
        return tuple(found)

    @cached_property
    def states(self) -> StateTable:
        """Table of the states that each rank stores."""
        return tuple(tuple(self._stored(rank)) for rank in range(self.n_ranks))

    def _stored(self, rank: int) -> Iterator[StatePart]:
        row, place = divmod(rank, self.places)
        program = self.values.step.program
        trained = {gradient.state for gradient in self.gradients}
        for s, state in enumerate(program.states):
            if state.kind == "constant" or row not in self.state_rows[s]:
                continue
            part = self.values.layout(Form(-1, s, self.values.state_codes(s)), place)
            flat = None
            if s in self.flattened:
                vector = self.flat(part.n_elements, place)
                flat = vector.runs(0)[0] if vector.runs(0) else (0, 0)
            has_room = flat is not None and s not in self.gathered
            yield StatePart(state.names, part, flat, program.state_infos[s].layout.dtype, s in trained, has_room)


class OutputParts(NamedTuple):
    """A tensor that a step returns.

    Attributes:
        node: of the functional program.
        variant: the form in which ranks have it, before summands are added up; None for one made on the spot.
        parts: of each rank the part that it gives; None for a rank that gives nothing.
    """

    node: torch.fx.Node
    variant: Form | None
    parts: tuple[PartLayout | None, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the output, which may be the real view of a complex tensor."""
        info = info_of(self.node)
        assert info is not None
        return info.layout.dtype


class Gradient(NamedTuple):
    """A gradient of a parameter.

    Attributes:
        state: the parameter, of the program.
        node: of the trace, whose value it is.
        update: op of the graph after recomputation that reads it.
        entry: of ``graph.inputs``, by which that reads it.
    """

    state: int
    node: torch.fx.Node
    update: int
    entry: int


def dense(shape: tuple[int, ...], dtype: torch.dtype) -> TensorInfo:
    """A tensor without gaps."""
    return TensorInfo(Layout(shape, row_major(shape), dtype, "cpu"), 0, 0)
