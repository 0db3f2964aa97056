"""Which runs this host can carry out, and how long stragglers sleep on it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from env.gym.named import LOCAL
from graphs.errors import FitError

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.opgraph import OpGraph
    from graphs.transforms.strategy import Strategy
    from placement.replicas.fit_task import FitTask
    from placement.replicas.real.torchrun import Ranks
    from placement.replicas.stragglers import Stragglers
    from placement.replicas.virtual.seating import Seating
    from placement.runtime.sharded.plan import StrategyPlan
    from placement.solving.result import Result


def check_real(cluster: Cluster) -> None:
    """Refuse what does not run in processes of this host.

    Raises:
        FitError: the cluster's workers are no CPU cores.
    """
    devices = (cluster.devices[d] for d in cluster.compute_devices.tolist())
    other = next((device for device in devices if device.kind != "cpu"), None)
    if other is not None:
        raise FitError(
            f"a real run takes workers on CPU cores, and cluster {cluster.name!r} has {other.name!r} of kind "
            f"{other.kind!r}; take the cluster local, or leave out real."
        )


def plans_of(
    task: FitTask, graph: OpGraph, cluster: Cluster, seating: Seating, strategy: Strategy, ranks: Ranks | None = None
) -> list[StrategyPlan]:
    """Of each worker, what the processes of its devices do; empty where each worker is one device.

    Ranks of torchrun go by what the first of them has worked out: each may have measured another cluster.

    Raises:
        StrategyError: graph or devices do not allow the strategy, or it cannot be run.
    """
    if strategy.devices == 1:
        return []
    from env.resizing import part_of
    from graphs.capture import capture_program
    from placement.runtime.application import plan_of
    from placement.solving.strategic import strategy_row

    rows = torch.arange(task.batch) % len(task.data[0])
    arguments = tuple(each[rows] for each in task.data)
    program = capture_program(task.model, arguments, {}, True, loss=task.loss, optimizer="sgd")
    parts = [part_of(cluster, np.array(own, dtype=np.int64)) for own in seating.workers]

    def results() -> list[Result]:
        return [strategy_row(graph, part, strategy).result for part in parts]

    return [plan_of(program, result) for result in (results() if ranks is None else ranks.shared(results))]


def is_here(cluster: Cluster, strategy: Strategy) -> bool:
    """Whether workers are cores of this machine, one each, which can be timed instead of simulated."""
    return cluster.name == LOCAL and strategy.is_none


def delays_of(gradients_s: Sequence[float], stragglers: Stragglers) -> Callable[[int, int], float]:
    """(worker, step) -> seconds that a straggler sleeps, in proportion to the mean of measured gradients."""
    gradient_s = statistics.mean(gradients_s)
    return lambda worker, step: gradient_s * (stragglers.factor(worker, step) - 1)
