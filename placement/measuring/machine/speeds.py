"""How fast one device is: FLOP/s by dtype, memory bandwidth, and what launching an op costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx
from torch.nn import functional as nn_functional

from placement.measuring.machine.figures import AllGather, Figure, alone, settled

DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Effort:
    """How much to do for one figure; `BRIEF` is for tests; its figures are too noisy to use.

    Attributes:
        figure_s: seconds of repeating one measurement.
        matrix: rows and columns of the matrices multiplied, and channels of the convolution times 8.
        copied_bytes: of the copy that memory bandwidth is taken from; more than caches hold.
        launches: ops in the routine that launch overhead is taken from.
        sizes: bytes of the tensors sent over a link, in increasing order.
        sends: how often each of them is sent.
        exchanged: bytes of the tensors of collectives, in increasing order; none for no collectives.
        retries: how often a doubtful figure is measured again; with 0 of them no figure is doubted.
    """

    figure_s: float
    matrix: int
    copied_bytes: int
    launches: int
    sizes: tuple[int, ...]
    sends: int
    exchanged: tuple[int, ...] = ()
    retries: int = 0


# Sizes of tensors around those of activations and gradients. What fits into the caches is exchanged faster, so that no
# straight line goes through the times of all sizes.
THOROUGH = Effort(
    figure_s=0.3,
    matrix=512,
    copied_bytes=128 << 20,
    launches=300,
    sizes=(64, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20),
    sends=20,
    exchanged=tuple(1 << k for k in (10, 13, 15, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26)),
    retries=2,
)
BRIEF = Effort(0.01, 64, 1 << 20, 20, (64, 4 << 10, 64 << 10), 3, (1 << 10, 64 << 10))


@dataclass(frozen=True)
class DeviceSpeed:
    """The measured speed of one device; the fields are those of `env.cluster.Device`."""

    peak_flops: dict[str, Figure]
    memory_bytes_per_s: Figure
    launch_overhead_s: Figure

    def figures(self) -> dict[str, Figure]:
        """All of them by name."""
        return {**self.peak_flops, "memory bandwidth": self.memory_bytes_per_s, "launch": self.launch_overhead_s}


def measure_speed(place: torch.device, effort: Effort, all_gather: AllGather = alone) -> DeviceSpeed:
    """Measure one device; ``all_gather`` as for `settled`, where other workers measure at the same time."""

    def measured(figure: Callable[[], Figure | None]) -> Figure | None:
        return settled(figure, effort.retries, all_gather)

    with torch.no_grad():
        rates = {dtype: measured(partial(flops_per_s, place, dtype, effort)) for dtype in DTYPES}
        bandwidth = measured(partial(memory_bytes_per_s, place, effort))
        launch = measured(partial(launch_overhead_s, place, effort))
    assert bandwidth is not None
    assert launch is not None
    return DeviceSpeed({dtype: rate for dtype, rate in rates.items() if rate is not None}, bandwidth, launch)


def flops_per_s(place: torch.device, dtype: str, effort: Effort) -> Figure | None:
    """The better of a matrix product's and a convolution's; None where the device computes neither in that dtype."""
    n, channels, side = effort.matrix, max(8, effort.matrix // 8), 32
    number_format = getattr(torch, dtype)
    rates = []
    try:
        a, b = (torch.rand(n, n, device=place).to(number_format) for _ in range(2))
        rates.append(_rate(2 * n**3, time_of(lambda: a @ b, place, effort.figure_s)))
        image = torch.rand(4, channels, side, side, device=place).to(number_format)
        weight = torch.rand(channels, channels, 3, 3, device=place).to(number_format)
        flops = 2 * 9 * channels**2 * image[:, 0].numel()
        work = partial(nn_functional.conv2d, image, weight, padding=1)
        rates.append(_rate(flops, time_of(work, place, effort.figure_s)))
    except RuntimeError:  # how PyTorch says that it has no such kernel
        pass
    return max(rates, key=lambda rate: rate.value, default=None)


def memory_bytes_per_s(place: torch.device, effort: Effort) -> Figure:
    """Bytes read and written by a copy, per second."""
    source = torch.zeros(effort.copied_bytes // 2, dtype=torch.uint8, device=place)
    target = torch.ones_like(source)
    return _rate(effort.copied_bytes, time_of(lambda: target.copy_(source), place, effort.figure_s))


def launch_overhead_s(place: torch.device, effort: Effort) -> Figure:
    """The cost of an op that computes next to nothing, Python's part included, in code as a placement runs it."""
    graph = fx.Graph()
    value = start = graph.placeholder("start")
    ops = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.maximum.default)
    for number in range(effort.launches):
        value = graph.call_function(ops[number % len(ops)], (value, start))
    graph.output(value)
    routine, one = fx.GraphModule({}, graph).forward, torch.ones(1, device=place)
    found = time_of(lambda: routine(one), place, effort.figure_s)
    return replace(found, value=found.value / effort.launches)


def _rate(amount: float, time_s: Figure) -> Figure:
    return replace(time_s, value=amount / time_s.value)


def time_of(work: Callable[[], object], place: torch.device, figure_s: float) -> Figure:
    """Seconds of a piece of work, repeated for that long, but three times at least."""
    work()
    samples: list[float] = []
    began, computed = time.perf_counter(), time.process_time()
    end = began + figure_s
    while len(samples) < 3 or time.perf_counter() < end:
        synchronise(place)
        start = time.perf_counter()
        work()
        synchronise(place)
        samples.append(time.perf_counter() - start)
    # Work on a GPU is waited for, and the threads of one process compute longer than the clock runs.
    share = (time.process_time() - computed) / (time.perf_counter() - began) if place.type == "cpu" else 1.0
    return Figure.of(samples, min(1.0, share))


def synchronise(place: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if place.type == "cuda":
        torch.cuda.synchronize(place)
