"""`on_meta`: code that makes tensors, run without memory for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_META = torch.device("meta")
_MOVES = (torch.Tensor.cpu, torch.Tensor.cuda)


@contextmanager
def on_meta() -> Iterator[None]:
    """Make tensors on ``meta``, where the block does not say otherwise, and let them stay there when they are moved.

    A GPU, which need not be there, stands for ``meta``, and so does any device for memory of a tensor that is there
    (`torch.nn.Module.to_empty`). Reading a value raises PyTorch's error.
    """
    with _META, _Staying():
        yield


class _Staying(TorchFunctionMode):
    """Moves from ``meta`` to another device do nothing; PyTorch refuses them, for there are no values to copy."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        device = given.get("device")
        if type(device) is int or (device is not None and torch.device(device).type == "cuda"):
            given["device"] = _META
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if func in _MOVES:
                return args[0]
            if func is torch.empty_like:
                given["device"] = _META
            if func is torch.Tensor.to:
                args = (args[0], *(_META if _is_device(value) else value for value in args[1:]))
                given |= {"device": _META} if given.get("device") is not None else {}
        return func(*args, **given)


def _is_device(value: Any) -> bool:
    """Whether it is one as ``torch.Tensor.to`` takes it; a number is that of a GPU."""
    return isinstance(value, str | torch.device) or type(value) is int
