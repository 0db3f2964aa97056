"""Hooks on gradients of a model's parameters, which torch's parts replace by parameters of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from graphs.errors import MismatchError
from placement.runtime.torch_runner.setup import Setup


class Hooks(NamedTuple):
    """The hooks of one parameter, and the parameter that has them."""

    parameter: torch.Tensor
    on_gradient: tuple[Callable[..., Any], ...]
    on_accumulated: tuple[Callable[..., Any], ...]


def hooks_of(model: nn.Module) -> Mapping[str, Hooks]:
    """Those of each parameter that has some, by its names."""
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        on_gradient = tuple((getattr(parameter, "_backward_hooks", None) or {}).values())
        on_accumulated = tuple((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())
        if on_gradient or on_accumulated:
            found[name] = Hooks(parameter, on_gradient, on_accumulated)
    return found


def put_hooks(name: str, tensor: Any, hooks: Hooks | tuple[()], setup: Setup) -> None:
    """Give what a rank has of a parameter the hooks of the parameter.

    Raises:
        MismatchError: gradients are no longer computed, or added up, once a step for this very tensor.
    """
    if not hooks:
        return
    if setup.micro_batches > 1 and hooks.on_accumulated:
        raise MismatchError(
            f"parameter {name!r} has a hook on its accumulated gradient, which would run once for each of "
            f"{setup.micro_batches} micro-batches; take a strategy without 'mb', or change gradients after step()."
        )
    if setup.is_sharded and hooks.on_gradient:
        raise MismatchError(
            f"parameter {name!r} has a hook on its gradient, which fully_shard computes for a gathered copy; use "
            "register_post_accumulate_grad_hook, or a strategy without ZeRO-2 and 3."
        )
    if tensor is not hooks.parameter:
        for hook in hooks.on_gradient:
            tensor.register_hook(hook)
        for hook in hooks.on_accumulated:
            tensor.register_post_accumulate_grad_hook(hook)
