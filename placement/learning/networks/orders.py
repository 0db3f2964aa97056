"""From devices of groups to placements that are allowed, and to orders of ops."""

from __future__ import annotations

import numpy as np

from env.plan import Plan
from env.problem import Problem
from graphs.errors import MismatchError
from graphs.opgraph import FloatArray, IntArray
from placement.learning.networks import grouping_kernel as kernel


def within_pins(problem: Problem, device: IntArray) -> IntArray:
    """int64 [k, n]: units that may not run on their device go to the fastest that they may run on."""
    allowed = problem.allowed[np.arange(problem.graph.n_ops), device]
    if allowed.all():
        return device
    unit_s = np.zeros((problem.n_units, problem.cluster.n_devices))
    np.add.at(unit_s, problem.unit_of, np.where(problem.allowed, problem.op_s, np.inf))
    return np.where(allowed, device, unit_s.argmin(axis=1)[problem.unit_of])


def on_devices(problem: Problem, device: IntArray, shift_s: FloatArray | None = None) -> IntArray:
    """int64 [k, n]: places in line by the longest path to the end of the graph, with everything on its device.

    Args:
        device: int64 [k, n].
        shift_s: float64 [k, n], added to the path of each op; nothing by default.
    """
    result = np.empty(device.shape, dtype=np.int64)
    shift_s = np.zeros(device.shape) if shift_s is None else shift_s
    kernel.orders(device, shift_s, *_structure(problem), result)
    return result


def correction_of(problem: Problem, plan: Plan) -> FloatArray:
    """float64 [n]: the shift of every op with which `on_devices` gives the plan's own order, where it has one."""
    n = problem.graph.n_ops
    if plan.order is None:
        return np.zeros(n)
    path_s = np.empty(n)
    kernel.path(plan.device, *_structure(problem), path_s)
    line = np.argsort(plan.order, kind="stable")
    wanted_s = np.empty(n)
    # Ops of equal paths are told apart by less than any time that matters.
    wanted_s[line] = np.sort(path_s)[::-1] - np.arange(n) * 1e-12 * path_s.max()
    return wanted_s - path_s


def _structure(problem: Problem) -> tuple[IntArray, FloatArray, IntArray, IntArray, IntArray, FloatArray]:
    graph = problem.graph
    readers = graph.output_ptr, graph.consumer_ptr, graph.consumers
    return graph.topological_order, problem.op_s, *readers, problem.mean_transfer_s


def majority(problem: Problem, group: IntArray, device: IntArray, n_groups: int) -> IntArray:
    """int64 [n_groups]: the device with most of the work of each group; ``group`` int64 [U], ``device`` int64 [n]."""
    n_devices = problem.cluster.n_devices
    key = group[problem.unit_of] * n_devices + device
    share = np.bincount(key, problem.mean_op_s + 1e-12, n_groups * n_devices).reshape(n_groups, n_devices)
    found: IntArray = share.argmax(axis=1)
    return found


def check_devices(problem: Problem, n_devices: int) -> None:
    """Refuse a cluster of another size.

    Raises:
        MismatchError: says both numbers.
    """
    if problem.cluster.n_devices != n_devices:
        raise MismatchError(
            f"this policy places on {n_devices} devices, but cluster {problem.cluster.name!r} has "
            f"{problem.cluster.n_devices}; train one for it, or use method pretrained."
        )
