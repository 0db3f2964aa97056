"""What an agent sees of a strategy: one vector of numbers, whatever the graph and the cluster."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from baselines.strategies.devices import are_alike
from baselines.strategies.estimating.estimate import Figures
from baselines.strategies.searching.patterns import patterns
from env.cluster import Cluster
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.learning.strategies.actions import MESH, NUMBERED, SYNCHRONOUS, mesh_sizes

LIMIT = 10.0  # of every number, either way
_LITTLE = 1e-12

STRATEGY_FEATURES = (
    *(f"log2 {axis}" for axis in MESH),
    *(f"order {order}" for order in SYNCHRONOUS),
    *(f"zero {level}" for level in range(4)),
    *(f"recompute {number}" for number in range(NUMBERED)),
    *("log2 virtual stages of a device", "log2 micro-batches", "sequence", "tp in some modules", "log10 bucket"),
    *("names devices", "names cuts", "uneven shares", "share of devices"),
)
STATE_FEATURES = (
    *("log time / one device", "log time / bound", "log time / best so far", "fits", "peak / memory"),
    *("lacking / memory", "share of steps left"),
)
TASK_FEATURES = (
    *("log10 ops", "trains", "log2 batch", "log2 devices", "devices alike", "log10 kept / all memory"),
    *("log10 sending what is kept / one device", "log10 bound / one device"),
)
FEATURES = (*STRATEGY_FEATURES, *STATE_FEATURES, *TASK_FEATURES)


def vector(values: list[float]) -> NDArray[np.float32]:
    """float32, within `LIMIT`."""
    return np.clip(np.array(values, dtype=np.float64), -LIMIT, LIMIT).astype(np.float32)


def strategy_features(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> list[float]:
    """`STRATEGY_FEATURES`."""
    sizes = mesh_sizes(strategy)
    tensor = next((rule for rule in strategy.mesh if rule.name == "tp"), None)
    in_some = [rule for rule in strategy.mesh if rule.tensor_modules or (rule.name == "tp" and rule.modules)]
    is_pipeline = strategy.stages > 1
    known = patterns(graph).recomputed
    again = known.index(strategy.recompute) if strategy.recompute in known else -1
    return [
        *(math.log2(sizes[axis]) for axis in MESH),
        *(float(is_pipeline and strategy.order == order) for order in SYNCHRONOUS),
        *(float(strategy.zero == level) for level in range(4)),
        *(float(again == number) for number in range(NUMBERED)),
        math.log2(strategy.virtual_stages / strategy.stages),
        math.log2(strategy.micro_batches),
        float(tensor is not None and tensor.sequence),
        float(bool(in_some)),
        math.log10(1 + strategy.bucket_bytes),
        float(bool(strategy.device_names)),
        float(bool(strategy.cuts)),
        float(any(rule.shares for rule in strategy.mesh)),
        strategy.devices / max(1, len(cluster.compute_devices)),
    ]


def state_features(
    here: Figures, one_s: float, bound_s: float, best_s: float, memory_bytes: float, left: float
) -> list[float]:
    """`STATE_FEATURES`.

    Args:
        here: the strategy the agent has come to.
        one_s, bound_s, best_s: seconds of one device, of the bound over all strategies, and of the best so far.
        memory_bytes: of the largest device.
        left: share of the steps of the episode.
    """
    log: Callable[[float], float] = lambda s: math.log(max(here.step_time_s, _LITTLE) / max(s, _LITTLE))  # noqa: E731
    shares = (amount / max(1.0, memory_bytes) for amount in (here.peak_bytes, here.missing_bytes))
    return [log(one_s), log(bound_s), log(best_s), float(here.fits), *shares, left]


def task_features(graph: OpGraph, cluster: Cluster, one_s: float, bound_s: float) -> list[float]:
    """`TASK_FEATURES`."""
    devices = cluster.compute_devices
    memory = sum(cluster.devices[d].usable_bytes for d in devices.tolist())
    kept = float(graph.kept_bytes.sum())
    apart = ~np.eye(len(devices), dtype=np.bool_)
    bandwidth = cluster.routes.bandwidth_bytes_per_s[np.ix_(devices, devices)][apart].min(initial=np.inf)
    ratios = (kept / max(1, memory), kept / bandwidth / max(one_s, _LITTLE), bound_s / max(one_s, _LITTLE))
    return [
        math.log10(graph.n_ops),
        float(graph.is_training),
        math.log2(graph.origin.batch_size or 1),
        math.log2(len(devices)),
        float(are_alike(cluster, devices.tolist())),
        *(math.log10(max(ratio, _LITTLE)) for ratio in ratios),
    ]
