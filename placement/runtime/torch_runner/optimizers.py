"""The optimizer of what a rank has of the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
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
