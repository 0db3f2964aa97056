"""A participant's knowledge when it begins, and the promises of the four parts of a method to each other."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from placement.fitting.requests import AllGather, Participant, Request

if TYPE_CHECKING:
    from torch import Tensor

    from placement.fitting.task import WeightLayout


class Updater(Protocol):
    """A batch rule at work on one vector of weights: an optimizer with its state."""

    def update(self, weights: Tensor, gradient: Tensor) -> None:
        """One update of weights, float32 [n], in place, by a mean gradient, float32 [n]."""


class BatchRule(Protocol):
    """How a mean gradient becomes an update, and how that depends on the size of the batch. A frozen record."""

    def updater(self, layout: WeightLayout, learning_rate: float, workers: int) -> Updater:
        """A new optimizer for weights of this layout.

        Args:
            layout: of the weights, whole parameters.
            learning_rate: the one that is right for the batch of one worker.
            workers: whose mini-batches make up the batch of an update.
        """


class Compressor:
    """A compression at work for one sender: what error feedback keeps is its own.

    Sub-classes write `encode` and `decode`; those whose messages can be summed as they are write `mean`, too.
    """

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """Tensors sent in the place of float32 [n]; their error is added to the next values."""
        return (values,)

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """float32 [n] of a message of `encode`, this sender's or another's."""
        return tensors[0]

    def mean(self, values: Tensor, group: tuple[int, ...]) -> Generator[Request, Any, Tensor]:
        """The mean of the group's values, as every member gets it: equal to the last bit in all of them.

        A group of one sends nothing, and loses nothing.
        """
        if len(group) == 1:
            return values
        messages = yield AllGather(self.encode(values), group)
        total = torch.zeros_like(values)
        for message in messages:
            total += self.decode(message)
        return total / len(group)


class Compression(Protocol):
    """How gradients become smaller on the wire. A frozen record."""

    def compressor(self, layout: WeightLayout, generator: torch.Generator, number: int) -> Compressor:
        """One for the participant of this number; `generator` is its own."""


class ArrivalRule(Protocol):
    """Rule for the workers that an update of a parameter server waits for. A frozen record.

    The server adds up gradients that are taken. Once it hands weights out again, their sum over `share` is one update.
    """

    def refuse(self, workers: int) -> str | None:
        """One sentence where numbers are out of range; None where all is well."""

    def share(self, workers: int) -> int:
        """How many gradients make up a global batch."""

    def least(self, workers: int) -> int:
        """The fewest living workers that it goes on with."""

    def is_taken(self, read: int, now: int) -> bool:
        """Whether a gradient at weights of version `read` counts when the server's have version `now`."""

    def released(self, waiting: Set[int], steps: Mapping[int, int], workers: int) -> Set[int]:
        """Workers that get weights now, and with them their next step.

        Args:
            waiting: those whose gradient was taken since they last got weights, lost ones included.
            steps: of each living worker, how many gradients of it have arrived.
            workers: how many began.
        """


class ExchangeRule(Protocol):
    """Rule for the messages of participants and their times. A frozen record of options."""

    def servers(self, workers: int) -> tuple[str | None, ...]:
        """Participants beside the workers, numbered after them: the device each is on, None for any."""

    def refuse(self, method: MethodParts, workers: int) -> str | None:
        """One sentence where parts do not go together or numbers are out of range; None where all is well."""

    def participant(self, role: Role) -> Participant:
        """The generator of one participant, a worker or a server by its number."""


class MethodParts(Protocol):
    """The four parts of a method."""

    @property
    def exchange(self) -> ExchangeRule: ...
    @property
    def compression(self) -> Compression: ...
    @property
    def batch_rule(self) -> BatchRule: ...
    @property
    def arrival(self) -> ArrivalRule: ...


@dataclass(frozen=True, eq=False)
class Role:
    """One participant's part in a run.

    Attributes:
        number: workers are 0 to workers - 1, servers follow.
        workers: replicas that compute gradients.
        start: float32 [n], the weights that all begin with.
        layout: of the weights.
        method: all four parts.
        learning_rate: the one that is right for the batch of one worker.
        seed: of everything random in the run.
    """

    number: int
    workers: int
    start: Tensor
    layout: WeightLayout
    method: MethodParts
    learning_rate: float
    seed: int

    @property
    def everybody(self) -> tuple[int, ...]:
        """All workers."""
        return tuple(range(self.workers))

    def generator(self) -> torch.Generator:
        """Random numbers of this participant alone."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + self.number)

    def updater(self, workers: int | None = None) -> Updater:
        """The batch rule at work; `workers` whose mini-batches make up an update, all by default."""
        return self.method.batch_rule.updater(self.layout, self.learning_rate, workers or self.workers)

    def compressor(self) -> Compressor:
        """The compression at work for what this participant sends."""
        return self.method.compression.compressor(self.layout, self.generator(), self.number)
