"""Sandblaster L-BFGS: a coordinator directs shards that have the weights, and hands out portions of the batch."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import count

import torch

from placement.fitting import requests
from placement.fitting.batch_rules.torch_optimizers import Sgd
from placement.fitting.exchanges.lbfgs import LimitedMemory
from placement.fitting.exchanges.refusals import below, first_of, with_arrival_rule, with_compression
from placement.fitting.exchanges.shards import ShardClient, WeightShard, shards_of
from placement.fitting.exchanges.vectors import VectorShards, vector_shard
from placement.fitting.requests import Compute, Participant, ParticipantLost, Portion, Post, Receive, told
from placement.fitting.role import MethodParts, Role


@dataclass(frozen=True)
class Sandblaster:
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

    history: int = 10
    portions: int = 4
    shards: int = 1
    server: str = ""

    def servers(self, workers: int) -> tuple[str | None, ...]:
        """The coordinator, then one for each shard."""
        return (self.server or None,) * (1 + self.shards)

    def refuse(self, method: MethodParts, workers: int) -> str | None:
        """Numbers below 1; another batch rule than plain SGD; an arrival rule; a compression."""
        return first_of(
            *(below(f"sandblaster:{name}", getattr(self, name), 1) for name in ("history", "portions", "shards")),
            None
            if method.batch_rule == Sgd()
            else "sandblaster has its own batch rule, L-BFGS; leave the batch rule out.",
            with_arrival_rule("sandblaster", method),
            with_compression("sandblaster", method),
        )

    def participant(self, role: Role) -> Participant:
        """A worker, the coordinator, or a shard."""
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
            case requests.LOST:
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
