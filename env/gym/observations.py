"""Observations of a task that never change: fixed, padded arrays for a Gymnasium `Dict` of `Box` spaces.

docs/environments.md lists every array. U units, E edges between units, D devices, each of the largest task; smaller
tasks are padded with zeros, edges with -1. Times are ``log1p(seconds / tick)``, where a tick is the mean time of a unit
of the task on its allowed devices; amounts ``log1p(amount / mean amount)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from env.gym.task_kernel import CLIP
from graphs.opgraph import FloatArray, Phase

if TYPE_CHECKING:
    from env.gym.task import Task

Observation = dict[str, NDArray[Any]]

KIND_BUCKETS = 8
UNIT_FEATURES = (
    "time",  # mean over allowed devices, in ticks
    "kept_bytes",
    "output_bytes",
    "working_bytes",
    "memory",  # kept bytes / memory of the largest device
    "upward_rank",  # of the op with the longest, as a share of the longest path
    "downward_rank",
    "depth",  # most edges on a path to its first op, as a share of the largest
    "in_degree",  # units it reads from, log1p
    "out_degree",  # units that read from it, log1p
    "ops",  # log1p
    "pinned",  # share of the devices that are not allowed
    *(f"phase_{phase.name.lower()}" for phase in Phase),  # share of its ops
    *(f"kind_{k}" for k in range(KIND_BUCKETS)),  # 1 for crc32(kind) % 8 of its longest op
)
EDGE_FEATURES = ("bytes", "time")  # amount; mean transfer time between two devices, in ticks
DEVICE_FEATURES = ("present", "speed", "memory")  # 1; mean op time / own; memory / that of the largest


def tick_s(task: Task) -> float:
    """Mean seconds of a unit over its allowed devices, the unit of time of an observation; 1 if all take none."""
    return float(_unit_mean_s(task).mean()) or 1.0


def describe(task: Task) -> Observation:
    """The arrays of one task, not padded."""
    problem, tick = task.problem, tick_s(task)
    edges = task.edges
    mean_bytes = problem.graph.transfer_bytes.mean() if problem.graph.n_tensors else 0.0
    capacity = problem.capacity_bytes / max(1, problem.capacity_bytes.max())
    everyone = np.ones(task.n_devices)
    found: dict[str, NDArray[Any]] = {
        "unit_features": unit_features(task),
        "unit_times": np.where(task.allowed, np.log1p(task.op_s / tick), 0.0),
        "unit_mask": np.ones(task.n_units, dtype=np.int8),
        "allowed": task.allowed.astype(np.int8),
        "edges": np.column_stack([edges.source, edges.target]).astype(np.int32),
        "edge_features": np.column_stack([_amount(edges.total_bytes), np.log1p(edges.mean_s / tick)]),
        "device_features": np.column_stack([everyone, _speed(task), capacity]),
        "link_latency": np.log1p(problem.latency_s / tick),
        "link_transfer": np.log1p(mean_bytes / problem.bandwidth_bytes_per_s / tick),
    }
    return {key: _bounded(value) for key, value in found.items()}


def unit_features(task: Task) -> FloatArray:
    """float64 [U, F], the columns of `UNIT_FEATURES`."""
    problem, graph = task.problem, task.problem.graph
    of_ops = task.of_ops

    def total(per_op: NDArray[Any]) -> FloatArray:
        return np.bincount(task.unit_of, per_op, task.n_units).astype(np.float64)

    sizes = np.diff(task.ptr)
    longest_s = (of_ops.upward_rank_s + of_ops.downward_rank_s).max() or 1.0
    depth = np.minimum.reduceat(of_ops.depth[task.members], task.ptr[:-1])
    longest = task.members[_argmax_by(problem.mean_op_s[task.members], task.ptr)]
    bucket = of_ops.kind_bucket(KIND_BUCKETS)[longest]
    columns = [
        np.log1p(_unit_mean_s(task) / tick_s(task)),
        _amount(task.kept_bytes),
        _amount(total(of_ops.output_bytes)),
        _amount(task.working_bytes),
        task.kept_bytes / max(1, problem.capacity_bytes.max()),
        task.largest(of_ops.upward_rank_s) / longest_s,
        task.largest(of_ops.downward_rank_s) / longest_s,
        depth / max(1, depth.max()),
        np.log1p(np.bincount(task.edges.target, minlength=task.n_units)),
        np.log1p(np.bincount(task.edges.source, minlength=task.n_units)),
        np.log1p(sizes),
        1.0 - task.allowed.mean(axis=1),
        *(total(graph.phase == phase) / sizes for phase in Phase),
        *(bucket == k for k in range(KIND_BUCKETS)),
    ]
    return np.column_stack(columns).astype(np.float64)


def static_space(n_units: int, n_edges: int, n_devices: int) -> dict[str, spaces.Space[Any]]:
    """Spaces of the arrays of `describe`, padded to these sizes."""

    def numbers(*shape: int) -> spaces.Space[Any]:
        return spaces.Box(0.0, CLIP, shape, np.float32)

    return {
        "unit_features": numbers(n_units, len(UNIT_FEATURES)),
        "unit_times": numbers(n_units, n_devices),
        "unit_mask": spaces.Box(0, 1, (n_units,), np.int8),
        "allowed": spaces.Box(0, 1, (n_units, n_devices), np.int8),
        "edges": spaces.Box(-1, n_units - 1, (n_edges, 2), np.int32),
        "edge_features": numbers(n_edges, len(EDGE_FEATURES)),
        "device_features": numbers(n_devices, len(DEVICE_FEATURES)),
        "link_latency": numbers(n_devices, n_devices),
        "link_transfer": numbers(n_devices, n_devices),
    }


def stack(tasks: Sequence[Task | None], space: dict[str, spaces.Space[Any]]) -> Observation:
    """`describe` of every task, padded: [T, ...] for every key. None leaves a row of padding."""
    result = {}
    for key, box in space.items():
        assert box.shape is not None
        result[key] = np.full((len(tasks), *box.shape), -1 if key == "edges" else 0, dtype=box.dtype)
    for t, task in enumerate(tasks):
        if task is not None:
            for key, value in describe(task).items():
                result[key][t][tuple(slice(size) for size in value.shape)] = value
    return result


def _unit_mean_s(task: Task) -> FloatArray:
    mean_s: FloatArray = np.where(task.allowed, task.op_s, 0.0).sum(axis=1) / task.allowed.sum(axis=1)
    return mean_s


def _amount(values: NDArray[Any]) -> FloatArray:
    mean = float(values.mean()) if len(values) else 0.0
    result: FloatArray = np.log1p(values / (mean or 1.0))
    return result


def _speed(task: Task) -> FloatArray:
    """float64 [D]: seconds that the ops allowed on a device take on average over seconds on it; 0 where none is."""
    allowed, problem = task.problem.allowed, task.problem
    own_s = np.where(allowed, problem.op_s, 0.0).sum(axis=0)
    mean_s = np.where(allowed, problem.mean_op_s[:, np.newaxis], 0.0).sum(axis=0)
    return np.where(own_s > 0, mean_s / np.where(own_s > 0, own_s, 1.0), 0.0)


def _argmax_by(values: FloatArray, ptr: NDArray[np.int64]) -> NDArray[np.int64]:
    """Place of the largest of ``values[ptr[u]:ptr[u + 1]]``, the first of equals, for every u."""
    group = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    order = np.lexsort((np.arange(len(values)), -values, group))
    return order[ptr[:-1]]


def _bounded(value: NDArray[Any]) -> NDArray[Any]:
    return value if value.dtype.kind == "i" else np.clip(value, 0.0, CLIP).astype(np.float32)
