"""Optimizers by name: what one parameter's update keeps and moves, and the op it becomes."""

from __future__ import annotations

from dataclasses import dataclass

from graphs.capture.drafts import Draft, StateUse
from graphs.errors import UnknownNameError
from graphs.opgraph import Phase


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


def optimizer_named(name: str) -> Optimizer:
    """Raises: UnknownNameError."""
    if not isinstance(name, str) or name not in OPTIMIZERS:  # torch.optim.Adam itself, say
        raise UnknownNameError("optimizer", str(name), sorted(OPTIMIZERS))
    return OPTIMIZERS[name]


def update_draft(use: StateUse, state: int, gradients: list[int], optimizer: Optimizer) -> Draft:
    """The update of one parameter (``use`` has number ``state``), which from now on keeps its gradient and states."""
    use.trained, use.copies = True, optimizer.kept_copies
    return Draft(
        label=f"{use.name.rpartition('.')[2]}.{optimizer.name}",
        kind=f"optimizer.{optimizer.name}",
        module=use.module,
        dtype=use.dtype,
        moved_bytes=optimizer.moved_copies * use.size_bytes,
        phase=Phase.UPDATE,
        inputs=gradients,
        states=[state],
        writes_state=True,
    )
