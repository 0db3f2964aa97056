"""`Results`: what a rank's code gives at the end of the step: its gradients, the loss, outputs, and counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from graphs.transforms.splitting.sharding import SUM
from placement.runtime.exchanging.exchanges import Exchange, Member
from placement.runtime.parts.layouts import whole
from placement.runtime.planning.forms import Wanted, info_of
from placement.runtime.program.device_layout import Key
from placement.runtime.program.hosted_tensors import landed, sent_away
from placement.runtime.writing.glue import flattened

if TYPE_CHECKING:
    from placement.runtime.planning.planned_outputs import OutputParts
    from placement.runtime.planning.planned_storage import Gradient
    from placement.runtime.writing.arguments import Arguments
    from placement.runtime.writing.code import Code
    from placement.runtime.writing.rank_exchanges import RankExchanges
    from placement.runtime.writing.rank_parts import RankParts


class Results:
    """Results of the step, whole on every rank but for gradients, which come as this rank stores their parameters.

    Attributes:
        given: (key, line) of each result.
    """

    def __init__(self, code: Code, parts: RankParts, arguments: Arguments, exchanges: RankExchanges) -> None:
        self._code, self._parts, self._arguments, self._exchanges = code, parts, arguments, exchanges
        self._plan, self._values, self._step = parts.plan, parts.values, parts.step
        self.given: list[tuple[Key, fx.Node]] = []
        self._sent: dict[int, fx.Node] = {}  # gradients on their way to the host, by state

    def send_gradient(self, op: int) -> None:
        """Send the gradient that op j updates with to the host, where gradients lie there."""
        if self._plan.keeps_parameters_on_hosts:
            for gradient in self._plan.storage.gradients:
                if gradient.update == op and gradient.state not in self._sent:
                    self._sent[gradient.state] = self._code.call(sent_away, self._gradient(gradient))

    def give(self) -> None:
        """Everything."""
        self._give_gradients()
        if self._step.program.train:
            self._give_loss()
        self._give_outputs()
        self._count()

    def _give_gradients(self) -> None:
        for gradient in self._plan.storage.gradients:
            if self._values.split.rows[gradient.update] != self._parts.row:
                continue
            if gradient.state in self._sent:
                value = self._code.call(landed, self._sent[gradient.state])
            else:
                value = self._gradient(gradient)
            name = self._step.program.states[gradient.state].names[0]
            self.given.append((("gradient", name), value))

    def _gradient(self, gradient: Gradient) -> fx.Node:
        """A gradient as this rank stores its parameter."""
        key = "gradient", gradient.state
        is_reduced = key in self._code.pending
        value = self._code.arrived(key) if is_reduced else self._exchanges.gradient(gradient)
        if gradient.state not in self._plan.storage.flattened:
            return value
        return self._exchanges.as_stored(gradient.state, value if is_reduced else self._code.call(flattened, value))

    def _give_loss(self) -> None:
        """The loss to every rank: the sum of what the ranks of its stage have of it."""
        node = self._step.new[self._step.program.trace.results[0]]
        info = info_of(node)
        assert info is not None
        value = self._own_loss(node)
        if value is None:
            value = self._code.zeros(info.layout.shape, info.layout.dtype)
        member = Member("all_reduce", whole(info.layout.shape), dtype=info.layout.dtype)
        ranks = tuple(range(self._plan.n_ranks))
        exchange = Exchange(self._plan.first_own_exchange, ranks, (member,), "the loss")
        self.given.append((("loss", 0), self._code.exchanged(exchange, value)))

    def _own_loss(self, node: fx.Node) -> fx.Node | None:
        """This rank's summand of the loss; None where it has none, or one that another rank gives."""
        anchor = self._values.nodes.anchors[node]
        op = self._values.producer(anchor)
        if self._values.split.rows[op] != self._parts.row:
            return None
        tensor = self._values.nodes.result(op, anchor.slot)
        assert tensor is not None
        form = self._values.final(tensor)
        coordinates = self._values.split.coordinates(self._parts.place)
        if any(code != SUM and c != 0 for code, c in zip(form.codes, coordinates, strict=True)):
            return None
        return self._arguments.view(node, Wanted(form, form))

    def _give_outputs(self) -> None:
        """Every output, whole, to every rank; summands are added up first."""
        for number, output in enumerate(self._plan.outputs.each):
            if output.form is None:
                self.given.append((("output", number), self._arguments.literal(output.node)))
                continue
            value = self._own_output(number, output)
            if self._plan.outputs.sender_of(number) is not None:
                value = self._sent_output(number, value)
            elif self._plan.n_ranks > 1:
                exchange = self._plan.outputs.exchange(number)
                (member,) = exchange.members
                if value is None or not self._plan.outputs.is_given_by(number, self._parts.rank):
                    value = self._code.zeros(member.given(self._parts.rank).local_shape, member.dtype)
                value = self._code.exchanged(exchange, value)
            assert value is not None
            self.given.append((("output", number), value))

    def _sent_output(self, number: int, value: fx.Node | None) -> fx.Node:
        """An output that one rank sends to those that have nothing of it."""
        transfers, rank = self._plan.outputs.transfers(number), self._parts.rank
        for transfer in transfers.values():
            if rank == transfer.source:
                assert value is not None
                self._code.send(transfer, value)
        if rank in transfers:
            return self._code.receive(transfers[rank])
        assert value is not None
        return value

    def _own_output(self, number: int, output: OutputParts) -> fx.Node | None:
        """The part of an output that is here; None where none is."""
        part = output.parts[self._parts.rank]
        if part is None or output.form is None:
            return None
        value = self._arguments.view(output.node, Wanted(output.form, output.form))
        exchange = self._plan.outputs.sum_exchange(number, self._parts.rank)
        return value if exchange is None else self._code.exchanged(exchange, value)

    def _count(self) -> None:
        """Writes to counters, which are ops of no graph."""
        for node, state in self._step.state_writes.items():
            if node not in self._step.made_by and self._parts.row in self._plan.storage.rows[state]:
                self._arguments.literal(node)
