"""Sandblaster L-BFGS: a coordinator directs shards that have the weights, and hands out portions of the batch."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Generator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from placement.fitting import participants
from placement.fitting.batch_rules import Sgd
from placement.fitting.exchanges.averaging import Exchange
from placement.fitting.exchanges.servers import ShardClient, WeightShard, shards_of
from placement.fitting.participants import (
    Compute,
    MethodParts,
    Participant,
    ParticipantLost,
    Portion,
    Post,
    Receive,
    Request,
    Role,
    Updated,
    told,
)

if TYPE_CHECKING:
    from torch import Tensor

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
            case participants.LOST:
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


# Below it, s . y says nothing about the curvature (torch.optim.LBFGS).
_LEAST_CURVATURE = 1e-10
_DIRECTION, _LAST_GRADIENT, _PAIRS = HISTORY, HISTORY + 1, HISTORY + 2


class LimitedMemory:
    """As `torch.optim.LBFGS` without line search, one iteration for each update (Nocedal and Wright, algorithm 7.5).

    Where torch would end, since the direction does not go downhill, this forgets its history and begins anew.
    """

    def __init__(self, vectors: VectorShards, history: int, learning_rate: float) -> None:
        self._vectors, self._learning_rate = vectors, learning_rate
        self._step = 0.0  # the last one, in directions; 0: none, or nothing is remembered
        self._scale = 1.0  # the inverse Hessian matrix before the pairs
        # Pairs (s, y): a step, and by what it changed the gradient. One is kept free for the next.
        self._free = [(_PAIRS + 2 * place, _PAIRS + 2 * place + 1) for place in range(history + 1)]
        self._pairs: list[tuple[int, int, float]] = []  # the oldest first, with 1 / (s . y)

    def update(self) -> Participant:
        """One update by the gradient that is there."""
        vectors = self._vectors
        if self._step:
            yield from self._remember()
        yield from self._aim()
        if (yield from vectors.dot(GRADIENT, _DIRECTION)) >= 0 and self._pairs:
            self._free += [(s, y) for s, y, _ in self._pairs]
            self._pairs, self._scale, self._step = [], 1.0, 0.0
            yield from self._aim()
        if self._step:
            self._step = self._learning_rate
        else:
            norm = yield from vectors.norm1(GRADIENT)
            self._step = self._learning_rate * min(1.0, 1.0 / norm if norm else 1.0)
        yield from vectors.copy(_LAST_GRADIENT, GRADIENT)
        yield from vectors.step(self._step, _DIRECTION)

    def _remember(self) -> Participant:
        """The pair of the last step, unless it says nothing."""
        vectors, (s, y) = self._vectors, self._free[-1]
        yield from vectors.copy(s, _DIRECTION)
        yield from vectors.scale(s, self._step)
        yield from vectors.copy(y, GRADIENT)
        yield from vectors.add(y, -1.0, _LAST_GRADIENT)
        curvature = yield from vectors.dot(s, y)
        if curvature > _LEAST_CURVATURE:
            self._free.pop()
            self._pairs.append((s, y, 1.0 / curvature))
            self._scale = curvature / (yield from vectors.dot(y, y))
            if not self._free:
                oldest_s, oldest_y, _ = self._pairs.pop(0)
                self._free.append((oldest_s, oldest_y))

    def _aim(self) -> Participant:
        """The direction: minus the inverse Hessian matrix times the gradient, by the two loops."""
        vectors, factors = self._vectors, []
        yield from vectors.copy(_DIRECTION, GRADIENT)
        yield from vectors.scale(_DIRECTION, -1.0)
        for s, y, inverse in reversed(self._pairs):
            factors.append(inverse * (yield from vectors.dot(s, _DIRECTION)))
            yield from vectors.add(_DIRECTION, -factors[-1], y)
        if self._pairs:
            yield from vectors.scale(_DIRECTION, self._scale)
        for (s, y, inverse), factor in zip(self._pairs, reversed(factors), strict=True):
            other = inverse * (yield from vectors.dot(y, _DIRECTION))
            yield from vectors.add(_DIRECTION, factor - other, s)


@dataclass(frozen=True)
class Sandblaster(Exchange):
    """Dean et al. 2012, "Large scale distributed deep networks", section 4.2 and algorithm 1.2 of the appendix.

    The batch is all training samples. Portions of it much smaller than a worker's share go to whoever is free, and at
    the end of a batch those of slow workers once more to others; the first result of a portion counts. L-BFGS is that
    of `torch.optim.LBFGS` without line search (Nocedal and Wright, algorithm 7.5), its history on the shards. A lost
    worker is not missed; a lost shard or coordinator ends the run.

    Attributes:
        history: pairs of steps and changes of the gradient that are kept.
        portions: of the batch, for each worker.
        shards: servers that the parameters are divided among.
        server: device of coordinator and shards; "": any.
    """

    name = "sandblaster"
    ranges = (("history", 1, math.inf), ("portions", 1, math.inf), ("shards", 1, math.inf))
    takes_compression = False

    history: int = 10
    portions: int = 4
    shards: int = 1
    server: str = ""

    def servers(self, workers: int) -> tuple[str | None, ...]:
        """The coordinator, then one for each shard."""
        return (self.server or None,) * (1 + self.shards)

    def misfit(self, method: MethodParts, workers: int) -> str | None:
        has_own = method.batch_rule == Sgd()
        return None if has_own else "sandblaster has its own batch rule, L-BFGS; leave the batch rule out."

    def participant(self, role: Role) -> Participant:
        shards = shards_of(role, self.shards, role.workers + 1)
        portions = self.portions * role.workers
        if role.number < role.workers:
            return _worker(role, shards, portions)
        if role.number == role.workers:
            return self._coordinator(role, shards, portions)
        return vector_shard(role, shards[role.number - role.workers - 1], portions)

    def _coordinator(self, role: Role, shards: tuple[WeightShard, ...], portions: int) -> Participant:
        vectors = VectorShards(tuple(shard.server for shard in shards))
        lbfgs = LimitedMemory(vectors, self.history, role.learning_rate)
        free = set[int]()
        living = set(role.everybody)
        for version in count():
            yield from _hand_out(Portions(portions), version, free, living, vectors.servers)
            yield from lbfgs.update()


def _hand_out(
    portions: Portions, version: int, free: set[int], living: set[int], servers: tuple[int, ...]
) -> Participant:
    """Hand out all portions at weights of a version, until all servers have the results of all.

    `free` and `living` are workers, kept from batch to batch.
    """
    lacking = set(servers)
    while lacking:
        for worker in sorted(free):
            portion = portions.next_for(worker)
            if portion is not None:
                free.remove(worker)
                yield Post(worker, "portion", (torch.tensor(portion),), version)
        message = yield Receive()
        match message.tag:
            case "complete":
                lacking.discard(message.sender)
            case "free":
                free.add(message.sender)
                if message.version == version:
                    portions.finish(message.sender)
            case participants.LOST:
                free.discard(message.sender)
                living.discard(message.sender)
                portions.lose(message.sender)
                if message.sender in servers or not living:
                    raise ParticipantLost(message.sender)


def _worker(role: Role, shards: tuple[WeightShard, ...], portions: int) -> Participant:
    weights, client = role.start.clone(), ShardClient(role, shards)
    yield Post(role.workers, "free", version=-1)
    while True:
        message = yield Receive("portion", role.workers)
        portion, version = int(message.tensors[0]), message.version
        if not client.has(version):
            yield from client.fetch(weights)
        # Otherwise the batch is complete, and the shards are ahead: somebody else was faster.
        if client.has(version):
            yield told(version, weights)
            computed = yield Compute(weights, version, Portion(portion, portions))
            result = torch.tensor([portion, computed.samples])
            for shard in shards:
                yield Post(shard.server, "push", (computed.gradient[shard.entries], result), version)
        yield Post(role.workers, "free", version=version)


class Portions:
    """Portions of one batch: each is handed out once; those still under way then go to whoever is free, too."""

    def __init__(self, number: int) -> None:
        self._open = deque(range(number))
        self._orders = count()
        self._last_order: dict[int, int] = {}  # of each portion that was handed out, when it was last
        self._given: dict[int, int] = {}  # the portion of each busy worker
        self._done_by: defaultdict[int, set[int]] = defaultdict(set)

    def next_for(self, worker: int) -> int | None:
        """A portion for a free worker: a new one, or the one that was handed out longest ago; None: all are done."""
        if self._open:
            portion = self._open.popleft()
        else:
            under_way = self._last_order.keys() - self._done()
            if not under_way:
                return None
            portion = min(under_way, key=self._last_order.__getitem__)
        self._last_order[portion] = next(self._orders)
        self._given[worker] = portion
        return portion

    def finish(self, worker: int) -> None:
        """A worker has sent its result."""
        self._done_by[worker].add(self._given.pop(worker))

    def lose(self, worker: int) -> None:
        """A worker died. Its portions are done again, since nobody knows which results it still sent."""
        theirs = self._done_by.pop(worker, set())
        if worker in self._given:
            theirs.add(self._given.pop(worker))
        self._open.extend(sorted(theirs - set(self._given.values()) - self._done()))

    def _done(self) -> set[int]:
        return set[int]().union(*self._done_by.values())
