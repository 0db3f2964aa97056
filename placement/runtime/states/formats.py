"""The number formats of a precision in a user's model: of its parameters and buffers, and of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphs.capture.casting import cast, cast_inside, dtype_of, is_convertible, kept_formats
from graphs.recipes import Precision


def convert(model: nn.Module, precision: Precision) -> None:
    """Give a model the formats in which it was captured; its parameters stay the objects they are."""
    formats = kept_formats(model, precision)
    for parameter in model.parameters():
        if id(parameter) in formats:
            parameter.data = cast(parameter.data, formats[id(parameter)])
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in formats:
                module._buffers[name] = made.setdefault(id(buffer), cast(buffer, formats[id(buffer)]))


def gradient_format(parameter: torch.Tensor) -> torch.dtype | None:
    """The format of a parameter's ``grad``; None for that of whatever gradient comes.

    That of the parameter where torch is older than `torch.Tensor.grad_dtype`.
    """
    return getattr(parameter, "grad_dtype", parameter.dtype)


def accept_gradients(model: nn.Module, precision: Precision) -> None:
    """Let ``grad`` of parameters be wider than they are, where gradients are kept so (`torch.Tensor.grad_dtype`)."""
    if precision.has_masters:
        for parameter in model.parameters():
            if parameter.requires_grad and is_convertible(parameter):
                parameter.grad_dtype = dtype_of(precision.gradient)


def compute_in(model: nn.Module, precision: Precision) -> Callable[[], None]:
    """Let calls of a model, which has the formats of a precision, compute in it: op for op what is captured of it.

    Returns:
        The call that ends it.
    """
    kept: list[dict[str, Any]] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        kept.extend(module._parameters for module in model.modules())
        return cast_inside(model, precision, {}, args, kwargs)

    def after(*_: Any) -> None:
        for module, parameters in zip(model.modules(), kept, strict=True):
            module.__dict__["_parameters"] = parameters
        kept.clear()

    hooks = (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, always_call=True),
    )

    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end
