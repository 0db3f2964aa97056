"""`ModelStep`: one step of a model, plain or this process's share of it, and what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphs.capture.record import Loss, output_tensors
from placement.measuring.runs.differences import GRADIENT
from placement.runtime.states.formats import gradient_format
from placement.runtime.states.masters import with_masters

# Adam's step takes as long as with any other rate, and the weights stay what they are, however often it is run.
_RATE = 0.0


@dataclass(frozen=True, eq=False)
class ModelStep:
    """A step: both passes and the update of a training step, the forward pass of inference.

    Attributes:
        model: plain, or this process's share.
        args, kwargs: of one step.
        loss: of the model's output; None of a share (`StrategyModule`), which has its own.
        train: a training step.
        optimizer: None where nothing is to be trained here.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    train: bool
    optimizer: torch.optim.Optimizer | None
    loss: Loss | None

    @classmethod
    def of(
        cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], train: bool, loss: Loss | None
    ) -> ModelStep:
        """A step of a model, trained by Adam."""
        own = [parameter for parameter in model.parameters() if parameter.requires_grad and train]
        optimizer = torch.optim.Adam(own, lr=_RATE, foreach=False) if own else None
        if optimizer is not None and any(gradient_format(one) not in (None, one.dtype) for one in own):
            optimizer = with_masters(optimizer)  # of a precision whose gradients are wider
        return cls(model, args, kwargs, train, optimizer, loss)

    def passes(self) -> Any:
        """Run the step but for the update; the loss, or the outputs of inference."""
        if not self.train:
            with torch.no_grad():
                return self.model(*self.args, **self.kwargs)
        self.model.zero_grad()
        if self.loss is None:
            share: Any = self.model
            return share.step(*self.args, **self.kwargs)
        value = self.loss(self.model(*self.args, **self.kwargs))
        value.backward()  # type: ignore[no-untyped-call]
        return value

    def update(self) -> None:
        """Change the weights by what the passes gave."""
        if self.optimizer is not None:
            self.optimizer.step()

    def __call__(self) -> None:
        self.passes()
        self.update()

    def computed(self) -> dict[str, Tensor]:
        """Run the passes; the loss and all gradients by name, or the outputs of inference by number."""
        found = self.passes()
        if not self.train:
            return {f"output/{number}": tensor for number, tensor in enumerate(output_tensors(found))}
        grads = {f"{GRADIENT}{name}": p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return {"loss": found} | grads
