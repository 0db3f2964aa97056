"""`Exchange`, the base of all exchanges, and those without servers: synchronous SGD, local SGD, DiLoCo and gossip."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

import torch
from torch import Tensor

from placement.fitting.arrivals import WaitForAll
from placement.fitting.batch_rules import ElementWise
from placement.fitting.compressions import Uncompressed
from placement.fitting.participants import (
    LOST,
    Compute,
    MethodParts,
    Participant,
    Post,
    Receive,
    Role,
    Updated,
    Updater,
    told,
)


class Exchange(ABC):
    """Base of exchanges, which are frozen records of their options (`ExchangeRule`).

    Attributes:
        name: in the text of a method.
        ranges: options, each with the least and the most that it may be.
        takes_arrival_rule: it has a server that such a rule could steer.
        takes_compression: it sends gradients; whole weights would be spoilt.
    """

    name: ClassVar[str]
    ranges: ClassVar[tuple[tuple[str, float, float], ...]] = ()
    takes_arrival_rule: ClassVar[bool] = False
    takes_compression: ClassVar[bool] = True

    def servers(self, workers: int) -> tuple[str | None, ...]:
        return ()

    def refuse(self, method: MethodParts, workers: int) -> str | None:
        for option, least, most in self.ranges:
            if (sentence := self._outside(option, least, most)) is not None:
                return sentence
        if (sentence := self.misfit(method, workers)) is not None:
            return sentence
        if not self.takes_arrival_rule and type(method.arrival) is not WaitForAll:
            return f"{self.name} takes no arrival rule; leave it out, or choose parameter_server, which has one."
        if not self.takes_compression and not isinstance(method.compression, Uncompressed):
            return f"{self.name} sends weights, not gradients, and cannot compress them; leave the compression out."
        return None

    def misfit(self, method: MethodParts, workers: int) -> str | None:
        """What else does not go together, in one sentence."""
        return None

    def _outside(self, option: str, least: float, most: float) -> str | None:
        value = getattr(self, option)
        if least <= value <= most:
            return None
        expected = f"{least} or more" if most == math.inf else f"a value from {least} to {most}"
        return f"{self.name}:{option}={value} is out of range; choose {expected}."

    @abstractmethod
    def participant(self, role: Role) -> Participant:
        """The generator of one participant, a worker or a server by its number."""


@dataclass(frozen=True)
class Synchronous(Exchange):
    """All-reduce of gradients, then the same update in every worker."""

    name = "sync"

    def participant(self, role: Role) -> Participant:
        return synchronous_steps(role, role.start.clone(), role.updater(), count())


def synchronous_steps(role: Role, weights: Tensor, updater: Updater, versions: Iterable[int]) -> Participant:
    """Steps from weights of each of these versions to the next, in place, by the mean gradient of all workers."""
    compressor = role.compressor()
    for version in versions:
        computed = yield Compute(weights, version)
        mean = yield from compressor.mean(computed.gradient, role.everybody)
        updater.update(weights, mean)
        yield Updated(version + 1, weights=weights if role.number == 0 else None)


@dataclass(frozen=True)
class LocalSgd(Exchange):
    """Stich 2018, "Local SGD converges fast and communicates little".

    With `after` it is post-local SGD, with `group` hierarchical local SGD (both Lin et al. 2018, "Don't use large
    mini-batches, use local SGD"). The change since the last mean is averaged, so that it can be compressed (Basu et al.
    2019, "Qsparse-local-SGD").

    Attributes:
        period: steps of a worker between two means.
        after: updates that are synchronous before workers go their own ways.
        group: workers that take a mean among themselves each period; 0: all.
        rounds: where there are groups, each such mean is one of all workers.
    """

    name = "local_sgd"
    ranges = (("period", 1, math.inf), ("after", 0, math.inf), ("rounds", 1, math.inf))

    period: int = 8
    after: int = 0
    group: int = 0
    rounds: int = 4

    def misfit(self, method: MethodParts, workers: int) -> str | None:
        return self._outside("group", 0, workers)

    def participant(self, role: Role) -> Participant:
        weights, updater = role.start.clone(), role.updater(role.workers if self.after else 1)
        yield from synchronous_steps(role, weights, updater, range(self.after))
        size = self.group or role.workers
        first = role.number // size * size
        group = tuple(range(first, min(first + size, role.workers)))  # the last one may be smaller
        of_group, of_all = role.compressor(), role.compressor()
        group_mean, mean = weights.clone(), weights.clone()  # the last ones
        for turn in count():
            version = self.after + self.period * (turn + 1)
            yield from local_steps(weights, updater, range(version - self.period, version))
            if group == role.everybody or (turn + 1) % self.rounds == 0:
                mean += yield from of_all.mean(weights - mean, role.everybody)
                group_mean.copy_(mean)
                weights.copy_(mean)
                if role.number == 0:
                    yield told(version, weights)
            else:
                group_mean += yield from of_group.mean(weights - group_mean, group)
                weights.copy_(group_mean)


def local_steps(weights: Tensor, updater: Updater, versions: Iterable[int]) -> Participant:
    """Steps of a worker on its own, from weights of each of these versions to the next, in place."""
    for version in versions:
        computed = yield Compute(weights, version)
        updater.update(weights, computed.gradient)
        yield Updated(version + 1)


@dataclass(frozen=True)
class DiLoCo(Exchange):
    """Douillard et al. 2023, "DiLoCo: distributed low-communication training of language models", algorithm 1.

    The batch rule is the inner optimizer (the paper: AdamW, 500 steps), and keeps its state. The outer one is SGD with
    Nesterov momentum. An outer learning rate of 1 without momentum is local SGD.

    Attributes:
        period: steps of a worker between two outer updates.
        outer_lr, outer_momentum: of the outer optimizer.
    """

    name = "diloco"
    ranges = (("period", 1, math.inf), ("outer_lr", 0, math.inf), ("outer_momentum", 0, 1))

    period: int = 8
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def participant(self, role: Role) -> Participant:
        weights, inner, compressor = role.start.clone(), role.updater(1), role.compressor()
        lr, momentum, start = self.outer_lr, self.outer_momentum, role.start.clone()
        outer = ElementWise(lambda flat: torch.optim.SGD([flat], lr=lr, momentum=momentum, nesterov=momentum > 0))
        for turn in count():
            version = self.period * (turn + 1)
            yield from local_steps(weights, inner, range(version - self.period, version))
            change = yield from compressor.mean(start - weights, role.everybody)
            outer.update(start, change)
            weights.copy_(start)
            if role.number == 0:
                yield told(version, weights)


_TOPOLOGIES = ("ring", "random")


@dataclass(frozen=True)
class Gossip(Exchange):
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

    name = "gossip"
    takes_compression = False

    topology: str = "ring"

    def misfit(self, method: MethodParts, workers: int) -> str | None:
        if self.topology not in _TOPOLOGIES:
            return f"gossip:topology={self.topology} is not known; choose {' or '.join(_TOPOLOGIES)}."
        if workers < 2:
            return "gossip takes 2 workers or more, and here is 1; add workers, or choose sync."
        return None

    def participant(self, role: Role) -> Participant:
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
