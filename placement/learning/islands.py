"""`Islands`: one training run on several workers, which learn by themselves between averages of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from env.problem import Problem
from placement.learning.learners.learner import IslandLearner, LearnerState, Update
from placement.processes.threads import single_threaded
from placement.solving.compiling import compile_for
from placement.solving.methods import SINGLE
from placement.workers.runner import Runner, opened

_UPDATES = 8  # of each island between two averages


@dataclass(frozen=True, eq=False)
class Learning:
    """What the workers of a training run read.

    Attributes:
        make: makes a learner like that of the run, whose state is then put in; of a module, or a partial of one.
        first: a problem of the run.
    """

    make: Callable[[], IslandLearner]
    first: Problem
    _made: list[IslandLearner] = field(default_factory=list, repr=False)

    def learner(self) -> IslandLearner:
        """The learner of this process, made once."""
        if not self._made:
            with single_threaded():
                self._made.append(self.make())
        return self._made[0]

    def prepare(self) -> None:
        """Have kernels compiled, and the learner made, before the time of the run begins."""
        compile_for(self.first, [SINGLE], search=False)
        self.learner()

    def __reduce__(self) -> tuple[type[Learning], tuple[Callable[[], IslandLearner], Problem]]:
        """What a worker is sent: no learner, which it makes itself."""
        return Learning, (self.make, self.first)


@dataclass(frozen=True, eq=False)
class IslandUpdates:
    """What one island does between two averages: so many updates, from a state and the best of all islands."""

    state: LearnerState
    best: tuple[Any, ...]
    count: int


@dataclass(frozen=True, eq=False)
class Learned:
    """What has become of an island: its state, which of its tensors are averaged, samples, best answers, updates."""

    state: LearnerState
    averaged: frozenset[str]
    samples: int
    best: tuple[Any, ...]
    updates: tuple[Update, ...]


class Islands:
    """A learner whose update is a round: every island makes some updates by itself, then parameters are averaged.

    Each island draws by a seed of its own, and keeps its own samples to imitate; parameters and the optimizer's moments
    are the mean of all, and the best answers those of all. So a run depends on the seed and the number of islands, not
    on who is done first. One island learns what its learner does.

    Source: S. Stich, "Local SGD converges fast and communicates little", ICLR 2019 (arXiv:1805.09767).

    Attributes:
        policy: as it was averaged last.
        best: of each problem, of all islands.
    """

    def __init__(self, runner: Runner, learner: IslandLearner, count: int, seed: int) -> None:
        """Of a learner before its first update; `count` islands, the first with its own seed."""
        self._runner, self._learner, self.policy = runner, learner, learner.policy
        first = learner.state()
        self._states = [first]
        for number in range(1, count):
            learner.reseed(int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint32)[0]))
            self._states.append(learner.state())
        learner.restore(first)
        self._samples = [learner.samples] * count
        self._rounds = 0

    @property
    def best(self) -> tuple[Any, ...]:
        """Of each problem; None where nothing fits yet."""
        return tuple(self._learner.best)

    @property
    def samples(self) -> int:
        """Of all islands."""
        return sum(self._samples)

    def update(self) -> Update:
        """One round. What is reported is of one problem, another in each round."""
        found = self._runner.run(learn_on_island, [IslandUpdates(state, self.best, _UPDATES) for state in self._states])
        self._states = averaged([island.state for island in found], found[0].averaged)
        self._samples = [island.samples for island in found]
        self._learner.restore(self._states[0])
        for island in found:
            self._learner.adopt(island.best)
        update = self._report([update for island in found for update in island.updates])
        self._rounds += 1
        return update

    def _report(self, updates: Sequence[Update]) -> Update:
        problems = sorted({update.problem for update in updates})
        problem = problems[self._rounds % len(problems)]
        shown = [update for update in updates if update.problem == problem]
        means = [update.mean_s for update in shown if np.isfinite(update.mean_s)]
        best = self.best[problem]
        return Update(
            problem=problem,
            samples=self.samples,
            mean_s=float(np.mean(means)) if means else np.nan,
            best_s=np.inf if best is None else best.value_s,
            feasible=float(np.mean([update.feasible for update in shown])),
            entropy=float(np.mean([update.entropy for update in shown])),
            metrics={key: float(np.mean([update.metrics[key] for update in shown])) for key in shown[0].metrics},
        )

    def state(self) -> LearnerState:
        """The run as it stands between two rounds."""
        tensors = {f"{k}.{name}": tensor for k, one in enumerate(self._states) for name, tensor in one.tensors.items()}
        own = self._learner.state()
        tensors |= {f"all.{name}": tensor for name, tensor in own.tensors.items()}
        islands = [one.values for one in self._states]
        return LearnerState(
            tensors, {"islands": islands, "all": own.values, "samples": self._samples, "rounds": self._rounds}
        )

    def restore(self, state: LearnerState) -> None:
        """Go on from there, with as many islands."""
        values = state.values

        def part(key: str, of: Any) -> LearnerState:
            start = f"{key}."
            own = {name.removeprefix(start): each for name, each in state.tensors.items() if name.startswith(start)}
            return LearnerState(own, of)

        self._states = [part(str(number), of) for number, of in enumerate(values["islands"])]
        self._learner.restore(part("all", values["all"]))
        self._samples, self._rounds = list(values["samples"]), values["rounds"]


def learn_on_island(shared: Learning, task: IslandUpdates) -> Learned:
    """The updates of one island in one round."""
    learner = shared.learner()
    with single_threaded():
        learner.restore(task.state)
        learner.adopt(task.best)
        updates = tuple(learner.update() for _ in range(task.count))
        return Learned(learner.state(), learner.averaged, learner.samples, tuple(learner.best), updates)


def averaged(states: Sequence[LearnerState], names: frozenset[str]) -> list[LearnerState]:
    """The states with these tensors replaced by their mean, where all of them have one."""
    common = set.intersection(*(set(state.tensors) for state in states)) & names
    means = {name: _mean([state.tensors[name] for state in states]) for name in sorted(common)}
    return [replace(state, tensors={**state.tensors, **means}) for state in states]


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors)).mean(dim=0)


@contextmanager
def on_islands(
    learner: IslandLearner, learning: Learning, seed: int, workers: int | None, address: str | None
) -> Iterator[IslandLearner | Islands]:
    """The learner itself, or where workers or an address of Ray are given, one island for each worker.

    Raises:
        WorkersError: as `placement.workers.runner.opened`.
    """
    if address is None and workers in (None, 1) and not isinstance(workers, bool):
        yield learner
        return
    count = 1 if workers is None else workers
    with opened(learning, count, address) as runner:
        yield Islands(runner, learner, count, seed)
