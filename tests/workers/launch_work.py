"""What a process of test_launch.py does: meet the others, then end in one of several ways."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from graphs.errors import MismatchError
from placement.processes.starting import StepProgress
from placement.runtime.ranks.launch import tell


def meet(number: int) -> tuple[int, float, int, int]:
    """Rank, sum over all ranks of the number times one more than the rank, threads and cores of this process."""
    mine = torch.tensor(float(number * (dist.get_rank() + 1)))
    dist.all_reduce(mine)
    for done in range(3):
        tell(StepProgress(done, 3, 0.0))
        time.sleep(0.15)
    return dist.get_rank(), float(mine), torch.get_num_threads(), len(os.sched_getaffinity(0))


def end(task: tuple[str, Path]) -> None:
    """Rank 1 ends in that way, and rank 0 waits for it in a collective."""
    how, folder = task
    rank = dist.get_rank()
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    dist.barrier()
    (folder / f"{rank}.met").touch()
    if rank == 1:
        _end(how)
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2))


def _end(how: str) -> None:
    if how == "raise":
        raise ValueError("this op is tired.\nAnd says so at length.")
    if how == "refuse":
        raise MismatchError("the batch does not divide.")
    if how == "exit":
        os._exit(3)
    if how == "sleep":
        time.sleep(600)
    os.kill(os.getpid(), getattr(signal, how))
