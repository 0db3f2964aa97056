"""Seconds of ops on a device: measured, by its rates, or by the roofline (docs/score.md, "Times" and "Rates").

One function for everyone that asks: `env.problem.Problem` for graphs as they are, and estimates of strategies for ops
that would be cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from env.times.eager import launches, moved_again
from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.origin import FUSED
from graphs.records import ANY_DEVICE, Phase

if TYPE_CHECKING:
    from env.device import Device
    from env.rates import ProductRates, Rates
    from graphs.opgraph import OpGraph


@dataclass(frozen=True, eq=False)
class OpWork:
    """Work of n ops, as far as their times depend on it.

    Attributes:
        kernels, work, stream: int64 [n], as of `OpGraph`.
        launches: float64 [n], of a device with rates, where updates share theirs.
        flops, bytes_moved: float64 [n].
        extents: float64 [n, 5].
        dtypes: d names.
        dtype_of: int64 [n], index into them.
        again: float64 [n], times that bytes are moved beyond once (`env.times.eager`).
        is_backward, trains: bool [n], of the backward pass; updates whose parameter costs their host time of its own.
        stack: how ops become kernels; that of hand-made kernels has attention of its own.
    """

    kernels: IntArray
    launches: FloatArray
    work: IntArray
    stream: IntArray
    flops: FloatArray
    bytes_moved: FloatArray
    extents: FloatArray
    dtypes: tuple[str, ...]
    dtype_of: IntArray
    again: FloatArray
    is_backward: BoolArray
    trains: BoolArray
    stack: str | None = None

    @staticmethod
    def of(graph: OpGraph) -> OpWork:
        """The work of a graph's ops."""
        names, dtype_of = np.unique(np.array(graph.dtypes, dtype=object).astype(str), return_inverse=True)
        return OpWork(
            kernels=graph.kernels,
            launches=launches(graph.kinds, graph.kernels, graph.origin.stack),
            work=graph.work,
            stream=graph.stream,
            flops=graph.flops.astype(np.float64, copy=False),
            bytes_moved=graph.bytes_moved.astype(np.float64, copy=False),
            extents=graph.extents,
            dtypes=tuple(str(name) for name in names),
            dtype_of=dtype_of.reshape(-1).astype(np.int64, copy=False),
            again=moved_again(graph.kinds, graph.dtypes, graph.extents, graph.origin.stack),
            is_backward=graph.phase == Phase.BACKWARD,
            trains=(graph.phase == Phase.UPDATE) & (graph.origin.stack != FUSED),
            stack=graph.origin.stack,
        )

    def divided(self, flops: FloatArray, bytes_moved: FloatArray, extents: FloatArray) -> OpWork:
        """Parts of the same ops."""
        return replace(self, flops=flops, bytes_moved=bytes_moved, extents=extents)


def measured_seconds(graph: OpGraph, device: Device) -> FloatArray | None:
    """float64 [n]: times measured on a device, the most specific ones; NaN where there is none. None: no times."""
    column = {key: j for j, key in enumerate(graph.time_keys)}
    result = None
    for key in (ANY_DEVICE, device.kind, device.model, device.name):  # the most specific wins
        if key in column:
            times = graph.time_s[:, column[key]]
            result = times if result is None else np.where(np.isnan(times), result, times)
    return result


def op_seconds(ops: OpWork, device: Device, measured: FloatArray | None = None) -> FloatArray:
    """float64 [n]: seconds of each op on a device, in graph order.

    Args:
        measured: float64 [n], times that count in place of others, NaN where there is none.
    """
    if device.rates is None:
        result = kernel_seconds(ops, device)
        return result if measured is None else np.where(np.isnan(measured), result, measured)
    from env.times.launch_kernel import add_waits  # loads the compiler

    result = kernel_seconds(ops, device)
    has_launches = np.zeros(len(result), dtype=np.bool_) if measured is None else ~np.isnan(measured)
    if measured is not None:
        result = np.where(has_launches, measured, result)
    add_waits(result, host_seconds(ops, device, device.rates), ops.stream, has_launches)
    return result


