"""A process's own samples of the global batch, for `placement.shard_of`, data loaders and steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphs.errors import MismatchError
from placement.runtime.parts.layouts import PartCut, PartLayout, take, take_from

_applied: OwnSamples | None = None


@dataclass(frozen=True)
class OwnSamples:
    """The samples of the global batch that are a process's own.

    Attributes:
        parts: which entries of dimension 0 are here, one for each size of it: that of the batch is the smallest, tokens
            in one row may have another. Empty where every process has all, whatever their number.
    """

    parts: tuple[PartLayout, ...] = ()

    @classmethod
    def of(cls, layouts: Mapping[str, PartLayout]) -> OwnSamples:
        """How dimension 0 of the inputs of a rank is cut; those that are not cut there do not count.

        Raises:
            MismatchError: inputs of one size are cut in two ways.
        """
        found: dict[int, tuple[str, PartLayout]] = {}
        for name, layout in sorted(layouts.items()):
            if layout.along(0):
                part = PartLayout(layout.shape[:1], layout.along(0))
                first, other = found.setdefault(layout.shape[0], (name, part))
                if other.runs(0) != part.runs(0):
                    raise MismatchError(
                        f"arguments {first!r} and {name!r} have {layout.shape[0]} in dimension 0, of which other "
                        "entries are this process's own; pass step() the global batch."
                    )
        return cls(tuple(part for _, (_, part) in sorted(found.items())))

    def indices(self, size: int) -> list[int]:
        """The numbers of the own samples in a global batch of a size, increasing.

        Raises:
            MismatchError: the global batch has another size.
        """
        runs = self.part(size).runs(0) if self.parts else ((0, size),)
        return [i for start, stop in runs for i in range(start, stop)]

    def part(self, size: int) -> PartLayout:
        """The part of so many entries that is here.

        Raises:
            MismatchError: the global batch has another size.
        """
        found = next((part for part in self.parts if part.shape == (size,)), None)
        if found is None:
            sizes = " or ".join(str(part.shape[0]) for part in self.parts)
            raise MismatchError(
                f"a batch has {size} samples; expected {sizes}, the global batch that the strategy is for (a data "
                "loader drops a smaller last one with drop_last=True)."
            )
        return found


def set_own_samples(own: OwnSamples | None) -> None:
    """Let `shard_of` follow the strategy that was applied."""
    global _applied
    _applied = own


def shard_of(batch: Any, own: OwnSamples | None = None) -> Any:
    """The samples of a global batch that are this process's own, after `placement.apply` of a strategy.

    Args:
        batch: a tensor with the samples in dimension 0, or tuples, lists and mappings of such, nested. Numbers, text
            and tensors of no dimension stay.
        own: another one than that of the strategy applied last.

    Returns:
        The same nest with tensors that are views where that is possible. A mapping comes as a dict.

    Raises:
        MismatchError: no strategy has been applied, or the batch has another size.
    """
    own = own or _followed()
    if isinstance(batch, torch.Tensor) and batch.dim() and own.parts:
        return take(batch, PartLayout(tuple(batch.shape), own.part(batch.shape[0]).cuts))
    if isinstance(batch, Mapping):
        return {key: shard_of(value, own) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(shard_of(value, own) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(shard_of(value, own) for value in batch)
    return batch


class ShardSampler:
    """This process's own samples in each batch of a sampler.

    Every process draws the same global batches, so give the sampler a generator with one seed:

        draw = RandomSampler(data, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(data, batch_sampler=placement.ShardSampler(BatchSampler(draw, 32, drop_last=True)))

    Args:
        batches: gives the numbers of the samples of each global batch, as `torch.utils.data.BatchSampler` does.
        own: another one than that of the strategy applied last.
    """

    def __init__(self, batches: Any, own: OwnSamples | None = None) -> None:
        self.batches, self._own = batches, own or _followed()

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            numbers: Sequence[int] = list(batch)
            yield [numbers[i] for i in self._own.indices(len(numbers))]

    def __len__(self) -> int:
        return len(self.batches)


def _followed() -> OwnSamples:
    if _applied is None:
        raise MismatchError(
            "no strategy has been applied, so that no samples are this process's own; call placement.apply before."
        )
    return _applied


def own_arguments(layouts: Mapping[str, PartLayout], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A rank's parts of the arguments of a step, of which it is given all or its own part, dimension by dimension.

    Args:
        layouts: the part of each argument that ops on this rank read, by path; those of no interest here are left out.
        tensors: by path.

    Raises:
        MismatchError: an argument is missing, or is neither whole nor this rank's part.
    """
    found = {}
    for name, want in layouts.items():
        if name not in tensors:
            raise MismatchError(f"argument {name!r} is missing or no tensor; this process reads it, so pass it.")
        tensor = tensors[name]
        found[name] = take_from(tensor, _given(name, tuple(tensor.shape), want), want)
    return found


def _given(name: str, shape: tuple[int, ...], want: PartLayout) -> PartLayout:
    """The part that a tensor of a shape is."""
    if len(shape) != len(want.shape):
        raise MismatchError(f"argument {name!r} has {len(shape)} dimensions; expected {len(want.shape)}.")
    cuts: list[PartCut] = []
    for dim, (size, all_of_it, own) in enumerate(zip(shape, want.shape, want.local_shape, strict=True)):
        if size not in (all_of_it, own):
            part = f", or {own}, this process's own part" if own != all_of_it else ""
            raise MismatchError(
                f"argument {name!r} has {size} in dimension {dim}; expected {all_of_it}, shape {want.shape} as the "
                f"strategy was made for{part}."
            )
        if size != all_of_it:
            cuts += want.along(dim)
    return PartLayout(want.shape, tuple(cuts))
