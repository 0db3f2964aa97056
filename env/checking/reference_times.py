"""Op times once more, in plain Python, one op after the other: docs/score.md, "Times" and "Rates".

It shares no code with `env.rates` and `env.times`. So that ties fall the same way, sums and products are in the order
that both write down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from env.cluster import Device
from graphs.opgraph import ANY_DEVICE, Op
from graphs.records import Extents, Phase, Work

_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_IN_16_BYTES = {"bfloat16": 8.0, "float16": 8.0, "float8_e4m3fn": 16.0, "float8_e5m2": 16.0}
# Names of torch's own kernels, without what is around them (``softmax`` of ``aten._softmax``): times as long as their
# bytes is a + b (1 + c / columns), from so many columns on; then whether it is so in bfloat16 alone, and with hand-made
# kernels, too.
_KERNELS = {
    "softmax": (1.7, 0.0, 0.0, 1024, False, False),
    "log_softmax": (1.7, 0.0, 0.0, 1024, False, False),
    "softmax_backward_data": (4 / 3, 0.0, 0.0, 1024, False, False),
    "log_softmax_backward_data": (4 / 3, 0.0, 0.0, 1024, False, False),
    "safe_softmax": (2.75, 0.0, 0.0, 0, False, False),
    "nll_loss_forward": (0.0, 0.0, 0.0, 0, False, False),
    "nll_loss_backward": (0.5, 0.0, 0.0, 0, False, False),
    "layer_norm": (0.0, 1.0, 700.0, 0, False, False),
    "native_layer_norm": (0.0, 1.0, 700.0, 0, False, False),
    "native_layer_norm_backward": (1.0, 2 / 3, 2750.0, 0, False, False),
    "rms_norm": (0.0, 1.0, 700.0, 0, False, False),
    "fused_rms_norm": (0.0, 1.0, 700.0, 0, False, False),
    "fused_rms_norm_backward": (1.0, 2 / 3, 2750.0, 0, False, False),
    "sum": (0.0, 1.0, 2000.0, 0, False, False),
    "native_batch_norm": (0.0, 1.5, 550.0, 0, True, True),
    "native_batch_norm_backward": (0.0, 5 / 3, 500.0, 0, True, True),
    "max_pool2d_with_indices": (2.6, 0.0, 0.0, 0, False, True),
    "max_pool2d_with_indices_backward": (5.0, 0.0, 0.0, 0, False, True),
}
_PRODUCTS = (Work.PRODUCT, Work.WEIGHT_GRADIENT, Work.GROUPED)


def op_times(ops: Sequence[Op], devices: Sequence[Device], place: Sequence[int], stack: str | None) -> list[float]:
    """Seconds of every op, by a graph's stack, on its device, whose number ``place`` has."""
    if stack == "fused":
        devices = [_with_hand_made_attention(device) for device in devices]
    if stack == "compiled":
        devices = [_with_padding(device) for device in devices]
    devices = [_slower_in_steps(device, stack or "eager") for device in devices]
    by_device: dict[int, list[float]] = {}
    alike: list[tuple[Device, list[float]]] = []
    by_name = {key for op in ops for key in op.time_s}
    for d in dict.fromkeys(place):
        plain = replace(devices[d], name=devices[d].name if devices[d].name in by_name else "-", memory_of="")
        found = next((times for device, times in alike if device == plain), None)
        by_device[d] = _times_on(ops, devices[d], stack) if found is None else found
        if found is None:
            alike.append((plain, by_device[d]))
    return [by_device[d][i] for i, d in enumerate(place)]


def _with_hand_made_attention(device: Device) -> Device:
    rates = device.rates
    if rates is None or rates.fused_attention is None:
        return device
    return replace(device, rates=replace(rates, attention=rates.fused_attention))


def _with_padding(device: Device) -> Device:
    return device if device.rates is None else replace(device, rates=replace(device.rates, misaligned=1.0))


def _slower_in_steps(device: Device, stack: str) -> Device:
    factor = 1.0 if device.rates is None or device.rates.steps is None else device.rates.steps.get(stack, 1.0)
    if device.rates is None or factor == 1.0:
        return device
    return replace(device, rates=device.rates.scaled(1 / factor, 1 / factor))


