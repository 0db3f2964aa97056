"""The number formats of a precision in a user's model: of its parameters and buffers, and of their gradients."""

from __future__ import annotations

import torch
from torch import nn

from graphs.capture.casting import cast, dtype_of, is_convertible, kept_formats
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


def accept_gradients(model: nn.Module, precision: Precision) -> None:
    """Let ``grad`` of parameters be wider than they are, where gradients are kept so (`torch.Tensor.grad_dtype`)."""
    if precision.has_masters:
        for parameter in model.parameters():
            if parameter.requires_grad and is_convertible(parameter):
                parameter.grad_dtype = dtype_of(precision.gradient)
