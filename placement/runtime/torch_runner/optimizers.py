"""The optimizer of what a rank has of the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from placement.runtime.torch_runner.stages import local

if TYPE_CHECKING:
    from placement.runtime.torch_runner.setup import Setup


def make_optimizer(model: nn.Module, mesh: DeviceMesh, setup: Setup, kind: Any, **settings: Any) -> Any:
    """The optimizer of a rank's parameters, with what the strategy says of where its state is.

    Args:
        kind: a class such as `torch.optim.AdamW`.
        settings: of it.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if setup.zero == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # torch 2.13 warns when it is imported

        # Each rank keeps and updates its part of the optimizer's state, and hands the weights to the others.
        group = mesh.get_group("dp")
        if setup.updates_parts:
            make = functools.partial(ZeroRedundancyOptimizer, optimizer_class=kind, process_group=group, **settings)
            return PartsOptimizer(trained, make, setup)
        if setup.cuts_replicas:
            whole = [p for p in trained if not isinstance(p, DTensor)]
            cut = [p for p in trained if isinstance(p, DTensor)]
            return Together(ZeroRedundancyOptimizer(whole, kind, group, **settings), kind(cut, **settings))
        return ZeroRedundancyOptimizer(trained, kind, group, **settings)
    if setup.updates_parts:
        return PartsOptimizer(trained, functools.partial(kind, **settings), setup)
    return kind(alike(trained), **settings)


def alike(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameters in groups that the optimizer updates together: plain tensors, and DTensors of one mesh."""
    groups: dict[Any, list[nn.Parameter]] = {None: []}
    for p in parameters:
        groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return [{"params": group} for group in groups.values() if group] or [{"params": []}]


class PartsOptimizer:
    """An optimizer of this rank's parts of parameters, as plain tensors.

    With its state in the memory of the host it updates copies of them there.
    """

    def __init__(self, parameters: list[nn.Parameter], make: Callable[..., Any], setup: Setup) -> None:
        self.setup = setup
        self.parameters = parameters
        self.parts = [nn.Parameter(self._part(p.detach(), True)) for p in parameters]
        self.optimizer = make(self.parts)
        self.param_groups = [{"params": self.parameters}]

    def _part(self, tensor: torch.Tensor, is_copied: bool = False) -> torch.Tensor:
        if self.setup.offloads_optimizer:
            return local(tensor).to("cpu", copy=is_copied)
        return local(tensor)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def step(self) -> None:
        for p, part in zip(self.parameters, self.parts, strict=True):
            part.grad = None if p.grad is None else self._part(p.grad)
        self.optimizer.step()
        if self.setup.offloads_optimizer:
            with torch.no_grad():
                for p, part in zip(self.parameters, self.parts, strict=True):
                    local(p).copy_(part)


class Together:
    """Several optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def give_memory(model: nn.Module, device: torch.device, setup: Setup) -> set[str]:
    """Move weights and buffers to the device, and give those on ``meta`` memory; returns the names of these.

    Where the host keeps the parameters, they stay there.
    """
    missing = {name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta}

    def lies(tensor: torch.Tensor) -> torch.Tensor:
        place = device
        if setup.offloads_parameters:
            place = torch.device("cpu") if isinstance(tensor, nn.Parameter) else device
        return torch.empty_like(tensor, device=place) if tensor.is_meta else tensor.to(place)

    model._apply(lies)
    return missing


def give_weights(model: Any, device: torch.device, file: str | None, setup: Setup) -> None:
    """Memory for weights that are on ``meta``, and their values; others are moved.

    Args:
        file: of a ``state_dict()`` of the whole model; None for new values, by ``reset_parameters`` of modules.

    Raises:
        ValueError: a weight that neither the file nor its module gives a value.
    """
    missing = give_memory(model, device, setup)
    if missing and file:
        values = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        if setup.stages:
            values = {
                f"stages.{number}.model.{name}": value for name, value in values.items() for number in model.stages
            }
        set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, strict=False))
        missing -= values.keys()
    for path, module in model.named_modules():
        own = {f"{path}.{name}" if path else name for name in (*module._parameters, *module._buffers)}
        if missing & own and not file and hasattr(module, "reset_parameters"):
            module.reset_parameters()
            missing -= own
    if missing:
        raise ValueError(f"{min(missing)} has no values: give a file with it, or build it outside of meta")
