"""Fitting the constants of `env.rates.Rates` to one half of measured kernels, and judging them on the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from env.device import Device
from env.rates import AttentionRate, ConvolutionRate, ProductRate, Rates
from graphs.errors import ClusterError
from graphs.formatting import format_count, format_seconds
from graphs.records import ATTENTIONS, Work
from placement.calibrating.kernels import MeasuredKernel
from placement.calibrating.records import Fit

Array = NDArray[np.float64]
_STEPS = 60
_ENOUGH = 1e-7  # of the cost: below such a gain it ends


def least_squares(
    residuals: Callable[[Array], Array],
    first: Array,
    lower: Array,
    upper: Array,
    *,
    step: float = 0.003,
    scale: float = math.inf,
    steps: int = _STEPS,
) -> Array:
    """The numbers [p] that make residuals [n] smallest.

    Args:
        residuals: of some numbers.
        first: where to begin.
        lower, upper: what each number may be.
        step: over which derivatives are taken: large where residuals have steps of their own.
        scale: residuals far above it count by their logarithm (Cauchy's loss); infinite for plain squares.
        steps: at most.

    Each step solves the normal equations of the weighted residuals, damped more after a failure (Marquardt, An
    algorithm for least-squares estimation of nonlinear parameters, 1963).
    """
    x = np.clip(first, lower, upper)
    r = residuals(x)
    cost, damping = _cost(r, scale), 1e-2
    for _ in range(steps):
        weight = 1.0 / (1.0 + (r / scale) ** 2)
        slopes = _slopes(residuals, x, r, step, upper)
        normal, downhill = slopes.T @ (weight[:, None] * slopes), slopes.T @ (weight * r)
        gained = 0.0
        while damping < 1e8:
            # A constant on which no time depends has no curvature: that of the others keeps the equations regular.
            curvature = np.diag(normal)
            diagonal = np.diag(damping * np.maximum(curvature, 1e-6 * curvature.max() + 1e-30))
            tried = np.clip(x - np.linalg.lstsq(normal + diagonal, downhill)[0], lower, upper)
            there = residuals(tried)
            gained = cost - _cost(there, scale)
            if gained > 0.0:
                x, r, damping = tried, there, damping / 5.0
                break
            damping *= 4.0
        if gained <= _ENOUGH * cost:
            break
        cost -= gained
    return x


def _cost(r: Array, scale: float) -> float:
    if math.isinf(scale):
        return float(np.sum(r * r))
    return float(np.sum(scale * scale * np.log1p((r / scale) ** 2)))


def _slopes(residuals: Callable[[Array], Array], x: Array, r: Array, step: float, upper: Array) -> Array:
    """float64 [n, p]: derivatives by differences, taken downwards where a number is at its upper bound."""
    columns = []
    for k in range(len(x)):
        moved, by = x.copy(), step if x[k] + step <= upper[k] else -step
        moved[k] += by
        columns.append((residuals(moved) - r) / by)
    return np.stack(columns, axis=1)


_OVER_PEAK = 1.03  # what clocks above the data sheet's and the clock of the measurement may explain
_MOST_AWAY = 50.0  # times that a constant may leave what it began with
_ROUNDING = 1e-9  # a limit stays one after logarithms and exponentials
_LARGE_S = 2e-5  # by the peak: of products that take longer, no floor or launch explains a multiple
_MOST_SLOWER = 20.0  # times that large products may take longer than was predicted
LEAST = 4  # kernels of a kind that constants are fitted to
KINDS = ("products", "convolutions", "attention", "memory-bound ops")


def kind_of(kernel: MeasuredKernel) -> str:
    """One of `KINDS`."""
    if kernel.work in ATTENTIONS:
        return "attention"
    is_convolution = kernel.extents[4] > 0.0
    return "memory-bound ops" if kernel.work == Work.OTHER else KINDS[1 if is_convolution else 0]


def fitted(
    device: Device,
    kernels: Sequence[MeasuredKernel],
    seed: int = 0,
    *,
    multiprocessors: int | None = None,
    sustained: float | None = None,
) -> tuple[Device, list[Fit]]:
    """The device with rates fitted to one half of the kernels, chosen at random, and how far the other half is off.

    Memory-bound ops decide bandwidth and floor, products of each dtype their five constants at most, attention its own
    five, convolutions three; kinds of fewer than eight kernels stay as they were, and so do those of whose kernels the
    rates as they were are no further off than those fitted. Errors are those of single kernels in short runs.

    Args:
        multiprocessors: that the device says it has; None for those of its rates.
        sustained: as measured; None for that of its rates.

    Raises:
        ClusterError: a product is faster than the device's peak.
    """
    check_peaks(device, kernels)
    halves = _halves(kernels, np.random.default_rng(seed))
    rates = replace(start_of(device, kernels), sustained=1.0)
    rates = rates if multiprocessors is None else replace(rates, multiprocessors=multiprocessors)
    before = device if device.rates is None else replace(device, rates=replace(device.rates, sustained=1.0))
    mine, others = halves

    def nearer(found: Rates, what: str, dtype: str | None = None) -> Rates:
        every = _only(kernels, what, dtype)
        before, after = (median_error(replace(device, rates=each), every) for each in (rates, found))
        return found if after < before or device.rates is None else rates

    rates = nearer(_memory(rates, _only(mine, "memory-bound ops"), device), "memory-bound ops")
    dtypes = list(dict.fromkeys(one.dtype for one in _only(kernels, "products")))
    for number, dtype in enumerate(dtypes):
        own = _only(mine, "products", dtype)
        rates = nearer(_products(rates, dtype, own, device, is_first=number == 0), "products", dtype)
    rates = nearer(_attention(rates, _only(mine, "attention"), device), "attention")
    rates = nearer(_convolutions(rates, _only(mine, "convolutions"), device), "convolutions")
    after = replace(device, rates=rates)
    fits = []
    for what in KINDS:
        for dtype in dict.fromkeys(one.dtype for one in _only(kernels, what)):
            own, left_out = _only(mine, what, dtype), _only(others, what, dtype)
            if len(own) >= LEAST:
                errors = (median_error(each, left_out) for each in (before, after))
                fits.append(Fit(what, dtype, len(own), len(left_out), *errors))
    if sustained is None:
        sustained = device.rates.sustained if device.rates is not None else 1.0
    return replace(device, rates=replace(rates, sustained=sustained)), fits


def check_peaks(device: Device, kernels: Sequence[MeasuredKernel]) -> None:
    """Raises: ClusterError: a product is faster than any on this device can be."""
    for one in kernels:
        peak = device.peak_flops.get(one.dtype)
        if kind_of(one) == "products" and peak is not None and one.flops > _OVER_PEAK * peak * one.seconds:
            _, m, n, k, _ = one.extents
            raise ClusterError(
                f"a {one.dtype} product of {m:g} x {n:g} x {k:g} in {format_seconds(one.seconds)} is "
                f"{format_count(one.flops / one.seconds)}FLOP/s, and {device.model or device.name!r} has a peak of "
                f"{format_count(peak)}FLOP/s; check the unit of the times and the device."
            )


def check_times(device: Device, kernels: Sequence[MeasuredKernel], where: str) -> None:
    """Raises: ClusterError: large products take so long that the unit of their times or the device is wrong."""
    large = [one for one in _only(kernels, "products") if one.flops / device.flops_per_s(one.dtype) > _LARGE_S]
    if not large:
        return
    factor = float(np.median([one.seconds for one in large] / seconds_of(device, large)))
    if factor > _MOST_SLOWER:
        raise ClusterError(
            f"{where}: large products take {factor:,.0f} times as long as {device.model or device.name!r} is known to "
            f"need; expected at most {_MOST_SLOWER:g} times; check the unit of the times and the device."
        )


def distinct(kernels: Sequence[MeasuredKernel]) -> list[MeasuredKernel]:
    """Each shape once, with the median of its times: a shape that was fitted to must not be left out, too."""
    times: dict[tuple[object, ...], list[MeasuredKernel]] = {}
    for one in kernels:
        times.setdefault((one.work, one.dtype, one.extents), []).append(one)
    return [replace(same[0], seconds=float(np.median([one.seconds for one in same]))) for same in times.values()]


def seconds_of(device: Device, kernels: Sequence[MeasuredKernel]) -> Array:
    """float64 [n]: how long kernels take by the rates of a device or, where it has none, by its roofline."""
    flops, moved = (np.array([getattr(one, name) for one in kernels]) for name in ("flops", "bytes_moved"))
    if device.rates is None:
        rates = np.array([device.flops_per_s(one.dtype) for one in kernels])
        roofline: Array = np.maximum(flops / rates, moved / device.bytes_per_s)
        return roofline
    return _seconds(device.rates, kernels, device)


def median_error(device: Device, kernels: Sequence[MeasuredKernel]) -> float:
    """The median of how far times are off, as a share of what was measured; 0 of none."""
    if not kernels:
        return 0.0
    measured = np.array([one.seconds for one in kernels])
    return float(np.median(np.abs(seconds_of(device, kernels) / measured - 1.0)))


def _seconds(rates: Rates, kernels: Sequence[MeasuredKernel], device: Device) -> Array:
    work = np.array([int(one.work) for one in kernels], dtype=np.int64)
    extents = np.array([one.extents for one in kernels], dtype=np.float64)
    flops, moved = (np.array([getattr(one, name) for one in kernels]) for name in ("flops", "bytes_moved"))
    dtypes = list(dict.fromkeys(one.dtype for one in kernels))
    dtype_of = np.array([dtypes.index(one.dtype) for one in kernels], dtype=np.int64)
    by_op = rates.by_op(dtypes, dtype_of, device.peak_flops)
    result: Array = rates.seconds(work, extents, flops, moved, by_op) + rates.floor_s
    return result


def start_of(device: Device, kernels: Sequence[MeasuredKernel]) -> Rates:
    """Rates to begin with: the device's own or, where it has none, by its data sheet and the fastest kernel."""
    if device.rates is not None:
        return device.rates
    reached: dict[str, float] = {}
    for one in kernels:
        if kind_of(one) == "products":
            reached[one.dtype] = max(reached.get(one.dtype, 0.0), one.flops / one.seconds)
    products = {dtype: _first_rate(most, device) for dtype, most in reached.items()}
    products = products or {dtype: _first_rate(peak, device) for dtype, peak in device.peak_flops.items()}
    units = 1 if device.kind == "cpu" else 108
    return Rates(units, device.bytes_per_s, 1e-6 if device.kind != "cpu" else 1e-7, products)


def _first_rate(flops_per_s: float, device: Device) -> ProductRate:
    return ProductRate(flops_per_s, 64.0, 8.0, device.bytes_per_s)


# -- one kind of kernel ----------------------------------------------------------------------------------------------


def _memory(rates: Rates, kernels: Sequence[MeasuredKernel], device: Device) -> Rates:
    """Bandwidth, and the floor of a kernel."""
    if len(kernels) < LEAST:
        return rates
    moved, seconds = (np.array([getattr(one, name) for one in kernels]) for name in ("bytes_moved", "seconds"))

    def modelled(logs: Array) -> Array:
        result: Array = moved / math.exp(logs[0]) + math.exp(logs[1])
        return result

    first = np.log([float(np.max(moved / seconds)), float(np.min(seconds))])
    most = np.array([math.log(device.memory_bytes_per_s), math.inf])
    found = np.exp(_least_squares(modelled, seconds, first, most))
    return replace(rates, bytes_per_s=float(found[0]), floor_s=float(found[1]))


def _products(rates: Rates, dtype: str, kernels: Sequence[MeasuredKernel], device: Device, is_first: bool) -> Rates:
    """Constants of the products of a dtype; of the first one also how much longer gradients of weights take."""
    if len(kernels) < LEAST:
        return rates
    seconds = np.array([one.seconds for one in kernels])
    reached = float(np.max([one.flops / one.seconds for one in kernels]))
    starts = [_first_rate(reached, device)]
    starts += [rates.products[dtype]] if dtype in rates.products else []
    has_gradients = is_first and any(one.work == Work.WEIGHT_GRADIENT for one in kernels)

    def made(logs: Array) -> Rates:
        flops_per_s, depth, edge, bytes_per_s, floor_s, more = np.exp(logs).tolist()
        rate = ProductRate(flops_per_s, depth, edge, bytes_per_s)
        factor = 1.0 + more if has_gradients else rates.weight_gradient
        products = {**rates.products, dtype: rate}
        return replace(rates, products=products, floor_s=floor_s if is_first else rates.floor_s, weight_gradient=factor)

    floor_s = max(min(rates.floor_s, float(np.min(seconds))), 1e-8)
    most = np.full(6, math.inf)
    most[0] = math.log(device.peak_flops.get(dtype, math.inf))
    most[3] = math.log(device.memory_bytes_per_s)

    def found_from(start: ProductRate) -> Rates:
        figures = (max(start.flops_per_s, reached), max(start.depth, 1.0), max(start.edge, 0.1), start.bytes_per_s)
        first = np.log([*figures, floor_s, 0.05])
        return made(_least_squares(lambda logs: _seconds(made(logs), kernels, device), seconds, first, most))

    def error(found: Rates) -> float:
        return float(np.median(np.abs(np.log(_seconds(found, kernels, device) / seconds))))

    # The loss has valleys of its own for outliers: what it finds depends on where it begins.
    return min(map(found_from, starts), key=error)


def _attention(rates: Rates, kernels: Sequence[MeasuredKernel], device: Device) -> Rates:
    """Constants of attention as torch runs it."""
    if len(kernels) < LEAST:
        return rates
    seconds = np.array([one.seconds for one in kernels])
    reached = float(np.max([one.flops * one.extents[4] / one.seconds for one in kernels]))
    start = rates.attention or AttentionRate(reached, 128.0, 16.0, 0.5, 1.3)

    def made(logs: Array) -> Rates:
        flops_per_s, depth, width, longest, more = np.exp(logs).tolist()
        return replace(rates, attention=AttentionRate(flops_per_s, depth, width, longest, 1.0 + more))

    first = np.log([start.flops_per_s, max(start.depth, 1.0), max(start.width, 0.1), max(start.longest, 0.01),
                    max(start.backward - 1.0, 0.01)])  # fmt: skip
    found = _least_squares(lambda logs: _seconds(made(logs), kernels, device), seconds, first)
    return made(found)


def _convolutions(rates: Rates, kernels: Sequence[MeasuredKernel], device: Device) -> Rates:
    """How many times as long convolutions take as their products, by pass; all of them are there, or none is fitted."""
    plain_s = _seconds(replace(rates, convolutions=None), kernels, device) if kernels else np.zeros(0)
    times = np.array([one.seconds for one in kernels]) / plain_s
    is_weight = np.array([one.work == Work.WEIGHT_GRADIENT for one in kernels], dtype=np.bool_)
    is_both = np.array([one.flops > 3.0 * math.prod(one.extents[:4]) for one in kernels], dtype=np.bool_)
    passes = [times[chosen] for chosen in (~is_weight & ~is_both, is_both, is_weight)]
    if len(kernels) < LEAST or not all(map(len, passes)):
        return rates
    forward, both, weight = (float(np.median(each)) for each in passes)
    data = 2.0 * both - weight
    return replace(rates, convolutions=ConvolutionRate(*(max(each, 1.0) for each in (forward, data, weight))))


def _least_squares(
    modelled: Callable[[Array], Array], seconds: Array, first: Array, most: Array | None = None
) -> Array:
    """Logarithms of constants by least squares of the logarithms of times.

    Errors far beyond 5 % hardly count: some shapes have kernels of their own, which no few constants describe.

    Args:
        modelled: the times of all kernels by some constants.
        first, most: where to begin, and what a data sheet allows.
    """
    away = math.log(_MOST_AWAY)
    upper = first + away if most is None else np.minimum(first + away, most - _ROUNDING)
    lower = np.minimum(first, upper) - away
    # Times have steps, waves of tiles: derivatives over some percent, not at a point.
    return least_squares(lambda logs: np.log(modelled(logs) / seconds), first, lower, upper, step=0.005, scale=0.05)


def _halves(
    kernels: Sequence[MeasuredKernel], random: np.random.Generator
) -> tuple[list[MeasuredKernel], list[MeasuredKernel]]:
    order = random.permutation(len(kernels)).tolist()
    middle = (len(order) + 1) // 2
    return [kernels[k] for k in order[:middle]], [kernels[k] for k in order[middle:]]


def _only(kernels: Sequence[MeasuredKernel], what: str, dtype: str | None = None) -> list[MeasuredKernel]:
    return [one for one in kernels if kind_of(one) == what and dtype in (None, one.dtype)]
