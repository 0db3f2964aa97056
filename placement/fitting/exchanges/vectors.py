"""Vectors whose parts lie on servers: a coordinator names them and says what to do, and sees numbers only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from placement.fitting import requests
from placement.fitting.requests import Participant, ParticipantLost, Post, Receive, Request, Updated

if TYPE_CHECKING:
    from torch import Tensor

    from placement.fitting.exchanges.shards import WeightShard
    from placement.fitting.role import Role

# Numbers of vectors. From HISTORY on they are free to use.
WEIGHTS, GRADIENT, HISTORY = 0, 1, 2


@dataclass(frozen=True)
class VectorShards:
    """A coordinator's side: each operation is told to all servers, and carried out there in the order of telling.

    Attributes:
        servers: numbers of the participants.
    """

    servers: tuple[int, ...]

    def copy(self, target: int, other: int) -> Participant:
        """Target becomes the other vector."""
        return self._tell("copy", target, other)

    def add(self, target: int, factor: float, other: int) -> Participant:
        """Target grows by so many times the other vector."""
        return self._tell("add", target, other, factor)

    def scale(self, target: int, factor: float) -> Participant:
        """Target is multiplied by a number."""
        return self._tell("scale", target, target, factor)

    def dot(self, one: int, other: int) -> Generator[Request, Any, float]:
        """The dot product of two vectors."""
        yield from self._tell("dot", one, other)
        return (yield from self._sum("dot"))

    def norm1(self, one: int) -> Generator[Request, Any, float]:
        """The sum of absolute values."""
        yield from self._tell("norm1", one, one)
        return (yield from self._sum("norm1"))

    def step(self, factor: float, direction: int) -> Participant:
        """An update: the weights grow by so many times the direction, and the gradient begins anew."""
        yield from self._tell("step", WEIGHTS, direction, factor)
        yield from self._sum("step")

    def _tell(self, tag: str, one: int, other: int, factor: float = 1.0) -> Participant:
        for server in self.servers:
            yield Post(server, tag, (torch.tensor([one, other]), torch.tensor(factor, dtype=torch.float64)))

    def _sum(self, tag: str) -> Generator[Request, Any, float]:
        total = 0.0
        for server in self.servers:
            message = yield Receive(tag, server)
            total += float(message.tensors[0])
        return total


def vector_shard(role: Role, shard: WeightShard, portions: int) -> Participant:
    """A server: the gradient of a batch comes in portions, whatever their order, each once; then vectors are used.

    Numbers that are answered are float64 [].
    """
    vectors: defaultdict[int, Tensor] = defaultdict(lambda: torch.zeros(shard.entries.stop - shard.entries.start))
    vectors[WEIGHTS] += role.start[shard.entries]
    version, samples, seen = 0, 0, set[int]()
    while True:
        message = yield Receive()
        match message.tag:
            case "fetch":
                yield Post(message.sender, "weights", (vectors[WEIGHTS],), version)
            case "push":
                gradient, (portion, n_samples) = message.tensors[0], message.tensors[1].tolist()
                if message.version != version or portion in seen:
                    continue  # somebody else was faster
                seen.add(portion)
                vectors[GRADIENT] += gradient * n_samples
                samples += n_samples
                if len(seen) == portions:
                    vectors[GRADIENT] /= samples
                    yield Post(role.workers, "complete", (), version)
            case requests.LOST:
                if message.sender == role.workers:
                    raise ParticipantLost(message.sender)
            case "step":
                _, direction = message.tensors[0].tolist()
                vectors[WEIGHTS] += float(message.tensors[1]) * vectors[direction]
                vectors[GRADIENT].zero_()
                version, samples = version + 1, 0
                seen.clear()
                yield Updated(version, part=shard.part)
                yield Post(message.sender, "step", (torch.zeros((), dtype=torch.float64),))
            case operation:
                one, other = (vectors[number] for number in message.tensors[0].tolist())
                number = _carried_out(operation, one, other, float(message.tensors[1]))
                yield Updated(version, None, part=shard.part)
                if number is not None:
                    yield Post(message.sender, operation, (number,))


def _carried_out(operation: str, one: Tensor, other: Tensor, factor: float) -> Tensor | None:
    match operation:
        case "copy":
            one.copy_(other)
        case "add":
            one.add_(other, alpha=factor)
        case "scale":
            one.mul_(factor)
        case "dot":
            return one.double() @ other.double()
        case "norm1":
            return one.double().abs().sum()
    return None
