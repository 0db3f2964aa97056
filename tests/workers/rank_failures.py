"""How a run of two ranks fails: one good step, then one in which rank 1 fails, under torchrun or plain.

And what processes of test_doors.py say: where they listen.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphs.capture import capture_program
from graphs.errors import MismatchError
from placement.runtime.modules.placed_ranks import placed_ranks
from placement.runtime.program.device_layout import DeviceLayout
from placement.runtime.program.functional import functional
from placement.runtime.ranks.group import RankGroup, joined

_todo, _folder = "", Path()
X = torch.ones(2, 4)


def _act(how: str) -> None:
    if how:
        (_folder / "acted").touch()
    if how == "raise":
        raise ValueError("this op is tired")
    if how == "sleep":
        time.sleep(600)
    if how in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, how))


def is_alive(pid: int) -> bool:
    """Whether a process is there and not only waits to be counted out by whoever inherited it."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


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


def chain() -> Any:
    """This rank's share of a chain on two ranks."""
    torch.manual_seed(0)
    model = Chain()
    program = capture_program(model, (X,))
    device = [int("act" in name or "second" in name) for name in program.graph.op_names]
    order = [[op for op, own in enumerate(device) if own == rank] for rank in range(2)]
    starts = [float(op) for op in range(len(device))]
    return placed_ranks(model, DeviceLayout(functional(program), device, order, starts, [torch.device("cpu")] * 2))


def trained() -> Any:
    """This rank's share of two layers that are trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    program = capture_program(model, (X,), train=True)
    device = [int(path == "1") for path in program.graph.modules]
    order = [[op for op, own in enumerate(device) if own == rank] for rank in range(2)]
    starts = [float(op) for op in range(len(device))]
    return placed_ranks(model, DeviceLayout(functional(program), device, order, starts, [torch.device("cpu")] * 2))


def fail(how: str, folder: Path) -> None:
    """One good step, then one in which rank 1 fails."""
    global _todo, _folder
    torch.set_num_threads(1)
    _folder = folder
    if how == "sleep":  # the caller's own group says how long it waits
        dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    rank = joined(2).rank
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    if how in ("mixed", "saving", "restart"):
        _fail_in_training(how, folder, rank)
        return
    placed = chain()
    with torch.no_grad():
        placed(X)
        _todo = how if rank == 1 else ""
        if how == "outside" and rank == 1:
            _act(how)
            raise KeyError("no such file")
        if how == "shape" and rank == 1:
            try:
                placed(X[:, :3])
            except MismatchError:  # once it has tried to capture that
                _act(how)
                raise
        placed(X)


def _fail_in_training(how: str, folder: Path, rank: int) -> None:
    placed = trained()
    adam = torch.optim.Adam(placed.parameters())
    if how == "restart":
        _restarted(placed, adam, folder, rank)
    elif how == "mixed" and rank == 0:
        placed.step(X)
    elif how == "mixed":
        placed.eval()(X)
    elif rank == 0:
        placed.save(folder / "model.safetensors")
    else:
        placed.clip_grad_norm_(1.0)


def _restarted(placed: Any, adam: torch.optim.Optimizer, folder: Path, rank: int) -> None:
    """Four steps with a checkpoint after each; in the first start rank 0 dies while it saves the third one."""
    from placement.runtime.modules import run_folder

    done = placed.load_run(folder / "run", adam) or {"step": 0}
    with (folder / f"steps-{rank}").open("a") as steps:
        for step in range(done["step"], 4):
            torch.manual_seed(step)
            print(step, float(placed.step(X)).hex(), file=steps, flush=True)
            adam.step()
            adam.zero_grad()
            if step == 2 and rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                run_folder.written = lambda *content: os.kill(os.getpid(), signal.SIGKILL)
            placed.save_run(folder / "run", adam, step=step + 1)


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


def doors(description: None) -> dict[str, list[str]]:
    """Where this process and its parent listen, while all are there."""
    ranks = RankGroup.of()
    found = {"own": listening(os.getpid()), "parent": listening(os.getppid())}
    ranks.barrier()
    return found


if __name__ == "__main__":
    fail(sys.argv[1], Path(sys.argv[2]))
