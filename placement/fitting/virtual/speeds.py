"""Which participant is on which devices of a cluster, and how long it computes there."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from env.plan import Plan
from env.problem import Problem
from env.resizing import part_of
from env.simulation.simulator import Simulator
from graphs.errors import FitError, UnknownNameError
from graphs.formatting import counted
from graphs.opgraph import OpGraph, Phase
from graphs.records import LANE
from graphs.transforms.strategy import Strategy

if TYPE_CHECKING:
    from env.cluster import Cluster


@dataclass(frozen=True)
class Assignment:
    """Devices by number.

    Attributes:
        workers: of each worker; the first one sends and receives for it.
        servers: of each server.
    """

    workers: tuple[tuple[int, ...], ...]
    servers: tuple[int, ...]

    @property
    def device(self) -> tuple[int, ...]:
        """Device from which each participant sends, and at which it receives."""
        return (*(own[0] for own in self.workers), *self.servers)

    @classmethod
    def of(cls, cluster: Cluster, workers: int, devices_each: int, servers: Sequence[str | None]) -> Assignment:
        """Workers one after the other on the devices that compute; servers where they say.

        A server that does not say is on a CPU beside them, each on the next one; where there is none, with the next
        worker.

        Raises:
            FitError: more workers than devices, or no device of a server's name.
        """
        devices = most_workers(cluster, workers, devices_each)
        ends = range(devices_each, workers * devices_each + 1, devices_each)
        of_workers = tuple(tuple(devices[end - devices_each : end]) for end in ends)
        hosts = [d for d, device in enumerate(cluster.devices) if device.kind == "cpu" and d not in devices]
        anywhere = hosts or [own[0] for own in of_workers]
        found = []
        for number, name in enumerate(servers):
            if name is None:
                found.append(anywhere[number % len(anywhere)])
            elif name in cluster.device_index:
                found.append(cluster.device_index[name])
            else:
                known = ", ".join(device.name for device in cluster.devices if device.kind != LANE)
                raise FitError(
                    f"the method has a server on {name!r}, and cluster {cluster.name!r} has no such device; take one "
                    f"of {known}."
                )
        return cls(of_workers, tuple(found))


def most_workers(cluster: Cluster, workers: int, devices_each: int) -> list[int]:
    """The devices that compute.

    Raises:
        FitError: too few for so many workers.
    """
    devices: list[int] = cluster.compute_devices.tolist()
    if not 1 <= workers <= len(devices) // devices_each:
        each = "" if devices_each == 1 else f" on {devices_each} devices each"
        most = "1" if len(devices) < 2 * devices_each else f"1 to {len(devices) // devices_each}"
        raise FitError(
            f"{counted(workers, 'worker')}{each} {'was' if workers == 1 else 'were'} asked for, and cluster "
            f"{cluster.name!r} has {counted(len(devices), 'device')} that compute{'s' if len(devices) == 1 else ''}; "
            f"give {most}."
            if len(devices) >= devices_each
            else f"a worker takes {devices_each} devices, and cluster {cluster.name!r} has {len(devices)}; take a "
            "smaller strategy."
        )
    return devices


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


# Options of each distribution with their defaults, and the least that each may be.
_OPTIONS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "none": {},
    "exponential": {"mean": (0.5, 0.0)},
    "pareto": {"shape": (1.5, 1.0)},
    "slow": {"worker": (0.0, 0.0), "factor": (2.0, 1.0)},
}

_MOST = 1e9


@dataclass(frozen=True)
class Stragglers:
    """Factors by which gradients take longer.

    ``none``; ``exponential:mean=0.5``: 1 + X, X exponential with that mean; ``pareto:shape=1.5``: Pareto from 1 up,
    heavy-tailed, of infinite variance for shapes up to 2; ``slow:worker=1:factor=3``: one worker always, others never.

    Attributes:
        text: as above.
        seed: of the draws. One for each (worker, step): it does not depend on who asks first.
    """

    text: str
    seed: int
    _factor: Callable[[int, np.random.Generator], float]

    @classmethod
    def parse(cls, text: str, seed: int, workers: int | None = None) -> Stragglers:
        """The distribution that a text names, of so many workers if that is known.

        Raises:
            UnknownNameError: there is no such distribution.
            FitError: an option that it does not have, a number out of range, or a worker that is not there.
        """
        name, *options = text.strip().split(":")
        if name not in _OPTIONS:
            raise UnknownNameError("distribution of stragglers", name, _OPTIONS)
        values = {key: default for key, (default, _) in _OPTIONS[name].items()}
        for option in options:
            key, _, number = option.partition("=")
            if key not in values:
                expected = ", ".join(values) or "none"
                raise FitError(f"stragglers {text!r}: {name} has no option {key!r}; expected one of: {expected}.")
            values[key] = _number(number, key, _OPTIONS[name][key][1], text)
            if key == "worker" and values[key] not in range(workers or 1 << 30):
                there = "" if workers is None else f" below {workers}, the number of workers"
                raise FitError(f"stragglers {text!r}: there is no worker {number}; expected a whole number{there}.")
        return cls(text, seed, _factors(name, values))

    def factor(self, worker: int, step: int) -> float:
        """1 or more: how many times as long as planned a worker's gradient number `step` takes."""
        return self._factor(worker, np.random.default_rng((self.seed, worker, step)))


def _number(text: str, key: str, least: float, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= _MOST:
        raise FitError(
            f"stragglers {whole!r}: {key}={text} is out of range; expected a number from {least:g} to {_MOST:g}."
        )
    return value


def _factors(name: str, values: Mapping[str, float]) -> Callable[[int, np.random.Generator], float]:
    if name == "exponential":
        return lambda worker, generator: 1.0 + generator.exponential(values["mean"])
    if name == "pareto":
        return lambda worker, generator: 1.0 + generator.pareto(values["shape"])  # numpy's begins at 0
    if name == "slow":
        return lambda worker, generator: values["factor"] if worker == values["worker"] else 1.0
    return lambda worker, generator: 1.0
