"""One of several ranks of ``torchrun`` that fit a model together: FILE METHODS HOW; rank r writes FILEr."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
from fitted_models import cores
from torch import Tensor, nn

import placement
from graphs.errors import FitError


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.layer(inputs) - targets).square().mean()


def main(file: str, methods: str, how: str) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank if how == "different" else 0)
    model, inputs = Regression(), torch.randn(64, 4)
    if how == "killed" and rank == 1:
        threading.Thread(target=_kill_own_child, daemon=True).start()
    try:
        found = placement.fit(
            model, (inputs, inputs.sum(1, keepdim=True)), cores(2), methods.split(","), updates=60, batch=4, real=True
        )
        told = [[run.method, run.updates, run.loss, found.workers] for run in found.runs]
    except FitError as error:
        told = str(error)
    Path(f"{file}{rank}").write_text(json.dumps(told))


def _kill_own_child() -> None:
    """As soon as there is one."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while not (found := children.read_text().split()):
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(int(found[0]), 9)


if __name__ == "__main__":
    main(*sys.argv[1:])
