"""Gossip: no server and no all-reduce; each worker averages its weights with those of a neighbour or two."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from placement.fitting.exchanges.refusals import first_of, with_arrival_rule, with_compression
from placement.fitting.requests import LOST, Compute, Participant, Post, Receive, Updated
from placement.fitting.role import MethodParts, Role

_TOPOLOGIES = ("ring", "random")


@dataclass(frozen=True)
class Gossip:
    """Averaging among neighbours. The model is that of the first worker that lives.

    In a ring each step takes the mean of a worker's weights and its neighbours', and then the gradient, which was
    computed meanwhile: D-PSGD, Lian et al. 2017, "Can decentralized algorithms outperform centralized algorithms?",
    algorithm 1. At random each worker sends its weights to another one after each step and waits for nobody; who gets
    some blends them with its own by push-sum weights: GoSGD, Blot et al. 2016, "Gossip training for deep learning",
    which keeps the weighted mean of all weights, as the pairwise averaging of AD-PSGD (Lian et al. 2018) keeps the
    plain one, but needs no meeting of two. It goes on without lost workers; a ring does not.

    Attributes:
        topology: ``ring`` or ``random``.
    """

    topology: str = "ring"

    def servers(self, workers: int) -> tuple[str | None, ...]:
        """None."""
        return ()

    def refuse(self, method: MethodParts, workers: int) -> str | None:
        """An unknown topology; one worker alone; an arrival rule; a compression."""
        known = " or ".join(_TOPOLOGIES)
        return first_of(
            None if self.topology in _TOPOLOGIES else f"gossip:topology={self.topology} is not known; choose {known}.",
            None if workers > 1 else "gossip takes 2 workers or more, and here is 1; add workers, or choose sync.",
            with_arrival_rule("gossip", method),
            with_compression("gossip", method),
        )

    def participant(self, role: Role) -> Participant:
        """A worker."""
        return _in_ring(role) if self.topology == "ring" else _at_random(role)


def _in_ring(role: Role) -> Participant:
    weights, updater = role.start.clone(), role.updater(1)
    beside = {(role.number + turn) % role.workers for turn in (-1, 1)}
    for version in count():
        for other in sorted(beside):
            yield Post(other, "weights", (weights,), version)
        computed = yield Compute(weights, version)
        total = weights.clone()
        for other in sorted(beside):
            message = yield Receive("weights", other)
            total += message.tensors[0]
        weights.copy_(total / (len(beside) + 1))
        updater.update(weights, computed.gradient)
        yield Updated(version + 1, weights=weights if role.number == 0 else None)


def _at_random(role: Role) -> Participant:
    weights, updater, generator = role.start.clone(), role.updater(1), role.generator()
    mass = torch.ones(1, dtype=torch.float64)
    living = set(role.everybody)
    for version in count():
        while (message := (yield Receive(wait=False))) is not None:
            if message.tag == LOST:
                living.discard(message.sender)
            else:
                mass = blend(weights, mass, *message.tensors)
        computed = yield Compute(weights, version)
        updater.update(weights, computed.gradient)
        others = sorted(living - {role.number})
        if others:
            mass = mass / 2
            other = others[int(torch.randint(len(others), (), generator=generator))]
            yield Post(other, "weights", (weights, mass), version + 1)
        yield Updated(version + 1, weights=weights if role.number == min(living) else None)


def blend(weights: Tensor, mass: Tensor, other_weights: Tensor, other_mass: Tensor) -> Tensor:
    """Overwrite weights by the mean of two, weighted by their masses, and return the sum of these.

    Sum of masses and sum of masses times weights stay what they were (push-sum: Kempe et al. 2003).
    """
    together = mass + other_mass
    if other_mass > 0:  # halved a thousand times it is none
        weights.lerp_(other_weights, float(other_mass / together))
    return together
