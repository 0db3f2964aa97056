"""Memory that a training step of PyTorch really takes: bytes of the tensors that are alive, op by op."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the memory of all tensors that it has seen and that somebody still holds.

    Attributes:
        peak_bytes: the most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._now = self.peak_bytes = 0

    def see(self, value: Any) -> None:
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    self._now += storage.nbytes()
                    self.peak_bytes = max(self.peak_bytes, self._now)
                    weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, number: int) -> None:
        self._now -= self._sizes.pop(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see(result)
        return result


def peak_of_step(model: nn.Module, loss: Callable[[], torch.Tensor], inputs: Any, steps: int = 2) -> int:
    """The peak of training steps with Adam; the second has the optimizer's state from the start.

    Args:
        loss: runs the model on its inputs.
        inputs: tensors, nested.
    """
    seen = LiveBytes()
    seen.see((list(model.parameters()), list(model.buffers()), inputs))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with seen, one_thread:
        for _ in range(steps):
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen.peak_bytes
