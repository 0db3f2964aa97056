"""Participants: what they ask of an engine, what they know when they begin, and what the parts of a method promise."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from graphs.errors import FitError

if TYPE_CHECKING:
    from torch import Tensor

    from placement.fitting.task import WeightLayout

LOST = "lost"


class ParticipantLost(FitError):
    """A participant died that another one cannot go on without.

    Attributes:
        number: of the dead one.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"participant {number} was lost, and this method does not go on without it; start it again.")

    def sentence(self, workers: int) -> str:
        """The lost participant, in the words of a run with so many workers, after whom servers are numbered."""
        return str(self).replace(f"participant {self.number}", name_of(self.number, workers), 1)


def name_of(number: int, workers: int) -> str:
    """Name of a participant: "worker 1", or "server 0", which is numbered after the workers."""
    return f"worker {number}" if number < workers else f"server {number - workers}"


@dataclass(frozen=True)
class Portion:
    """Part `number` of `count` almost equal ones of all training samples in their order."""

    number: int
    count: int


@dataclass(frozen=True)
class Compute:
    """A gradient on the participant's own device. Answered by a `Computed`.

    Attributes:
        weights: float32 [n], all weights, flat.
        version: how many updates these weights have seen; kept in the trace.
        samples: int64 [b], numbers of the samples, or a portion of all; None takes the worker's next mini-batch.
        backward_weights: float32 [n], those that the backward pass reads where they are others than the forward's.
    """

    weights: Tensor
    version: int
    samples: Tensor | Portion | None = None
    backward_weights: Tensor | None = None


@dataclass(frozen=True)
class Computed:
    """The answer to `Compute`: the mean loss of the samples, its gradient, float32 [n], and how many samples."""

    loss: float
    gradient: Tensor
    samples: int


@dataclass(frozen=True)
class Post:
    """Tensors to another participant. Answered by None at once; the transfer goes on by itself.

    Attributes:
        to: number of the participant.
        tag: what the message is, a word.
        tensors: what is sent; copied before the answer. Their bytes are what the transfer takes.
        version: a number that goes with it.
    """

    to: int
    tag: str
    tensors: tuple[Tensor, ...] = ()
    version: int = 0


@dataclass(frozen=True)
class Message:
    """A sent message, as the receiver gets it: a `Post`'s tensors, tag and version, and its sender."""

    sender: int
    tag: str
    tensors: tuple[Tensor, ...]
    version: int


@dataclass(frozen=True)
class Receive:
    """The next message. Answered by a `Message`; messages of one sender arrive in the order in which they were sent.

    Attributes:
        tag: only messages of this tag; None: any. `LOST` comes with any.
        sender: only messages of this participant; None: any.
        wait: False is answered by None where no such message has arrived.
    """

    tag: str | None = None
    sender: int | None = None
    wait: bool = True


@dataclass(frozen=True)
class AllReduce:
    """The sum over a group, an equal shape in each. Answered by the summed tensors, once all of the group have asked.

    Attributes:
        tensors: what is summed.
        group: numbers of the participants, ascending, the asking one among them.
    """

    tensors: tuple[Tensor, ...]
    group: tuple[int, ...]


@dataclass(frozen=True)
class AllGather:
    """Every member's tensors. Answered by a tuple, one entry for each of `group` in its order; shapes may differ."""

    tensors: tuple[Tensor, ...]
    group: tuple[int, ...]


@dataclass(frozen=True)
class Updated:
    """An update was made to a model that others read: told to the engine for trace and curve. Answered by None.

    In virtual time it also takes what reading and writing the weights takes on the participant's device.

    Attributes:
        version: how many updates there are now, this one included.
        staleness: updates between the reading of the weights that the gradient was taken at and this one; 0 if none.
            None: no update of that model, but of a worker's own copy, or none; it does not count.
        weights: float32 [n], the model that the method would hand over now; None: no model, another participant
            tells it. The engine evaluates it now and then, and ends the run once it is good enough.
        part: how much of the weights is updated: 0.5 by a shard of two, 0 where the model was only read.
    """

    version: int
    staleness: float | None = 0.0
    weights: Tensor | None = None
    part: float = 1.0


def told(version: int, weights: Tensor) -> Updated:
    """The model as a participant has read or put it together, which is no update."""
    return Updated(version, None, weights, part=0.0)


Request = Compute | Post | Receive | AllReduce | AllGather | Updated
Participant = Generator[Request, Any, None]


class Inbox:
    """Messages in the order of their arrival, and who is known to be lost."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._gone: set[int] = set()

    def put(self, message: Message) -> None:
        """A message has arrived; one with the tag `LOST` is the last of its sender."""
        self._messages.append(message)
        if message.tag == LOST:
            self._gone.add(message.sender)

    def take(self, wanted: Receive) -> Message | ParticipantLost | None:
        """The first message that is wanted, or that it will never come; None: not yet."""
        for place, message in enumerate(self._messages):
            if message.tag == LOST:
                is_wanted = wanted.sender is None
            else:
                is_wanted = wanted.tag in (None, message.tag) and wanted.sender in (None, message.sender)
            if is_wanted:
                del self._messages[place]
                return message
        return ParticipantLost(wanted.sender) if wanted.sender is not None and wanted.sender in self._gone else None

    def lost_of(self, group: tuple[int, ...]) -> int | None:
        """One of a group that is known to be lost; None where there is none."""
        return min(self._gone.intersection(group), default=None)


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
