"""Host time of a launch: what an eager step of training costs its host for each kernel, where kernels take no time."""

from __future__ import annotations

import time

import torch
from torch import nn

from graphs.capture import capture
from graphs.records import Phase
from placement.measuring.machine.speeds import synchronise

_LAYERS, _WIDTH = 24, 16


class _Thin(nn.Module):
    """Layers that compute next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        layers = ((nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.LayerNorm(_WIDTH)) for _ in range(_LAYERS))
        self.layers = nn.Sequential(*(layer for each in layers for layer in each))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x).sum()
        return result


def host_launch_s(place: torch.device, seconds: float) -> float:
    """Seconds of the host for each kernel of the forward and backward pass, as captured graphs count kernels.

    Python's part, the dispatcher's and autograd's are in it. The fastest of several steps counts: whatever else a host
    does makes it slower.
    """
    graph = capture(_Thin(), (torch.zeros(4, _WIDTH),), train=True)
    kernels = int(graph.kernels[graph.phase != Phase.UPDATE].sum())
    model, x = _Thin().to(place), torch.zeros(4, _WIDTH, device=place)
    best, end = float("inf"), time.monotonic() + seconds
    turns = 0
    while turns < 5 or time.monotonic() < end:
        turns += 1
        synchronise(place)
        start = time.perf_counter()
        model(x).backward()
        synchronise(place)
        best = min(best, time.perf_counter() - start)
        model.zero_grad()
    return best / kernels
