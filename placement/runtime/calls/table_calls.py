"""Tables whose rows are cut: each part looks up what it has, zeros stand for the rows of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from placement.runtime.calls.part_calls import Handlers, LocalCall, PartCall, aten
from placement.runtime.parts.layouts import PartLayout

TABLES = Handlers()


def looked_up(table: torch.Tensor, indices: torch.Tensor, start: int) -> torch.Tensor:
    """The rows [..., H] of a table whose rows from ``start`` on are here, [n, H]; zeros for those of other parts."""
    place = indices - start
    outside = (place < 0) | (place >= table.shape[0])
    found: torch.Tensor = aten.embedding.default(table, place.masked_fill_(outside, 0))
    return found.masked_fill_(outside.unsqueeze(-1), 0)


def gradient_of_rows(
    gradient: torch.Tensor, indices: torch.Tensor, start: int, count: int, padding: int, by_frequency: bool
) -> torch.Tensor:
    """The gradient of ``count`` rows of a table from ``start`` on.

    Args:
        gradient: [..., H], of what was looked up.
        indices: of the whole table.
        padding: the row that gets none, in the whole table; negative for none.
        by_frequency: divide by how often a row was looked up.
    """
    place = indices - start
    place.masked_fill_((place < 0) | (place >= count), count)  # one more row takes what belongs to other parts
    left_out = padding - start if start <= padding < start + count else count
    found: torch.Tensor = aten.embedding_dense_backward.default(gradient, place, count + 1, left_out, by_frequency)
    return found.narrow(0, 0, count)


@TABLES.on("embedding")
def _embedding(call: PartCall) -> LocalCall:
    table = call["weight"]
    if not table.part.along(0):
        return call.plain()
    start, _ = _rows(call, table.part)
    return LocalCall(looked_up, (table, call["indices"], start), {})


@TABLES.on("embedding_dense_backward")
def _embedding_backward(call: PartCall) -> LocalCall:
    by_frequency = call["scale_grad_by_freq"]
    if by_frequency and not call["indices"].part.is_whole:
        raise call.refused("gradients are divided by how often a row is looked up by all parts")
    if not call.output.along(0):
        return call.plain()
    start, stop = _rows(call, call.output)
    gradient, indices = call["grad_output"], call["indices"]
    return LocalCall(gradient_of_rows, (gradient, indices, start, stop - start, call["padding_idx"], by_frequency), {})


# -- bags of indices ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BagsHere:
    """Calls an operator on the bags that are here, all of one size, with offsets into the indices that are here."""

    target: Callable[..., Any]
    __name__ = "bags_here"

    def __call__(self, x: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The first index of a bag in the whole tells nothing of its place in a stretch of each sample's bags.
        count = offsets.shape[0]
        size = indices.shape[0] // max(count, 1)
        here = torch.arange(count, dtype=offsets.dtype, device=offsets.device) * size
        return self.target(x, indices, here, *args, **kwargs)


@dataclass(frozen=True)
class BagsOfRows:
    """Adds up the rows of a table that are here, from ``start`` on; those of other parts count nothing."""

    start: int
    __name__ = "bags_of_rows"

    def __call__(
        self, table: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
    ) -> Any:
        place = indices - self.start
        is_here = (place >= 0) & (place < table.shape[0])
        counted = is_here.to(table.dtype) if weights is None else weights * is_here
        return aten._embedding_bag.default(table, place * is_here, offsets, False, 0, False, counted)


@dataclass(frozen=True)
class GradientOfBagRows:
    """The gradient of ``count`` rows of a table from ``start`` on, whose bags were added up."""

    start: int
    count: int
    __name__ = "gradient_of_bag_rows"

    def __call__(
        self,
        gradient: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        *about: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        place = indices - self.start
        place.masked_fill_((place < 0) | (place >= self.count), self.count)  # a row more takes what belongs to others
        settings = self.count + 1, False, 0, False, weights
        found: torch.Tensor = aten._embedding_bag_backward.default(gradient, place, offsets, *about, *settings)
        return found.narrow(0, 0, self.count)


@TABLES.on("_embedding_bag", "_embedding_bag_forward_only", "embedding_bag")
def _bags(call: PartCall) -> LocalCall:
    table, offsets = call["weight"], call["offsets"]
    if not table.part.along(0):
        return call.plain(None if offsets.part.is_whole else BagsHere(call.target))
    target: Any = BagsOfRows(_rows(call, table.part)[0])
    target = target if offsets.part.is_whole else BagsHere(target)
    return LocalCall(target, (table, call["indices"], offsets, call["per_sample_weights"]), {})


@TABLES.on("_embedding_bag_backward")
def _bags_backward(call: PartCall) -> LocalCall:
    offsets = call["offsets"]
    if not call.output.along(0):
        return call.plain(None if offsets.part.is_whole else BagsHere(call.target))
    start, stop = _rows(call, call.output)
    target: Any = GradientOfBagRows(start, stop - start)
    target = target if offsets.part.is_whole else BagsHere(target)
    names = "grad", "indices", "offsets", "offset2bag", "bag_size", "maximum_indices"
    return LocalCall(target, tuple(call[name] for name in names), {"weights": call["per_sample_weights"]})


def _rows(call: PartCall, part: PartLayout) -> tuple[int, int]:
    """First and last row of a table that are here, as ``(start, stop)``."""
    runs = part.runs(0)
    if len(runs) != 1:
        raise call.refused("the rows of its table that are here do not lie side by side")
    return runs[0]
