"""`run_beside`: a model under a strategy on processes of this machine, beside the model in one piece.

Each rank is a fork of this process, so that a model need not be written to a file, nor torch be loaded again.
"""

from __future__ import annotations

import copy
import math
import os
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from graphs.capture.record import default_loss, output_tensors
from graphs.disk import temporary_folder
from graphs.origin import ModelCall
from placement.processes.processes import how_ended
from placement.processes.starting import Parent, WorkerEndedError, WorkerFailedError, Workers
from placement.runtime.modules.strategy_module import StrategyModule
from placement.runtime.ranks.launch import met_store
from placement.runtime.torch_runner.setup import Setup

CLOSE = 5e-4  # of the largest entry of a tensor: parts add up in another order, in float32
_RATE, _LEAST = 0.1, 1e-4
_ROUNDING = 1e-6  # of a weight, which is changed by it to see what becomes of errors of rounding
_TIMES = 3  # as much as what becomes of them
_PATIENCE_S = 30.0  # of a rank for another one

# By name: the loss, each gradient and each weight after one update; or what a model in evaluation mode returns.
Numbers = dict[str, torch.Tensor]


def step_in_one_piece(call: ModelCall) -> Numbers:
    """What one step makes of a copy of a model, or, in evaluation mode, what that returns."""
    model = copy.deepcopy(call.model)
    if not model.training:
        with torch.no_grad():
            return _outputs(model(*call.args, **call.kwargs))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=_RATE)
    loss = (call.loss or default_loss)(model(*call.args, **call.kwargs))
    loss.backward()
    optimizer.step()
    pairs = model.named_parameters(remove_duplicate=False)
    return _numbers(loss, {name: p.grad for name, p in pairs if p.grad is not None}, model.state_dict())


def rounding(call: ModelCall, expected: Numbers) -> dict[str, float]:
    """How far each number moves where weights do by what rounding may make of them.

    Args:
        expected: of `step_in_one_piece`.
    """
    model = copy.deepcopy(call.model)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + _ROUNDING * (2 * torch.rand(p.shape, generator=random) - 1))
    moved = step_in_one_piece(replace(call, model=model))
    return {name: _apart(value, expected[name]) for name, value in moved.items()}


def run_beside(call: ModelCall, expected: Numbers, errors: dict[str, float], setup: Setup, limit_s: float) -> str:
    """What differs between numbers under a strategy and those in one piece, in words; "" for nothing.

    Args:
        expected, errors: of `step_in_one_piece` and `rounding`.
        limit_s: how long it may take.

    Raises:
        NoAnswerError: it takes longer.
    """
    size = math.prod(setup.mesh.values())
    with temporary_folder() as folder:
        life = partial(_life, call, expected, errors, setup, str(folder / "store"), size)
        workers = Workers.forked([partial(life, rank) for rank in range(size)])
        try:
            found: list[str] = workers.collect(limit_s)
        except WorkerFailedError as error:
            return f"its ranks fail in a trial run: {error}"
        except WorkerEndedError as error:
            return f"rank {error.rank} of a trial run {how_ended(error.code)}"
        finally:
            workers.end()
    return found[0]


def _life(
    call: ModelCall,
    expected: Numbers,
    errors: dict[str, float],
    setup: Setup,
    store: str,
    size: int,
    rank: int,
    parent: Parent,
) -> None:
    """The life of a rank, which answers what differs."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    patience = timedelta(seconds=_PATIENCE_S)
    try:
        dist.init_process_group("gloo", store=met_store(store), rank=rank, world_size=size, timeout=patience)
        found = _step(call, setup)
        parent.answer("" if rank else first_difference(found, expected, errors))
    except Exception as error:
        parent.fail(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}".rstrip("."))
    dist.barrier()  # whoever leaves first would end the sums of others


def _step(call: ModelCall, setup: Setup) -> Numbers:
    """What one step under a strategy makes, on rank 0; or, in evaluation mode, what the model returns."""
    mesh = init_device_mesh("cpu", tuple(setup.mesh.values()), mesh_dim_names=tuple(setup.mesh))
    placed = StrategyModule(call.model, setup, mesh, torch.device("cpu"), call.loss, call.model.training)
    if not call.model.training:
        return _outputs(placed(*call.args, **call.kwargs))
    optimizer = placed.optimizer(torch.optim.SGD, lr=_RATE)
    loss = placed.step(*call.args, **call.kwargs)
    gradients = placed.gathered_gradients()
    optimizer.step()
    return _numbers(loss, gradients, placed.gathered_state_dict())


def _outputs(output: Any) -> Numbers:
    return {f"output {number}": tensor.detach() for number, tensor in enumerate(output_tensors(output))}


def _numbers(loss: torch.Tensor, gradients: Numbers, weights: Numbers) -> Numbers:
    of_gradients = {f"gradient {name}": value.clone() for name, value in gradients.items()}
    of_weights = {f"weight {name}": value.detach().clone() for name, value in weights.items()}
    return {"loss": loss.detach(), **of_gradients, **of_weights}


def first_difference(found: Numbers, expected: Numbers, errors: dict[str, float]) -> str:
    """What is another number than in one piece, in words; "" for nothing."""
    for name, right in expected.items():
        value = found.get(name)
        if value is None or value.shape != right.shape:
            has = "nothing" if value is None else list(value.shape)
            return f"{name} in a trial run is {has}, in one piece {list(right.shape)}"
        if not right.numel():
            continue
        off, scale = _apart(value, right), float(right.abs().max())
        if not off <= CLOSE * max(scale, _LEAST) + _TIMES * errors.get(name, 0.0):
            return f"{name} in a trial run differs by {off:.2g}, the largest entry in one piece is {scale:.2g}"
    return ""


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two entries."""
    one, other = (each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (one, other))
    return float((one - other).abs().max()) if one.numel() else 0.0
