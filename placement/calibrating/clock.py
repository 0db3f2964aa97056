"""The clock of kernels: seconds that a piece of work takes on a device, without what its host needs to launch it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import count

import torch

Call = Callable[[], object]
_MOST_CALLS = 200  # in one recorded graph
_SAMPLE_S = 2e-3  # of one recorded graph: far above what its launch takes


class TimeLeft:
    """A time that ends some seconds from now; work that would begin after it is left out."""

    def __init__(self, seconds: float) -> None:
        self.end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left, 0 at least."""
        return max(0.0, self.end_s - time.monotonic())

    def share(self, part: float) -> TimeLeft:
        """A part of it."""
        return TimeLeft(self.left_s * part)


def kernel_s(operands: Callable[[], Call], turns: int, place: torch.device, figure_s: float) -> float:
    """The median time of one call, in seconds.

    Args:
        operands: makes a call on operands of its own.
        turns: how many of those there are; called by turns, so that no operand waits in a cache.
        place: the device on which they run.
        figure_s: how long to repeat them, three times at least.

    On a GPU the calls are recorded in a CUDA graph and replayed between two events, so that neither the host's time nor
    that of launches is in the figure; work that cannot be recorded is launched in a row instead.
    """
    if place.type != "cuda":
        return _cpu_s([operands() for _ in range(turns)], figure_s)
    with torch.cuda.device(place):
        stream = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
        # Operands, too: a backward pass runs on the stream of its forward pass, and no other may be recorded.
        with torch.cuda.stream(stream):
            return _gpu_s([operands() for _ in range(turns)], stream, figure_s)


def _cpu_s(works: Sequence[Call], figure_s: float) -> float:
    works[0]()
    samples: list[float] = []
    end = time.perf_counter() + figure_s
    for turn in count(1):
        start = time.perf_counter()
        works[turn % len(works)]()
        samples.append(time.perf_counter() - start)
        if turn >= 3 and time.perf_counter() >= end:
            break
    return statistics.median(samples)


def _gpu_s(works: Sequence[Call], stream: torch.cuda.Stream, figure_s: float) -> float:
    for work in works:  # libraries choose kernels and take workspaces
        work()
    once_s = _between_events(works[0], stream)
    calls = max(1, min(_MOST_CALLS, int(_SAMPLE_S / max(once_s, 1e-7))))
    run = _recorded(works, calls)
    _between_events(run, stream)
    samples: list[float] = []
    end = time.perf_counter() + figure_s
    while len(samples) < 3 or time.perf_counter() < end:
        samples.append(_between_events(run, stream) / calls)
    return statistics.median(samples)


def _between_events(work: Call, stream: torch.cuda.Stream) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def _recorded(works: Sequence[Call], calls: int) -> Call:
    """Some calls as one CUDA graph or, where they cannot be recorded, as a loop of launches; on the current stream."""

    def loop() -> None:
        for number in range(calls):
            works[number % len(works)]()

    # Not `torch.cuda.graph`, which collects garbage and empties the cache each time.
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        graph.capture_begin()
        try:
            loop()
        finally:
            graph.capture_end()
    except RuntimeError:
        torch.cuda.synchronize()
        return loop
    return graph.replay
