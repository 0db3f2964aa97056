"""`Arguments`: the line of each node that an op reads: a form of a tensor or state, a view of one, or a number."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import fx

from graphs.errors import StrategyError
from graphs.opgraph import Phase
from graphs.transforms.splitting.sharding import is_by_groups
from placement.runtime.calls.local_calls import LocalCall
from placement.runtime.parts.layouts import PartLayout, whole
from placement.runtime.planning.forms import ONCE, Form, Wanted, info_of
from placement.runtime.program.functional import HANDING_ON, after, uninitialised

if TYPE_CHECKING:
    from placement.runtime.writing.code import Code
    from placement.runtime.writing.rank_forms import RankForms
    from placement.runtime.writing.rank_parts import Parts, RankParts

# Views that leave the first dimension as it is, however long: of lists they split the others.
_OF_ANY_LENGTH = {"t", "transpose", "permute", "mT", "unsqueeze", "detach", "alias", "contiguous"}
_ALONG_OTHERS = {"chunk": 2, "split": 2, "split_with_sizes": 2, "slice": 1, "select": 1, "narrow": 1}  # place of `dim`


class Arguments:
    """Lines by which a rank gets what its ops read, all made of `RankForms`.

    Attributes:
        views: of (node, wanted, run): views of forms; of a run where one call writes into the memory.
    """

    def __init__(self, code: Code, parts: RankParts, forms: RankForms) -> None:
        self._code, self._parts, self._forms = code, parts, forms
        self._plan, self._values, self._step, self._graph = parts.plan, parts.values, parts.step, parts.graph
        self._number = {node: i for i, node in enumerate(self._step.graph.nodes)}
        self.views: dict[tuple[fx.Node, Wanted, tuple[int, int] | None], fx.Node] = {}
        self._literals: dict[fx.Node, fx.Node] = {}

    def get(self, node: fx.Node, op: int, batch: int, outputs: Parts = ()) -> tuple[fx.Node, PartLayout | None]:
        """A node's value as op j reads it, and the part that it is; None for no tensor.

        Args:
            outputs: the parts that the call is to make.
        """
        info = info_of(node)
        if self._parts.is_drawn(node):
            return self.drawn(node), whole(info.layout.shape) if info else None
        shape_read = self._parts.shape_read(node, op, outputs)
        if info is not None and shape_read is not None:
            return self._code.blank(shape_read, info.layout.dtype), shape_read
        anchor = self._values.nodes.anchors.get(node)
        if anchor is None:
            if node.target is uninitialised and outputs and outputs[0] is not None:
                return self._code.call_on_parts(node, {}, {}, outputs[:1]), outputs[0]
            return self.literal(node), whole(info.layout.shape) if info else None
        wanted = self._values.wanted(anchor, op, batch)
        if self._plan.storage.is_gathered(wanted.have):
            if self._needs_no_weight(op, wanted):
                part = self._parts.layout(wanted.want)
                return self._code.blank(part, self._values.parts.root(wanted.want).layout.dtype), part
            wanted = self._gathered_state(wanted, op, batch)
        parts = self._parts.of_node(node, wanted)
        return self.view(node, wanted), parts[0] if parts else None

    def forget(self, form: Form) -> None:
        """Have views of a form made anew, of the line that it has now."""
        self.views = {key: line for key, line in self.views.items() if key[1].have != form}

    def drawn(self, node: fx.Node) -> fx.Node:
        """Random numbers, which are drawn before the step."""
        return self._code.take(("drawn", self._number[node]))

    def _needs_no_weight(self, op: int, wanted: Wanted) -> bool:
        """Whether an op only makes the gradient of a gathered weight, for which a convolution reads none of it."""
        if "convolution_backward" not in self._graph.kinds[op]:
            return False
        have = wanted.have._replace(phase=int(Phase.BACKWARD))
        batches = ONCE, *range(self._values.split.micro_batches)
        return not any(have._replace(batch=n) in self._code.pending for n in batches)

    def _gathered_state(self, wanted: Wanted, op: int, batch: int) -> Wanted:
        """A parameter that is gathered for its use: for this pass, else for the other.

        An op that runs once reads what is gathered for the first micro-batch.
        """
        for phase in (int(self._graph.phase[op]), int(Phase.FORWARD), int(Phase.BACKWARD)):
            for number in (batch, ONCE, 0):
                have = wanted.have._replace(phase=phase, batch=number)
                if have in self._code.pending or have in self._forms.made:
                    return wanted._replace(have=have)
        states, tensor = self._step.program.states, wanted.have.tensor
        maker = self._graph.tensor_producer[tensor]
        name = states[wanted.have.state].names[0] if tensor < 0 else self._graph.op_names[int(maker)]
        raise StrategyError(
            f"op {self._graph.op_names[op]!r} reads {name!r}, which the strategy does not gather for it; take a lower "
            "level than zero3."
        )

    # -- views ------------------------------------------------------------------------------------------------

    def view(self, node: fx.Node, wanted: Wanted) -> fx.Node:
        """A node that is a tensor or state in some form, or a view of it."""
        if node in self._step.counted and self._parts.layout(wanted.want).is_whole:
            return self.literal(node)
        if node in self._step.made_by or node in self._step.state_of or node in self._step.state_writes:
            return self._result(node, wanted)
        key = node, wanted, self._code.run_of if self._is_overwritten(node) else None
        if key in self.views:
            return self.views[key]
        if node in self._values.nodes.blanks:
            blank = self._parts.layout(wanted.want), self._values.parts.root(wanted.want).layout.dtype
            self.views[key] = self._code.blank(*blank)
        else:
            self.views[key] = self._viewed(node, wanted, self.view)
        return self.views[key]

    def _viewed(self, node: fx.Node, wanted: Wanted, seen: Callable[[fx.Node, Wanted], fx.Node]) -> fx.Node:
        """The call that makes a view, of ``seen`` of what it is a view of."""
        base = next(n for n in node.all_input_nodes if n in self._values.nodes.anchors)
        inputs = {n: seen(n, wanted) if n is base else self.literal(n) for n in node.all_input_nodes}
        if node.target in HANDING_ON:
            return inputs[base]
        by_groups = any(map(is_by_groups, wanted.want.codes))
        if by_groups and not _is_of_any_length(node):
            raise StrategyError(
                f"{node.target} looks at tokens at their experts in another shape, and how many there are the data "
                "says; leave out ep."
            )
        outputs, base_parts = self._parts.of_node(node, wanted), self._parts.of_node(base, wanted)
        parts = {n: whole(info.layout.shape) for n in inputs if n is not base and (info := info_of(n)) is not None}
        parts |= {base: base_parts[0]} if base_parts[:1] != () and base_parts[0] is not None else {}
        made = self._code.call_on_parts(node, inputs, parts, outputs)
        if by_groups:
            made.meta["by_groups"] = True
        return made

    def _is_overwritten(self, node: fx.Node) -> bool:
        """Whether a node is a copy that one call writes into, or a view of it; each run of the call has its own."""
        if node in self._step.overwrites:
            return node not in self._step.made_by
        if node in self._step.made_by or node.target is after or not node.all_input_nodes:
            return False
        return any(self._is_overwritten(n) for n in node.all_input_nodes if n in self._values.nodes.anchors)

    def _result(self, node: fx.Node, wanted: Wanted) -> fx.Node:
        """An op's result, or a state; for a tensor that a call wrote through a view, that view."""
        if self._step.is_view(node):
            return self._seen_through(node.args[0], wanted)  # type: ignore[arg-type]
        return self._forms.read(wanted)

    def _seen_through(self, view: fx.Node, wanted: Wanted) -> fx.Node:
        """A view that a call wrote through, of what it has made of the memory that lies behind."""
        if view in self._step.overwrites or view in self._step.state_of:
            return self._forms.read(wanted)
        if self._step.is_view(view):
            return self._seen_through(view.args[0], wanted)  # type: ignore[arg-type]
        return self._viewed(view, wanted, self._seen_through)

    def literal(self, node: fx.Node) -> fx.Node:
        """A node that is made on the spot, whole."""
        if node not in self._literals:
            self._literals[node] = self._made_here(node)
        return self._literals[node]

    def _made_here(self, node: fx.Node) -> fx.Node:
        step = self._step
        if node in step.state_of:
            return self._code.take(("state", step.names[node]))
        if node.op == "get_attr":
            return self._code.constant(operator.attrgetter(str(node.target))(node.graph.owning_module))
        if node in step.made_by:
            raise StrategyError(
                f"op {self._graph.op_names[step.made_by[node]]!r} makes a number that decides what others do; this "
                "strategy cannot be run."
            )
        inputs = {n: self.literal(n) for n in node.all_input_nodes}
        first = node.args[0] if node.args else None
        clone = torch.ops.aten.clone.default
        if node in step.overwrites and isinstance(first, fx.Node) and node.target is not clone:
            # A counter goes on from the value that it had when the step began, for all its readers.
            inputs[first] = self._code.call(clone, inputs[first])
        return self._code.local_call(node, LocalCall(node.target, node.args, dict(node.kwargs)), inputs)  # type: ignore[arg-type]


def _is_of_any_length(node: fx.Node) -> bool:
    """Whether a view does the same to a list of tokens of any length."""
    if node.target is operator.getitem:
        return True
    name = str(node.target).split(".")[1]
    place = _ALONG_OTHERS.get(name)
    if place is None:
        return name in _OF_ANY_LENGTH
    return bool((node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)) != 0)
