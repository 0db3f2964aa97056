"""`run_beside`: a model under a strategy on processes of this machine, beside the model in one piece.

Each rank is a fork of this process, so that a model need not be written to a file, nor torch be loaded again.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from graphs.capture.record import default_loss
from graphs.disk import temporary_folder
from graphs.origin import ModelCall
from placement.processes.starting import Parent, WorkerEndedError, WorkerFailedError, Workers
from placement.runtime.ranks.launch import met_store
from placement.runtime.torch_runner.optimizers import make_optimizer
from placement.runtime.torch_runner.parallel import parallelize
from placement.runtime.torch_runner.setup import Setup
from placement.runtime.torch_runner.step import run_step

CLOSE = 5e-4  # of the largest entry of a tensor: parts add up in another order, in float32
_RATE, _LEAST = 0.1, 1e-4
_PATIENCE_S = 30.0  # of a rank for another one
_STAGE = re.compile(r"^stages\.\d+\.(module\.)?model\.")

Numbers = list[tuple[str, torch.Tensor]]  # with their names in the user's model, of which several stages may have one


def step_in_one_piece(call: ModelCall) -> Numbers:
    """Loss, gradients and weights after one update of a copy of a model."""
    model = copy.deepcopy(call.model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=_RATE)
    loss = (call.loss or default_loss)(model(*call.args, **call.kwargs))
    loss.backward()
    return _numbers(model, loss, optimizer)


def run_beside(call: ModelCall, expected: Numbers, setup: Setup, limit_s: float) -> str:
    """What differs between a strategy's step and that in one piece, in words; "" for nothing.

    Args:
        expected: of `step_in_one_piece`.
        limit_s: how long it may take.

    Raises:
        NoAnswerError: it takes longer.
    """
    size = 1
    for each in setup.mesh.values():
        size *= each
    with temporary_folder() as folder:
        life = partial(_life, call, expected, setup, str(folder / "store"), size)
        workers = Workers.forked([partial(life, rank) for rank in range(size)])
        try:
            found = workers.collect(limit_s)
        except WorkerFailedError as error:
            return str(error)
        except WorkerEndedError as error:
            return f"rank {error.rank} of a smaller model ended with code {error.code}"
        finally:
            workers.end()
    seen = set().union(*(names for _, names in found))
    lost = (name for name, value in expected if name not in seen and value.any())
    missing = (f"no rank has {name} of a smaller model" for name in lost)
    return next(filter(None, (text for text, _ in found)), "") or next(missing, "")


def _life(call: ModelCall, expected: Numbers, setup: Setup, store: str, size: int, rank: int, parent: Parent) -> None:
    """The life of a rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    patience = timedelta(seconds=_PATIENCE_S)
    try:
        dist.init_process_group("gloo", store=met_store(store), rank=rank, world_size=size, timeout=patience)
        found = _step(call, setup)
        parent.answer((_first_difference(found, dict(expected)), {name for name, _ in found}))
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")[:200]
        parent.fail(f"its ranks failed on a smaller model ({type(error).__name__}: {line})")
    dist.barrier()  # whoever leaves first would end the sums of others


def _step(call: ModelCall, setup: Setup) -> Numbers:
    """Loss of the whole batch, and gradients and updated weights of what this rank has."""
    mesh = init_device_mesh("cpu", tuple(setup.mesh.values()), mesh_dim_names=tuple(setup.mesh))
    model = parallelize(call.model, mesh, setup)
    optimizer = make_optimizer(model, mesh, setup, torch.optim.SGD, lr=_RATE)
    loss = run_step(model, mesh, named_inputs(call), setup, call.loss or default_loss)
    return _numbers(model, loss, optimizer)


def named_inputs(call: ModelCall) -> dict[str, Any]:
    """All arguments of a call by name."""
    bound = inspect.signature(call.model.forward).bind(*call.args, **call.kwargs)
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        found |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return found


def _numbers(model: nn.Module, loss: torch.Tensor, optimizer: Any) -> Numbers:
    """The loss, and of what has a gradient, that and the updated weight."""
    trained = [(_name(name, model), p) for name, p in model.named_parameters() if p.grad is not None]
    gradients = [(f"gradient {name}", _whole(p.grad)) for name, p in trained if p.grad is not None]
    optimizer.step()
    return [("loss", loss.detach()), *gradients, *((f"weight {name}", _whole(p)) for name, p in trained)]


def _name(name: str, model: nn.Module) -> str:
    """A parameter's name without those of wrappers and stages."""
    return name.removeprefix("module.") if isinstance(model, DistributedDataParallel) else _STAGE.sub("", name)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def _first_difference(found: Numbers, expected: Mapping[str, torch.Tensor]) -> str:
    """What is another number than in one piece, in words; "" for nothing."""
    for name, value in found:
        right = expected.get(name)
        if right is None:
            continue  # a second name of a tied weight
        if value.shape != right.shape:
            return f"{name} of a smaller model has shape {list(value.shape)}, in one piece {list(right.shape)}"
        scale = float(right.abs().max()) if right.numel() else 0.0
        off = float((value - right).abs().max()) if right.numel() else 0.0
        if not off <= CLOSE * max(scale, _LEAST):
            return f"{name} of a smaller model differs by {off:.2g}, the largest entry in one piece is {scale:.2g}"
    return ""
