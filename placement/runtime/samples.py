"""A process's own samples of the global batch, for `placement.shard_of`, data loaders and steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphs.errors import MismatchError

_applied: OwnSamples | None = None


@dataclass(frozen=True)
class OwnSamples:
    """The samples of the global batch that are a process's own.

    Attributes:
        batch: number of samples of the global batch; 0 where every process has all, whatever their number.
        first, end: the own ones are first to end - 1.
    """

    batch: int = 0
    first: int = 0
    end: int = 0

    def of(self, size: int) -> slice:
        """The own samples in a global batch of a size.

        Raises:
            MismatchError: the global batch has another size.
        """
        if not self.batch:
            return slice(0, size)
        if size != self.batch:
            raise MismatchError(
                f"a batch has {size} samples; expected {self.batch}, the global batch that the strategy is for (a data "
                "loader drops a smaller last one with drop_last=True)."
            )
        return slice(self.first, self.end)


def set_own_samples(own: OwnSamples | None) -> None:
    """Let `shard_of` follow what was applied."""
    global _applied
    _applied = own


def shard_of(batch: Any, own: OwnSamples | None = None) -> Any:
    """The samples of a global batch that are this process's own, after `placement.apply` of a strategy.

    Args:
        batch: a tensor with the samples in dimension 0, or tuples, lists and mappings of such, nested. Numbers, text
            and tensors of no dimension stay.
        own: another one than that of the strategy applied last.

    Returns:
        The same nest with tensors that are views. A mapping comes as a dict.

    Raises:
        MismatchError: no strategy has been applied, or the batch has another size.
    """
    own = own or _followed()
    if isinstance(batch, torch.Tensor) and batch.dim():
        return batch[own.of(batch.shape[0])]
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
            yield list(numbers[self._own.of(len(numbers))])

    def __len__(self) -> int:
        return len(self.batches)


def _followed() -> OwnSamples:
    if _applied is None:
        raise MismatchError(
            "no strategy has been applied, so that no samples are this process's own; call placement.apply before."
        )
    return _applied
