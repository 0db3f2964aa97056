"""`Reader`: what a rank reads, wherever it comes from: made here, stored, sent by another stage, or exchanged."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from graphs.capture.trace import TensorInfo, flat, value_of
from graphs.errors import StrategyError
from graphs.op_kinds import op_kind
from graphs.opgraph import Phase
from graphs.transforms.derived import Exchanged
from placement.runtime.calls.local_calls import Extras, LocalCall, local_call
from placement.runtime.exchanging.exchanges import Exchange
from placement.runtime.parts.layouts import PartLayout, whole
from placement.runtime.planning.strategy_plan import Crossing, Gradient, StrategyPlan, dense
from placement.runtime.planning.values import ALL, ONCE, SUMMED, Form, Wanted, info_of
from placement.runtime.program.device_layout import Key
from placement.runtime.program.functional import after, uninitialised
from placement.runtime.program.routines import under_autocast
from placement.runtime.program.transfers import Transfer, receive, send
from placement.runtime.writing.glue import Join, TakePart, as_captured, begin, finish, flattened, nothing_like

_IDENTITIES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default}


def _is_copy(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.clone.default


class Reader:
    """Writes the lines by which a rank gets what its ops read."""

    def __init__(self, plan: StrategyPlan, rank: int) -> None:
        self._plan, self._values, self._rank = plan, plan.values, rank
        self._row, self._place = divmod(rank, plan.places)
        self._step, self._graph = plan.values.step, plan.values.graph
        self._exchanged = plan.values.applied.exchanged
        self._code = fx.Graph()
        self._endpoint = self._code.placeholder("endpoint")
        self._collectives = self._last_taken = self._code.placeholder("collectives")
        self._constants: dict[str, Any] = {}
        self._taken: dict[Key, fx.Node] = {}
        self._number = {node: i for i, node in enumerate(self._step.graph.nodes)}
        self._made: dict[tuple[int, int], dict[fx.Node, fx.Node]] = {}  # by op j and micro-batch
        self._roots: dict[Form, fx.Node] = {}  # tensors and states in the forms that are here
        self._reads: dict[tuple[Wanted, bool], fx.Node] = {}
        self._views: dict[tuple[fx.Node, Wanted, tuple[int, int] | None], fx.Node] = {}
        self._run_of = ONCE, ONCE  # the op j and the micro-batch that are being written
        self._literals: dict[fx.Node, fx.Node] = {}
        self._pending: dict[Any, tuple[fx.Node, int]] = {}  # what an exchange will give
        self._gathers: list[int] = []  # exchanges of parameters that were updated, in order
        self._n_gathered = 0  # how many of these have begun
        self._gathered_by: dict[Form, int] = {}
        # One exchange of gradients at a time: it holds what was given, and as much again on its way.
        self._open: fx.Node | None = None
        self._finished: dict[fx.Node, fx.Node] = {}
        self._sums: dict[int, tuple[fx.Node, int]] = {}  # of micro-batches so far, and of how many
        self._statistics: dict[int, fx.Node] = {}
        self._labels: dict[int, fx.Node] = {}
        self._calls: dict[Any, LocalCall] = {}
        self._exchanges: dict[int, Exchange] = {}
        self._transfers: dict[int, Transfer] = {}
        self._outgoing: dict[Form, list[Crossing]] = {}
        for crossing in plan.crossings:
            if crossing.source == self._row:
                self._outgoing.setdefault(crossing.variant, []).append(crossing)
        self._casts: dict[int, fx.Node] = {}
        self._ops: list[int] = []
        self._gives: list[tuple[Key, fx.Node]] = []

    def _local(
        self,
        node: fx.Node,
        parts: Mapping[fx.Node, PartLayout],
        outputs: tuple[PartLayout | None, ...],
        extras: Extras,
    ) -> LocalCall:
        """`local_call`, each once: micro-batches are alike."""
        is_special = extras.label_weight is not None or extras.sums is not None or bool(extras.borders or extras.lists)
        if is_special:
            return local_call(node, parts, outputs, extras)
        key = node, tuple(parts.items()), outputs
        if key not in self._calls:
            self._calls[key] = local_call(node, parts, outputs, extras)
        return self._calls[key]

    def _emitted(self, node: fx.Node, call: LocalCall, inputs: Mapping[fx.Node, fx.Node]) -> fx.Node:
        args, kwargs = fx.map_arg((call.args, call.kwargs), lambda n: inputs.get(n, n))
        target: Any = as_captured(node, call.target)
        if "autocast" in node.meta:
            return self._code.call_function(under_autocast, (node.meta["autocast"], target, *args), kwargs)
        return self._code.call_function(target, args, kwargs)

    def _argument(
        self, node: fx.Node, op: int, batch: int, outputs: tuple[PartLayout | None, ...] = ()
    ) -> tuple[fx.Node, PartLayout | None]:
        """A node's value as op j reads it, and the part that it is; None for no tensor."""
        info = info_of(node)
        if node in self._step.random and node not in self._step.made_by:
            return self._take(("drawn", self._number[node])), whole(info.layout.shape) if info else None
        anchor = self._values.anchors.get(node)
        if info is not None and self._reads_shape(op) and outputs and outputs[0] is not None:
            part = outputs[0] if outputs[0].shape == info.layout.shape else whole(info.layout.shape)
            return self._blank(part, info.layout.dtype), part
        if anchor is None:
            if node.target is uninitialised and outputs and outputs[0] is not None:
                call = local_call(node, {}, outputs[:1])
                return self._emitted(node, call, {}), outputs[0]
            return self._literal(node), whole(info.layout.shape) if info else None
        wanted = self._values.wanted(anchor, op, batch)
        if anchor.state in self._plan.gathered or wanted.have.tensor in self._plan.gathered_casts:
            if self._needs_no_weight(op, wanted):
                part = self._values.layout(wanted.want, self._place)
                return self._blank(part, self._values.root(wanted.want).layout.dtype), part
            wanted = self._gathered_state(wanted, op, batch)
        parts = self._parts_of(node, wanted)
        return self._view(node, wanted), parts[0] if parts else None

    def _reads_shape(self, op: int) -> bool:
        return op_kind(self._graph.kinds[op]).reads_shape_only

    def _parts_of(self, node: fx.Node, wanted: Wanted) -> tuple[PartLayout | None, ...]:
        """The part that each tensor of a node's value is, of a root or a view of it."""
        layout, root = self._values.layout(wanted.want, self._place), self._values.root(wanted.want)
        infos = flat(value_of(node))
        return tuple(layout.viewed(info, root) if isinstance(info, TensorInfo) else None for info in infos)

    def _blank(self, part: PartLayout, dtype: torch.dtype) -> fx.Node:
        """Memory of a part's size, for what reads no more than that."""
        layout = dense(part.local_shape, dtype).layout
        return self._code.call_function(uninitialised, (*layout[:3], torch.device(layout.device)))

    def _needs_no_weight(self, op: int, wanted: Wanted) -> bool:
        """Whether an op only makes the gradient of a gathered weight, for which a convolution reads none of it."""
        if "convolution_backward" not in self._graph.kinds[op]:
            return False
        have = wanted.have._replace(phase=int(Phase.BACKWARD))
        return not any(have._replace(batch=n) in self._pending for n in (ONCE, *range(self._values.micro_batches)))

    def _gathered_state(self, wanted: Wanted, op: int, batch: int) -> Wanted:
        """A parameter that is gathered for its use: for this pass, else for the other.

        An op that runs once reads what is gathered for the first micro-batch.
        """
        for phase in (int(self._graph.phase[op]), int(Phase.FORWARD), int(Phase.BACKWARD)):
            for number in (batch, ONCE, 0):
                have = wanted.have._replace(phase=phase, batch=number)
                if have in self._pending or have in self._roots:
                    return wanted._replace(have=have)
        states, tensor = self._step.program.states, wanted.have.tensor
        name = (
            states[wanted.have.state].names[0]
            if tensor < 0
            else self._graph.op_names[int(self._graph.tensor_producer[tensor])]
        )
        raise StrategyError(
            f"op {self._graph.op_names[op]!r} reads {name!r}, which the strategy does not gather for it; take a lower "
            "level than zero3."
        )

    def _view(self, node: fx.Node, wanted: Wanted) -> fx.Node:
        """A node that is a root in some form, or a view of it."""
        if node in self._step.counted and self._values.layout(wanted.want, self._place).is_whole:
            return self._literal(node)
        if node in self._step.made_by or node in self._step.state_of or node in self._step.state_writes:
            return self._result(node, wanted)
        key = node, wanted, self._run_of if self._is_overwritten(node) else None
        if key in self._views:
            return self._views[key]
        if node in self._values.blanks:
            blank = self._values.layout(wanted.want, self._place), self._values.root(wanted.want).layout.dtype
            self._views[key] = self._blank(*blank)
            return self._views[key]
        self._views[key] = self._viewed(node, wanted, self._view)
        return self._views[key]

    def _viewed(self, node: fx.Node, wanted: Wanted, seen: Callable[[fx.Node, Wanted], fx.Node]) -> fx.Node:
        """The call that makes a view, of ``seen`` of what it is a view of."""
        base = next(n for n in node.all_input_nodes if n in self._values.anchors)
        inputs = {n: seen(n, wanted) if n is base else self._literal(n) for n in node.all_input_nodes}
        if node.target in _IDENTITIES or node.target is after:
            return inputs[base]
        outputs, base_parts = self._parts_of(node, wanted), self._parts_of(base, wanted)
        parts = {n: whole(info.layout.shape) for n in inputs if n is not base and (info := info_of(n)) is not None}
        parts |= {base: base_parts[0]} if base_parts[:1] != () and base_parts[0] is not None else {}
        return self._emitted(node, self._local(node, parts, outputs, Extras()), inputs)

    def _is_overwritten(self, node: fx.Node) -> bool:
        """Whether a node is a copy that one call writes into, or a view of it; each run of the call has its own."""
        if node in self._step.overwrites:
            return node not in self._step.made_by
        if node in self._step.made_by or node.target is after or not node.all_input_nodes:
            return False
        return any(self._is_overwritten(n) for n in node.all_input_nodes if n in self._values.anchors)

    def _result(self, node: fx.Node, wanted: Wanted) -> fx.Node:
        """An op's result, or a state; for a tensor that a call wrote through a view, that view."""
        return self._seen_through(node.args[0], wanted) if self._step.is_view(node) else self._read(wanted)  # type: ignore[arg-type]

    def _seen_through(self, view: fx.Node, wanted: Wanted) -> fx.Node:
        """A view that a call wrote through, of what it has made of the memory that lies behind."""
        if view in self._step.overwrites or view in self._step.state_of:
            return self._read(wanted)
        if self._step.is_view(view):
            return self._seen_through(view.args[0], wanted)  # type: ignore[arg-type]
        return self._viewed(view, wanted, self._seen_through)

    def _read(self, wanted: Wanted) -> fx.Node:
        """The part of a root that is read."""
        is_zero = self._values.is_zero_at(wanted, self._place)
        key = wanted, is_zero
        if key not in self._reads:
            value = self._value(wanted.have)
            have, want = (self._values.layout(one, self._place) for one in wanted[:2])
            value = self._part(value, have, want)
            self._reads[key] = self._code.call_function(nothing_like, (value,)) if is_zero else value
        return self._reads[key]

    def _part(self, value: fx.Node, have: PartLayout, want: PartLayout) -> fx.Node:
        if have.coarse_cuts == want.coarse_cuts:
            return value
        if not have.holds(want):
            raise StrategyError(
                f"op {self._graph.op_names[self._run_of[0]]!r} reads a part of a tensor that its rank has not; this "
                "strategy cannot be run."
            )
        return self._code.call_function(TakePart(have, want), (value,))

    def _value(self, variant: Form) -> fx.Node:
        """A tensor or state in a form that this rank makes, gets or has."""
        if variant not in self._roots:
            self._roots[variant] = self._found(variant)
        return self._roots[variant]

    def _found(self, variant: Form) -> fx.Node:
        if variant in self._gathered_by:
            self._begin_gathers(self._gathered_by[variant] + 2)
        if variant in self._pending:
            value = self._arrived(variant)
            shape = self._values.layout(variant, self._place).local_shape
            is_flat = variant.state >= 0 or variant.tensor in self._plan.gathered_casts
            return self._code.call_function(torch.ops.aten.view.default, (value, list(shape))) if is_flat else value
        if variant.state >= 0:
            return self._take(("state", self._step.program.states[variant.state].names[0]))
        if variant.batch == ALL:
            return self._side_by_side(variant)
        table = self._values.table(variant.tensor)
        if table is not None:
            state = self._take(("state", self._step.program.states[table].names[0]))
            have, want = (self._values.layout(v, self._place) for v in (self._values.kept(table), variant))
            return self._part(state, have, want)
        if variant in self._exchange_of:
            self._exchange(*self._exchange_of[variant])
            return self._arrived(variant)
        producer = int(self._graph.tensor_producer[variant.tensor])
        if self._graph.kinds[producer] == "input":
            return self._input(variant, producer)
        is_own = producer in self._values.from_inputs
        is_here = self._values.rows[producer] == self._row or is_own
        is_early = is_here and (is_own or bool(self._values.of_integers[producer]))
        if is_early:
            self._compute(producer, variant.batch)
            if variant in self._roots:
                return self._roots[variant]
        if not is_here:
            return self._received(variant, producer)
        raise StrategyError(
            f"what op {self._graph.op_names[producer]!r} makes is read before it is there; this strategy cannot be run."
        )

    def _side_by_side(self, variant: Form) -> fx.Node:
        """Results of all micro-batches, put together."""
        every = [variant._replace(batch=batch) for batch in range(self._values.micro_batches)]
        parts = tuple(self._values.layout(one, self._place) for one in every)
        values = [self._value(one) for one in every]
        together = self._values.layout(variant, self._place)
        if parts[0].coarse_cuts == together.coarse_cuts:
            return values[0]
        if sum(part.n_elements for part in parts) != together.n_elements or not all(map(together.holds, parts)):
            name = self._graph.op_names[int(self._graph.tensor_producer[variant.tensor])]
            raise StrategyError(
                f"the parts that micro-batches have of what op {name!r} makes do not lie side by side; leave out the "
                "micro-batches, or cut the batch by dp alone."
            )
        return self._code.call_function(Join(parts, together), tuple(values))

    def _input(self, variant: Form, producer: int) -> fx.Node:
        step = self._step
        node = next(n for n, op in step.made_by.items() if op == self._values.source[producer])
        given = self._values.given(variant.tensor)
        have, want = (self._values.layout(one, self._place) for one in (given, variant))
        return self._part(self._take(("input", step.names[node])), have, want)

    def _literal(self, node: fx.Node) -> fx.Node:
        """A node that is made on the spot, whole."""
        if node not in self._literals:
            if node in self._step.state_of:
                found = self._take(("state", self._step.names[node]))
            elif node.op == "get_attr":
                name = f"constant_{len(self._constants)}"
                self._constants[name] = operator.attrgetter(str(node.target))(node.graph.owning_module)
                found = self._code.get_attr(name)
            elif node in self._step.made_by:
                raise StrategyError(
                    f"op {self._graph.op_names[self._step.made_by[node]]!r} makes a number that decides what others "
                    "do; this strategy cannot be run."
                )
            else:
                inputs = {n: self._literal(n) for n in node.all_input_nodes}
                first = node.args[0] if node.args else None
                if node in self._step.overwrites and isinstance(first, fx.Node) and not _is_copy(node):
                    # A counter goes on from the value that it had when the step began, for all its readers.
                    inputs[first] = self._code.call_function(torch.ops.aten.clone.default, (inputs[first],))
                found = self._emitted(node, LocalCall(node.target, node.args, dict(node.kwargs)), inputs)  # type: ignore[arg-type]
            self._literals[node] = found
        return self._literals[node]

    def _take(self, key: Key) -> fx.Node:
        if key not in self._taken:
            with self._code.inserting_after(self._last_taken):
                self._last_taken = self._code.placeholder(f"{key[0]}_{len(self._taken)}")
            self._taken[key] = self._last_taken
        return self._taken[key]

    def _send(self, variant: Form) -> None:
        for crossing in self._outgoing.get(variant, ()):
            tag = self._plan.crossings[crossing] + self._place
            self._transfers[tag] = self._plan.transfer(crossing, self._place)
            self._code.call_function(send, (self._endpoint, tag, self._value(variant)))

    def _received(self, variant: Form, producer: int) -> fx.Node:
        crossing = Crossing(variant, self._values.rows[producer], self._row, producer)
        tag = self._plan.crossings[crossing] + self._place
        self._transfers[tag] = self._plan.transfer(crossing, self._place)
        return self._code.call_function(receive, (self._endpoint, tag))

    def _begin(self, exchange: Exchange, values: Sequence[fx.Node]) -> fx.Node:
        self._exchanges[exchange.number] = exchange
        return self._code.call_function(begin, (self._collectives, exchange.number, *values))

    def _arrived(self, key: Any) -> fx.Node:
        handle, place = self._pending[key]
        return self._code.call_function(operator.getitem, (self._finish(handle), place))

    def _finish(self, handle: fx.Node) -> fx.Node:
        if handle not in self._finished:
            self._finished[handle] = self._code.call_function(finish, (self._collectives, handle))
        return self._finished[handle]

    @cached_property
    def _exchange_of(self) -> dict[Form, tuple[int, int]]:
        """Results of this rank's exchanges of integers that come from arguments alone -> number and micro-batch.
        Divisors of losses are counted before the step, and all ranks count in the same order.
        """
        found = {}
        for op in self._plan.ops(self._rank):
            number = self._plan.collective_of.get(op)
            members = () if number is None else self._exchanged.collectives[number].members
            for member in members:
                if number is not None and member.what == "tensor":
                    producer = int(self._graph.tensor_producer[member.number])
                    if producer in self._values.from_inputs or self._values.of_integers[producer]:
                        batch = int(self._exchanged.micro_batch[op])
                        found[self._variant_after(member, batch)] = number, batch
        return found

    def _begin_gathers(self, n: int) -> None:
        """Have the first n buckets of updated parameters on their way."""
        for index in range(self._n_gathered, min(n, len(self._gathers))):
            members = self._exchanged.collectives[self._gathers[index]].members
            states, variants = zip(*map(self._plan.flat_state, members), strict=True)
            values = [self._take(("state", self._step.program.states[state].names[0])) for state in states]
            handle = self._begin(self._plan.exchange(self._gathers[index], {}), values)
            self._pending |= {variant: (handle, place) for place, variant in enumerate(variants)}
            self._n_gathered = index + 1

    @cached_property
    def _nodes_of(self) -> dict[int, list[fx.Node]]:
        """The nodes of each captured op whose values somebody reads, in program order."""
        step = self._step
        trace = step.program.trace
        wanted: set[fx.Node] = set()
        stack = [step.new[node] for node in trace.results] + [step.new[node] for _, node in trace.gradients]
        stack += list(step.state_writes)
        while stack:
            node = stack.pop()
            if node not in wanted:
                wanted.add(node)
                stack += node.all_input_nodes
                # A write through a view is seen through that view of all of the memory.
                stack += [user for user in node.users if user.target is after and self._step.is_view(node)]
        found: dict[int, list[fx.Node]] = {}
        for node in step.graph.nodes:
            if node in step.made_by and node in wanted:
                found.setdefault(step.made_by[node], []).append(node)
        return found

    def _outputs(self, node: fx.Node, op: int, batch: int) -> tuple[PartLayout | None, ...]:
        """The part of each flat result of a call that is to be made."""
        found: list[PartLayout | None] = []
        infos = [info if isinstance(info, TensorInfo) else None for info in flat(value_of(node))]
        first = self._values.anchors[node]
        for slot, info in enumerate(infos):
            if info is None:
                found.append(None)
                continue
            if first.state >= 0:
                variant = Form(-1, first.state, self._values.state_codes(first.state))
            else:
                tensor = self._values.result(op, first.slot if len(infos) == 1 else slot)
                if tensor is None:
                    found.append(None)
                    continue
                variant = self._values.written(tensor, batch)
            found.append(self._values.layout(variant, self._place).viewed(info, self._values.root(variant)))
        return tuple(found)

    def _exchange(self, number: int, batch: int) -> None:
        """Begin an exchange of the strategy, unless it has begun or nothing is to be exchanged."""
        members = self._exchanged.collectives[number].members
        if number in self._exchanges or all(map(self._is_needless, members)):
            return
        values, keys = zip(*(self._given(member, batch) for member in members), strict=True)
        shapes = {m.number: self._sums_shape(m.number) for m in members if m.what == "statistics"}
        is_for_update = all(
            m.what == "gradient" or (m.what == "tensor" and m.number in self._plan.results) for m in members
        )
        if is_for_update and self._open is not None:
            self._finish(self._open)
        handle = self._begin(self._plan.exchange(number, shapes), values)
        if is_for_update:
            self._open = handle
        for place, key in enumerate(keys):
            self._pending[key] = handle, place
        for key in keys:
            if isinstance(key, Form):
                self._send(key)

    def _variant_after(self, member: Exchanged, batch: int) -> Form:
        number = SUMMED if member.is_summed else batch
        return Form(member.number, -1, member.after, number, member.is_again)

    def _given(self, member: Exchanged, batch: int) -> tuple[fx.Node, Any]:
        """This rank's input to an exchange, and the key of its result."""
        if member.what == "statistics":
            sums = self._sums_of(member.number)
            assert sums is not None
            return sums, ("statistics", member.number)
        if member.what == "gradient":
            state, _ = self._plan.flat_state(member)
            if ("gradient", state) in self._pending:  # its part is reduced, and is added up with those of other groups
                return self._arrived(("gradient", state)), ("gradient", state)
            value = self._gradient(self._plan.gradient_of[state], member.after)
            return self._code.call_function(flattened, (value,)), ("gradient", state)
        if member.what == "parameter":
            state, variant = self._plan.flat_state(member)
            stored = self._take(("state", self._step.program.states[state].names[0]))
            if member.cast >= 0:
                variant = self._plan.cast_form(member)
                stored = self._cast(member.cast, stored, self._values.root(variant).layout.dtype)
            return stored, variant._replace(phase=member.phase, batch=batch)
        before = Form(member.number, -1, member.before, SUMMED if member.is_summed else batch)
        again = before._replace(is_again=True)
        if member.is_again and (again in self._pending or again in self._roots):
            before = again
        return self._value(before), self._variant_after(member, batch)

    def _cast(self, op: int, stored: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The stored part of a parameter, as op j casts it."""
        if op not in self._casts:
            self._casts[op] = self._code.call_function(torch.ops.aten._to_copy.default, (stored,), {"dtype": dtype})
        return self._casts[op]

    def _is_needless(self, member: Exchanged) -> bool:
        """Whether an exchange is of a table of numbers, which every rank has, or of statistics that nobody reads."""
        if member.what == "statistics":
            return self._sums_of(member.number) is None
        return member.what == "tensor" and self._values.table(member.number) is not None

    def _gradient(self, gradient: Gradient, codes: tuple[int, ...] | None = None) -> fx.Node:
        """A gradient as its update reads it, or before it is reduced along the axis of ZeRO."""
        wanted = self._values.wanted_by_edge(gradient.entry, gradient.update, ONCE)
        if codes is not None:
            have = wanted.have._replace(codes=codes)
            wanted = Wanted(have, have)
        return self._view(self._step.new[gradient.node], wanted)

    # -- written by those who build on this ---------------------------------------------------------------------

    def _compute(self, op: int, batch: int) -> None:
        """Write the copy of op j for a micro-batch."""
        raise NotImplementedError

    def _sums_of(self, op: int) -> fx.Node | None:
        """The statistics of a batch norm, as far as parts have put them together."""
        raise NotImplementedError

    def _sums_shape(self, op: int) -> tuple[int, ...]:
        """Shape of the statistics of op j."""
        raise NotImplementedError
