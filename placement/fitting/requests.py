"""Requests of a participant to the engine that runs it.

A participant is a generator. It yields requests, and gets their answers sent back. `virtual/` carries requests out in
virtual time, `real/` in processes of torch.distributed; an exchange is written once and knows neither.

Participants may die; what is posted to a dead one is dropped. Each of the others gets a `Message` with the tag `LOST`,
after all that the dead one sent; only a `Receive` from anyone takes it, whatever its tag. A `Receive` from the dead one
that nothing is left for, and a collective with it, throw `ParticipantLost` into the generator; where it is not caught,
the run ends with its sentence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphs.errors import FitError

if TYPE_CHECKING:
    from torch import Tensor

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


@dataclass(frozen=True)
class Pause:
    """Nothing for so many seconds. Answered by None."""

    seconds: float


Request = Compute | Post | Receive | AllReduce | AllGather | Updated | Pause
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
