"""Exchanges with servers that keep the weights: a parameter server, Downpour SGD and elastic averaging."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Generator
from dataclasses import dataclass
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

import torch

from graphs.errors import FitError
from placement.fitting import participants
from placement.fitting.arrivals import FirstOf
from placement.fitting.exchanges.averaging import Exchange
from placement.fitting.participants import (
    LOST,
    Compute,
    MethodParts,
    Participant,
    ParticipantLost,
    Post,
    Receive,
    Request,
    Role,
    Updated,
    told,
)
from placement.fitting.task import WeightLayout

if TYPE_CHECKING:
    from torch import Tensor

    from placement.fitting.participants import Compressor, Updater


@dataclass(frozen=True, eq=False)
class WeightShard:
    """A server's part of the weights, whole parameters.

    Attributes:
        server: number of the participant that keeps it.
        entries: where it stands in the flat vector of all weights.
        layout: of its parameters.
        part: of all weights, 0 to 1.
    """

    server: int
    entries: slice
    layout: WeightLayout
    part: float

    def updater(self, role: Role, workers: int) -> Updater:
        """The batch rule at work on this part; `workers` whose mini-batches make up an update."""
        return role.method.batch_rule.updater(self.layout, role.learning_rate, workers)

    def compressor(self, role: Role) -> Compressor:
        """The compression at work on gradients of this part."""
        return role.method.compression.compressor(self.layout, role.generator(), role.number)


def shards_of(role: Role, count: int, first_server: int | None = None) -> tuple[WeightShard, ...]:
    """All weights in `count` parts of about equal size, on servers from `first_server`, by default the first one.

    Raises:
        FitError: there are fewer parameters than parts.
    """
    layout = role.layout
    total, ends = layout.size, [part.stop for part in layout.slices]
    if count > len(ends):
        raise FitError(f"{count} shards were asked for, but the model has {len(ends)} parameters; choose fewer shards.")
    cuts = [0]
    for number in range(1, count):
        # The first parameter that reaches so far, but one for each shard at least, before it and after.
        reached = bisect_left(ends, total * number / count) + 1
        cuts.append(min(max(reached, cuts[-1] + 1), len(ends) - (count - number)))
    cuts.append(len(ends))
    first = role.workers if first_server is None else first_server
    made = []
    for server, (a, b) in enumerate(pairwise(cuts), first):
        entries = slice(layout.slices[a].start, layout.slices[b - 1].stop)
        part = (entries.stop - entries.start) / total
        made.append(WeightShard(server, entries, WeightLayout(layout.names[a:b], layout.shapes[a:b]), part))
    return tuple(made)


class ShardClient:
    """A worker's side of the shards: gradients go there in parts, weights come back.

    Attributes:
        versions: of each shard that lives, that of the weights which were fetched last.
    """

    def __init__(self, role: Role, shards: tuple[WeightShard, ...], *, outlives_shards: bool = False) -> None:
        """`outlives_shards`: a lost shard's part is fetched no more, and the worker goes on while another lives."""
        self._outlives_shards = outlives_shards
        self.versions = dict.fromkeys(shards, 0)
        self._compressors = {shard: shard.compressor(role) for shard in shards}

    def has(self, version: int) -> bool:
        """Whether the weights that were fetched last are all of this version."""
        return set(self.versions.values()) == {version}

    def push(self, gradient: Tensor) -> Participant:
        """Send each shard its part of a gradient, float32 [n], with the version of the weights it was taken at."""
        for shard, version in self.versions.items():
            encoded = self._compressors[shard].encode(gradient[shard.entries])
            yield Post(shard.server, "push", encoded, version)

    def fetch(self, weights: Tensor) -> Generator[Request, Any, int]:
        """Ask all shards for their weights, and `receive` them."""
        for shard in self.versions:
            yield Post(shard.server, "fetch")
        return (yield from self.receive(weights))

    def receive(self, weights: Tensor) -> Generator[Request, Any, int]:
        """Overwrite weights, float32 [n], by what each shard sends. Returns the version of the oldest part."""
        for shard in tuple(self.versions):
            try:
                message = yield Receive("weights", shard.server)
            except ParticipantLost:
                if not self._outlives_shards or len(self.versions) == 1:
                    raise
                del self.versions[shard]
                continue
            weights[shard.entries] = message.tensors[0]
            self.versions[shard] = message.version
        return min(self.versions.values())


