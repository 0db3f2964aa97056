"""`apply`: the user's own model, run as a placement says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from env.problem import Problem
from env.simulator import Simulator
from graphs.capture import Program, capture_program
from graphs.capture.record import Loss
from graphs.errors import MismatchError
from graphs.opgraph import OpGraph, Phase
from placement.result import Result
from placement.runtime.functional import functional
from placement.runtime.layout import Layout
from placement.runtime.module import PlacedModule

Devices = Mapping[str, str | torch.device]
_DATA = {"input", "parameter", "buffer", "constant"}


def apply(
    model: nn.Module,
    result: Result | str | os.PathLike[str],
    args: tuple[Any, ...] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    devices: Devices | None = None,
) -> nn.Module:
    """The model with every op on the device that a placement gives it, as a drop-in for the model.

    In one process every device of the placement is a torch device, and a thread drives each; parameters are moved to
    where they were placed, and stay the objects they are. Under ``torchrun`` every process is one device, and gets its
    own share of the model. A placement on one device gives the model itself.

    Args:
        model: the model that was captured. With its parameters on ``meta``, each process makes only its own.
        result: what `placement.optimize` found, or the file it was saved to.
        args, kwargs: example inputs of the shapes that were captured.
        loss: as in `placement.capture`, if it was given there.
        devices: torch device of each device of the cluster by name; by default the n-th of kind ``"gpu"`` is
            ``cuda:n`` and every other one is the CPU.

    Raises:
        MismatchError: the result is infeasible or for another model, or names a device that is not there.
        CaptureError: the model cannot be captured.
    """
    placed = result if isinstance(result, Result) else Result.load(result)
    placed.device_numbers()  # says so if there is no placement
    if is_by_module(placed.graph):
        from placement.runtime.by_module import place_modules

        return place_modules(model, placed, places_of(placed, devices))
    program = capture_program(model, args, kwargs, is_training(placed.graph), loss=loss)
    layout = layout_of(program, placed, devices)
    if len(layout.places) == 1:
        return model.to(layout.places[0])
    if _is_distributed():
        from placement.runtime.ranks import rank_module

        return rank_module(model, layout, loss=loss)
    return PlacedModule(model, layout, loss)


def layout_of(program: Program, result: Result, devices: Devices | None = None) -> Layout:
    """Where and in which order the ops of a program run, on the devices that the result uses.

    Raises:
        MismatchError: the result is for another program, or names a device that is not there.
    """
    check_same(program.graph, result.graph)
    numbers, order = result.device_numbers(), result.order_numbers()
    used = sorted(set(numbers.tolist()))
    index = {device: i for i, device in enumerate(used)}
    places = places_of(result, devices)
    problem = Problem(result.graph, result.cluster, result.objective)
    _, schedule = Simulator(problem).schedule(numbers, order=order, transfer_order=result.transfer_numbers())
    sequence = schedule.order.tolist()
    return Layout(
        functional(program),
        [index[device] for device in numbers.tolist()],
        [[op for op in sequence if numbers[op] == device] for device in used],
        schedule.op_start_s.tolist(),
        [places[result.cluster.devices[device].name] for device in used],
    )


def places_of(result: Result, devices: Devices | None = None) -> dict[str, torch.device]:
    """The torch device of every device that a result uses, by name.

    Raises:
        MismatchError: it is not there.
    """
    gpus = [device.name for device in result.cluster.devices if device.kind == "gpu"]
    used = set((result.placement or {}).values())
    found = {}
    for device in result.cluster.devices:
        if device.name not in used:
            continue
        if devices is not None and device.name in devices:
            place = torch.device(devices[device.name])
        else:
            place = torch.device("cuda", gpus.index(device.name)) if device.kind == "gpu" else torch.device("cpu")
        if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
            raise MismatchError(
                f"device {device.name!r} of cluster {result.cluster.name!r} stands for {place}, and this machine has "
                f"{torch.cuda.device_count()} GPUs; pass devices={{{device.name!r}: 'cpu'}} to run it elsewhere, or "
                "place the model on Cluster.local()."
            )
        found[device.name] = place
    return found


def check_same(captured: OpGraph, placed: OpGraph) -> None:
    """Refuse a placement of another model; measured times and what the optimizer keeps may differ.

    Raises:
        MismatchError: names the first op that differs.
    """
    what = f"the placement is for graph {placed.name!r}, and this model gives another one"
    for mine, theirs in zip(captured.op_names, placed.op_names, strict=False):
        if mine != theirs:
            raise MismatchError(f"{what}: op {mine!r} where the placement has {theirs!r}; place this model first.")
    if captured.n_ops != placed.n_ops:
        raise MismatchError(
            f"{what}: {captured.n_ops} ops where the placement has {placed.n_ops}; place this model first."
        )
    for tensor, (mine, theirs) in enumerate(
        zip(captured.tensor_bytes.tolist(), placed.tensor_bytes.tolist(), strict=False)
    ):
        if mine != theirs:
            op = captured.op_names[captured.tensor_producer[tensor]]
            raise MismatchError(
                f"{what}: op {op!r} makes {mine} bytes where the placement has {theirs}; give inputs of the shapes "
                "that were placed."
            )


def is_by_module(graph: OpGraph) -> bool:
    """Whether the ops are calls of modules, which are called by their class: operators have a namespace."""
    return any("." not in kind.removesuffix(".backward") for kind in set(graph.kinds) - _DATA)


def is_training(graph: OpGraph) -> bool:
    """Whether it is the graph of a training step."""
    return bool((graph.phase == Phase.BACKWARD).any())


def _is_distributed() -> bool:
    """Whether this process is one of several that run one model."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    )
