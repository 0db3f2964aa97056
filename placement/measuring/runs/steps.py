"""`ModelStep`: one step of a model, plain or this process's share of it, and what the first three compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphs.capture.record import Loss, output_tensors
from placement.measuring.runs.differences import (
    BUFFER,
    EPS,
    GRADIENT,
    LARGEST,
    LOSS,
    OUTPUT,
    RATES,
    WEIGHT,
    largest,
)
from placement.runtime.states.formats import gradient_format
from placement.runtime.states.masters import with_masters
from placement.runtime.states.optimizers import optimizer_of

STEPS = 3  # that are compared: a fault of the second one is seen in the third, at the latest
_MOVE = 3e-4  # of a weight in a step, at most, but for momentum
_EPS = 0.01  # of the largest gradient: Adam then moves a weight by noise no more than by noise
_BUILT_UP = {"momentum": 5.61}  # moves in `STEPS` steps, where a step has something of those before: 1 + 1.9 + 2.71


@dataclass(eq=False)
class ModelStep:
    """A step: both passes and the update of a training step, the forward pass of inference.

    Attributes:
        model: plain, or this process's share.
        args, kwargs: of one step.
        loss: of the model's output; None of a share (`placement.apply` on several devices), which has its own.
        train: a training step.
        optimizer_name: as in `placement.runtime.states.optimizers.OPTIMIZERS`.
        optimizer: of that name, once `first_steps` has made it; None where nothing is to be trained here.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    train: bool
    loss: Loss | None
    optimizer_name: str = "adam"
    optimizer: Any = None

    @property
    def is_share(self) -> bool:
        """Whether other processes have the rest of the model."""
        return self.loss is None

    def passes(self) -> Any:
        """Run the step but for the update; the loss, or the outputs of inference."""
        if not self.train:
            with torch.no_grad():
                return self.model(*self.args, **self.kwargs)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
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

    # -- the first steps --------------------------------------------------------------------------------------

    def first_steps(self, reference: Mapping[str, Tensor] | None, told: Callable[[int], None]) -> dict[str, Tensor]:
        """Run the steps that are compared, after which weights stay what they are, however often a step is run.

        Args:
            reference: what these steps gave of the plain model; None for that itself.
            told: called with the number of each step that is done.

        Returns:
            By name, on the CPU: losses, and of training gradients of the first step, and weights and buffers after the
            last one; on another rank than the first only losses.
        """
        found: dict[str, Tensor] = {}
        named = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        if reference is not None:  # by the model's own names
            named = {name.removeprefix(BUFFER) for name in reference if name.startswith(BUFFER)}
        for number in range(1, STEPS + 1):
            given = self.passes()
            if not self.train:
                outputs = enumerate(output_tensors(given))
                found |= {f"{OUTPUT}{number}/{place}": _kept(tensor) for place, tensor in outputs}
            else:
                found[f"{LOSS}{number}"] = _kept(given)
                if number == 1:
                    gradients = {f"{GRADIENT}{name}": each for name, each in self._gradients().items()}
                    found |= gradients
                    if reference is None:
                        most = max(map(largest, gradients.values()), default=0.0)
                        # SGD moves by its rate times the gradient, as Adam by its own over this does.
                        eps = (_EPS * most or 1e-8) if self._is_adam else (most or 1.0)
                        moves = _BUILT_UP.get(self.optimizer_name, STEPS)
                        facts = {LARGEST: most, EPS: eps, RATES: moves * _MOVE}
                        found |= {name: torch.tensor(value) for name, value in facts.items()}
                    self.optimizer = self._optimizer(float((reference or found)[EPS]))
                self.update()
            told(number)
        if self.train:
            found |= self._states(named)
            for group in self.optimizer.param_groups if self.optimizer is not None else ():
                group["lr"] = 0.0  # a step takes as long as with any other rate
        return found

    @property
    def _is_adam(self) -> bool:
        return self.optimizer_name.startswith("adam")

    def _optimizer(self, eps: float) -> Any:
        settings: dict[str, Any] = {"lr": _MOVE, "eps": eps} if self._is_adam else {"lr": _MOVE / eps}
        made = optimizer_of(self.model, self.optimizer_name, foreach=False, **settings)
        is_own = isinstance(made, torch.optim.Optimizer) and not hasattr(type(self.model), "optimizer")
        if is_own and any(
            gradient_format(p) not in (None, p.dtype) for p in self.model.parameters() if p.requires_grad
        ):
            return with_masters(made)  # of a precision whose gradients are wider
        return made

    def _gradients(self) -> dict[str, Tensor]:
        if self.is_share:
            share: Any = self.model
            gathered: dict[str, Tensor] = share.gathered_gradients()
            return gathered
        named = self.model.named_parameters(remove_duplicate=False)  # as gathered_gradients() has what is tied
        return {name: _kept(p.grad) for name, p in named if p.grad is not None}

    def _states(self, buffers: set[str]) -> dict[str, Tensor]:
        """Weights and buffers, on the first rank; ``buffers``: the names of these."""
        model: Any = self.model
        states = model.gathered_state_dict() if self.is_share else model.state_dict()
        return {
            f"{BUFFER if name in buffers else WEIGHT}{name}": tensor if self.is_share else _kept(tensor)
            for name, tensor in states.items()
            if isinstance(tensor, Tensor)
        }


def _kept(tensor: Tensor) -> Tensor:
    """A copy on the CPU, which later steps leave alone."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
