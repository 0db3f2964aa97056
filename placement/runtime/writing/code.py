"""`Code`: the code of one rank while it is written: calls, values from outside, and messages to other ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from graphs.errors import StrategyError
from placement.runtime.calls.local_calls import Extras, LocalCall, local_call
from placement.runtime.planning.forms import ONCE, dense
from placement.runtime.program.functional import uninitialised
from placement.runtime.program.on_device import under_autocast
from placement.runtime.program.transfers import Transfer, expect, receive, send
from placement.runtime.writing.glue import TakePart, as_captured, begin, finish

if TYPE_CHECKING:
    from placement.runtime.exchanging.exchanges import Exchange
    from placement.runtime.parts.layouts import PartLayout
    from placement.runtime.program.device_layout import Key

CPU = torch.device("cpu")  # where calls make tensors, until `run_on` names the device
_AHEAD = 8  # transfers that a rank is always ready for, as `placement.runtime.program.routines` has it


class Code:
    """Lines of code of one rank; every other class of this room adds to the same ones.

    Args:
        op_names: of the graph after recomputation, for errors.

    Attributes:
        graph: the lines.
        constants: tensors that they read, by attribute.
        taken: lines of values from outside, by key.
        exchanges: that were begun, by number.
        transfers: that are sent or received, by tag.
        pending: results that an exchange will give, by the key that whoever began it chose.
        run_of: the op j and the micro-batch that are being written.
    """

    def __init__(self, op_names: Sequence[str]) -> None:
        self._op_names = op_names
        self.graph = fx.Graph()
        self._endpoint = self.graph.placeholder("endpoint")
        self._collectives = self._last_taken = self.graph.placeholder("collectives")
        self.constants: dict[str, Any] = {}
        self.taken: dict[Key, fx.Node] = {}
        self.exchanges: dict[int, Exchange] = {}
        self.transfers: dict[int, Transfer] = {}
        self.pending: dict[Hashable, tuple[fx.Node, int]] = {}  # with the handle and the place among its results
        self._finished: dict[fx.Node, fx.Node] = {}
        self._calls: dict[Any, LocalCall] = {}
        self.run_of = ONCE, ONCE

    # -- calls ------------------------------------------------------------------------------------------------

    def call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """A call of a function."""
        return self.graph.call_function(target, args)

    def local_call(self, node: fx.Node, call: LocalCall, inputs: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """A call that stands for a captured one.

        Args:
            inputs: the line of each captured node among its arguments.
        """
        args, kwargs = fx.map_arg((call.args, call.kwargs), lambda n: inputs.get(n, n))
        target: Any = as_captured(node, call.target)
        if "autocast" in node.meta:
            return self.graph.call_function(under_autocast, (node.meta["autocast"], target, *args), kwargs)
        return self.graph.call_function(target, args, kwargs)

    def call_on_parts(
        self,
        node: fx.Node,
        inputs: Mapping[fx.Node, fx.Node],
        parts: Mapping[fx.Node, PartLayout],
        outputs: tuple[PartLayout | None, ...],
        extras: Extras | None = None,
    ) -> fx.Node:
        """A captured call on parts of its tensors.

        Args:
            inputs, parts: of each argument its line, and the part that it is.
            outputs: the part of each flat result that is to be made.

        Raises:
            StrategyError: it cannot run on these parts.
        """
        extras = extras or Extras()
        if extras != Extras():
            return self.local_call(node, local_call(node, parts, outputs, extras), inputs)
        key = node, tuple(parts.items()), outputs  # micro-batches are alike
        if key not in self._calls:
            self._calls[key] = local_call(node, parts, outputs, extras)
        return self.local_call(node, self._calls[key], inputs)

    def part(self, value: fx.Node, have: PartLayout, want: PartLayout) -> fx.Node:
        """A part of a part; the same line where it is all of it.

        Raises:
            StrategyError: the one has not all of the other.
        """
        if have.coarse_cuts == want.coarse_cuts:
            return value
        if not have.holds(want):
            raise StrategyError(
                f"op {self._op_names[self.run_of[0]]!r} reads a part of a tensor that its rank has not; this "
                "strategy cannot be run."
            )
        return self.call(TakePart(have, want), value)

    def blank(self, part: PartLayout, dtype: torch.dtype) -> fx.Node:
        """Memory of a part's size, for what reads no more than that."""
        layout = dense(part.local_shape, dtype).layout
        return self.call(uninitialised, *layout[:3], CPU)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """Zeros, of a rank that has nothing to add."""
        return self.graph.call_function(torch.zeros, (shape,), {"dtype": dtype, "device": CPU})

    def cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A tensor in another number format."""
        return self.graph.call_function(torch.ops.aten._to_copy.default, (value,), {"dtype": dtype})

    # -- values from outside ----------------------------------------------------------------------------------

    def take(self, key: Key) -> fx.Node:
        """A value from outside: ``("state", name)``, ``("input", path)`` or ``("drawn", number)``."""
        if key not in self.taken:
            with self.graph.inserting_after(self._last_taken):
                self._last_taken = self.graph.placeholder(f"{key[0]}_{len(self.taken)}")
            self.taken[key] = self._last_taken
        return self.taken[key]

    def constant(self, value: Any) -> fx.Node:
        """A tensor that the captured program has in itself."""
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        return self.graph.get_attr(name)

    # -- messages ---------------------------------------------------------------------------------------------

    def send(self, transfer: Transfer, value: fx.Node) -> None:
        """Send a tensor to another rank."""
        self.transfers[transfer.tag] = transfer
        self.call(send, self._endpoint, transfer.tag, value)

    def receive(self, transfer: Transfer) -> fx.Node:
        """Wait for a tensor of another rank."""
        self.transfers[transfer.tag] = transfer
        return self.call(receive, self._endpoint, transfer.tag)

    def begin(self, exchange: Exchange, values: Sequence[fx.Node], keys: Sequence[Hashable]) -> fx.Node:
        """Begin an exchange, without waiting; its results are then `pending`, one for each key."""
        self.exchanges[exchange.number] = exchange
        handle = self.call(begin, self._collectives, exchange.number, *values)
        self.pending |= {key: (handle, place) for place, key in enumerate(keys)}
        return handle

    def finish(self, handle: fx.Node) -> fx.Node:
        """Wait for an exchange, once."""
        if handle not in self._finished:
            self._finished[handle] = self.call(finish, self._collectives, handle)
        return self._finished[handle]

    def arrived(self, key: Hashable) -> fx.Node:
        """A pending result; waits for its exchange."""
        handle, place = self.pending[key]
        return self.call(operator.getitem, self.finish(handle), place)

    def exchanged(self, exchange: Exchange, value: fx.Node) -> fx.Node:
        """The only result of an exchange, at once."""
        self.begin(exchange, [value], [exchange.number])
        return self.arrived(exchange.number)

    def expect_early(self) -> None:
        """Once all is written: be ready for transfers before they are received."""
        coming = [node for node in self.graph.nodes if node.target is receive]
        for number, node in enumerate(coming):
            with self.graph.inserting_before(coming[number - _AHEAD] if number >= _AHEAD else self._first_call):
                self.graph.call_function(expect, node.args)

    @property
    def _first_call(self) -> fx.Node:
        first: fx.Node = next(node for node in self.graph.nodes if node.op != "placeholder")
        return first
