"""Inductor is asked through its private parts: two tiny models notice when these move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphs.capture import capture
from graphs.records import Phase
from graphs.transforms import on_stack

ROOT = Path(__file__).parents[1]


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)
        self.last = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.last(self.norm(torch.nn.functional.gelu(self.first(x))))).square().mean()


@pytest.mark.filterwarnings("ignore")  # torch, of itself
@pytest.mark.parametrize("train", [False, True])
def test_ours_are_as_many_as_inductors(train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import inductor

    model, x = Small().train(train), torch.randn(32, 64)
    theirs = inductor.kernels(model, (x,), train)
    graph = on_stack(capture(model, (x,), train=train), "compiled")
    counts = graph.phase != Phase.UPDATE
    assert abs(int(graph.kernels[counts].sum()) - len(theirs)) <= (3 if train else 0)
    assert graph.bytes_moved[counts].sum() == pytest.approx(sum(kernel.bytes for kernel in theirs), rel=0.15)
    assert sum(kernel.is_library for kernel in theirs) == (5 if train else 2)
