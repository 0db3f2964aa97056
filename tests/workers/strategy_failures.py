"""What the processes of test_failures.py do: a strategy is applied, and something goes wrong."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import placement
from graphs.errors import PlacementError
from placement.runtime.exchanging.collectives import Collectives
from placement.runtime.ranks.process_group import ProcessGroup
from placement.runtime.storing import gathering

X = torch.ones(4, 4)
TOKENS = torch.arange(8).view(4, 2)


def model(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 4))


def reader() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 4))


def sentences(folder: str, group: ProcessGroup) -> dict[str, str]:
    """What each wrong call says; the ranks go on after it."""
    torch.set_num_threads(1)
    path, rank = Path(folder), group.rank
    placed: Any = placement.apply(model(), path / "found.json", X)
    placed.step(X)
    placed.save(path / "model.safetensors")
    placed.save_optimizer(path / "adam.safetensors", torch.optim.Adam(placed.parameters()))
    if rank == 0:
        content = (path / "model.safetensors").read_bytes()
        (path / "short.safetensors").write_bytes(content[: len(content) // 2])
        nn_file = {f"other.{name}": tensor for name, tensor in model().state_dict().items()}
        torch.save(nn_file, path / "model.pt")
    group.barrier()

    def elsewhere() -> None:
        torch.manual_seed(rank)
        placed.step(X)

    def in_evaluation() -> None:
        placed.eval()
        try:
            placed.step(X)
        finally:
            placed.train()

    def values(result: str) -> None:
        other = model()
        if rank:
            nn.init.ones_(other[0].weight)  # type: ignore[index, arg-type]
        placement.apply(other, path / f"{result}.json", X).step(X)  # type: ignore[operator]

    def batches() -> None:
        placement.apply(reader(), path / "tokens.json", TOKENS).step(TOKENS + rank)  # type: ignore[operator]

    def on_a_full_disk() -> None:
        with mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
            placed.save(path / "model.safetensors")

    acts: dict[str, Callable[[], Any]] = {
        "batch": lambda: placed.step(torch.ones(3, 4)),
        "part": lambda: placed.step(X[:1]),
        "width": lambda: placed.step(torch.ones(4, 5)),
        "missing": lambda: placed.step(),
        "surplus": lambda: placed.step(X, X),
        "checkpoint_folder": lambda: placed.load(path),
        "dtype": lambda: placed.step(X.double()),
        "gradient": lambda: placed.step(X.clone().requires_grad_()),
        "evaluation": in_evaluation,
        "forward": lambda: placed(X),
        "seeds": elsewhere,
        "values": lambda: values("found"),
        "values_in_parts": lambda: values("other"),
        "batches": batches,
        "deepcopy": lambda: copy.deepcopy(placed),
        "pickle": lambda: pickle.dumps(placed),
        "optimizer": lambda: placed.save_optimizer(path / "a", torch.optim.Adam(model().parameters())),
        "nothing": lambda: placed.load(path / "none.safetensors"),
        "truncated": lambda: placed.load(path / "short.safetensors"),
        "pickled": lambda: placed.load(path / "model.pt"),
        "of_an_optimizer": lambda: placed.load(path / "adam.safetensors"),
        "folder": lambda: placed.save(path / "none" / "model.safetensors"),
        "space": on_a_full_disk,
        "full": lambda: placed.save("/dev/full"),
        "strategies": lambda: placement.apply(model(), path / ("found.json", "other.json")[rank], X),
        "model": lambda: placement.apply(model(5), path / "found.json", X),
        "example": lambda: placement.apply(model(), path / "found.json", torch.ones(6, 4)),
        "mesh": lambda: placement.apply(model(), path / "three.json", X),
    }
    found = {}
    for name, act in acts.items():
        try:
            act()
        except (PlacementError, OSError) as error:
            found[name] = str(error)
        group.barrier()
    for parameter in placed.parameters():
        parameter.grad = None
    placed.get_parameter("0.weight").requires_grad_(False)
    torch.manual_seed(0)
    placed.step(X)
    found["frozen"] = str([name for name, p in placed.named_parameters() if p.grad is None])
    return found


# -- under torchrun --------------------------------------------------------------------------------------------------


def main(how: str, folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    placed: Any = placement.apply(model(), folder / "found.json", X)
    adam = torch.optim.Adam(placed.parameters())
    if how == "restart":
        _restarted(placed, adam, folder, rank)
        return
    placed.step(X)
    if how == "batch":
        placed.step(X if rank == 0 else torch.ones(3, 4))
    elif how == "calls" and rank == 0:
        placed.step(X)
    elif how == "calls":
        placed.save(folder / "model.safetensors")
    elif how == "talks" and rank == 0:
        placed.clip_grad_norm_(1.0)
    elif how == "talks":
        placed.gathered_state_dict()
    elif how == "kill" and rank == 1:
        Collectives.start = _killed(folder)  # type: ignore[method-assign]
    placed.step(X)


def _killed(folder: Path) -> Callable[..., Any]:
    def act(*args: Any) -> None:
        (folder / "acted").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    return act


def _restarted(placed: Any, adam: torch.optim.Optimizer, folder: Path, rank: int) -> None:
    """Four steps with a checkpoint after each; in the first start rank 0 dies while it saves the third one."""
    done = placed.load_run(folder / "run", adam) or {"step": 0}
    with (folder / f"steps-{rank}").open("a") as steps:
        for step in range(done["step"], 4):
            torch.manual_seed(step)
            print(step, float(placed.step(X)), file=steps, flush=True)
            adam.step()
            adam.zero_grad()
            if step == 2 and rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                gathering.put_together = _killed(folder)
            placed.save_run(folder / "run", adam, step=step + 1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
