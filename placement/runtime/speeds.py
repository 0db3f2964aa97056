"""How fast one device is: FLOP/s by dtype, memory bandwidth, and what launching an op costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx
from torch.nn import functional as nn_functional

DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Effort:
    """How much to do for one figure; the smaller one is for tests, whose figures nobody believes.

    Attributes:
        figure_s: seconds of repeating one measurement.
        matrix: rows and columns of the matrices multiplied, and channels of the convolution times 8.
        copied_bytes: of the copy that memory bandwidth is taken from; more than caches hold.
        launches: ops in the routine that launch overhead is taken from.
        sizes: bytes of the tensors sent over a link, in increasing order.
        sends: how often each of them is sent.
    """

    figure_s: float
    matrix: int
    copied_bytes: int
    launches: int
    sizes: tuple[int, ...]
    sends: int


# Sizes of tensors around those of activations and gradients.
THOROUGH = Effort(0.3, 512, 128 << 20, 300, (64, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20), 20)
BRIEF = Effort(0.01, 64, 1 << 20, 20, (64, 4 << 10, 64 << 10), 3)


@dataclass(frozen=True)
class DeviceSpeed:
    """What was measured of one device; the fields are those of `env.cluster.Device`."""

    peak_flops: dict[str, float]
    memory_bytes_per_s: float
    launch_overhead_s: float


def measure_speed(place: torch.device, effort: Effort, together: Callable[[], None] = lambda: None) -> DeviceSpeed:
    """Measure one device; ``together`` is called before each figure, to wait for the other workers."""
    peak_flops = {}
    with torch.no_grad():
        for dtype in DTYPES:
            together()
            rate = flops_per_s(place, dtype, effort)
            if rate is not None:
                peak_flops[dtype] = rate
        together()
        bandwidth = memory_bytes_per_s(place, effort)
        together()
        return DeviceSpeed(peak_flops, bandwidth, launch_overhead_s(place, effort))


def flops_per_s(place: torch.device, dtype: str, effort: Effort) -> float | None:
    """The better of a matrix product's and a convolution's; None where the device computes neither in that dtype."""
    n, channels, side = effort.matrix, max(8, effort.matrix // 8), 32
    number_format = getattr(torch, dtype)
    rates = []
    try:
        a, b = (torch.rand(n, n, device=place).to(number_format) for _ in range(2))
        rates.append(2 * n**3 / seconds_of(lambda: a @ b, place, effort.figure_s))
        image = torch.rand(4, channels, side, side, device=place).to(number_format)
        weight = torch.rand(channels, channels, 3, 3, device=place).to(number_format)
        flops = 2 * 9 * channels**2 * image[:, 0].numel()
        rates.append(flops / seconds_of(lambda: nn_functional.conv2d(image, weight, padding=1), place, effort.figure_s))
    except RuntimeError:  # how PyTorch says that it has no such kernel
        pass
    return max(rates, default=None)


def memory_bytes_per_s(place: torch.device, effort: Effort) -> float:
    """Bytes read and written by a copy, per second."""
    source = torch.zeros(effort.copied_bytes // 2, dtype=torch.uint8, device=place)
    target = torch.ones_like(source)
    return effort.copied_bytes / seconds_of(lambda: target.copy_(source), place, effort.figure_s)


def launch_overhead_s(place: torch.device, effort: Effort) -> float:
    """What an op costs that computes next to nothing, Python's part included, in code as a placement runs it."""
    graph = fx.Graph()
    value = start = graph.placeholder("start")
    ops = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.maximum.default)
    for number in range(effort.launches):
        value = graph.call_function(ops[number % len(ops)], (value, start))
    graph.output(value)
    routine, one = fx.GraphModule({}, graph).forward, torch.ones(1, device=place)
    return seconds_of(lambda: routine(one), place, effort.figure_s) / effort.launches


def seconds_of(work: Callable[[], object], place: torch.device, figure_s: float) -> float:
    """Median seconds of a piece of work, repeated for that long, but three times at least."""
    work()
    samples: list[float] = []
    end = time.perf_counter() + figure_s
    while len(samples) < 3 or time.perf_counter() < end:
        synchronise(place)
        start = time.perf_counter()
        work()
        synchronise(place)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def synchronise(place: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if place.type == "cuda":
        torch.cuda.synchronize(place)