@dataclass(frozen=True)
class ParameterServer(Exchange):
    """Li et al. 2014, "Scaling distributed machine learning with the parameter server".

    The arrival rule says whom an update waits for: all workers, the first of them, or those that are too far behind.

    Attributes:
        shards: servers that the parameters are divided among.
        server: device of the servers; "": any.
    """

    name = "parameter_server"
    ranges = (("shards", 1, math.inf),)
    takes_arrival_rule = True

    shards: int = 1
    server: str = ""

    def servers(self, workers: int) -> tuple[str | None, ...]:
        """One for each shard."""
        return (self.server or None,) * self.shards

    def misfit(self, method: MethodParts, workers: int) -> str | None:
        """Backup workers of several shards: each would take the first of others, and all could wait for each other."""
        takes_first = isinstance(method.arrival, FirstOf) and method.arrival.extra > 0
        if self.shards > 1 and takes_first and method.arrival.refuse(workers) is None:
            return "first takes one shard, since several would take the first of different workers; leave shards out."
        return method.arrival.refuse(workers)

    def participant(self, role: Role) -> Participant:
        shards = shards_of(role, self.shards)
        if role.number < role.workers:
            return _worker(role, shards)
        return _server(role, shards[role.number - role.workers])


def _worker(role: Role, shards: tuple[WeightShard, ...]) -> Participant:
    weights, client, version = role.start.clone(), ShardClient(role, shards), 0
    while True:
        computed = yield Compute(weights, version)
        yield from client.push(computed.gradient)
        version = yield from client.receive(weights)
        yield told(version, weights)


def _server(role: Role, shard: WeightShard) -> Participant:
    rule = role.method.arrival
    share = rule.share(role.workers)
    weights, version = role.start[shard.entries].clone(), 0
    updater, compressor = shard.updater(role, share), shard.compressor(role)
    total, read = torch.zeros_like(weights), list[int]()  # of the gradients since the last update: sum, and versions
    steps = dict.fromkeys(role.everybody, 0)
    waiting = set[int]()
    while True:
        message = yield Receive()
        worker = message.sender
        match message.tag:
            case "push":
                steps[worker] += 1
                if rule.is_taken(message.version, version):
                    total += compressor.decode(message.tensors)
                    read.append(message.version)
                    waiting.add(worker)
                else:
                    yield Post(worker, "weights", (weights,), version)
            case participants.LOST:
                # Its last gradient may be in the sum, so it stays among those who wait.
                steps.pop(worker, None)
                if len(steps) < rule.least(role.workers):
                    raise ParticipantLost(worker)
        released = set(rule.released(waiting, steps, role.workers))
        if released and read:
            updater.update(weights, total / share)
            version += 1
            staleness = version - 1 - sum(read) / len(read)
            total.zero_()
            read.clear()
            yield Updated(version, staleness, part=shard.part)
        for other in sorted(released):
            yield Post(other, "weights", (weights,), version)
        waiting -= released


