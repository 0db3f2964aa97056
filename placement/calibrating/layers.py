"""Layers of a transformer, really trained: what a step costs its host, and what it takes beside its kernels one by one.

Narrow layers, whose kernels take no time, show the host: launches of the forward pass, those of the backward pass, and
what each parameter costs beside them. Wide ones keep the device busy, and show what is left between a step and the sum
of its ops.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from env.device import Device
from graphs.capture import capture
from graphs.opgraph import OpGraph
from graphs.origin import EAGER
from graphs.records import Phase
from placement.measuring.machine.speeds import synchronise

_NARROW, _WIDE = (12, 16, 4), (4, 2048, 2048)  # layers, width, tokens of each sample
_HEADS, _SAMPLES = 2, 2
_HEAD_WIDTH = 128  # of wide layers
_LEAST_TURNS = 5
MOST_FACTOR = 2.0  # a step that takes more, or less than a half, was disturbed


@dataclass(frozen=True)
class HostTimes:
    """Seconds of a host: for each launch of the forward pass, each of the backward pass, and each parameter trained."""

    forward_s: float
    backward_s: float
    parameter_s: float


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_inner = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width) for _ in range(4))
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norm(x)
        heads = (each(given).unflatten(-1, (self.heads, -1)) for each in (self.queries, self.keys, self.values))
        query, key, value = (each.transpose(1, 2) for each in heads)
        made = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(made.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.inner(self.norm_inner(x))
        return result


class _Layers(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x.sum()


def _model(count: int, width: int, heads: int, is_frozen: bool = False) -> nn.Module:
    model = _Layers(*(_Layer(width, heads) for _ in range(count)))
    for parameter in list(model.parameters())[1 if is_frozen else 0 :]:
        parameter.requires_grad_(not is_frozen)
    return model


def host_times(place: torch.device, seconds: float) -> HostTimes:
    """What a step of narrow layers costs its host; launches are counted as in captured graphs.

    Three steps decide three figures: a forward pass, a step that trains one parameter, and one that trains all. The
    fastest of several turns counts: whatever else a host does makes it slower.
    """
    count, width, tokens = _NARROW
    counts, took_s = [], []
    for is_frozen in (True, False):
        model, x = _model(count, width, _HEADS, is_frozen), torch.zeros(_SAMPLES, tokens, width)
        graph = capture(model, (x,), train=True)
        launches = [int(graph.kernels[graph.phase == phase].sum()) for phase in (Phase.FORWARD, Phase.BACKWARD)]
        model, x = model.to(place), x.to(place)
        if is_frozen:
            counts.append([launches[0], 0, 0])
            took_s.append(_turns_s(lambda model=model, x=x: model(x), place, seconds / 3, min))  # type: ignore[misc]
        counts.append([*launches, int((graph.phase == Phase.UPDATE).sum())])
        took_s.append(_turns_s(_step(model, x), place, seconds / 3, min))
    return host_times_of(counts, took_s)


def host_times_of(counts: list[list[int]], took_s: list[float]) -> HostTimes:
    """The figures that three steps decide; a parameter costs nothing at least, a backward launch a tenth of a forward.

    Args:
        counts: of each step launches of the forward pass, of the backward pass, and parameters.
    """
    forward, backward, parameter = np.linalg.solve(np.array(counts, dtype=np.float64), took_s).tolist()
    return HostTimes(forward, max(backward, 0.1 * forward), max(parameter, 0.0))


def layers_s(place: torch.device, seconds: float) -> float:
    """Seconds of a training step of wide layers in bfloat16, the median of several; 0 where there is no room for it."""
    model, x = _wide()
    try:
        model, x = model.to(place, torch.bfloat16), torch.randn_like(x, device=place, dtype=torch.bfloat16)
        return _turns_s(_step(model, x), place, seconds, statistics.median)
    except RuntimeError:  # torch.OutOfMemoryError is one
        return 0.0


def layers_graph() -> OpGraph:
    """The step of `layers_s`."""
    with torch.device("meta"):
        model, x = _wide()
    return capture(model.to(torch.bfloat16), (x.to(torch.bfloat16),), train=True)


def _wide() -> tuple[nn.Module, torch.Tensor]:
    count, width, tokens = _WIDE
    return _model(count, width, width // _HEAD_WIDTH), torch.empty(_SAMPLES, tokens, width)


def with_step(device: Device, took_s: float) -> Device:
    """A device by whose rates an eager step of `layers_graph` takes as long as it was measured."""
    from env.times.op_times import OpWork, op_seconds  # loads the compiler

    rates = device.rates
    if rates is None or took_s <= 0.0:
        return device
    bare = replace(device, rates=replace(rates, steps={**(rates.steps or {}), EAGER: 1.0}))
    factor = took_s / float(op_seconds(OpWork.of(layers_graph()), bare).sum())
    if not 1.0 / MOST_FACTOR <= factor <= MOST_FACTOR:
        return device
    return replace(device, rates=replace(rates, steps={**(rates.steps or {}), EAGER: factor}))


def _step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _turns_s(
    work: Callable[[], object], place: torch.device, seconds: float, chosen: Callable[[list[float]], float]
) -> float:
    """Seconds of one turn, after one that does not count."""
    work()
    samples: list[float] = []
    end = time.monotonic() + seconds
    while len(samples) < _LEAST_TURNS or time.monotonic() < end:
        synchronise(place)
        start = time.perf_counter()
        work()
        synchronise(place)
        samples.append(time.perf_counter() - start)
    return chosen(samples)