def host_seconds(ops: OpWork, device: Device, rates: Rates) -> FloatArray:
    """float64 [n]: what the host takes for each op: its launches, and of an update what its parameter takes."""
    each_s = np.where(ops.is_backward, device.launch_overhead_s * rates.backward_launch, device.launch_overhead_s)
    result: FloatArray = ops.launches * each_s + np.where(ops.trains, rates.parameter_s, 0.0)
    return result


def kernel_seconds(ops: OpWork, device: Device) -> FloatArray:
    """float64 [n]: seconds of each op's kernels; without their launches on a device with rates."""
    if device.rates is None:
        return _per_kernel(ops, device.launch_overhead_s) + roofline_seconds(ops, device)
    rates = _reached(device, device.rates, ops.stack)
    work_s = rates.seconds(ops.work, ops.extents, ops.flops, ops.bytes_moved, _by_op(ops, device, rates))
    result: FloatArray = ops.launches * rates.floor_s + (work_s + _again_s(ops, rates))
    return result


def roofline_seconds(ops: OpWork, device: Device) -> FloatArray:
    """float64 [n]: the longer of computing and moving bytes, at the device's peaks."""
    peak = np.array([device.flops_per_s(dtype) for dtype in ops.dtypes])[ops.dtype_of]
    result: FloatArray = np.maximum(ops.flops / peak, ops.bytes_moved / device.bytes_per_s)
    return result


def least_seconds(ops: OpWork, device: Device, measured: FloatArray | None = None) -> tuple[FloatArray, FloatArray]:
    """``(once_s, work_s)``, float64 [n] each: a part of an op takes the first and its share of the second, at least.

    Launches and the roofline on a device without rates; else the floor of kernels, and `Rates.least_seconds`. A
    measured time does not tell what launches took.
    """
    if device.rates is None:
        once_s, work_s = _per_kernel(ops, device.launch_overhead_s), roofline_seconds(ops, device)
    else:
        rates = _reached(device, device.rates, ops.stack)
        once_s = ops.launches * rates.floor_s
        work_s = rates.least_seconds(ops.work, ops.extents, ops.flops, ops.bytes_moved, _by_op(ops, device, rates))
        work_s = work_s + _again_s(ops, rates)
    if measured is None:
        return once_s, work_s
    is_modelled = np.isnan(measured)
    return np.where(is_modelled, once_s, 0.0), np.where(is_modelled, work_s, measured)


def launch_seconds(device: Device) -> float:
    """Cost of a kernel beyond its work: its launch, or, on a device with rates, the floor of a kernel."""
    return device.launch_overhead_s if device.rates is None else device.rates.floor_s


def moving_seconds(device: Device, moved: Any, kernels: int = 1) -> Any:
    """Seconds of some kernels that move so many bytes in all, a float or an array."""
    rates = device.rates
    per_s = device.bytes_per_s if rates is None else rates.bytes_per_s * device.bandwidth_efficiency
    return kernels * launch_seconds(device) + moved / per_s


def _per_kernel(ops: OpWork, seconds: float) -> FloatArray:
    result: FloatArray = ops.kernels.astype(np.float64) * seconds
    return result


def _again_s(ops: OpWork, rates: Rates) -> FloatArray:
    result: FloatArray = ops.again * ops.bytes_moved / rates.bytes_per_s
    return result


def _reached(device: Device, rates: Rates, stack: str | None = None) -> Rates:
    """Rates on a stack, with the device's efficiencies, which count on top."""
    rates = rates.of_stack(stack)
    if device.compute_efficiency == 1.0 and device.bandwidth_efficiency == 1.0:
        return rates
    return rates.scaled(device.compute_efficiency, device.bandwidth_efficiency)


def _by_op(ops: OpWork, device: Device, rates: Rates) -> ProductRates:
    return rates.by_op(ops.dtypes, ops.dtype_of, device.peak_flops)
