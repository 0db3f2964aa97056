"""`RankForms`: the tensors and states that a rank has while it runs, each in the forms in which somebody needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import fx

from graphs.errors import StrategyError
from graphs.transforms.splitting.sharding import is_by_groups
from placement.runtime.planning.forms import ALL, Form, Wanted
from placement.runtime.planning.strategy_plan import Crossing
from placement.runtime.program.hosted_tensors import arrived, copied_in
from placement.runtime.writing.code import CPU, Code
from placement.runtime.writing.glue import Join, nothing_like

if TYPE_CHECKING:
    from placement.runtime.writing.rank_parts import RankParts

Source = Callable[[Form], "fx.Node | None"]
"""Gives the line of a form, or None where it comes from elsewhere."""


class RankForms:
    """Lines of tensors and states by their form. A form that is not there yet is made when it is first asked for.

    Sources of a form, the first that has it:

        an exchange that is pending               `RankExchanges.arriving`
        memory of this rank                       `_stored`
        micro-batches, put side by side           `_side_by_side`
        a state that an op hands out as it is     `_table`
        an exchange of integers, begun now        `RankExchanges.counted`
        an argument of the step                   `_input`
        an op on integers, run now                `RankOps.early`
        another stage                             `_received`

    Attributes:
        made: the lines, by form; ops enter what they make.
    """

    def __init__(self, code: Code, parts: RankParts) -> None:
        self._code, self._parts = code, parts
        self._values, self._graph, self._step = parts.values, parts.graph, parts.step
        self.made: dict[Form, fx.Node] = {}
        self._reads: dict[tuple[Wanted, bool], fx.Node] = {}
        self._sources: tuple[Source, ...] = ()
        numbers = {one.state for copied in parts.values.split.rewrite.copied.values() for one in copied}
        self._hosted = {state for state, n in parts.values.split.state_number.items() if n in numbers}
        self._outgoing: dict[Form, list[Crossing]] = {}
        for crossing in parts.plan.crossings:
            if crossing.source == parts.row:
                self._outgoing.setdefault(crossing.form, []).append(crossing)

    def connect(self, arriving: Source, counted: Source, early: Source) -> None:
        """Name the sources that read forms themselves, and so are made later than this."""
        own = self._stored, self._side_by_side, self._table
        self._sources = (arriving, *own, counted, self._input, early, self._received)

    def get(self, form: Form) -> fx.Node:
        """A tensor or state in a form.

        Raises:
            StrategyError: an op that has not run makes it.
        """
        if form not in self.made:
            self.made[form] = self._first(form)
        return self.made[form]

    def read(self, wanted: Wanted) -> fx.Node:
        """The part of a tensor or state that an op reads, zeros where another part gives its summand."""
        is_zero = self._values.is_zero_at(wanted, self._parts.place)
        key = wanted, is_zero
        if key not in self._reads:
            value = self.part_of(wanted.have, wanted.want)
            self._reads[key] = self._code.call(nothing_like, value) if is_zero else value
        return self._reads[key]

    def part_of(self, have: Form, want: Form) -> fx.Node:
        """The part ``want`` of a form."""
        return self._code.part(self.get(have), self._parts.layout(have), self._parts.layout(want))

    def state(self, state: int) -> fx.Node:
        """A parameter or buffer as this rank stores it."""
        return self._code.take(("state", self._step.program.states[state].names[0]))

    def replace(self, form: Form, value: fx.Node) -> None:
        """Have a form, and parts of it, read from another line from now on."""
        self.made[form] = value
        self._reads = {key: line for key, line in self._reads.items() if key[0].have != form}

    def is_sent(self, form: Form) -> bool:
        """Whether other stages read a form."""
        return form in self._outgoing

    def send(self, form: Form) -> None:
        """Send a form to all stages that read it."""
        for crossing in self._outgoing.get(form, ()):
            self._check_sizes(form)
            self._code.send(self._parts.plan.transfer(crossing, self._parts.place), self.get(form))

    # -- sources ----------------------------------------------------------------------------------------------

    def _first(self, form: Form) -> fx.Node:
        found: Iterable[fx.Node | None] = (source(form) for source in self._sources)
        return next(node for node in found if node is not None)

    def _stored(self, form: Form) -> fx.Node | None:
        if form.state < 0:
            return None
        value = self.state(form.state)
        # If the plan has not copied it before this line, it is copied now.
        return self._code.call(arrived, self._code.call(copied_in, value, CPU)) if form.state in self._hosted else value

    def _side_by_side(self, form: Form) -> fx.Node | None:
        """Results of all micro-batches, put together."""
        if form.batch != ALL:
            return None
        every = [form._replace(batch=batch) for batch in range(self._values.split.micro_batches)]
        parts = tuple(map(self._parts.layout, every))
        values = tuple(map(self.get, every))
        together = self._parts.layout(form)
        if parts[0].coarse_cuts == together.coarse_cuts:
            return values[0]
        if sum(part.n_elements for part in parts) != together.n_elements or not all(map(together.holds, parts)):
            raise StrategyError(
                f"the parts that micro-batches have of what op {self._maker(form)!r} makes do not lie side by side; "
                "leave out the micro-batches, or cut the batch by dp alone."
            )
        return self._code.call(Join(parts, together), *values)

    def _table(self, form: Form) -> fx.Node | None:
        table = self._values.nodes.table(form.tensor)
        if table is None:
            return None
        have = self._parts.layout(self._values.kept(table))
        return self._code.part(self.state(table), have, self._parts.layout(form))

    def _input(self, form: Form) -> fx.Node | None:
        """A part of an argument of the step."""
        producer = int(self._graph.tensor_producer[form.tensor])
        if self._graph.kinds[producer] != "input":
            return None
        node = next(n for n, op in self._step.made_by.items() if op == self._values.split.source[producer])
        given = self._parts.layout(self._values.given(form.tensor))
        return self._code.part(self._code.take(("input", self._step.names[node])), given, self._parts.layout(form))

    def _received(self, form: Form) -> fx.Node:
        """A form that another stage sends."""
        producer = int(self._graph.tensor_producer[form.tensor])
        if self._values.split.rows[producer] == self._parts.row or producer in self._values.from_inputs:
            raise StrategyError(
                f"what op {self._maker(form)!r} makes is read before it is there; this strategy cannot be run."
            )
        self._check_sizes(form)
        crossing = Crossing(form, self._values.split.rows[producer], self._parts.row, producer)
        return self._code.receive(self._parts.plan.transfer(crossing, self._parts.place))

    def _check_sizes(self, form: Form) -> None:
        """Refuse to send to another stage what has as many entries as the data says.

        Raises:
            StrategyError: tokens at their experts.
        """
        if any(map(is_by_groups, form.codes)):
            raise StrategyError(
                f"stages of the pipeline part the experts from what op {self._maker(form)!r} makes of their tokens; "
                "let stages begin at a layer, with cuts=."
            )

    def _maker(self, form: Form) -> str:
        return self._graph.op_names[int(self._graph.tensor_producer[form.tensor])]
