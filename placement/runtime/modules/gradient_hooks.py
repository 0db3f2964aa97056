"""Hooks on gradients of a model's parameters, which run once a step, on the gradient of the whole batch.

Torch would run them on the gradient of each part of the batch, or of a copy that `fully_shard` gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn


class Hooks(NamedTuple):
    """The hooks of one parameter: on its gradient, and on the parameter when that has been added."""

    on_gradient: tuple[Callable[[Tensor], Tensor | None], ...]
    on_accumulated: tuple[Callable[[Tensor], None], ...]

    def changed(self, gradient: Tensor) -> Tensor:
        """What they make of the gradient of a step."""
        for hook in self.on_gradient:
            found = hook(gradient)
            gradient = gradient if found is None else found
        return gradient


def taken_hooks(model: nn.Module) -> Mapping[str, Hooks]:
    """Those of each parameter that has some, by each of its names. The parameters have them no more."""
    found: dict[int, Hooks] = {}
    named: list[tuple[str, Any]] = list(model.named_parameters(remove_duplicate=False))
    for _, parameter in named:
        kinds = [parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}]
        if id(parameter) not in found and any(kinds):
            found[id(parameter)] = Hooks(*(tuple(hooks.values()) for hooks in kinds))
            for hooks in kinds:
                hooks.clear()
    return {name: found[id(parameter)] for name, parameter in named if id(parameter) in found}
