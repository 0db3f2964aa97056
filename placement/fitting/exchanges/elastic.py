"""Elastic averaging: workers train on their own, and springs hold them to a centre."""

from __future__ import annotations

from dataclasses import dataclass

from placement.fitting.exchanges.refusals import below, first_of, outside, with_arrival_rule, with_compression
from placement.fitting.requests import LOST, Compute, Participant, ParticipantLost, Post, Receive, Updated
from placement.fitting.role import MethodParts, Role


@dataclass(frozen=True)
class ElasticAveraging:
    """Asynchronous EASGD: Zhang, Choromanska, LeCun 2015, "Deep learning with elastic averaging SGD", algorithm 1.

    Every few steps a worker x and the centre c move towards each other: with d = a (x - c), x loses d and c gains it,
    so that their sum stays. With momentum as the batch rule it is EAMSGD. The model is the centre. Lost workers are
    not missed.

    Attributes:
        period: steps of a worker between two meetings with the centre.
        rate: the paper's beta, which is a times the number of workers.
        server: device that keeps the centre; "": any.
    """

    period: int = 8
    rate: float = 0.9
    server: str = ""

    def servers(self, workers: int) -> tuple[str | None, ...]:
        """One, with the centre."""
        return (self.server or None,)

    def refuse(self, method: MethodParts, workers: int) -> str | None:
        """A period below 1; a rate that is no fraction; an arrival rule; a compression."""
        return first_of(
            below("elastic:period", self.period, 1),
            outside("elastic:rate", self.rate, 0, 1),
            with_arrival_rule("elastic", method),
            with_compression("elastic", method),
        )

    def participant(self, role: Role) -> Participant:
        """A worker, or the centre."""
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
