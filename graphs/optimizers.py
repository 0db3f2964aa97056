"""Optimizers by name: how many tensors one parameter's update keeps and moves."""

from __future__ import annotations

from dataclasses import dataclass

UPDATE_KIND = "optimizer."  # and the optimizer's name: the kind of an update op


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as capture sees it.

    Attributes:
        name: as in `OPTIMIZERS`.
        states: tensors of the parameter's size kept between steps.
    """

    name: str
    states: int

    @property
    def kept_copies(self) -> int:
        """Tensors kept per trained parameter: the parameter, its gradient and the states."""
        return 2 + self.states

    @property
    def moved_copies(self) -> int:
        """Tensors read and written by one update: the gradient is read, parameter and states are read and written."""
        return 3 + 2 * self.states


OPTIMIZERS = {
    "adam": Optimizer("adam", states=2),
    "adamw": Optimizer("adamw", states=2),
    "momentum": Optimizer("momentum", states=1),
    "sgd": Optimizer("sgd", states=0),
}
