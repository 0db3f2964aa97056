"""Tensors on the host: `HostedForms` wait there for the backward pass, `CopiedParameters` lie there between uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from graphs.transforms.activations import HOSTED
from graphs.transforms.splitting.storage_ops import cast_tensor
from placement.runtime.program.hosted_tensors import arrived, asked_back, copied_in, sent_away
from placement.runtime.writing.code import CPU, Code

if TYPE_CHECKING:
    from placement.runtime.planning.forms import Form
    from placement.runtime.writing.arguments import Arguments
    from placement.runtime.writing.rank_forms import RankForms
    from placement.runtime.writing.rank_parts import RankParts


class HostedForms:
    """Sends tensors to the host once they are made, and asks them back where the plan does.

    Ops that are written in between read them on the device; those behind that, which are of the backward pass, read
    what has come back. The lines between keep nothing of a tensor that went away once the forward pass has read it.
    """

    def __init__(self, code: Code, parts: RankParts, forms: RankForms, arguments: Arguments) -> None:
        self._code, self._parts, self._forms, self._arguments = code, parts, forms, arguments
        self._away: dict[Form, fx.Node] = {}
        hosted = parts.values.split.rewrite.hosted
        self._is_hosted = None if hosted is None else hosted.is_hosted
        self._planned = self._of_plan()

    def send_away(self, op: int, batch: int) -> None:
        """Send what op j has made for a micro-batch to the host, as far as it waits there."""
        if (op, batch) not in self._planned:
            return
        for form in self._tensors(op, batch):
            if form in self._forms.made and form not in self._away:
                self._away[form] = self._code.call(sent_away, self._forms.made[form])

    def ask_back(self, op: int, batch: int) -> None:
        """Have what op j made read from what comes back from now on."""
        for form in self._tensors(op, batch):
            if form in self._away:
                coming = self._code.call(asked_back, self._away[form])
                self._forms.replace(form, self._code.call(arrived, coming))
                self._arguments.forget(form)

    def _tensors(self, op: int, batch: int) -> list[Form]:
        """The hosted tensors that op j makes."""
        graph, values = self._parts.graph, self._parts.values
        numbers = range(int(graph.output_ptr[op]), int(graph.output_ptr[op + 1]))
        return [values.written(t, batch) for t in numbers if self._is_hosted is not None and self._is_hosted[t]]

    def _of_plan(self) -> frozenset[tuple[int, int]]:
        """(op j, micro-batch) of what goes to the host from here; a tensor that an exchange reads again does not."""
        if self._is_hosted is None:
            return frozenset()
        exchanged = self._parts.values.applied.exchanged
        rows = self._parts.values.split.rows
        here = [op for op, kind in enumerate(exchanged.graph.kinds) if kind == HOSTED]
        origin, part, batch = exchanged.origin.tolist(), exchanged.part.tolist(), exchanged.micro_batch.tolist()
        mine = (op for op in here if part[op] == self._parts.place and rows[origin[op]] == self._parts.row)
        return frozenset((origin[op], batch[op]) for op in mine)


class CopiedParameters:
    """Copies parameters that lie on the host where the plan does, for those who read them from then on.

    Attributes:
        casts: ops that cast a parameter for the ops of its layer, once for each copy -> the parameter.
    """

    def __init__(self, code: Code, parts: RankParts, forms: RankForms, arguments: Arguments) -> None:
        self._code, self._forms, self._arguments = code, forms, arguments
        self._values, split = parts.values, parts.values.split
        self._state_of = {number: state for state, number in split.state_number.items()}
        self._copied = split.rewrite.copied
        self._for_gathers: dict[int, fx.Node] = {}
        apart = [one for copied in self._copied.values() for one in copied if one.cast >= 0 and not one.is_gathered]
        self.casts = {one.cast: self._state_of[one.state] for one in apart}

    def begin(self, op: int) -> None:
        """Begin the copies of an op of the strategy's graph."""
        for one in self._copied[op]:
            state = self._state_of[one.state]
            coming = self._code.call(copied_in, self._forms.state(state), CPU)
            if one.is_gathered:
                self._for_gathers[state] = coming
            else:
                self._replace(self._values.kept(state), self._code.call(arrived, coming))

    def stored(self, state: int) -> fx.Node:
        """The line that a rank gives to a gather of a parameter, on its device."""
        if state in self._for_gathers:
            return self._code.call(arrived, self._for_gathers.pop(state))
        return self._forms.state(state)

    def cast(self, op: int) -> None:
        """Cast what was copied last, as op j does."""
        form = self._values.written(cast_tensor(self._values.split.graph, op))
        value = self._forms.get(self._values.kept(self.casts[op]))
        self._replace(form, self._code.cast(value, self._values.parts.root(form).layout.dtype))

    def _replace(self, form: Form, value: fx.Node) -> None:
        self._forms.replace(form, value)
        self._arguments.forget(form)
