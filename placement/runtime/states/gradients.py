"""`add_gradients`: what a step has computed, added to ``grad`` of parameters as autograd does it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from placement.runtime.states.formats import gradient_format


def add_gradients(model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
    """Add gradients to ``grad`` of the parameters of those names."""
    places = {gradient.device for gradient in gradients.values() if gradient.is_cuda}
    gradients = {name: _accepted(model.get_parameter(name), gradient) for name, gradient in gradients.items()}
    if any(not gradient.is_cuda for gradient in gradients.values()):
        for place in places:  # copies to the host are on their way
            torch.cuda.current_stream(place).synchronize()
    counts: dict[int, int] = {}
    for gradient in gradients.values():
        if gradient.layout is torch.strided:
            memory = gradient.untyped_storage().data_ptr()
            counts[memory] = counts.get(memory, 0) + 1
    for name, gradient in gradients.items():
        parameter = model.get_parameter(name)
        if parameter.grad is not None:
            parameter.grad += gradient
            continue
        if gradient.layout is not torch.strided:
            parameter.grad = gradient
            continue
        storage = gradient.untyped_storage()
        is_alone = counts[storage.data_ptr()] == 1 and storage.nbytes() == gradient.nbytes
        # As autograd: the gradient itself where nothing else is in its memory, and strides like the parameter's.
        if is_alone and gradient.stride() == parameter.stride():
            parameter.grad = gradient
        else:
            parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _accepted(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient where its parameter is, in the format in which that takes one; replicas may add up a narrower one."""
    dtype = gradient_format(parameter) or gradient.dtype
    if gradient.is_cuda and parameter.device.type == "cpu" and gradient.layout is torch.strided:
        memory = torch.empty_like(gradient, dtype=dtype, device="cpu", pin_memory=True)
        return memory.copy_(gradient, non_blocking=True)
    return gradient.to(parameter.device, dtype)
