"""Memory and values of the weights that a rank has, once they are cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

if TYPE_CHECKING:
    from placement.runtime.torch_runner.setup import Setup


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