@dataclass(frozen=True)
class Downpour(Exchange):
    """Dean et al. 2012, "Large scale distributed deep networks", section 4.1 and algorithm 1.1 of the appendix.

    A shard updates its part by the batch rule (the paper: Adagrad) with each gradient that comes, and waits for nobody.
    Between two fetches a worker goes on with weights of its own, which it updates by the same rule. A lost worker is
    not missed; the part of a lost shard stays with the workers, each on its own, while another shard lives.

    Attributes:
        fetch: steps from one fetch of the weights to the next.
        push: steps whose gradients are added up before they are pushed.
        shards: servers that the parameters are divided among.
        server: device of the servers; "": any.
    """

    name = "downpour"
    ranges = (("fetch", 1, math.inf), ("push", 1, math.inf), ("shards", 1, math.inf))

    fetch: int = 1
    push: int = 1
    shards: int = 1
    server: str = ""

    def servers(self, workers: int) -> tuple[str | None, ...]:
        """One for each shard."""
        return (self.server or None,) * self.shards

    def participant(self, role: Role) -> Participant:
        shards = shards_of(role, self.shards)
        if role.number < role.workers:
            return self._worker(role, shards)
        return _downpour_server(role, shards[role.number - role.workers])

    def _worker(self, role: Role, shards: tuple[WeightShard, ...]) -> Participant:
        weights, updater, version = role.start.clone(), role.updater(1), 0
        client = ShardClient(role, shards, outlives_shards=True)
        accrued = torch.zeros_like(weights)
        for step in count(1):
            computed = yield Compute(weights, version)
            accrued += computed.gradient
            if step % self.push == 0:
                yield from client.push(accrued)
                accrued.zero_()
            if self.fetch > 1:
                updater.update(weights, computed.gradient)
                yield Updated(version, None)
            if step % self.fetch == 0:
                version = yield from client.fetch(weights)
                yield told(version, weights)


def _downpour_server(role: Role, shard: WeightShard) -> Participant:
    weights, version = role.start[shard.entries].clone(), 0
    updater, compressor = shard.updater(role, 1), shard.compressor(role)
    living = set(role.everybody)
    while True:
        message = yield Receive()
        match message.tag:
            case "push":
                updater.update(weights, compressor.decode(message.tensors))
                version += 1
                yield Updated(version, version - 1 - message.version, part=shard.part)
            case "fetch":
                yield Post(message.sender, "weights", (weights,), version)
            case participants.LOST:
                living.discard(message.sender)
                if not living:
                    raise ParticipantLost(message.sender)


@dataclass(frozen=True)
class ElasticAveraging(Exchange):
    """Asynchronous EASGD: Zhang, Choromanska, LeCun 2015, "Deep learning with elastic averaging SGD", algorithm 1.

    Every few steps a worker x and the centre c move towards each other: with d = a (x - c), x loses d and c gains it,
    so that their sum stays. With momentum as the batch rule it is EAMSGD. The model is the centre. Lost workers are
    not missed.

    Attributes:
        period: steps of a worker between two meetings with the centre.
        rate: the paper's beta, which is a times the number of workers.
        server: device that keeps the centre; "": any.
    """

    name = "elastic"
    ranges = (("period", 1, math.inf), ("rate", 0, 1))
    takes_compression = False

    period: int = 8
    rate: float = 0.9
    server: str = ""

    def servers(self, workers: int) -> tuple[str | None, ...]:
        """One, with the centre."""
        return (self.server or None,)

    def participant(self, role: Role) -> Participant:
        return self._worker(role) if role.number < role.workers else self._centre(role)

    def _worker(self, role: Role) -> Participant:
        weights, updater, version = role.start.clone(), role.updater(1), 0
        centre = role.workers
        while True:
            for _ in range(self.period):
                computed = yield Compute(weights, version)
                updater.update(weights, computed.gradient)
                yield Updated(version, None)
            yield Post(centre, "weights", (weights,), version)
            message = yield Receive("difference", centre)
            weights -= message.tensors[0]
            version = message.version

    def _centre(self, role: Role) -> Participant:
        weights, living, version = role.start.clone(), set(role.everybody), 0
        while True:
            message = yield Receive()
            if message.tag == LOST:
                living.discard(message.sender)
                if not living:
                    raise ParticipantLost(message.sender)
                continue
            difference = (message.tensors[0] - weights) * (self.rate / role.workers)
            weights += difference
            version += 1
            yield Post(message.sender, "difference", (difference,), version)
            yield Updated(version, version - 1 - message.version, weights)
