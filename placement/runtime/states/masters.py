"""`with_masters`: an optimizer that updates wide copies of narrow parameters, as Megatron-LM's does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from graphs.errors import MismatchError

MASTER = "master"  # slot of an optimizer's state
_O = TypeVar("_O", bound=torch.optim.Optimizer)


def with_masters(optimizer: _O) -> _O:
    """Let an optimizer of torch's keep a float32 copy of each narrower parameter, and update that.

    Its states are float32, too; after each step the parameter is its copy, rounded. The copy is made of the
    parameter at the first step, and is among the optimizer's state as ``"master"``, saved and loaded with it.

    Args:
        optimizer: of parameters whose gradients are float32, as `placement.apply` gives them for ``"master"``, or as
            narrow as they are.

    Returns:
        The same optimizer.

    Raises:
        MismatchError: none of its parameters is narrower.
    """
    if not any(map(is_narrow, _parameters(optimizer))):
        raise MismatchError(
            f"the parameters of this {type(optimizer).__name__} are none narrower than float32, of which copies would "
            "be kept; use it as it is, or capture the model with precision='master'."
        )
    masters = _Masters(optimizer)
    optimizer.register_step_pre_hook(lambda *_: masters.begin())
    optimizer.register_step_post_hook(lambda *_: masters.end())
    # Torch gives what it loads the formats of the parameters.
    optimizer.register_load_state_dict_pre_hook(lambda *_: masters.begin())
    optimizer.register_load_state_dict_post_hook(lambda *_: masters.end(are_loaded=True))
    return optimizer


class _Masters:
    """Puts the copies in the place of the parameters, and back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._narrow: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def begin(self) -> None:
        """Let parameters be their copies."""
        for parameter in filter(is_narrow, _parameters(self._optimizer)):
            gradient = parameter.grad
            has_narrow = gradient is not None and is_narrow(gradient)
            self._narrow[parameter] = parameter.data, gradient if has_narrow else None
            state: dict[str, Any] = self._optimizer.state.get(parameter, {})
            if has_narrow:
                parameter.grad = None  # of another format than the copy
            parameter.data = state.pop(MASTER) if MASTER in state else parameter.data.float()
            if has_narrow:
                assert gradient is not None
                parameter.grad_dtype = torch.float32
                parameter.grad = gradient.float()

    def end(self, are_loaded: bool = False) -> None:
        """Let them be what they were, of the copies' values; copies that were loaded stay those."""
        for parameter, (narrow, gradient) in self._narrow.items():
            state: dict[str, Any] = self._optimizer.state.get(parameter, {})
            if not are_loaded and (state or parameter.grad is not None):  # it has been updated
                state = self._optimizer.state[parameter]
                state[MASTER] = parameter.data
            if MASTER in state:
                narrow.copy_(state[MASTER])
            if gradient is not None:
                parameter.grad = None
            parameter.data = narrow
            if gradient is not None:
                parameter.grad_dtype = gradient.dtype
                parameter.grad = gradient
        self._narrow.clear()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def is_narrow(parameter: torch.Tensor) -> bool:
    """Whether its numbers are floating-point ones narrower than float32."""
    return parameter.is_floating_point() and parameter.dtype.itemsize < torch.float32.itemsize