def _times_on(ops: Sequence[Op], device: Device, stack: str | None) -> list[float]:
    if device.rates is None:
        return [_seconds(op, device, stack) for op in ops]
    # How long after its host, which runs ahead, each stream's device has done all that was launched so far.
    ahead: dict[int, float] = {}
    result = []
    for op in ops:
        seconds = _seconds(op, device, stack)
        after_launch = ahead.get(op.stream, 0.0) - _host_s(op, stack, device)
        if after_launch < 0 and _measured(op, device) is None:
            ahead[op.stream] = seconds
            seconds -= after_launch
        else:
            ahead[op.stream] = max(after_launch + seconds, 0.0)
        result.append(seconds)
    return result


def _host_s(op: Op, stack: str | None, device: Device) -> float:
    """Launches by pass, and what a trained parameter takes but on the stack of hand-made kernels."""
    rates: Any = device.rates
    each_s = device.launch_overhead_s * (rates.backward_launch if op.phase == Phase.BACKWARD else 1.0)
    parameter_s = rates.parameter_s if op.phase == Phase.UPDATE and stack != "fused" else 0.0
    return float(_launches(op, stack) * each_s + parameter_s)


def _measured(op: Op, device: Device) -> float | None:
    for key in (device.name, device.model, device.kind, ANY_DEVICE):
        if key in op.time_s:
            return float(op.time_s[key])
    return None


def _seconds(op: Op, device: Device, stack: str | None) -> float:
    """Measured, or of the op's kernels; with launches where there are no rates."""
    measured = _measured(op, device)
    if measured is not None:
        return measured
    if device.rates is not None:
        per_s = device.rates.bytes_per_s * device.bandwidth_efficiency
        again_s = _again(op, stack) * op.bytes_moved / per_s
        return _launches(op, stack) * device.rates.floor_s + (_work_s(op, device) + again_s)
    peak = device.peak_flops[op.dtype] if op.dtype in device.peak_flops else device.peak_flops["float32"]
    flops_s = op.flops / (peak * device.compute_efficiency)
    moving_s = op.bytes_moved / (device.memory_bytes_per_s * device.bandwidth_efficiency)
    return op.kernels * device.launch_overhead_s + max(flops_s, moving_s)


def _launches(op: Op, stack: str | None) -> float:
    """An eager update is one of 36 tensors that an optimizer updates in one go."""
    is_update = op.kind.startswith("optimizer.") and stack in (None, "eager")
    return op.kernels / 36 if is_update else float(op.kernels)


def _again(op: Op, stack: str | None) -> float:
    """How often torch's own kernels move an op's bytes beyond once."""
    groups, _, columns, *_ = op.extents
    if stack not in (None, "eager", "fused") or columns <= 0:
        return 0.0
    if "conv" in op.kind:
        return 2.0 if groups == 1 and op.dtype in ("bfloat16", "float16") else 0.0
    words = op.kind.lower().split("(")[0].split(".")
    name = words[min(len(words) - 1, 1)].strip("_")
    fixed, narrow, half, above, in_bfloat16, stays = _KERNELS.get(name, (1.0, 0.0, 0.0, 0.0, False, True))
    if columns <= above or (in_bfloat16 and op.dtype != "bfloat16") or (stack == "fused" and not stays):
        return 0.0
    return fixed + narrow * (1.0 + half / columns) - 1.0


def _work_s(op: Op, device: Device) -> float:
    rates: Any = device.rates
    moving_s = op.bytes_moved / (rates.bytes_per_s * device.bandwidth_efficiency)
    name, factor = _stand_in(op.dtype, rates.products, device.peak_flops)
    product = rates.products[name]
    flops_per_s = product.flops_per_s * device.compute_efficiency * factor
    if op.work in _PRODUCTS and min(op.extents[:4]) > 0:
        computing_s = _product_s(op, device, product, flops_per_s)
        return _overlapped(computing_s, op.bytes_moved / (product.bytes_per_s * device.bandwidth_efficiency))
    if op.work in (Work.ATTENTION, Work.ATTENTION_BACKWARD) and min(op.extents) > 0 and rates.attention is not None:
        usual, _ = _stand_in("bfloat16", rates.products, device.peak_flops)
        share = min(flops_per_s / (rates.products[usual].flops_per_s * device.compute_efficiency), 1.0)
        return _overlapped(_attention_s(op, rates, device.compute_efficiency, share), moving_s)
    return float(max(op.flops * rates.sustained / flops_per_s, moving_s))


def _stand_in(dtype: str, products: Mapping[str, Any], peaks: Mapping[str, float]) -> tuple[str, float]:
    if dtype in products:
        return dtype, 1.0
    name = "bfloat16" if "bfloat16" in products else next(iter(products))
    return name, peaks.get(dtype, peaks["float32"]) / peaks.get(name, peaks["float32"])


