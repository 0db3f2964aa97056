"""Scaling a cluster so that it predicts known steps: one factor for kernels, and one for the network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from env.cluster import Cluster
from env.device import Device
from graphs.errors import ClusterError
from graphs.formatting import format_seconds
from graphs.opgraph import OpGraph
from graphs.transforms.stacks import on_stack
from graphs.transforms.strategy import Strategy
from placement.calibrating.fitting import least_squares
from placement.calibrating.given import KnownStep
from placement.calibrating.records import CheckedStep
from placement.inputs.sources import read_source

MOST_FACTOR = 8.0  # beyond it a step and a cluster do not belong together
_TOLERANCE = 0.02  # what a step may be off after it
_FILES = (".json", ".onnx", ".pt2")
_FAR_OFF = 0.5  # what one of several steps may be off
_PULL = 0.02  # of a factor that no step decides, towards 1


def fitted_to(
    steps: Sequence[KnownStep], cluster: Cluster
) -> tuple[Cluster, tuple[CheckedStep, ...], dict[str, float]]:
    """The cluster scaled so that the steps take as long as they took.

    One step decides how long kernels take; with two or more the network's times are a second factor, by least squares
    of the logarithms.

    Returns:
        The cluster, the steps predicted by it and by the one given, and the factors by which times were multiplied.

    Raises:
        ClusterError: no factor up to 8 explains a step, or one would need more than a device's peak.
        PlacementError: as of `read_source`, `scored`.
    """
    graphs = [_graph_of(step) for step in steps]

    def predicted(factors: NDArray[np.float64]) -> NDArray[np.float64]:
        changed = scaled(cluster, *np.exp(factors))
        pairs = zip(steps, graphs, strict=True)
        return np.array([_predicted_s(step, graph, changed) for step, graph in pairs])

    count = 2 if len(steps) > 1 and cluster.n_devices > 1 else 1
    known_s = np.array([step.seconds for step in steps])

    def residuals(factors: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([np.log(predicted(factors) / known_s), _PULL * factors[1:]])

    before = predicted(np.zeros(count))
    upper = np.full(count, math.log(MOST_FACTOR))
    lower = -upper
    lower[0] = max(lower[0], math.log(_least_factor(cluster)) + 1e-9)
    found = least_squares(residuals, np.zeros(count), lower, upper, step=0.02, steps=8)
    after = predicted(found)
    compute, *network = np.exp(found).tolist()
    _check(steps, cluster, before, after, found[0] - lower[0])
    names = ("kernels", "network")[:count]
    factors = dict(zip(names, (compute, *network), strict=True))
    rows = zip(steps, before.tolist(), after.tolist(), strict=True)
    return scaled(cluster, compute, *network), tuple(CheckedStep(*row) for row in rows), factors


def _check(
    steps: Sequence[KnownStep], cluster: Cluster, before: NDArray[np.float64], after: NDArray[np.float64], room: float
) -> None:
    """Raises: ClusterError: a step is still far off; ``room`` is what was left down to the peaks."""
    off = np.array([after[k] / step.seconds - 1.0 for k, step in enumerate(steps)])
    k = int(np.argmax(np.abs(np.log1p(off))))
    if abs(off[k]) <= (_TOLERANCE if len(steps) == 1 else _FAR_OFF):
        return
    took = f"--step {steps[k].text!r} took {format_seconds(steps[k].seconds)}"
    if off[k] > 0 and room < 1e-3:
        raise ClusterError(
            f"{took}, and at the data-sheet peaks of {cluster.name!r} it cannot take less than "
            f"{format_seconds(float(after[k]))}; check the step, its sizes and --base."
        )
    raise ClusterError(
        f"{took}, and {cluster.name!r} predicts {format_seconds(float(before[k]))}, which no factor up to "
        f"{MOST_FACTOR:g} explains; check the strategy, the sizes and --base."
    )


def _least_factor(cluster: Cluster) -> float:
    """How much faster all kernels may become: at it one device is at its peak."""
    return max(_share_of_peak(cluster.devices[number]) for number in cluster.compute_devices.tolist())


def _share_of_peak(device: Device) -> float:
    if device.rates is None:
        return max(device.compute_efficiency, device.bandwidth_efficiency)
    rates = device.rates
    shares = [rate.flops_per_s / device.peak_flops.get(dtype, math.inf) for dtype, rate in rates.products.items()]
    moved = max(rates.bytes_per_s, *(rate.bytes_per_s for rate in rates.products.values()))
    return max(*shares, moved / device.memory_bytes_per_s)


def _graph_of(step: KnownStep) -> OpGraph:
    is_file = step.model.endswith(_FILES)  # a graph already, of training or not
    graph = read_source(step.model, train=step.train and not is_file, dims=step.dims, stack=step.stack).graph
    if step.optimizer is not None:
        from graphs.transforms.optimizers import with_optimizer

        graph = with_optimizer(graph, step.optimizer)
    return on_stack(graph, step.stack)


def predicted_s(step: KnownStep, cluster: Cluster) -> float:
    """Seconds that a cluster predicts for a step."""
    return _predicted_s(step, _graph_of(step), cluster)


def _predicted_s(step: KnownStep, graph: OpGraph, cluster: Cluster) -> float:
    from baselines.strategies.searching.scoring import scored  # loads the compiled simulator

    strategy = Strategy.parse(step.strategy)
    if strategy.is_none:  # one device, not a placement that nobody described
        cluster = Cluster(cluster.name, (cluster.devices[int(cluster.compute_devices[0])],))
    return scored(graph, cluster, strategy).step_time_s


def scaled(cluster: Cluster, compute: float, network: float = 1.0) -> Cluster:
    """The cluster with all kernels, and all transfers and collectives, taking that many times as long."""
    links = tuple(
        replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / network, latency_s=link.latency_s * network)
        for link in cluster.links
    )
    collectives = tuple(
        replace(one, seconds=tuple(seconds * network for seconds in one.seconds)) for one in cluster.collectives
    )
    computing = set(cluster.compute_devices.tolist())
    devices = tuple(slower(one, compute) if k in computing else one for k, one in enumerate(cluster.devices))
    fabric = None if cluster.fabric is None else cluster.fabric.scaled(1.0 / network, network, network)
    return replace(cluster, devices=devices, links=links, collectives=collectives, fabric=fabric)


def slower(device: Device, factor: float) -> Device:
    """A device whose kernels take that many times as long; at least `_least_factor`."""
    if device.rates is not None:
        rates = device.rates.scaled(1.0 / factor, 1.0 / factor)
        source = f"{rates.source}; times by {factor:.4g}, by known steps".removeprefix("; ")
        source = source if factor != 1 else rates.source
        return replace(device, rates=replace(rates, source=source, floor_s=rates.floor_s * factor))
    return replace(
        device,
        compute_efficiency=min(1.0, device.compute_efficiency / factor),
        bandwidth_efficiency=min(1.0, device.bandwidth_efficiency / factor),
    )
