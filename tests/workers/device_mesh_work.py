"""What the processes of test_device_mesh.py do: a script that has a device mesh hands it to `placement.apply`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import placement
from graphs.errors import MismatchError

X = torch.ones(4, 4)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def handed_over(folder: str) -> dict[str, Any]:
    """For each mesh the loss of a step, or the sentence; under dp2, the last one for a placement."""
    meshes = {
        "plain": init_device_mesh("cpu", (2,)),
        "named": init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "dp")),
        "own names": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")),
        "other axis": init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)),
        "other order": DeviceMesh("cpu", [1, 0]),
        "one": DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("dp", "tp"))["tp"],
    }
    found = {name: _applied(Path(folder) / "found.json", mesh) for name, mesh in meshes.items()}
    found["placement"] = _applied(Path(folder) / "placement.json", meshes["plain"])
    dist.barrier()
    return found


def _applied(file: Path, mesh: DeviceMesh) -> float | str:
    try:
        placed: Any = placement.apply(model(), file, X, mesh=mesh)
    except MismatchError as error:
        return str(error)
    return float(placed.step(X))
