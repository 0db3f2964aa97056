"""What a process of test_ranks.py does to end a run: one good step, then one in which rank 1 fails or stalls.

And of test_doors.py: say where it listens.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from rank_work import chosen, share
from torch import nn

from graphs.capture import capture_program
from placement.runtime.ranks.process_group import ProcessGroup, join


def _act(how: str) -> None:
    if how:
        (_folder / "acted").touch()
    if how == "raise":
        raise ValueError("this op is tired")
    if how == "sleep":
        time.sleep(600)
    if how == "busy":
        end = time.monotonic() + 600
        while time.monotonic() < end:
            pass
    if how in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, how))


def is_alive(pid: int) -> bool:
    """Whether a process is there and not only waits to be counted out by whoever inherited it."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


_todo, _folder = "", Path()


@torch.library.custom_op("rank_failures::act", mutates_args=())
def act(x: torch.Tensor) -> torch.Tensor:
    _act(_todo)
    return x.clone()


@act.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Chain(nn.Module):
    """First on one rank, the op that acts on the other, last on the first again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.ops.rank_failures.act(self.second(self.first(x))))


def silent(description: None, group: ProcessGroup) -> None:
    """Rank 1 ends, and rank 0 waits to be told something."""
    if group.rank == 0:
        group.barrier()


def stopped(description: None, group: ProcessGroup) -> None:
    """Alone, so that no other process can miss it."""
    os.kill(os.getpid(), signal.SIGSTOP)


def failure(description: dict[str, str], group: ProcessGroup) -> float:
    """One good step, then one in which rank 1 acts."""
    global _todo, _folder
    how, _folder = description["how"], Path(description["folder"])
    (_folder / f"{group.rank}.pid").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model, x = Chain(), torch.ones(2, 4)
    program = capture_program(model, (x,))
    names = program.graph.op_names
    layout = chosen(program, [int("act" in name or "second" in name) for name in names])
    placed = share(model, layout, group)
    with torch.no_grad():
        placed(x)
        _todo = how if group.rank == 1 else ""
        start = time.monotonic()
        if how == "outside" and group.rank == 1:
            _act(how)
            raise KeyError("no such file")
        placed(x)
    return time.monotonic() - start


def mixed(description: None, group: ProcessGroup) -> None:
    """One rank trains a step and the other one evaluates the model."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    program = capture_program(model, (x,), train=True)
    placed = share(model, chosen(program, [int(path == "1") for path in program.graph.modules]), group)
    if group.rank == 0:
        placed.step(x)
    else:
        placed.eval()(x)


def listening(pid: int) -> list[str]:
    """Addresses at which a process listens, as proc(5) has them: hexadecimal, the lowest byte first."""
    inodes = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        if each.is_symlink():  # not closed meanwhile
            inodes.add(os.readlink(each))
    sockets = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text(encoding="ascii").splitlines()[1:]
    ]
    return [
        fields[1].partition(":")[0] for fields in sockets if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes
    ]


def doors(description: None, group: ProcessGroup) -> dict[str, list[str]]:
    """Where this process and its parent listen, while all are there."""
    found = {"own": listening(os.getpid()), "parent": listening(os.getppid())}
    group.barrier()
    return found


if __name__ == "__main__":  # under torchrun
    failure({"how": sys.argv[1], "folder": sys.argv[2]}, join(2))
