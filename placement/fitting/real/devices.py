"""Runs that this host can carry out, and the sleep of stragglers on it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from env.gym.named import LOCAL
from graphs.errors import FitError
from graphs.formatting import counted
from placement.fitting.task import CPU, FitTask
from placement.runtime.ranks.meeting import of_this_host

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.opgraph import OpGraph
    from graphs.transforms.strategy import Strategy
    from placement.fitting.real.torchrun import Ranks
    from placement.fitting.stragglers import Stragglers
    from placement.fitting.virtual.assignment import Assignment
    from placement.runtime.planning.strategy_plan import StrategyPlan

_GPU = "gpu"  # as kind of a device


def check_real(cluster: Cluster, devices: int) -> None:
    """Refuse what does not run in processes of this machine.

    Args:
        devices: how many of the cluster's devices workers are on, the first ones.

    Raises:
        FitError: they are neither CPU cores nor GPUs that are here, or this process has begun to use a GPU.
    """
    kinds = [cluster.devices[d].kind for d in cluster.compute_devices.tolist()[:devices]]
    other = next((kind for kind in kinds if kind not in ("cpu", _GPU)), None)
    if other is not None:
        raise FitError(
            f"a real run takes workers on CPU cores or GPUs, and cluster {cluster.name!r} has devices of kind "
            f"{other!r}; take the cluster local, or leave out real."
        )
    needed, there = (of_this_host(kinds) or kinds).count(_GPU), torch.cuda.device_count()
    if needed > there:
        raise FitError(
            f"the workers of a real run on cluster {cluster.name!r} take {counted(needed, 'GPU')}, and this machine "
            f"has {there}; take the cluster local, or leave out real."
        )
    if needed and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise FitError(
            "this process uses a GPU already, so that no process of a worker can be forked from it; leave model and "
            "data on the CPU, from which fit takes them to the GPUs."
        )


def kinds_of(cluster: Cluster, assignment: Assignment) -> tuple[str, ...]:
    """Kind of device of each process of a run: those of each worker, and then servers, which need no GPU."""
    workers = [cluster.devices[device].kind for own in assignment.workers for device in own]
    return (*workers, *["cpu"] * len(assignment.servers))


def place_of(kinds: Sequence[str], number: int) -> torch.device:
    """Device on which a process computes, by the kinds of all; the GPUs of each host are counted from ``cuda:0``."""
    if kinds[number] != _GPU:
        return CPU
    here = of_this_host(range(len(kinds))) or range(number)
    return torch.device("cuda", sum(kinds[other] == _GPU for other in here if other < number))


def plans_of(
    task: FitTask,
    graph: OpGraph,
    cluster: Cluster,
    assignment: Assignment,
    strategy: Strategy,
    ranks: Ranks | None = None,
) -> list[StrategyPlan]:
    """Plans of each worker's processes, one for each device; empty where each worker is one device.

    Ranks of torchrun go by what the first of them has worked out: each may have measured another cluster.

    Raises:
        StrategyError: graph or devices do not allow the strategy, or it cannot be run.
    """
    if strategy.devices == 1:
        return []
    from env.resizing import part_of
    from graphs.capture import capture_program
    from placement.results.result import Result
    from placement.runtime.application import plan_of
    from placement.solving.strategy_row import strategy_row

    rows = torch.arange(task.batch) % len(task.data[0])
    arguments = tuple(each[rows] for each in task.data)
    how: dict[str, Any] = {"loss": task.loss, "optimizer": "sgd", "precision": task.precision}
    program = capture_program(task.model, arguments, {}, True, **how)
    parts = [part_of(cluster, np.array(own, dtype=np.int64)) for own in assignment.workers]

    def results() -> list[str]:
        return [strategy_row(graph, part, strategy).result.to_json() for part in parts]

    found = results() if ranks is None else ranks.shared(results)
    return [plan_of(program, Result.from_json(text)) for text in found]


def is_here(cluster: Cluster, strategy: Strategy) -> bool:
    """Whether workers are cores of this machine, one each, which can be timed instead of simulated."""
    return cluster.name == LOCAL and strategy.is_none and all(device.kind == "cpu" for device in cluster.devices)


def delays_of(gradients_s: Sequence[float], stragglers: Stragglers) -> Callable[[int, int], float]:
    """(worker, step) -> seconds that a straggler sleeps, in proportion to the mean of measured gradients."""
    gradient_s = statistics.mean(gradients_s)
    return lambda worker, step: gradient_s * (stragglers.factor(worker, step) - 1)
