"""One of several ranks of ``torchrun`` that fit a model together: FILE METHODS HOW [STRATEGY]; rank r writes FILEr."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from fitted_models import cores
from torch import Tensor, nn

import placement
from graphs.disk import write_atomically
from graphs.errors import PlacementError

if TYPE_CHECKING:
    from placement.fitting.log import CurvePoint


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.layer(inputs) - targets).square().mean()


def main(file: str, methods: str, how: str, strategy: str = "none") -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank if how == "different" else 0)
    model, inputs = Regression(), torch.randn(64, 4)
    if how == "killed" and rank == 1:
        threading.Thread(target=_kill_own_child, daemon=True).start()
    updates = 10**9 if how == "endless" else 60
    data = inputs, inputs.sum(1, keepdim=True)
    try:
        cluster, given = cores(2 if strategy == "none" else 4), {"strategy": strategy, "progress": _tell}
        found = placement.fit(model, data, cluster, methods.split(","), updates=updates, batch=4, real=True, **given)
        told = [[run.method, run.updates, run.loss, found.workers] for run in found.runs]
    except PlacementError as error:
        told = str(error)
    write_atomically(Path(f"{file}{rank}"), json.dumps(told))


def _tell(method: str, point: CurvePoint) -> None:
    print(method, point.updates, flush=True)


def _kill_own_child() -> None:
    """As soon as there is one."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while not (found := children.read_text().split()):
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(int(found[0]), 9)


if __name__ == "__main__":
    main(*sys.argv[1:])
