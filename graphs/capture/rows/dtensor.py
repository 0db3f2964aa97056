"""The one place that reads the rules of torch's DTensor, which are private to it.

Used where we have no rule of our own. A rule of DTensor is a function from a call's shapes to lists of placements,
results first; each list is one letter. Checked by `tests/graphs/rows/test_rows.py`, which fails when torch moves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from graphs.capture.trace import Layout
from graphs.ops.letters import Cut, Letter

# Rules that computing with numbers has shown to be wrong, and why.
WRONG = {
    "aten.convolution.default": "channels and borders of a part are taken for those of the whole",
    "aten.convolution_backward.default": "as the convolution",
    "aten.native_batch_norm.default": "statistics of a part are taken for those of the batch",
}


@cache
def strategies() -> Mapping[Any, Any]:
    """DTensor's rules for one dimension of a mesh by operator; none where this torch keeps them elsewhere."""
    try:
        from torch.distributed.tensor import DTensor

        found: Mapping[Any, Any] = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    except (ImportError, AttributeError):
        return {}
    return found


def letters(target: Any, args: Any, kwargs: Any, n_outputs: int) -> list[Letter]:
    """DTensor's letters for a call with `Layout` for each tensor; none where it has no rule, or one that fails."""
    strategy = strategies().get(target)
    if strategy is None or str(target) in WRONG:
        return []
    shapes: list[tuple[int, ...]] = []
    try:
        listed = strategy(target, _metas(args, shapes), {name: _metas(value, shapes) for name, value in kwargs})
        found = [_letter(placements, shapes, n_outputs) for placements in listed]
    except Exception:  # a private function of another library: whatever it raises, there is no rule
        return []
    return [letter for letter in found if letter is not None]


def _metas(value: Any, shapes: list[tuple[int, ...]]) -> Any:
    if type(value) is Layout:
        from torch.distributed.tensor._dtensor_spec import TensorMeta

        shapes.append(value.shape)
        return TensorMeta(torch.Size(value.shape), value.stride, value.dtype)
    return tuple(_metas(item, shapes) for item in value) if isinstance(value, tuple) else value


def _letter(placements: Any, shapes: list[tuple[int, ...]], n_outputs: int) -> Letter | None:
    """One list of placements, results first; None where it splits nothing or is no plain split."""
    placements = list(placements)
    if len(placements) != n_outputs + len(shapes):
        return None
    ordered = placements[n_outputs:] + placements[:n_outputs]
    cuts, partial, size = [], [], 0
    for slot, placement in enumerate(ordered):
        if placement is None or type(placement).__name__ == "Replicate":
            continue
        if type(placement).__name__ in ("Shard", "_ShardingPlaceholder"):
            cuts.append(Cut(slot, (placement.dim,)))
            if slot < len(shapes):
                size = max(size, shapes[slot][placement.dim])
        elif type(placement).__name__ == "Partial" and placement.reduce_op == "sum":
            partial.append(slot)
        else:
            return None
    return Letter(size, tuple(cuts), tuple(partial)) if size > 1 else None
