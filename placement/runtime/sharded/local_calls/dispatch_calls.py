"""Dispatch to experts: each part sorts its own tokens, and works with places in its own list.

What is followed through the graph when rows are made (`graphs.capture.rows.dispatch`) holds here: an operator on local
places is the same operator. But numbers of places that are counted out, not sorted, are those of the whole list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from placement.runtime.sharded.local_calls.part_calls import Handlers, LocalCall, PartCall, aten

DISPATCHES = Handlers()
_ALIGNED_BYTES = 16  # of rows, for torch's grouped products
_COUNTED_OUT = (aten.arange.default, aten.arange.start, aten.arange.start_step)


@dataclass(frozen=True)
class WithOwnPlaces:
    """Calls ``index_put`` with places in a list that begins at ``start`` of that of all parts."""

    target: Any
    start: int
    __name__ = "with_own_places"

    def __call__(self, x: torch.Tensor, indices: Any, values: torch.Tensor, *args: Any) -> Any:
        return self.target(x, indices, values - self.start, *args)


@DISPATCHES.on("index_put", "index_put_", "_index_put_impl_")
def _index_put(call: PartCall) -> LocalCall:
    """The inverse of an order, ``inverse[order] = arange(n)``: where in its own list each part finds a token."""
    values = call["values"]
    runs = values.part.runs(0) if values.layout.shape and not values.layout.dtype.is_floating_point else ()
    if not runs or not _is_counted_out(values.node) or not runs[0][0]:
        return call.plain()
    if len(runs) > 1:
        raise call.refused("places that are here do not lie side by side")
    return call.plain(WithOwnPlaces(call.target, runs[0][0]))


def _is_counted_out(node: fx.Node) -> bool:
    """Whether a node is ``arange``, perhaps through views and copies of it."""
    while node.target not in _COUNTED_OUT:
        if node.op != "call_function" or len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    return True


@DISPATCHES.on("_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward")
def _grouped_product(call: PartCall) -> LocalCall:
    """Tokens in groups; how many each expert has, the data says."""
    if any(operand.part.along(0) for operand in call.operands if len(operand.layout.shape) == 3):
        raise call.refused("experts in parts have as many tokens each as the data says")
    if call.name == "_grouped_mm":
        for operand in call.operands:
            width = operand.part.local_shape[-1] * operand.layout.dtype.itemsize
            if len(operand.part.local_shape) > 1 and width % _ALIGNED_BYTES:
                raise call.refused(
                    f"its kernel takes rows of a multiple of {_ALIGNED_BYTES} bytes, and parts have {width}; take "
                    "another number of parts"
                )
    return call.plain()
