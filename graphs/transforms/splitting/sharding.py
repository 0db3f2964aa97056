"""How a graph is cut along one axis of a mesh: a row for every op, and what must be exchanged where rows disagree.

Two kinds of axes. Along a *named* axis (batch, sequence, height ...) every op is cut where it has a row of that name,
as data parallelism does; along that of experts the batch is cut where an op has no row of experts. Along a *tensor*
axis weights are cut: matrix products by their columns where they read whole tensors and by their rows where they read
cut ones, all other ops follow at the least cost (Shoeybi et al. 2019, "Megatron-LM"); with ``sequence`` what is left
whole is cut along the sequence (Korthikanti et al. 2023). A named axis may cut weights in some modules: then these are
tensor parallel and all others data parallel on the same devices (Krizhevsky 2014, "One weird trick for parallelizing
convolutional neural networks").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from graphs.arrays import BoolArray, FloatArray
from graphs.op_kinds import op_kind
from graphs.opgraph import OpGraph, Phase
from graphs.records import OWN_FAMILY, SEQUENCE, ByGroups, Shard, SplitRow, Work
from graphs.transforms.splitting.choices import Choice, ChoiceCosts, choice_of
from graphs.transforms.splitting.cuts import (
    EXPERTS,
    HEADS,
    IN_TIME,
    SUM,
    WHOLE,
    Axis,
    Sharding,
    code,
    shares,
    with_whole_tables,
)
from graphs.transforms.splitting.op_states import normalised, reduced_by_readers, states_of, where
from graphs.transforms.splitting.ring_rows import in_ring, turned
from graphs.transforms.splitting.storage_ops import gradient_casts, sums_of_uses, weight_casts


def shard(graph: OpGraph, axis: Axis, among: BoolArray | None = None) -> Sharding:
    """Cut a graph along one axis, op by op in topological order.

    Ops without a fitting row, or with fewer units than parts, stay whole. A state of which one of them needs all is
    kept whole: it is not gathered for a use.

    Args:
        among: bool [n], the ops that may be cut; None for all that the axis allows.
    """
    among, whole = np.ones(graph.n_ops, dtype=np.bool_) if among is None else among, frozenset[int]()
    while True:
        walk = _Walk(graph, axis, among, whole)
        torn = walk.torn()
        if not torn:
            return walk.result()
        whole |= torn


def _has_own_figure(kind: str) -> bool:
    """Whether an op writes, or reads of its forward op, a figure about its part of the batch."""
    facts = op_kind(kind)
    return facts.has_statistics or facts.is_label_loss


class _Walk(ChoiceCosts):
    """Chooses the row of one op after the other."""

    def __init__(self, graph: OpGraph, axis: Axis, among: BoolArray, whole: frozenset[int]) -> None:
        self.graph, self.axis = graph, axis
        ptr, tensors = graph.inputs
        self.input_ptr, self.input_tensor = ptr.tolist(), tensors.tolist()
        self.output_ptr = graph.output_ptr.tolist()
        self.states_of = [*states_of(graph)]
        # An op that reads a cast of a state reads the state: how that is cut is decided once, and its casts follow.
        self.casts = weight_casts(graph)
        self.weights = self._see_through_casts()
        self.wanted: dict[int, set[int]] = {}  # of each cast, how its readers want it
        # An op that writes a gradient before its cast writes the gradient: as the state is cut.
        self.gradients = {int(graph.tensor_producer[t]): (t, *cast) for t, cast in gradient_casts(graph).items()}
        self.available: list[set[int]] = [set() for _ in range(graph.n_tensors)]
        self.written = [WHOLE] * graph.n_tensors
        self.read = [WHOLE] * len(self.input_tensor)
        self.state: list[int | None] = [WHOLE if s in whole else None for s in range(len(graph.states))]
        self.row: list[SplitRow | None] = [None] * graph.n_ops
        self.size = graph.tensor_bytes.astype(float).tolist()
        self.state_bytes = np.array([state.parameter_bytes for state in graph.states], dtype=np.int64)
        self.flops, self.moved = graph.flops.tolist(), graph.bytes_moved.tolist()
        self.phase = graph.phase.tolist()
        is_tensor = where(graph, axis.tensor_modules) if axis.tensor_modules else np.full(graph.n_ops, not axis.words)
        is_cut = where(graph, axis.modules) | (is_tensor & bool(axis.words))
        if axis.name == IN_TIME:  # an update comes once, after all micro-batches
            is_cut &= graph.phase != Phase.UPDATE
            is_cut &= ~(sums_of_uses(graph) & axis.in_stages)
        self.is_tensor, self.is_cut = is_tensor.tolist(), (is_cut & among).tolist()
        self.choices: dict[tuple[object, ...], list[Choice]] = {}
        self.open: dict[int, list[Choice]] = {}  # ops that nothing binds yet, and their rows
        self.producer = graph.tensor_producer.tolist()
        self.tied = self._read_twice()
        self.forward_of = graph.forward_of.tolist()
        self.row_number = graph.row_numbers
        self.kind = list(zip(graph.kinds, self.phase, strict=True))
        self.normalised = normalised(graph) if axis.cuts_weights else (frozenset(),) * graph.n_tensors
        self.is_reduced_by_readers = reduced_by_readers(graph, axis.size).tolist()
        self.chosen: dict[tuple[object, ...], Choice] = {}
        for op in graph.topological_order.tolist():
            self._decide(op)
        for op in list(self.open):  # what only open ops read
            if op in self.open:
                self._take(op, self.open.pop(op)[0])
        for op in self.casts:
            self._take(op, self._like_its_readers(op))

    def _see_through_casts(self) -> dict[int, tuple[int, ...]]:
        """By op, the places of tensors it reads that are casts of states, which from now on are states it uses."""
        state_of = {t: s for op, s in self.casts.items() for t in range(self.output_ptr[op], self.output_ptr[op + 1])}
        found: dict[int, tuple[int, ...]] = {}
        for op in range(self.graph.n_ops) if state_of else ():
            read = self.input_tensor[self.input_ptr[op] : self.input_ptr[op + 1]]
            places = tuple(k for k, t in enumerate(read) if t in state_of and self.graph.tensor_bytes[t])
            if places:
                found[op] = places
                self.states_of[op] = (*(state_of[read[k]] for k in places), *self.states_of[op])
        return found

    def _read_twice(self) -> set[int]:
        """Numbers of the states that several ops of the forward pass use."""
        forward = (self.graph.phase == Phase.FORWARD).tolist()
        count = Counter(s for op, own in enumerate(self.states_of) if forward[op] and op not in self.casts for s in own)
        return {state for state, users in count.items() if users > 1}

    def _like_its_readers(self, op: int) -> Choice:
        """The row of a cast by which it writes what its readers want: the state as it is cut."""
        n_read, tensor = self.input_ptr[op + 1] - self.input_ptr[op], self.output_ptr[op]
        kept = self.state[self.casts[op]] or WHOLE
        wanted = self.wanted.get(tensor, set())
        rows = self._choices(op, n_read) if kept > SUM and self.is_cut[op] else []
        like = (choice for choice in rows if choice.states == [kept] and choice.outputs[0] in wanted)
        return next(like, self._whole(op, n_read))

    def torn(self) -> frozenset[int]:
        """States that are cut though an op that the axis may cut, but does not, needs all of them."""
        among = self.is_tensor if self.axis.tensor_modules else self.is_cut
        whole = (op for op, row in enumerate(self.row) if row is None and among[op])
        used = {s for op in whole if self.phase[op] != Phase.UPDATE for s in self.states_of[op]}
        return frozenset(s for s in used if (self.state[s] or WHOLE) > SUM)

    def result(self) -> Sharding:
        graph, size = self.graph, self.axis.size
        share, written_share = np.ones((graph.n_ops, size)), np.ones((graph.n_tensors, size))
        halo = np.zeros(len(self.read))
        by_extent: dict[tuple[int, bool], FloatArray] = {}

        def shares_of(extent: int, word: str) -> FloatArray:
            key = (extent, word == "batch")
            if key not in by_extent:
                by_extent[key] = shares(extent, size, self.axis.shares if key[1] else ())
            return by_extent[key]

        for op, row in enumerate(self.row):
            if row is None:
                continue
            if row.extent > 1:
                share[op] = self._loaded(shares_of(row.extent, row.axis), row.load)
            for t, part in zip(range(self.output_ptr[op], self.output_ptr[op + 1]), row.outputs, strict=True):
                if isinstance(part, Shard):
                    load = part.load if isinstance(part, ByGroups) else 1.0
                    written_share[t] = self._loaded(shares_of(part.extent, row.axis), load)
            for e, part in zip(range(self.input_ptr[op], self.input_ptr[op + 1]), row.inputs, strict=False):
                if isinstance(part, Shard) and part.halo:
                    halo[e] = part.halo / (part.extent * part.blocks)
        self._read_own_parts()
        states = np.array([WHOLE if kept is None else kept for kept in self.state], dtype=np.int64)
        written, read = (np.array(codes, dtype=np.int64) for codes in (self.written, self.read))
        return Sharding(self.axis, tuple(self.row), written, read, states, share, written_share, halo)

    def _loaded(self, share: FloatArray, load: float) -> FloatArray:
        """Shares where every part has as much as the one with most: all wait for it. No more than everything."""
        return share if load == 1.0 else np.minimum(share * load, 1.0)

    def _read_own_parts(self) -> None:
        """Some ops read the tensors of their own part, however they are cut.

        Ops that make new tensors read a shape alone. The statistics of a batch norm are local, as the forward pass had
        them. The number of labels by which a loss is divided is known from the labels, before the step: nothing waits
        for the losses of the other parts.
        """
        kinds = self.graph.kinds
        for op, row in enumerate(self.row):
            if op_kind(kinds[op]).reads_shape_only:
                for e in range(self.input_ptr[op], self.input_ptr[op + 1]):
                    self.read[e] = self.written[self.input_tensor[e]]
            if row is None or not _has_own_figure(kinds[op]):
                continue
            for e in range(self.input_ptr[op], self.input_ptr[op + 1]):
                t = self.input_tensor[e]
                if self.written[t] == SUM and _has_own_figure(kinds[self.producer[t]]):
                    self.read[e] = SUM

    # -- one op -----------------------------------------------------------------------------------------------

    def _decide(self, op: int) -> None:
        if op in self.casts:
            return
        read, states = [self.input_tensor[e] for e in self._entries(op)], self.states_of[op]
        written = range(self.output_ptr[op], self.output_ptr[op + 1])
        if self.is_tensor[op] and not states and all(self._is_open(t) for t in read):
            self._leave_open(op, self._rows(op, read, states), written)
            return
        # Layers repeat, and with them all that a choice depends on.
        situation = self._situation(op, read, states, written)
        best = self.chosen.get(situation)
        if best is None:
            best = self.chosen[situation] = self._chosen(op, read, states)
        self._take(op, best)

    def _situation(self, op: int, read: list[int], states: Sequence[int], written: range) -> tuple[object, ...]:
        """All that the choice of an op's row depends on."""
        forward = self.forward_of[op]
        mirrored = self.row[forward] if forward >= 0 else None
        return (
            self.row_number[op],
            self.weights.get(op, ()),
            self.kind[op],
            self.is_cut[op],
            self.is_tensor[op],
            self.is_reduced_by_readers[op],
            self.flops[op],
            self.moved[op],
            None if mirrored is None else (mirrored.axis, mirrored if self.axis.is_ring else None),
            *((self.size[t], frozenset(self.available[t]), self.normalised[t], self._is_open(t)) for t in read),
            *((self.state[s], s in self.tied) for s in states),
            *((self._part_written(t) for t in read) if self.axis.is_ring else ()),
            self._gradient_state(op),
            self.row_number[self.gradients[op][1]] if op in self.gradients else -1,
            *((self.size[t], self.normalised[t]) for t in written),
            *(self.state[s] for s in (() if forward < 0 or states else self.states_of[forward])),
        )

    def _chosen(self, op: int, read: list[int], states: Sequence[int]) -> Choice:
        rows = self._rows(op, read, states)
        if self.axis.by_heads and not states and (heads := self._of_heads(op, rows, read)):
            return min(heads, key=lambda choice: self.exchange_s(choice, read))
        named = [choice for choice in rows if choice.row is not None and choice.row.axis in self.axis.words]
        if self.axis.has_experts and not self.axis.words:
            by_experts = [choice for choice in rows if choice.row is not None and choice.row.axis == EXPERTS]
            if by_experts:
                return min(by_experts, key=lambda choice: self.exchange_s(choice, read))
        if self.axis.is_ring and (ringed := self._in_ring(op, named, read)) is not None:
            return ringed
        if named and not self.is_tensor[op]:
            return min(named, key=lambda choice: (self._rank(choice), self.exchange_s(choice, read)))
        return self._followed(op, rows, read)

    def _of_heads(self, op: int, rows: list[Choice], read: list[int]) -> list[Choice]:
        """Rows of heads for a core of attention, and for ops after one that read heads as they are cut."""
        heads = [choice for choice in rows if choice.row is not None and choice.row.axis == HEADS]
        is_core = bool(op_kind(self.graph.kinds[op]).attention_core)
        return heads if is_core else [choice for choice in heads if self.fits(choice, read)]

    def _in_ring(self, op: int, named: list[Choice], read: list[int]) -> Choice | None:
        """The row of attention whose keys and values go round, which reads them as they are cut; None for none."""
        row = next((choice.row for choice in named if choice.row is not None and choice.row.axis == SEQUENCE), None)
        forward = self.forward_of[op]
        is_backward = row is not None and self.graph.work[op] == Work.ATTENTION_BACKWARD
        if row is None or (is_backward and turned(self.graph, forward, self.row[forward]) is None):
            return None
        made = [self._part_written(t) for t in read]
        ringed = in_ring(self.graph, op, row, made, self.axis.size)
        return None if ringed is None else choice_of(ringed, len(read))

    def _part_written(self, tensor: int) -> Shard | None:
        """The stretch of a sequence along which a tensor is written cut; None where it is not."""
        op = self.producer[tensor]
        row = self.row[op]
        part = None if row is None or row.axis != SEQUENCE else row.outputs[tensor - self.output_ptr[op]]
        return part if isinstance(part, Shard) else None

    def _take(self, op: int, best: Choice) -> None:
        """Make a row the op's, and close what it reads."""
        states, row = self.states_of[op], best.row
        written = range(self.output_ptr[op], self.output_ptr[op + 1])
        for k in self.weights.get(op, ()):
            e = self.input_ptr[op] + k
            self.read[e] = WHOLE if row is None else code(row.inputs[k], row.axis)
            self.wanted.setdefault(self.input_tensor[e], set()).add(self.read[e])
        for e, need in zip(self._entries(op), best.tensors, strict=True):
            t = self.input_tensor[e]
            self._close(t, need)
            self.read[e] = need
            self.available[t].add(need)
        for s, need in zip(states, best.states, strict=True):
            if self.state[s] is None or need > SUM:
                self.state[s] = WHOLE if need == SUM else need
        for t, made in zip(written, best.outputs, strict=True):
            self.written[t] = made
            self.available[t].add(made)
        self.row[op] = best.row

    def _entries(self, op: int) -> list[int]:
        """Entries of ``graph.inputs`` of an op that are no weights."""
        first, weights = self.input_ptr[op], self.weights.get(op, ())
        return [e for e in range(first, self.input_ptr[op + 1]) if e - first not in weights]

    # -- random masks and the like: cut as the first reader wants them, since every part can make its own -----------

    def _is_open(self, tensor: int) -> bool:
        return self.producer[tensor] in self.open

    def _leave_open(self, op: int, rows: list[Choice], written: range) -> None:
        whole = self._whole(op, self.input_ptr[op + 1] - self.input_ptr[op])
        fitting = [choice for choice in self._of_axis(rows) if SUM not in choice.outputs]
        self.open[op] = [whole, *fitting]
        for number, t in enumerate(written):
            self.available[t] = {choice.outputs[number] for choice in self.open[op]}

    def _close(self, tensor: int, need: int) -> None:
        """Decide on the row of an open op, and of those that it reads from, by what is needed of one of its tensors."""
        op = self.producer[tensor]
        rows = self.open.pop(op, None)
        if rows is None:
            return
        number = tensor - self.output_ptr[op]
        fitting = (choice for choice in rows if choice.outputs[number] == need)
        chosen = next(fitting, rows[0])
        for t in range(self.output_ptr[op], self.output_ptr[op + 1]):
            self.available[t] = set()
        self._take(op, chosen)

    def _of_axis(self, rows: list[Choice]) -> list[Choice]:
        """Rows for a tensor axis: those that do not cut the batch or another dimension with an axis of its own."""
        own = ("sequence",) if self.axis.sequence else ()
        return [c for c in rows if c.row is None or c.row.axis not in OWN_FAMILY or c.row.axis in own]

    def _rows(self, op: int, read: list[int], states: Sequence[int]) -> list[Choice]:
        """The rows that an op may take."""
        if not self.is_cut[op]:
            return []
        rows = [
            choice
            for choice in self._choices(op, len(read))
            if self._keeps(choice, states)
            and self._writes_as_kept(op, choice)
            and not self._adds_up_stretches(choice, read)
        ]
        if not self.is_tensor[op] or op_kind(self.graph.kinds[op]).is_product:
            return rows
        tensors = (*read, *range(self.output_ptr[op], self.output_ptr[op + 1]))
        return [choice for choice in rows if not self._cuts_normalised(choice, tensors, self.weights.get(op, ()))]

    def _cuts_normalised(self, choice: Choice, tensors: tuple[int, ...], weights: tuple[int, ...]) -> bool:
        """Whether it cuts a dimension that a norm reads, and not into units of another word."""
        row = choice.row
        if row is None or row.axis in OWN_FAMILY:
            return False
        read = row.inputs[: len(choice.tensors) + len(weights)]
        parts = (*(part for k, part in enumerate(read) if k not in weights), *row.outputs)
        return any(
            isinstance(part, Shard) and part.dim in self.normalised[t] for t, part in zip(tensors, parts, strict=True)
        )

    def _choices(self, op: int, n_read: int) -> list[Choice]:
        """The rows of an op that allow as many parts as there are."""
        rows = self.graph.split_rows[op]
        is_tensor, weights = self.is_tensor[op], self.weights.get(op, ())
        n_read += len(weights)
        is_update = self.phase[op] == Phase.UPDATE
        if is_update:  # of the whole table it needs the whole gradient
            rows = tuple(row for row in rows if with_whole_tables(row, n_read) is row)
        by_groups = is_tensor and op_kind(self.graph.kinds[op]).is_grouped
        key = (self.row_number[op], is_update, n_read, is_tensor, by_groups, weights)
        found = self.choices.get(key)
        if found is None:
            found = self.choices[key] = [
                choice_of(row, n_read, weights)
                for row in (with_whole_tables(each, n_read) for each in rows)
                if (row.extent >= self._parts(row, is_tensor) or row.extent == 1)
                and (
                    self.axis.has_experts or not (is_tensor and row.axis == EXPERTS and (by_groups or row.is_by_groups))
                )
            ]
        return found

    def _parts(self, row: SplitRow, is_tensor: bool) -> int:
        """Into how many parts the row must go: other axes may cut the same dimension, but none that of weights."""
        if row.axis == EXPERTS:
            return max(self.axis.size, self.axis.expert_parts)
        return max(self.axis.size, self.axis.parts if not is_tensor or row.axis in OWN_FAMILY else 0)

    def _rank(self, choice: Choice) -> int:
        """Place among the words of the axis: along that of experts the batch is cut only where there are none."""
        return -1 if choice.row is None else self.axis.words.index(choice.row.axis)

    def _keeps(self, choice: Choice, states: Sequence[int]) -> bool:
        """Whether states stay as they are kept. A summand of a gradient is written where the whole state is."""
        return all(
            self.state[s] is None or self.state[s] == (WHOLE if need == SUM else need)
            for s, need in zip(states, choice.states, strict=True)
        )

    def _gradient_state(self, op: int) -> int:
        """The code of the state whose gradient an op writes before its cast; WHOLE where it writes none."""
        return WHOLE if op not in self.gradients else self.state[self.gradients[op][2]] or WHOLE

    def _writes_as_kept(self, op: int, choice: Choice) -> bool:
        """Whether a gradient that is to be cast is written as its state is kept, or a summand of it."""
        if op not in self.gradients:
            return True
        tensor, cast, _ = self.gradients[op]
        made, kept = choice.outputs[tensor - self.output_ptr[op]], self._gradient_state(op)
        if kept <= SUM:
            return bool(made <= SUM)
        return any(one.tensors == [made] and one.states == [kept] for one in self._choices(cast, 1))

    def _adds_up_stretches(self, choice: Choice, read: list[int]) -> bool:
        """Whether it takes for a summand what is written in stretches, of which no exchange makes one."""
        return any(
            need == SUM and self.written[t] > SUM and not self._is_open(t)
            for t, need in zip(read, choice.tensors, strict=True)
        )

    def _followed(self, op: int, rows: list[Choice], read: list[int]) -> Choice:
        """The cheapest row where there is no named one; weights are cut along a tensor axis."""
        whole = self._whole(op, len(read))
        if not self.is_tensor[op]:
            exact = [choice for choice in rows if self.fits(choice, read)]
            return min(exact, key=lambda choice: self.cost_s(op, choice, read), default=whole)
        # An op that uses a cut state is cut as the state is, if it can be.
        kept = [self.state[s] or WHOLE for s in self.states_of[op]]
        is_bound = bool(rows) and max([*kept, self._gradient_state(op)]) > SUM
        uncut = [] if is_bound else [whole]
        usual = self._of_axis(rows)
        if self._is_cut_loss(op, read) and not any(self.fits(choice, read) for choice in usual):
            others = [choice for choice in rows if choice not in usual]
            return min([*uncut, *usual, *others], key=lambda choice: self.exchange_s(choice, read))
        mirrored = [choice for choice in rows if choice not in usual and self._mirrors(op, choice)]
        if mirrored:
            return min(mirrored, key=lambda choice: self.exchange_s(choice, read))
        of_weights = next((choice for choice in rows if self._is_of_weights(op, choice, read)), None)
        if of_weights is not None:
            return of_weights
        rows = [choice for choice in rows if choice in usual or self._follows_cut(choice, read)]
        if self.phase[op] == Phase.FORWARD and self._is_product(op):
            narrow = next((choice for choice in rows if self._is_narrow(op, choice, read)), None)
            if narrow is not None:
                return narrow
            cut = [choice for choice in rows if any(need > SUM for need in choice.states)]
            if cut:
                return min(cut, key=lambda choice: self.product_s(op, choice, read))
        # Summands that are added up anyway are exchanged once, as their sum.
        added = [choice for choice in rows if len(read) > 1 and set(choice.tensors) == {SUM}]
        if self.axis.sequence and not any(self.fits(choice, read) for choice in added):
            along = [choice for choice in rows if choice.row is not None and choice.row.axis == "sequence"]
            # Tensors made of whole tensors, such as masks and rotary tables, stay whole: their readers take a stretch.
            if self._is_of_whole(op, read):
                rows = [choice for choice in rows if choice not in along]
            elif along:
                is_sum = any(self.available[t] == {SUM} for t in read)
                if is_sum or not any(self.fits(choice, read) for choice in rows):
                    if not is_sum:  # what is cut stays so where the rest, such as the weights of experts, is small
                        along = [*along, *(choice for choice in rows if self._follows_cut(choice, read))]
                    return min(along, key=lambda choice: self.exchange_s(choice, read))
        return min([*uncut, *rows] or [whole], key=lambda choice: self.cost_s(op, choice, read))

    def _is_of_whole(self, op: int, read: list[int]) -> bool:
        """Whether it reads states or tensors, and those are whole. Noise that is drawn again waits for an empty one."""
        filled = [t for t in read if self.size[t]]
        is_whole = all(self._is_open(t) or self.available[t] == {WHOLE} for t in filled)
        return is_whole and bool(filled or self.states_of[op])

    def _follows_cut(self, choice: Choice, read: list[int]) -> bool:
        """Whether it reads a tensor as it is cut that is nowhere whole."""
        return any(
            need > SUM and need in self.available[t] and WHOLE not in self.available[t]
            for t, need in zip(read, choice.tensors, strict=True)
        )

    def _is_narrow(self, op: int, choice: Choice, read: list[int]) -> bool:
        """Whether the parts of a sequence are read as they are, by weights that are so few that each part has them all.

        It is so of a router. Weights that are cut take a gather of what is read, forward and backward, and a sum of its
        gradient; weights that are not, a sum of theirs and the same of the results.
        """
        if choice.row is None or choice.row.axis != SEQUENCE or not self.fits(choice, read):
            return False
        if any(WHOLE in self.available[t] for t in read):
            return False
        weights = float(self.state_bytes[list(self.states_of[op])].sum())
        made = sum(self.size[self.output_ptr[op] : self.output_ptr[op + 1]])
        return bool(3 * made + 4 * weights < 3 * sum(self.size[t] for t in read))

    def _mirrors(self, op: int, choice: Choice) -> bool:
        """Whether it cuts an op of the backward pass as its forward op is cut."""
        forward = self.forward_of[op]
        row = self.row[forward] if forward >= 0 else None
        return row is not None and choice.row is not None and row.axis == choice.row.axis

    def _is_of_weights(self, op: int, choice: Choice, read: list[int]) -> bool:
        """Whether it writes the summand of a gradient as the weights are kept, of a table that several ops use."""
        forward = self.forward_of[op]
        kept = [] if forward < 0 or self.states_of[op] else [self.state[s] or WHOLE for s in self.states_of[forward]]
        is_there = all(need in self.available[t] or need == WHOLE for t, need in zip(read, choice.tensors, strict=True))
        return is_there and max(kept, default=WHOLE) > SUM and choice.outputs == kept and self._mirrors(op, choice)

    def _is_cut_loss(self, op: int, read: list[int]) -> bool:
        """Whether it reads a tensor that is cut, and the forward pass makes but little of its results, as of logits.

        Each part may then have other samples of them, which takes less to exchange than all samples everywhere. The
        squares of an RMSNorm are no such results, nor are those of a product whose weights are to be cut.
        """
        if self._is_product(op) or any(self.normalised[t] for t in range(self.output_ptr[op], self.output_ptr[op + 1])):
            return False
        return self.is_reduced_by_readers[op] and any(
            WHOLE not in have and max(have) > SUM for have in map(self.available.__getitem__, read)
        )

    def _whole(self, op: int, n_read: int) -> Choice:
        """Every part does all of the op; its states are where they are kept, gathered if need be."""
        kept = [WHOLE if (now := self.state[s]) is None else now for s in self.states_of[op]]
        return Choice(None, [WHOLE] * n_read, kept, [WHOLE] * (self.output_ptr[op + 1] - self.output_ptr[op]))

    def _is_product(self, op: int) -> bool:
        return bool(self.states_of[op]) and op_kind(self.graph.kinds[op]).is_product
