"""The arguments of a call: what they have to be for a captured program, and what else may be captured for them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from graphs.capture import Program
from graphs.capture.record import argument_leaves
from graphs.capture.trace import Outputs, same_stride, value_of
from graphs.errors import MismatchError


def bound(
    model: nn.Module, program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The tensors among the arguments by their path, checked against those captured.

    Raises:
        MismatchError: another argument, shape, dtype or setting than captured.
    """
    check_call(model, args, kwargs)
    leaves = argument_leaves(model, args, kwargs)
    check_kinds(program, leaves)
    for path, captured, shape in _other_shapes(program, leaves):
        raise MismatchError(f"{_misfit(path, captured, shape)}; place the model for these shapes.")
    inputs = tensors_of(leaves)
    check_data(inputs)
    return inputs


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises: MismatchError: the model's ``forward`` does not take such arguments."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # it does not tell what it takes
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise MismatchError(
            f"{type(model).__name__} takes ({', '.join(signature.parameters)}), and got others: {error}; pass the "
            "arguments that the model takes."
        ) from None


def check_data(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises: MismatchError: a tensor has a shape and no data."""
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise MismatchError(f"{name!r} is on meta, without data; to run the model give it a tensor that has data.")


def check_states(model: nn.Module) -> None:
    """Raises: MismatchError: a parameter or buffer has a shape and no data."""
    check_data(dict(model.named_parameters()) | dict(model.named_buffers()))


def tensors_of(leaves: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among the leaves of the arguments."""
    return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}


def tangent(outputs: Outputs, number: int, given: torch.Tensor | None, place: torch.device) -> torch.Tensor:
    """The gradient that the user's loss sends into an output, None for none, as it was captured."""
    node = outputs.tangents[number]
    if given is None:
        layout = value_of(node).layout
        given = torch.zeros(layout.shape, dtype=layout.dtype, device=place)
    return as_captured(given, node, place)


def check_tangents(outputs: Outputs, given: Sequence[torch.Tensor | None]) -> None:
    """Raises: MismatchError: the loss depends on an output that the loss of the capture does not depend on."""
    for number, gradient in enumerate(given):
        if gradient is not None and number not in outputs.tangents:
            raise MismatchError(
                f"the loss depends on output {number + 1} of {len(given)}, of shape {tuple(gradient.shape)}, and the "
                "loss that the model was captured with does not, so that nothing is placed for its gradient; capture "
                "the model with loss=, a function of the outputs that depends on it too."
            )


def as_captured(tensor: torch.Tensor, node: fx.Node, place: torch.device) -> torch.Tensor:
    """The tensor on a device, with the strides that its node was captured with: the code views it as those allow."""
    layout = value_of(node).layout
    moved = tensor.to(place)
    if same_stride(layout.shape, layout.stride, moved.stride()):
        return moved
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=place).copy_(tensor.detach())


def check_kinds(program: Program, leaves: Mapping[str, Any]) -> None:
    """Refuse other arguments than captured, whatever their shapes.

    Raises:
        MismatchError: a tensor is missing, new or of another dtype, or something that is no tensor has another value.
    """
    expected, settings = program.trace.arguments, program.settings
    for path in expected:
        if not isinstance(leaves.get(path), torch.Tensor):
            got = f"is {leaves[path]!r:.60}" if path in leaves else "is missing or no tensor"
            raise MismatchError(f"argument {path!r} {got}; it was a tensor when the model was captured, so pass one.")
    shared: dict[fx.Node, str] = {}
    for path, node in expected.items():
        other = shared.setdefault(node, path)
        if leaves[other] is not leaves[path]:
            raise MismatchError(
                f"arguments {other!r} and {path!r} were one tensor when the model was captured; pass one tensor, or "
                "capture it with two."
            )
    for path, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            if path not in expected:
                raise MismatchError(
                    f"argument {path!r} was not there when the model was captured; leave it out, or place the model "
                    "with it."
                )
            dtype = value_of(expected[path]).layout.dtype
            if leaf.dtype != dtype:
                raise MismatchError(
                    f"argument {path!r} is {leaf.dtype}; expected {dtype}, as captured; convert it, or place the model "
                    "for this type."
                )
        elif path not in settings:
            raise MismatchError(
                f"argument {path!r} = {leaf!r:.60} was not there when the model was captured; leave it out, or place "
                "the model with it."
            )
    for path, value in settings.items():
        if path not in leaves or not _same(leaves[path], value):
            got = f"is {leaves[path]!r:.60}" if path in leaves else "is missing"
            raise MismatchError(
                f"argument {path!r} {got}; it was {value!r:.60} when the model was captured; pass that, or place the "
                "model for the other value."
            )


def check_batch(program: Program, leaves: Mapping[str, Any]) -> None:
    """Refuse another number of dimensions than captured, and batch sizes that differ between arguments.

    Raises:
        MismatchError: names the argument and the dimension.
    """
    others = list(_other_shapes(program, leaves))
    for path, captured, shape in others:
        if not shape or len(shape) != len(captured):
            raise MismatchError(f"{_misfit(path, captured, shape)}; place the model for these shapes.")
    others = [(path, captured, shape) for path, captured, shape in others if captured[0] != shape[0]]
    if not others:
        return
    first, old, new = others[0][0], others[0][1][0], others[0][2][0]
    for path, node in program.trace.arguments.items():
        captured, size = value_of(node).layout.shape, leaves[path].shape[:1]
        is_other = captured[:1] != size and (captured[0], size[0]) != (old, new)
        if is_other or (captured[:1] == size == (old,) and old > 1):
            raise MismatchError(
                f"arguments {first!r} and {path!r} have {new} and {size[0]} in dimension 0; expected {old} and "
                f"{captured[0]} as captured, or one batch size in both."
            )


def _other_shapes(
    program: Program, leaves: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(path, captured shape, shape) of each tensor whose shape is another one."""
    for path, node in program.trace.arguments.items():
        captured, shape = value_of(node).layout.shape, tuple(leaves[path].shape)
        if captured != shape:
            yield path, captured, shape


def other_shape(program: Program, leaves: Mapping[str, Any]) -> str:
    """The argument with another shape than captured, and its dimension: the batch, if no other."""
    others = list(_other_shapes(program, leaves))
    path, captured, shape = next((other for other in others if other[1][1:] != other[2][1:]), others[0])
    return _misfit(path, captured, shape, first=int(captured[1:] != shape[1:]))


def _misfit(path: str, captured: tuple[int, ...], shape: tuple[int, ...], first: int = 0) -> str:
    """The first dimension that is another one, from ``first`` on."""
    if len(shape) != len(captured):
        return f"argument {path!r} has {len(shape)} dimensions; expected {len(captured)}, shape {captured} as captured"
    dimension = next(i for i in range(first, len(shape)) if shape[i] != captured[i])
    return (
        f"argument {path!r} has {shape[dimension]} in dimension {dimension}; expected {captured[dimension]}, shape "
        f"{captured} as captured"
    )


def _same(value: Any, captured: Any) -> bool:
    if value is captured:
        return True
    try:
        return type(value) is type(captured) and bool(value == captured)
    except Exception:  # say, an array, whose comparison is an array
        return False
