"""Dispatch to experts: each part sorts its own tokens, and works with places in its own list.

Facts followed through the graph when rows are made (`graphs.capture.rows.dispatch`, `graphs.capture.rows.counted`) hold
here: an operator on local places is the same operator. But numbers that are counted out, not sorted, are those of the
whole list, or of all samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from placement.runtime.calls.part_calls import Handlers, LocalCall, PartCall, ReadTensor, aten

DISPATCHES = Handlers()
_COUNTED_OUT = (aten.arange.default, aten.arange.start, aten.arange.start_step)


@dataclass(frozen=True)
class WithOwnPlaces:
    """Calls ``index_put`` with the places of a part's own list, whatever they are in that of all parts."""

    target: Any
    __name__ = "with_own_places"

    def __call__(self, x: torch.Tensor, indices: Any, values: torch.Tensor, *args: Any) -> Any:
        places = torch.arange(values.numel(), dtype=values.dtype, device=values.device)
        return self.target(x, indices, places.view_as(values), *args)


@dataclass(frozen=True)
class AtOwnEntries:
    """Calls an index whose tensor number ``place`` counts the entries of all parts, of which those from ``start``."""

    target: Any
    place: int
    start: int
    __name__ = "at_own_entries"

    def __call__(self, x: torch.Tensor, indices: Any, *args: Any) -> Any:
        return self.target(x, [i - self.start if d == self.place else i for d, i in enumerate(indices)], *args)


@DISPATCHES.on("index")
def _index(call: PartCall) -> LocalCall:
    """An entry for each sample, ``x[arange(n), position]``: each part takes those of its own samples."""
    for place, index in enumerate(call["indices"]):
        runs = call.first.part.runs(place)
        if not isinstance(index, ReadTensor) or runs == ((0, call.first.part.shape[place]),):
            continue
        if _is_counted_out(index.node):
            if len(runs) > 1:
                raise call.refused("samples that are here do not lie side by side")
            return call.plain(AtOwnEntries(call.target, place, runs[0][0]))
    return call.plain()


@DISPATCHES.on("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def _index_put(call: PartCall) -> LocalCall:
    """The backward pass of `_index`, or the inverse of an order, ``inverse[order] = arange(n)``.

    By the latter each part finds a token in its own list.
    """
    own = _index(call)
    if isinstance(own.target, AtOwnEntries):
        return own
    values = call["values"]
    is_list = bool(values.layout.shape) and not values.layout.dtype.is_floating_point
    if not is_list or values.part.is_whole or not _is_counted_out(values.node):
        return call.plain()
    return call.plain(WithOwnPlaces(call.target))


def _is_counted_out(node: fx.Node) -> bool:
    """Whether a node is ``arange``, perhaps through views and copies of it."""
    while node.target not in _COUNTED_OUT:
        if node.op != "call_function" or len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    return True
