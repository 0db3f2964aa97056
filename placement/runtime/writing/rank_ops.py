"""`RankOps`: the ops of a rank, each as calls on the parts that are here, and what becomes of their results."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from graphs.capture.costs import signature
from graphs.errors import StrategyError
from graphs.records import HOST
from graphs.rows import Partial
from graphs.transforms.splitting.exchange import ACCUMULATE
from placement.runtime.calls.local_calls import Extras
from placement.runtime.parts.layouts import PartLayout, whole
from placement.runtime.planning.forms import SUMMED, Form, info_of
from placement.runtime.program.functional import after, draws_by_data, uninitialised
from placement.runtime.program.hosted_tensors import added_on_host, sent_away
from placement.runtime.writing.extras import BatchSums, Borders
from placement.runtime.writing.glue import added
from placement.runtime.writing.ring import Ring

if TYPE_CHECKING:
    from placement.runtime.writing.arguments import Arguments
    from placement.runtime.writing.code import Code
    from placement.runtime.writing.rank_forms import RankForms
    from placement.runtime.writing.rank_parts import Parts, RankParts


class RankOps:
    """Runs of ops. Results go into `RankForms.made`, to sums over micro-batches, and to other stages.

    Attributes:
        ran: captured ops in the order in which they run.
        calls: (node, op j, micro-batch) of every call on parts, but those of rings.
        ring: attention whose keys and values go round.
    """

    def __init__(self, code: Code, parts: RankParts, forms: RankForms, arguments: Arguments, sums: BatchSums) -> None:
        self._code, self._parts, self._forms = code, parts, forms
        self._arguments, self._sums, self._borders = arguments, sums, Borders(code, parts, forms)
        self.ring = Ring(code, parts, forms, arguments)
        self._plan, self._values, self._step, self._graph = parts.plan, parts.values, parts.step, parts.graph
        self._runs: set[tuple[int, int]] = set()  # op j and micro-batch
        self._totals: dict[int, tuple[fx.Node, int]] = {}  # tensor -> its sum of micro-batches so far, of how many
        exchanged = parts.values.applied.exchanged
        there = zip(exchanged.graph.kinds, exchanged.graph.pins, exchanged.origin.tolist(), strict=True)
        makers = {op for kind, pins, op in there if kind == ACCUMULATE and HOST in pins}  # of gradients hosts add up
        self._sums_on_host = {t for t, op in enumerate(self._graph.tensor_producer.tolist()) if op in makers}
        self._away: dict[int, fx.Node] = {}  # the gradient that was sent last, by tensor
        self.ran: list[int] = []
        self.calls: list[tuple[fx.Node, int, int]] = []

    def run(self, op: int, batch: int) -> None:
        """Run op j for a micro-batch, unless it has run."""
        source = self._values.split.source[op]
        if (op, batch) in self._runs or source not in self._step.program.call_tensors:
            return
        made: dict[fx.Node, fx.Node] = {}
        self._runs.add((op, batch))
        outer, self._code.run_of = self._code.run_of, (op, batch)
        self.ran.append(source)
        for node in self._parts.nodes_of.get(source, ()):
            if node.target is operator.getitem and node.args[0] in made:
                made[node] = self._code.call(operator.getitem, made[node.args[0]], node.args[1])  # type: ignore[index]
            elif node.target is after:
                first = node.all_input_nodes[0]
                made[node] = made[first] if first in made else self._copied(first, node, op, batch)
            else:
                made[node] = self._called(node, op, batch, made)
                made[node].meta.setdefault("op", source)
                if self._parts.is_by_groups(op):
                    made[node].meta["by_groups"] = True
        self._code.run_of = outer
        self._enter(op, batch, made)

    def early(self, form: Form) -> fx.Node | None:
        """A form of integers that an op here makes of arguments of the step; runs it now. A source of `RankForms`."""
        producer = int(self._graph.tensor_producer[form.tensor])
        is_own = producer in self._values.from_inputs
        is_here = is_own or self._values.split.rows[producer] == self._parts.row
        if is_here and (is_own or bool(self._values.of_integers[producer])):
            self.run(producer, form.batch)
        return self._forms.made.get(form)

    # -- calls ------------------------------------------------------------------------------------------------

    def _called(self, node: fx.Node, op: int, batch: int, made: dict[fx.Node, fx.Node]) -> fx.Node:
        """The call of a node on the parts that are here."""
        if self.ring.has(op):
            return self.ring.result(node, op, batch)
        self.calls.append((node, op, batch))
        outputs = self._parts.made(node, op, batch)
        if node in self._step.random:
            return self._drawn(node, op, outputs)
        self._check_repeatable(node, op)
        inputs: dict[fx.Node, fx.Node] = {}
        parts: dict[fx.Node, PartLayout] = {}
        for argument in node.all_input_nodes:
            value, part = self._arguments.get(argument, op, batch, outputs)
            inputs[argument] = value
            if part is not None:
                parts[argument] = part
            if argument in self._step.overwrites and argument not in self._step.made_by:
                made[argument] = value
        self._check_summands(op, parts)
        borders = self._borders.of_call(node, op, batch, inputs, parts)
        label_weight, sums = self._sums.label_weight(op), self._sums.statistics(op)
        of_classes, lists = self._sums.classes(op, batch), self._parts.lists(node, op, batch)
        by_groups = self._parts.is_by_groups(op)
        extras = Extras(label_weight, sums, of_classes, borders, lists, by_groups and bool(lists))
        self._copy_written(node, op, batch, inputs, is_of_all=sums is not None)
        return self._code.call_on_parts(node, inputs, parts, outputs, extras)

    def _drawn(self, node: fx.Node, op: int, outputs: Parts) -> fx.Node:
        """A part of random numbers that were drawn before the step."""
        drawn, part = self._arguments.drawn(node), outputs[0]
        assert part is not None
        mine = self._code.part(drawn, whole(part.shape), part)
        # The next op may overwrite it, and a second run needs the same numbers.
        runs_again = self._values.split.source[op] in self._values.split.run_twice
        return self._copy(mine) if runs_again else mine

    def _copy(self, value: fx.Node) -> fx.Node:
        return self._code.call(torch.ops.aten.clone.default, value)

    def _copied(self, copy: fx.Node, node: fx.Node, op: int, batch: int) -> fx.Node:
        """The copy of a tensor that a call has written through a view."""
        wanted = self._values.wanted(self._values.nodes.anchors[copy], op, batch)
        part, written = self._parts.of_node(copy, wanted)[0], self._parts.made(node, op, batch)[0]
        if part is None or written is None or part.coarse_cuts != written.coarse_cuts:
            name = self._graph.op_names[op]
            raise StrategyError(
                f"op {name!r} writes into a view of a part that it does not leave; take a strategy that leaves it "
                "whole."
            )
        return self._arguments.views[copy, wanted, (op, batch)]

    def _copy_written(
        self, node: fx.Node, op: int, batch: int, inputs: dict[fx.Node, fx.Node], *, is_of_all: bool
    ) -> None:
        """Let a call write into copies of arguments that must stay.

        The first run alone updates running statistics, and of micro-batches that share them the first alone.
        Tensors that somebody else reads are not overwritten.
        """
        is_again = self._values.split.is_again(op)
        copied: list[Any] = []
        if signature(node.target).statistics and (is_again or (is_of_all and batch > 0)):
            copied += node.args[3:5]
        if node in self._step.overwrites and not self._may_overwrite(node.args[0], op, batch):
            copied.append(node.args[0])
        for argument in copied:
            if isinstance(argument, fx.Node):
                inputs[argument] = self._copy(inputs[argument])

    def _may_overwrite(self, node: object, op: int, batch: int) -> bool:
        """Whether nobody but this op reads the memory of a node."""
        if not isinstance(node, fx.Node) or node.target is uninitialised:
            return True
        if node in self._step.overwrites and node not in self._step.made_by:
            return True
        anchor = self._values.nodes.anchors.get(node)
        if anchor is None or anchor.state >= 0:
            return False
        entry = self._values.nodes.entry(op, anchor)
        tensor = int(self._graph.inputs[1][entry])
        producer = int(self._graph.tensor_producer[tensor])
        wanted = self._values.wanted_by_edge(entry, op, batch)
        return (
            len(self._graph.consumers_of(tensor)) == 1
            and tensor not in self._plan.results
            and self._graph.kinds[producer] != "input"
            and wanted.have == self._values.written(tensor, batch) == wanted.want
            and not self._forms.is_sent(wanted.have)
        )

    # -- results ----------------------------------------------------------------------------------------------

    def _enter(self, op: int, batch: int, made: Mapping[fx.Node, fx.Node]) -> None:
        """Make results known: to their readers, to sums over micro-batches, to other stages."""
        for node, value in made.items():
            anchor = self._values.nodes.anchors.get(node)
            if anchor is None or anchor.op != self._values.split.source[op]:
                continue
            tensor = self._values.nodes.result(op, anchor.slot)
            if tensor is None:
                continue
            form = self._values.written(tensor, batch)
            info = info_of(node)
            if info is None or info.layout.shape != self._values.parts.root(form).layout.shape:
                continue
            if not self._step.is_view(node):
                self._forms.made[form] = value
        for tensor in range(int(self._graph.output_ptr[op]), int(self._graph.output_ptr[op + 1])):
            form = self._values.written(tensor, batch)
            if form in self._forms.made:
                self._forms.send(form)
                if tensor in self._plan.summed:
                    self._add(tensor, self._forms.made[form])

    def _add(self, tensor: int, value: fx.Node) -> None:
        """Add a micro-batch's tensor to those before it."""
        total, count = self._totals.get(tensor, (value, 0))
        if tensor in self._sums_on_host:  # each is added when the next one comes, or at the end
            value = self._code.call(sent_away, value)
            before = self._away.pop(tensor, None)
            total = value if before is None else total if count == 1 else self._code.call(added_on_host, total, before)
            self._away[tensor] = value
            if 0 < count == self._values.split.micro_batches - 1:
                total = self._code.call(added_on_host, total, value)
        elif count == 1:  # in memory of its own
            total = self._code.call(torch.ops.aten.add.Tensor, total, value)
        elif count > 1:
            total = self._code.call(added, total, value)
        if count:
            total.meta["sum"] = tensor
        self._totals[tensor] = total, count + 1
        if count + 1 == self._values.split.micro_batches:
            form = self._values.written(tensor, SUMMED)
            self._forms.made[form] = total
            self._forms.send(form)

    # -- refusals ---------------------------------------------------------------------------------------------

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
        if signature(node.target).statistics:
            return
        if self._values.split.is_again(op) and node in self._step.state_writes:
            raise StrategyError(
                f"op {name!r} changes a buffer, and would change it again where it is recomputed; leave its module "
                "out of recompute."
            )
        later = self._plan.overwriting.get(self._values.split.source[op])
        if self._values.split.is_again(op) and later is not None:
            raise StrategyError(
                f"op {name!r} would read what {self._step.program.graph.op_names[later]!r} has written into a buffer "
                "since it ran first; leave its module out of recompute."
            )
        if self._values.split.is_chunked(op) and node in self._step.state_writes:
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
        rows = [sharding.row[op] for sharding in self._values.split.shardings]
        adds_up = any(row is not None and row.extent > 1 and Partial() in row.outputs for row in rows)
        if adds_up and not any(part.coarse_cuts for part in parts.values()):
            raise StrategyError(
                f"op {self._graph.op_names[op]!r} is one summand for each part by its row, but each part would make "
                "all of the sum; take a strategy that leaves it whole."
            )
