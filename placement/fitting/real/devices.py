"""Runs that this host can carry out, and the sleep of stragglers on it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from env.gym.named import LOCAL
from graphs.errors import FitError
from graphs.formatting import counted
from placement.fitting.task import CPU, FitTask

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.opgraph import OpGraph
    from graphs.transforms.strategy import Strategy
    from placement.fitting.real.torchrun import Ranks
    from placement.fitting.stragglers import Stragglers
    from placement.fitting.virtual.assignment import Assignment
    from placement.runtime.torch_runner.setup import Setup

ItemT = TypeVar("ItemT")
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
    needed, there = (_of_this_host(kinds) or kinds).count(_GPU), torch.cuda.device_count()
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
    here = _of_this_host(range(len(kinds))) or range(number)
    return torch.device("cuda", sum(kinds[other] == _GPU for other in here if other < number))


def setups_of(
    task: FitTask,
    graph: OpGraph,
    cluster: Cluster,
    assignment: Assignment,
    strategy: Strategy,
    ranks: Ranks | None = None,
) -> list[Setup]:
    """How each worker's processes, one for each device, run the strategy; empty where each worker is one device.

    Ranks of torchrun go by what the first of them has worked out: each may have measured another cluster.

    Raises:
        StrategyError: graph or devices do not allow the strategy.
        MismatchError: torch cannot run it.
        FitError: this process has a process group.
    """
    if strategy.devices == 1:
        return []
    if dist.is_initialized():
        raise FitError(
            "this process has a process group, which forks of it would have, too, and the processes of a worker become "
            "one of their own; fit before init_process_group, or after destroy_process_group."
        )
    from env.resizing import part_of
    from placement.results.result import Result
    from placement.runtime.setups.facts_of import setup_of
    from placement.solving.strategy_row import strategy_row

    parts = [part_of(cluster, np.array(own, dtype=np.int64)) for own in assignment.workers]

    def results() -> list[str]:
        return [strategy_row(graph, part, strategy).result.to_json() for part in parts]

    found = results() if ranks is None else ranks.shared(results)
    return [setup_of(Result.from_json(text), graph, task.model) for text in found]


def _of_this_host(by_process: Sequence[ItemT]) -> list[ItemT] | None:
    """Those of processes, by number, that ``torchrun`` has started on this host; None where it has only one."""
    known = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if not all(known):
        return None
    rank, size, local_rank, local_size = map(int, known)
    first = rank - local_rank
    return None if local_size >= size else list(by_process[first : first + local_size])


def is_here(cluster: Cluster, strategy: Strategy) -> bool:
    """Whether workers are cores of this machine, one each, which can be timed instead of simulated."""
    return cluster.name == LOCAL and strategy.is_none and all(device.kind == "cpu" for device in cluster.devices)


def delays_of(gradients_s: Sequence[float], stragglers: Stragglers) -> Callable[[int, int], float]:
    """(worker, step) -> seconds that a straggler sleeps, in proportion to the mean of measured gradients."""
    gradient_s = statistics.mean(gradients_s)
    return lambda worker, step: gradient_s * (stragglers.factor(worker, step) - 1)
