"""The code of one rank: its ops on parts of tensors, what it sends, receives and exchanges, in the planned order."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from graphs.capture.costs import signature
from graphs.errors import StrategyError
from graphs.opgraph import Phase
from graphs.rows import Partial
from graphs.transforms.derived import STORED
from graphs.transforms.splitting.exchange import ACCUMULATE
from graphs.transforms.splitting.sharding import SUM
from graphs.transforms.splitting.synchronised import STATISTICS
from placement.runtime.exchanging.exchanges import Exchange, Member
from placement.runtime.parts.layouts import PartLayout, whole
from placement.runtime.planning.strategy_plan import Gradient, OutputParts, StrategyPlan
from placement.runtime.planning.values import SUMMED, Form, Wanted, info_of
from placement.runtime.program.fast_calls import with_fast_calls
from placement.runtime.program.functional import after, draws_by_data, uninitialised
from placement.runtime.program.routines import Routine
from placement.runtime.program.transfers import Transfer, expect, receive, send
from placement.runtime.writing.extras import WithExtras
from placement.runtime.writing.glue import added, flattened
from placement.runtime.writing.reuse import in_place

_AHEAD = 8  # transfers that a rank is always ready for, as `placement.runtime.program.routines` has it


def write(plan: StrategyPlan, rank: int) -> RankCode:
    """The code of one rank.

    Raises:
        StrategyError: a call cannot run on parts, or needs an exchange that the strategy does not plan.
    """
    return Writer(plan, rank).write()


@dataclass(frozen=True, eq=False)
class RankCode:
    """Code of one rank.

    Attributes:
        routine: its code; it takes an `Endpoint`, `Collectives` and ``("state", name)``, ``("input", path)``,
            ``("drawn", number)``, and gives ``("gradient", name)``, ``("loss", 0)``, ``("output", number)``.
        exchanges: that it takes part in.
        transfers: by tag, that it sends or receives.
    """

    routine: Routine
    exchanges: tuple[Exchange, ...]
    transfers: Mapping[int, Transfer]


class Writer(WithExtras):
    """Writes the code of one rank."""

    def write(self) -> RankCode:
        """Everything."""
        self._gather_updated()
        self._count_labels()
        for op in self._plan.ops(self._rank):
            self._run(op)
        self._give_gradients()
        self._give_loss()
        self._give_outputs()
        self._run_effects()
        self._expect_early()
        self._code.output(tuple(node for _, node in self._gives))
        module = fx.GraphModule(self._constants, self._code)
        takes, gives = tuple(self._taken), tuple(key for key, _ in self._gives)
        routine = Routine(with_fast_calls(module), takes, gives, tuple(self._ops), module)
        exchanges = in_place(self._code, (self._exchanges[number] for number in sorted(self._exchanges)))
        return RankCode(routine, exchanges, self._transfers)

    def _run(self, op: int) -> None:
        """One op of the strategy's graph."""
        exchanged = self._exchanged
        kind, origin, batch = exchanged.graph.kinds[op], int(exchanged.origin[op]), int(exchanged.micro_batch[op])
        number = self._plan.collective_of.get(op)
        if number is not None:
            if not self._is_update(number):
                self._exchange(number, batch)
        elif kind == STATISTICS:
            self._sum_statistics(origin)
        elif kind in (ACCUMULATE, STORED) or self._is_none_of_ours(origin):
            return
        elif self._graph.kernels[origin] or kind != "input":
            self._compute(origin, batch)

    def _is_none_of_ours(self, op: int) -> bool:
        """Whether op j is the optimizer's, or casts what is stored of a parameter, which gathering it does."""
        return bool(self._graph.phase[op] == Phase.UPDATE) or op in self._plan.casts_of_parts

    def _is_update(self, number: int) -> bool:
        """Whether a collective gathers what the update before this step has written."""
        return all(
            m.what == "parameter" and m.phase == Phase.UPDATE for m in self._exchanged.collectives[number].members
        )

    def _compute(self, op: int, batch: int) -> None:
        """The copy of op j for a micro-batch."""
        source = self._values.source[op]
        if (op, batch) in self._made or source not in self._step.program.call_tensors:
            return
        made: dict[fx.Node, fx.Node] = {}
        self._made[op, batch] = made
        outer, self._run_of = self._run_of, (op, batch)
        self._ops.append(source)
        for node in self._nodes_of.get(source, ()):
            if node.target is operator.getitem and node.args[0] in made:
                made[node] = self._code.call_function(operator.getitem, (made[node.args[0]], node.args[1]))  # type: ignore[index]
            elif node.target is after:
                first = node.all_input_nodes[0]
                made[node] = made[first] if first in made else self._copied(first, node, op, batch)
            else:
                made[node] = self._called(node, op, batch, made)
                made[node].meta.setdefault("op", source)
        self._run_of = outer
        self._enter(op, batch, made)

    def _copied(self, copy: fx.Node, node: fx.Node, op: int, batch: int) -> fx.Node:
        """The copy of a tensor that a call has written through a view."""
        wanted = self._values.wanted(self._values.anchors[copy], op, batch)
        part, written = self._parts_of(copy, wanted)[0], self._outputs(node, op, batch)[0]
        if part is None or written is None or part.coarse_cuts != written.coarse_cuts:
            name = self._graph.op_names[op]
            raise StrategyError(
                f"op {name!r} writes into a view of a part that it does not leave; take a strategy that leaves it "
                "whole."
            )
        return self._views[copy, wanted, (op, batch)]

    def _enter(self, op: int, batch: int, made: Mapping[fx.Node, fx.Node]) -> None:
        """Make what an op wrote known: to its readers, to sums over micro-batches, to other stages."""
        for node, value in made.items():
            anchor = self._values.anchors.get(node)
            if anchor is None or anchor.op != self._values.source[op]:
                continue
            tensor = self._values.result(op, anchor.slot)
            if tensor is None:
                continue
            variant = self._values.written(tensor, batch)
            info = info_of(node)
            if info is None or info.layout.shape != self._values.root(variant).layout.shape:
                continue
            if not self._step.is_view(node):
                self._roots[variant] = value
        for tensor in range(int(self._graph.output_ptr[op]), int(self._graph.output_ptr[op + 1])):
            variant = self._values.written(tensor, batch)
            if variant in self._roots:
                self._send(variant)
                if tensor in self._plan.summed:
                    self._add(tensor, self._roots[variant])

    def _add(self, tensor: int, value: fx.Node) -> None:
        """Add a micro-batch's tensor to those before it."""
        total, count = self._sums.get(tensor, (value, 0))
        if count == 1:  # in memory of its own
            total = self._code.call_function(torch.ops.aten.add.Tensor, (total, value))
        elif count > 1:
            total = self._code.call_function(added, (total, value))
        if count:
            total.meta["sum"] = tensor
        self._sums[tensor] = total, count + 1
        if count + 1 == self._values.micro_batches:
            variant = self._values.written(tensor, SUMMED)
            self._roots[variant] = total
            self._send(variant)

    def _called(self, node: fx.Node, op: int, batch: int, made: dict[fx.Node, fx.Node]) -> fx.Node:
        """The call of a node on the parts that are here."""
        outputs = self._outputs(node, op, batch)
        if node in self._step.random:
            drawn = self._take(("drawn", self._number[node]))
            part = outputs[0]
            assert part is not None
            mine = self._part(drawn, whole(part.shape), part)
            # The next op may overwrite it, and a second run needs the same numbers.
            runs_again = self._values.source[op] in self._values.run_twice
            return self._code.call_function(torch.ops.aten.clone.default, (mine,)) if runs_again else mine
        self._check_repeatable(node, op)
        inputs: dict[fx.Node, fx.Node] = {}
        parts: dict[fx.Node, PartLayout] = {}
        for argument in node.all_input_nodes:
            value, part = self._argument(argument, op, batch, outputs)
            inputs[argument] = value
            if part is not None:
                parts[argument] = part
            if argument in self._step.overwrites and argument not in self._step.made_by:
                made[argument] = value
        self._check_summands(op, parts)
        extras = self._extras(node, op, batch, inputs, parts)
        if signature(node.target).statistics:
            self._keep_running(node, op, batch, inputs, is_of_all=extras.sums is not None)
        if node in self._step.overwrites:
            self._protect(node, op, batch, inputs)
        return self._emitted(node, self._local(node, parts, outputs, extras), inputs)

    def _check_repeatable(self, node: fx.Node, op: int) -> None:
        """Refuse what parts, or a second run, would do otherwise than one run of the whole.

        Raises:
            StrategyError: random numbers that depend on data, a second run of what changes a buffer, or reads one that
                is changed since, or a change by one micro-batch after the other.
        """
        name = self._graph.op_names[op]
        if draws_by_data(node):
            raise StrategyError(
                f"op {name!r} draws random numbers by what it reads ({node.target}), and parts would draw others than "
                "one device does; draw them with torch.rand and compare, or run it on one device."
            )
        if self._values.is_again(op) and node in self._step.state_writes and not signature(node.target).statistics:
            raise StrategyError(
                f"op {name!r} changes a buffer, and would change it again where it is recomputed; leave its module "
                "out of recompute."
            )
        later = self._plan.overwriting.get(self._values.source[op])
        if self._values.is_again(op) and later is not None and not signature(node.target).statistics:
            raise StrategyError(
                f"op {name!r} would read what {self._step.program.graph.op_names[later]!r} has written into a buffer "
                "since it ran first; leave its module out of recompute."
            )
        if self._values.is_chunked(op) and node in self._step.state_writes and not signature(node.target).statistics:
            buffer = self._step.program.states[self._step.state_writes[node]].names[0]
            raise StrategyError(
                f"op {name!r} writes entries of the buffer {buffer!r} for each sample, and is to run for each "
                "micro-batch, which has some samples alone; leave out the micro-batches."
            )

    def _check_summands(self, op: int, parts: Mapping[fx.Node, PartLayout]) -> None:
        """Refuse what every part would make of whole arguments although the parts' results are added up.

        Raises:
            StrategyError: op j is such an op.
        """
        values = self._values
        rows = [sharding.row[op] for sharding in (*values.mesh, *([values.chunks] if values.chunks else []))]
        adds_up = any(row is not None and row.extent > 1 and Partial() in row.outputs for row in rows)
        if adds_up and not any(part.coarse_cuts for part in parts.values()):
            raise StrategyError(
                f"op {self._graph.op_names[op]!r} is one summand for each part by its row, but each part would make "
                "all of the sum; take a strategy that leaves it whole."
            )

    def _protect(self, node: fx.Node, op: int, batch: int, inputs: dict[fx.Node, fx.Node]) -> None:
        """Let a call that overwrites its first argument overwrite a copy, where somebody else reads it."""
        first = node.args[0]
        if isinstance(first, fx.Node) and not self._may_overwrite(first, op, batch):
            inputs[first] = self._code.call_function(torch.ops.aten.clone.default, (inputs[first],))

    def _may_overwrite(self, node: fx.Node, op: int, batch: int) -> bool:
        """Whether nobody but this op reads the memory of a node."""
        if node.target is uninitialised or (node in self._step.overwrites and node not in self._step.made_by):
            return True
        anchor = self._values.anchors.get(node)
        if anchor is None or anchor.state >= 0:
            return False
        entry = self._values.entry(op, anchor)
        tensor = int(self._graph.inputs[1][entry])
        producer = int(self._graph.tensor_producer[tensor])
        wanted = self._values.wanted_by_edge(entry, op, batch)
        return (
            len(self._graph.consumers_of(tensor)) == 1
            and tensor not in self._plan.results
            and self._graph.kinds[producer] != "input"
            and wanted.have == self._values.written(tensor, batch) == wanted.want
            and wanted.have not in self._outgoing
        )

    def _expect_early(self) -> None:
        """Be ready for transfers before they are received."""
        coming = [node for node in self._code.nodes if node.target is receive]
        for number, node in enumerate(coming):
            first = coming[number - _AHEAD] if number >= _AHEAD else self._first_call
            with self._code.inserting_before(first):
                self._code.call_function(expect, node.args)

    @property
    def _first_call(self) -> fx.Node:
        first: fx.Node = next(node for node in self._code.nodes if node.op != "placeholder")
        return first

    def _gather_updated(self) -> None:
        """Below level 3 every rank needs the parameters that others have updated: the first bucket, then one ahead."""
        numbers = {self._plan.collective_of.get(op) for op in self._plan.ops(self._rank)}
        of_updates = {
            number: self._exchanged.collectives[number].members
            for number in numbers
            if number is not None and self._is_update(number)
        }
        # The model's first parameters are read first; the same order on all ranks.
        self._gathers = sorted(of_updates, key=lambda number: min(m.number for m in of_updates[number]))
        for index, number in enumerate(self._gathers):
            for member in of_updates[number]:
                self._gathered_by[self._plan.flat_state(member)[1]] = index
        self._begin_gathers(1)

    def _give_gradients(self) -> None:
        for gradient in self._plan.gradients:
            if self._values.rows[gradient.update] != self._row:
                continue
            name = self._step.program.states[gradient.state].names[0]
            if ("gradient", gradient.state) in self._pending:
                value = self._arrived(("gradient", gradient.state))
            else:
                value = self._gradient(gradient)
                if gradient.state in self._plan.flattened:
                    value = self._flat_part(value, gradient)
            self._gives.append((("gradient", name), value))

    def _flat_part(self, value: fx.Node, gradient: Gradient) -> fx.Node:
        """The stretch of a gradient that needs no reduction that this rank stores."""
        state = gradient.state
        part = self._values.layout(Form(-1, state, self._values.state_codes(state)), self._place)
        vector = self._code.call_function(flattened, (value,))
        return self._part(vector, whole((part.n_elements,)), self._plan.flat(part.n_elements, self._place))

    def _give_loss(self) -> None:
        """The loss to every rank: the sum of what the ranks of its stage have of it."""
        if not self._step.program.train:
            return
        node = self._step.new[self._step.program.trace.results[0]]
        info = info_of(node)
        assert info is not None
        value: fx.Node | None = None
        anchor = self._values.anchors[node]
        op = self._plan.producer_of(anchor)
        if self._values.rows[op] == self._row:
            tensor = self._values.result(op, anchor.slot)
            assert tensor is not None
            variant = self._values.final(tensor)
            coordinates = self._values.coordinates(self._place)
            if all(code == SUM or c == 0 for code, c in zip(variant.codes, coordinates, strict=True)):
                value = self._view(node, Wanted(variant, variant))
        if value is None:
            value = self._code.call_function(torch.zeros, (info.layout.shape,), {"dtype": info.layout.dtype})
        ranks = tuple(range(self._plan.n_ranks))
        member = Member("all_reduce", whole(info.layout.shape), dtype=info.layout.dtype)
        handle = self._begin(Exchange(self._plan.first_own_exchange, ranks, (member,), "the loss"), [value])
        self._pending["loss"] = handle, 0
        self._gives.append((("loss", 0), self._arrived("loss")))

    def _give_outputs(self) -> None:
        """Every output, whole, to every rank; summands are added up first."""
        for number, output in enumerate(self._plan.outputs):
            if output.variant is None:
                self._gives.append((("output", number), self._literal(output.node)))
                continue
            value = self._own_output(number, output)
            if self._plan.sender_of(number) is not None:
                value = self._sent_output(number, value)
            elif self._plan.n_ranks > 1:
                exchange = self._plan.output_exchange(number)
                (member,) = exchange.members
                part = member.given(self._rank)
                if value is None or not self._plan.gives_output(number, self._rank):
                    value = self._code.call_function(torch.zeros, (part.local_shape,), {"dtype": member.dtype})
                self._pending["whole output", number] = self._begin(exchange, [value]), 0
                value = self._arrived(("whole output", number))
            assert value is not None
            self._gives.append((("output", number), value))

    def _sent_output(self, number: int, value: fx.Node | None) -> fx.Node:
        """An output that one rank sends to those that have nothing of it."""
        transfers = self._plan.output_transfers(number)
        for transfer in transfers.values():
            if self._rank == transfer.source:
                assert value is not None
                self._transfers[transfer.tag] = transfer
                self._code.call_function(send, (self._endpoint, transfer.tag, value))
        if self._rank not in transfers:
            assert value is not None
            return value
        tag = transfers[self._rank].tag
        self._transfers[tag] = transfers[self._rank]
        return self._code.call_function(receive, (self._endpoint, tag))

    def _own_output(self, number: int, output: OutputParts) -> fx.Node | None:
        """The part of an output that is here; None where none is."""
        part = output.parts[self._rank]
        if part is None or output.variant is None:
            return None
        value = self._view(output.node, Wanted(output.variant, output.variant))
        ranks = self._plan.ranks_of_sum(output.variant, self._rank)
        if len(ranks) > 1:
            name = self._plan.first_of_outputs + number * self._plan.n_ranks + ranks[0]
            exchange = Exchange(name, ranks, (Member("all_reduce", part, dtype=output.dtype),), "an output")
            self._pending["output", number] = self._begin(exchange, [value]), 0
            value = self._arrived(("output", number))
        return value

    def _run_effects(self) -> None:
        """Writes to counters, which are ops of no graph."""
        for node in self._step.state_writes:
            state = self._step.state_writes[node]
            if node not in self._step.made_by and self._row in self._plan.state_rows[state]:
                self._literal(node)