def _product_s(op: Op, device: Device, product: Any, flops_per_s: float) -> float:
    rates: Any = device.rates
    batch, rows, columns, depth, *_ = _with_padded_channels(op)
    at_once = float(rates.multiprocessors)
    seconds = [2.0 * batch * rows * columns * depth / min(flops_per_s, 0.5 * device.peak_flops["float32"])]
    for r, c in _TILES:
        tiles = batch * math.ceil(rows / r - 1e-9) * math.ceil(columns / c - 1e-9)
        slower = (1 + product.edge * (1 / r + 1 / c)) / (1 + product.edge * (1 / 256 + 1 / 128))
        wave_s = at_once * (2 * r * c) * slower / flops_per_s
        seconds.append(math.ceil(tiles / at_once) * wave_s * (depth + product.depth))
        parts = min(math.floor(at_once / max(tiles, 1.0)), 16)
        if parts > 1:
            adding_s = 8.0 * parts * batch * rows * columns / (product.bytes_per_s * device.bandwidth_efficiency)
            seconds.append(wave_s * (math.ceil(depth / parts) + product.depth) + adding_s)
    for _ in range(_halvings(replace(op, extents=_with_padded_channels(op)))):
        seconds[1:] = [each * rates.misaligned for each in seconds[1:]]
    batch, rows, columns, depth, filters = op.extents
    longer = max(op.flops / (2.0 * batch * rows * columns * depth), 1.0)
    if op.work != Work.GROUPED and filters:
        longer *= _of_convolution(op, rates.convolutions, longer)
    elif op.work == Work.WEIGHT_GRADIENT:
        longer *= rates.weight_gradient
    longer *= rates.grouped if op.work == Work.GROUPED else 1.0
    return float(min(seconds) * rates.sustained * longer)


def _with_padded_channels(op: Op) -> Extents:
    """The sizes of a convolution on tensor cores, whose channels come in whole 16 bytes; of all else as they are."""
    batch, rows, columns, depth, filters = op.extents
    numbers = _IN_16_BYTES.get(op.dtype, 1.0)
    if op.work == Work.GROUPED or filters <= 0 or numbers == 1:
        return op.extents

    def padded(size: float, places: float) -> float:
        return math.ceil(size / places / numbers - 1e-9) * numbers * places

    if op.work == Work.WEIGHT_GRADIENT:
        return batch, padded(rows, 1), padded(columns, filters), depth, filters
    return batch, rows, padded(columns, 1), padded(depth, filters), filters


def _of_convolution(op: Op, rate: Any, gradients: float) -> float:
    if rate is None:
        return 1.0
    if op.work == Work.WEIGHT_GRADIENT:
        return float(rate.weight_gradient)
    return float((rate.data_gradient + rate.weight_gradient) / 2 if gradients > 1.5 else rate.forward)


def _halvings(op: Op) -> int:
    """How often 16 bytes are halved until rows in memory are whole numbers of them, of a dtype of tensor cores."""
    batch, rows, columns, depth, shared = op.extents
    numbers = _IN_16_BYTES.get(op.dtype, 1.0)
    if op.work == Work.WEIGHT_GRADIENT or (op.work == Work.GROUPED and shared == 3):
        along = [rows, columns]
    elif op.work == Work.GROUPED:
        along = [round(batch * columns) if shared == 2 else columns, depth]
    else:
        along = [columns, depth, *([rows] if batch > 1 else [])]
    halvings = 0
    while numbers > 1 and any(math.fmod(size + 1e-9, numbers) > 3e-9 for size in along):
        numbers, halvings = numbers / 2, halvings + 1
    return halvings


def _attention_s(op: Op, rates: Any, compute_efficiency: float, share: float) -> float:
    heads, queries, keys, width, density = op.extents
    rate = rates.attention
    per_s = rate.flops_per_s * compute_efficiency * (width / (width + rate.width)) * ((128 + rate.width) / 128) * share
    tiles = heads * math.ceil(queries / 128 - 1e-9)
    all_keys = tiles * (density * keys + rate.depth)
    last_keys = rate.longest * rates.multiprocessors * (keys + rate.depth)
    forward_s = 4.0 * 128 * width * (all_keys + last_keys) / per_s
    return float(forward_s * (2.5 * rate.backward if op.work == Work.ATTENTION_BACKWARD else 1.0))


def _overlapped(computing_s: float, moving_s: float) -> float:
    most, least = max(computing_s, moving_s), min(computing_s, moving_s)
    square = (least / most) * (least / most)
    return most * math.sqrt(math.sqrt(1 + square * square))
