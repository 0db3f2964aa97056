"""The casts that a precision makes in a step: of parameters and arguments before ops, of gradients after them.

Parameters are cast when a module first reads them, and once: as torch's FSDP2 gathers them, and so that the backward
pass casts a gradient as soon as it is complete.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from graphs.errors import CaptureError
from graphs.recipes import Precision

Call = Callable[..., Any]


def kept_formats(model: nn.Module, precision: Precision) -> dict[int, torch.dtype]:
    """Formats of the floating-point parameters under a precision, by their ids; of buffers where ``to`` converts them.

    FSDP2 leaves buffers as they are.

    Raises:
        CaptureError: the model has no such parameter.
    """
    kept = dtype_of(precision.parameter)
    found = {id(each): kept for each in model.parameters() if is_convertible(each)}
    if not found:
        raise CaptureError(
            f"{type(model).__name__} has no floating-point parameter for precision {precision.name!r} to convert; "
            "capture it without a precision."
        )
    if not precision.casts_parameters:
        found |= {id(each): kept for each in model.buffers() if is_convertible(each)}
    return found


def is_convertible(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds floating-point numbers of 16 bits or more; float8 is a format of its own."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def in_precision(model: nn.Module, precision: Precision | None) -> tuple[Call, dict[int, torch.Tensor]]:
    """The call of a model that computes in the format of a precision, and the casts of parameters that it makes.

    The call changes the model for good. Casts are by the ids of the parameters, there after the call.
    """
    made: dict[int, torch.Tensor] = {}
    if precision is None:
        return model, made

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast_inside(model, precision, made, args, kwargs)
        return model(*args, **kwargs)

    return call, made


def cast_inside(
    model: nn.Module, precision: Precision, made: dict[int, torch.Tensor], args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Let a model read its parameters cast from now on; its arguments, cast.

    Args:
        made: gets the casts, by the ids of the parameters.
    """
    dtype = dtype_of(precision.activation)
    if precision.casts_parameters:
        for module in model.modules():
            module.__dict__["_parameters"] = _CastWhenRead(module._parameters, dtype, made)
    found: tuple[Any, Any] = pytree.tree_map_only(torch.Tensor, lambda x: cast(x, dtype), (args, kwargs))
    return found


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in another format, if it can be converted."""
    return tensor.to(dtype) if is_convertible(tensor) else tensor


def follow(node: fx.Node, source: fx.Node) -> None:
    """Let the cast of a gradient come right after what made it: until then two formats of it are held."""
    if node is source:
        return
    maker = source.all_input_nodes[0] if source.target is operator.getitem else source
    if maker is not source:
        maker.append(source)  # it was made when it was first asked for
    source.append(node)
    node.meta |= {key: maker.meta[key] for key in ("module", "mirror", "call") if key in maker.meta}


def dtype_of(name: str) -> torch.dtype:
    """The format of that name."""
    found: torch.dtype = getattr(torch, name)
    return found


class _CastWhenRead(dict[str, torch.Tensor | None]):
    """Parameters of a module by name, each of them cast when it is read.

    Args:
        made: casts by the ids of parameters, of all modules of a model.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor | None], dtype: torch.dtype, made: dict[int, torch.Tensor]
    ) -> None:
        super().__init__(parameters)
        self._dtype, self._made = dtype, made

    def __getitem__(self, name: str) -> torch.Tensor | None:
        parameter = super().__getitem__(name)
        if parameter is None:
            return None
        if id(parameter) not in self._made:
            with torch.enable_grad():  # a part of a model that takes no gradients may be the first to read it
                self._made[id(parameter)] = cast(parameter, self._dtype)
        return self._made[id(parameter)]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if super().__contains__(name) else default

    def items(self) -> Any:
        return {name: self[name] for name in self}.items()

    def values(self) -> Any:
        return {name: self[name] for name in self}.values()
