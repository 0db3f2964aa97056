"""Which runs this host can carry out, and how long stragglers sleep on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from graphs.errors import FitError

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.transforms.strategy import Strategy
    from placement.replicas.fit_task import FitTask
    from placement.replicas.stragglers import Stragglers

_REPEATS = 5


def check_real(cluster: Cluster, strategy: Strategy) -> None:
    """Refuse what does not run in processes of this host.

    Raises:
        FitError: the cluster's workers are no CPU cores, or a worker is more than one device.
    """
    devices = (cluster.devices[d] for d in cluster.compute_devices.tolist())
    other = next((device for device in devices if device.kind != "cpu"), None)
    if other is not None:
        raise FitError(
            f"a real run takes workers on CPU cores, and cluster {cluster.name!r} has {other.name!r} of kind "
            f"{other.kind!r}; take the cluster local, or leave out real."
        )
    if strategy.devices > 1:
        raise FitError(
            f"a real run takes workers on one device each, and strategy {strategy.text!r} takes {strategy.devices}; "
            "leave out the strategy, or real."
        )


def delays_of(task: FitTask, stragglers: Stragglers) -> Callable[[int, int], float]:
    """(worker, step) -> seconds that a straggler sleeps: in proportion to a gradient, timed here, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        weights, samples, times_s = task.weights(), torch.arange(task.batch), []
        for _ in range(1 + _REPEATS):
            began_s = time.perf_counter()
            task.gradient(weights, samples)
            times_s.append(time.perf_counter() - began_s)
    finally:
        torch.set_num_threads(threads)
    gradient_s = statistics.median(times_s[1:])
    return lambda worker, step: gradient_s * (stragglers.factor(worker, step) - 1)
