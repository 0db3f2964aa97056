"""Costs of a strategy and their places: memory by parts, bytes by collective, bubbles, exposed communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from baselines.strategies.step_parts import StepParts, homes, step_parts, union
from env.cluster import Cluster
from env.simulation.simulator import Schedule, Score
from graphs.arrays import FloatArray, IntArray, sums
from graphs.records import LANE

if TYPE_CHECKING:
    from baselines.strategies.applied import Applied


@dataclass(frozen=True)
class StrategyFigures:
    """Figures of one step.

    Attributes:
        devices: how many devices compute; hosts to which a strategy offloads do not count, here and below.
        peak_bytes: of the device whose peak is highest, by part: parameters, gradients, optimizer, activations (with
            all other bytes that live for a part of the step); they add up to the peak.
        memory: the same of every device that holds something, by its name; folded, of the first of each stage.
        exchanged_bytes: by kind of collective, the bytes of the tensors exchanged, once a group of ranks.
        bubble: share of the devices' time, from the step's start to its end, in which they compute nothing.
        exposed_s: mean seconds in which a device computes nothing and communicates or is sent something.
        room_bytes: that the device whose peak is highest may fill.
        parts: of the step of the device that computes longest.
    """

    devices: int
    peak_bytes: Mapping[str, int]
    memory: Mapping[str, Mapping[str, int]]
    exchanged_bytes: Mapping[str, int]
    bubble: float
    exposed_s: float
    room_bytes: int
    parts: StepParts


def figures(what: Applied, score: Score, schedule: Schedule, given: Cluster | None = None) -> StrategyFigures:
    """The figures of a strategy that was scored.

    Args:
        given: the cluster before the strategy; None where no device stands for others.
    """
    graph, cluster = what.derived.graph, what.problem.cluster
    is_aside = np.array([device.kind == LANE for device in cluster.devices], dtype=np.bool_)
    if what.strategy.offload:
        is_aside[cluster.host_devices[cluster.host_devices >= 0]] = True
    op_home = homes(cluster)[what.plan.device]
    memory = _memory(what, score, op_home)
    busiest = int(np.argmax(np.where(is_aside, -1, score.peak_bytes)))
    exchanged: dict[str, int] = {}
    places = int(np.prod([axis.size for axis in what.exchanged.mesh], dtype=np.int64))
    groups = {axis.name: places // axis.size if what.is_folded else 1 for axis in what.exchanged.mesh}
    for collective in what.exchanged.collectives:
        size = collective.bytes * groups[collective.axis]  # one that is folded stands for all groups along its axis
        exchanged[collective.kind] = exchanged.get(collective.kind, 0) + size
    used = np.unique(op_home[graph.kernels > 0])
    used = used[~is_aside[used]]
    total = score.step_time_s * len(used)
    busy = float(score.busy_s[used].sum())
    return StrategyFigures(
        devices=len(used) * (places if what.is_folded else 1),
        peak_bytes=memory[cluster.devices[busiest].name],
        memory=memory,
        exchanged_bytes=exchanged,
        bubble=1.0 - busy / total if total > 0 else 0.0,
        exposed_s=float(np.mean([_exposed(d, cluster, schedule) for d in used.tolist()])),
        room_bytes=cluster.devices[busiest].usable_bytes,
        parts=step_parts(what, score, schedule, used, cluster if given is None else given),
    )


def _memory(what: Applied, score: Score, op_home: IntArray) -> dict[str, dict[str, int]]:
    """The peak of every device that holds something, and of the first, by parts; activations with coming gradients."""
    graph, devices = what.derived.graph, what.problem.cluster.devices
    kept = {
        name: sums(op_home, values, len(devices))
        for name, values in (
            ("parameters", graph.parameter_bytes),
            ("gradients", graph.standing_bytes - graph.parameter_bytes - graph.optimizer_bytes),
            ("optimizer", graph.optimizer_bytes),
        )
    }
    result = {}
    for d, device in enumerate(devices):
        peak = int(score.peak_bytes[d])
        if peak > 0 or d == 0:
            parts = {name: int(values[d]) for name, values in kept.items()}
            result[device.name] = {**parts, "activations": peak - sum(parts.values())}
    return result


def communicating(schedule: Schedule, cluster: Cluster, device: int) -> tuple[FloatArray, FloatArray]:
    """Times at which a device's lanes work, or a transfer from or to it is under way.

    Returns:
        ``(starts, ends)``, apart and increasing.
    """
    lanes = (int(lane_of[device]) for lane_of in (cluster.lane_of, cluster.outer_lane_of))
    members = device, *(lane for lane in lanes if lane >= 0)
    near = np.isin(schedule.transfer_source, members) ^ np.isin(schedule.transfer_target, members)
    lane = np.isin(schedule.device, members[1:])
    return union(
        np.concatenate([schedule.transfer_start_s[near], schedule.op_start_s[lane]]),
        np.concatenate([schedule.transfer_end_s[near], schedule.op_end_s[lane]]),
    )


def _exposed(device: int, cluster: Cluster, schedule: Schedule) -> float:
    """Seconds in which a device computes nothing and communicates."""
    mine = schedule.device == device
    computing = union(schedule.op_start_s[mine], schedule.op_end_s[mine])
    busy = communicating(schedule, cluster, device)
    both = union(*(np.concatenate(ends) for ends in zip(busy, computing, strict=True)))
    return float((both[1] - both[0]).sum() - (computing[1] - computing[0]).sum())
