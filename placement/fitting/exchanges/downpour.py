"""Downpour SGD: workers push gradients to shards of a parameter server, and fetch weights, each in its own time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import torch

from placement.fitting import requests
from placement.fitting.exchanges.refusals import below, first_of, with_arrival_rule
from placement.fitting.exchanges.shards import ShardClient, WeightShard, shards_of
from placement.fitting.requests import Compute, Participant, ParticipantLost, Post, Receive, Updated, told
from placement.fitting.role import MethodParts, Role


@dataclass(frozen=True)
class Downpour:
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

    fetch: int = 1
    push: int = 1
    shards: int = 1
    server: str = ""

    def servers(self, workers: int) -> tuple[str | None, ...]:
        """One for each shard."""
        return (self.server or None,) * self.shards

    def refuse(self, method: MethodParts, workers: int) -> str | None:
        """Numbers below 1; an arrival rule."""
        return first_of(
            *(below(f"downpour:{name}", getattr(self, name), 1) for name in ("fetch", "push", "shards")),
            with_arrival_rule("downpour", method),
        )

    def participant(self, role: Role) -> Participant:
        """A worker, or the server of a shard."""
        shards = shards_of(role, self.shards)
        if role.number < role.workers:
            return self._worker(role, shards)
        return _server(role, shards[role.number - role.workers])

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


def _server(role: Role, shard: WeightShard) -> Participant:
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
            case requests.LOST:
                living.discard(message.sender)
                if not living:
                    raise ParticipantLost(message.sender)
