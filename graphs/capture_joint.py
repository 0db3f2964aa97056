"""Traces by recording: forward and backward of a training step, or a forward pass with its module calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from graphs.capture_costs import general_kernels
from graphs.capture_record import Recorder
from graphs.capture_trace import Trace, input_names
from graphs.errors import CaptureError
from graphs.opgraph import Phase

Loss = Callable[[Any], torch.Tensor]


def trace_training(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Loss | None) -> Trace:
    """Forward pass, loss and gradients of all trainable parameters.

    Raises:
        CaptureError: there is nothing to train.
    """
    recorder = Recorder(model, input_names(model, args, kwargs))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise CaptureError(
            f"{type(model).__name__} has no trainable parameter; expected at least one with requires_grad, "
            "capture it with train=False."
        )
    # One thread, so that autograd runs the backward pass where the recorder can see it.
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with torch.enable_grad(), one_thread, general_kernels(), recorder, recorder.calls.watched():
        value = (loss or default_loss)(model(*args, **kwargs))
        _check_loss(value)
        recorder.phase = Phase.BACKWARD
        gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    pairs = [
        (recorder.node_of(p), recorder.node_of(gradient))
        for p, gradient in zip(parameters.values(), gradients, strict=True)
        if gradient is not None
    ]
    return Trace(recorder.graph, recorder.states, recorder.inputs, (recorder.node_of(value),), gradients=tuple(pairs))


def trace_forward(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace:
    """One forward pass without gradients; every op knows the module call it was made in."""
    recorder = Recorder(model, input_names(model, args, kwargs))
    with torch.no_grad(), general_kernels(), recorder, recorder.calls.watched():
        output = model(*args, **kwargs)
    results = tuple(recorder.node_of(tensor) for tensor in output_tensors(output))
    return Trace(recorder.graph, recorder.states, recorder.inputs, results, leaves=recorder.calls.leaves)


def default_loss(output: Any) -> torch.Tensor:
    """A scalar output, the output's ``loss``, or the sum of the means of all floating-point outputs.

    Raises:
        CaptureError: no output is floating-point.
    """
    given = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(given, torch.Tensor):
        return given.sum()
    tensors = [tensor for tensor in output_tensors(output) if tensor.is_floating_point()]
    if not tensors:
        raise CaptureError(
            f"the model returns {type(output).__name__} without a floating-point tensor; expected an output to train "
            "on, give loss=, a function from the output to a scalar."
        )
    if len(tensors) == 1 and tensors[0].ndim == 0:
        return tensors[0]
    means = [tensor.mean() for tensor in tensors]
    total = means[0]
    for mean in means[1:]:
        total = total + mean
    return total


def _check_loss(value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shown = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise CaptureError(f"the loss is {shown}; expected a scalar tensor, reduce it in loss=.")
    if not value.requires_grad:
        raise CaptureError(
            "the loss depends on no trainable parameter; expected a gradient, check for no_grad or detach in forward."
        )


def output_tensors(output: Any) -> list[torch.Tensor]:
    """All tensors in a nested output, each once; dataclasses and other objects (say, caches) are opened."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    stack = [output]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif id(value) not in seen and not isinstance(value, (nn.Module, type, str)):
            seen.add(id(value))
            if isinstance(value, Mapping):
                stack += reversed(list(value.values()))
            elif isinstance(value, (list, tuple, set)):
                stack += reversed(list(value))
            else:
                stack += reversed(list(getattr(value, "__dict__", {}).values()))
    return list(found.values())
