"""A parameter server, central or in shards: gradients go to it, weights come back when the arrival rule allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from placement.fitting import requests
from placement.fitting.arrivals import FirstOf
from placement.fitting.exchanges.refusals import below, first_of
from placement.fitting.exchanges.shards import ShardClient, WeightShard, shards_of
from placement.fitting.requests import Compute, Participant, ParticipantLost, Post, Receive, Updated, told
from placement.fitting.role import MethodParts, Role


@dataclass(frozen=True)
class ParameterServer:
    """Li et al. 2014, "Scaling distributed machine learning with the parameter server".

    The arrival rule says whom an update waits for: all workers, the first of them, or those that are too far behind.

    Attributes:
        shards: servers that the parameters are divided among.
        server: device of the servers; "": any.
    """

    shards: int = 1
    server: str = ""

    def servers(self, workers: int) -> tuple[str | None, ...]:
        """One for each shard."""
        return (self.server or None,) * self.shards

    def refuse(self, method: MethodParts, workers: int) -> str | None:
        """Backup workers of several shards: each would take the first of others, and all could wait for each other."""
        takes_first = isinstance(method.arrival, FirstOf) and method.arrival.extra > 0
        return first_of(
            below("parameter_server:shards", self.shards, 1),
            method.arrival.refuse(workers),
            "first takes one shard, since several would take the first of different workers; leave shards out."
            if takes_first and self.shards > 1
            else None,
        )

    def participant(self, role: Role) -> Participant:
        """A worker, or the server of a shard."""
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
            case requests.LOST:
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
