"""Local SGD: workers train on their own, and take the mean of their weights now and then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from torch import Tensor

from placement.fitting.exchanges.refusals import below, first_of, outside, with_arrival_rule
from placement.fitting.exchanges.synchronous import synchronous_steps
from placement.fitting.requests import Compute, Participant, Updated, told
from placement.fitting.role import MethodParts, Role, Updater


@dataclass(frozen=True)
class LocalSgd:
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

    period: int = 8
    after: int = 0
    group: int = 0
    rounds: int = 4

    def servers(self, workers: int) -> tuple[str | None, ...]:
        """None."""
        return ()

    def refuse(self, method: MethodParts, workers: int) -> str | None:
        """Numbers out of range; more workers in a group than there are; an arrival rule."""
        return first_of(
            below("local_sgd:period", self.period, 1),
            below("local_sgd:after", self.after, 0),
            outside("local_sgd:group", self.group, 0, workers),
            below("local_sgd:rounds", self.rounds, 1),
            with_arrival_rule("local_sgd", method),
        )

    def participant(self, role: Role) -> Participant:
        """A worker."""
        weights, updater = role.start.clone(), role.updater(role.workers if self.after else 1)
        yield from synchronous_steps(role, weights, updater, range(self.after))
        group = self._group_of(role.number, role.workers)
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

    def _group_of(self, worker: int, workers: int) -> tuple[int, ...]:
        """The workers of a worker's group; the last group may be smaller."""
        size = self.group or workers
        first = worker // size * size
        return tuple(range(first, min(first + size, workers)))


def local_steps(weights: Tensor, updater: Updater, versions: Iterable[int]) -> Participant:
    """Steps of a worker on its own, from weights of each of these versions to the next, in place."""
    for version in versions:
        computed = yield Compute(weights, version)
        updater.update(weights, computed.gradient)
        yield Updated(version + 1)
