"""A training script under torchrun, a process of which kills itself where it is told: `killed_run.py FOLDER [KILL]`.

KILL is ``phase,rank,seconds``: so long after that rank has first begun that phase of a step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import placement

PHASES = ("step", "checkpoint", "export")
N_STEPS = 9


class Net(nn.Module):
    """A loss of some layers with a buffer that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen += 1
        return (self.layers(x).tanh() - y).square().mean()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step."""
    draws = torch.Generator().manual_seed(step)
    return torch.randn(16, 64, generator=draws), torch.randn(16, 64, generator=draws)


def main(folder: Path, kill: str = ",,") -> None:
    """Train to the end, from where an earlier run has got."""
    phase, rank, seconds = kill.split(",")

    def begin(now: str) -> None:
        if (now, str(dist.get_rank())) == (phase, rank) and not (folder / "killed").exists():
            (folder / "killed").touch()
            threading.Thread(target=_kill, args=(float(seconds),), daemon=True).start()

    placed = placement.apply(Net(), folder / "result.json", batch(0))
    optimizer = placed.optimizer(torch.optim.AdamW, lr=0.01)
    found = placed.load_run(folder / "run", optimizer)
    for number in range(found["done"] if found else 0, N_STEPS):
        begin("step")
        optimizer.zero_grad()
        placed.step(*batch(number))
        optimizer.step()
        begin("checkpoint")
        placed.save_run(folder / "run", optimizer, done=number + 1)
        begin("export")
        placed.save(folder / "model.safetensors")
    placed.save(folder / "model.safetensors")


def _kill(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
