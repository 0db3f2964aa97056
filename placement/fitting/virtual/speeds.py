"""`Speeds`: how long participants compute, from the step that was captured and the devices that each one has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from env.plan import Plan
from env.problem import Problem
from env.resizing import part_of
from env.simulation.simulator import Simulator
from graphs.errors import FitError
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.strategy import Strategy

if TYPE_CHECKING:
    from env.cluster import Cluster
    from placement.fitting.stragglers import Stragglers
    from placement.fitting.virtual.assignment import Assignment


class ExchangeTimes(Protocol):
    """How long exchanges take."""

    def message_s(self, size: int, ends: tuple[int, int], computing: Collection[int]) -> tuple[float, float] | None:
        """Seconds that a message of so many bytes takes: its sender, and until it has arrived; None: as links say.

        Args:
            ends: numbers of its sender and its receiver.
            computing: those of the workers that compute a gradient meanwhile.
        """

    def collective_s(self, kind: str, members: int, size: int) -> float:
        """Seconds of an ``"all_reduce"`` or ``"all_gather"`` to which each member gives so many bytes."""


@dataclass(frozen=True, eq=False)
class Speeds:
    """How long participants take.

    Attributes:
        device: of each participant, the number of the device that it sends from and receives at.
        step_s: (worker, step, samples) -> seconds of one gradient, stragglers included.
        update_s: (participant) -> seconds of one update of all weights.
        exchanges: how long messages and collectives take, where the cluster's links do not say; what participants
            compute between their requests then takes as long as it takes here, updates among it.
    """

    device: Sequence[int]
    step_s: Callable[[int, int, int], float]
    update_s: Callable[[int], float]
    exchanges: ExchangeTimes | None = None

    def timed(
        self,
        gradients_s: Callable[[int], Sequence[float]],
        exchanges: ExchangeTimes,
        stragglers: Stragglers,
        seed: int,
    ) -> Speeds:
        """Speeds with gradients that each take a drawn one of the measured times, (samples) -> seconds."""

        def step_s(worker: int, step: int, samples: int) -> float:
            measured = gradients_s(samples)
            drawn = int(np.random.default_rng((seed, worker, step)).integers(len(measured)))
            return measured[drawn] * stragglers.factor(worker, step)

        return replace(self, step_s=step_s, update_s=lambda number: 0.0, exchanges=exchanges)


@dataclass(frozen=True)
class PlacedStep:
    """One training step on a worker's own devices: seconds of the gradient, and of the update."""

    gradient_s: float
    update_s: float


def speeds_of(
    graph_of: Callable[[int], OpGraph],
    batch: int,
    cluster: Cluster,
    assignment: Assignment,
    strategy: Strategy,
    stragglers: Stragglers,
) -> Speeds:
    """Speeds of participants on a cluster.

    A worker's step is scored as placed: on its one device, or by a strategy on its own. A server's update is that of
    the whole step on its device.

    Args:
        graph_of: the captured training step of so many samples.
        batch: samples of a worker's mini-batch.

    Raises:
        FitError, StrategyError: as `placed_step`, for a mini-batch.
    """

    @cache
    def placed(worker: int, samples: int) -> PlacedStep:
        if not samples:
            return PlacedStep(0.0, 0.0)
        return placed_step(graph_of(samples), cluster, assignment.workers[worker], strategy)

    workers = len(assignment.workers)
    updates_s = [placed(worker, batch).update_s for worker in range(workers)]
    problem = Problem(graph_of(batch), cluster)
    updates_s += [_update_s(problem, device) for device in assignment.servers]
    return Speeds(
        assignment.device,
        lambda worker, step, samples: placed(worker, samples).gradient_s * stragglers.factor(worker, step),
        updates_s.__getitem__,
    )


def placed_step(graph: OpGraph, cluster: Cluster, devices: Sequence[int], strategy: Strategy) -> PlacedStep:
    """The scored step of a graph on devices; of its time, the update has the share that its ops have.

    Raises:
        FitError: it does not fit in their memory.
        StrategyError: graph or devices do not allow the strategy.
    """
    problem = Problem(graph, cluster)
    if strategy.is_none:
        score = Simulator(problem).score(Plan(np.full(graph.n_ops, devices[0], dtype=np.int64)))
    else:
        from baselines.strategies.applied import applied  # loads all transforms
        from baselines.strategies.folding import is_to_be_folded

        part = part_of(cluster, np.array(devices, dtype=np.int64))
        what = applied(graph, part, strategy, folded=is_to_be_folded(graph, part, strategy))
        score = Simulator(what.problem).score(what.plan)
    if not score.feasible:
        names = ", ".join(cluster.devices[d].name for d in devices)
        raise FitError(
            f"a step of {graph.origin.batch_size} samples does not fit in the memory of {names}; take a smaller batch, "
            "or a strategy on more devices."
        )
    share = _update_s(problem, devices[0]) / float(problem.op_s_on(devices[0]).sum())
    return PlacedStep(score.step_time_s * (1 - share), score.step_time_s * share)


def _update_s(problem: Problem, device: int) -> float:
    """Seconds of the update of all weights on one device."""
    return float(problem.op_s_on(device)[problem.graph.phase == Phase.UPDATE].sum())
