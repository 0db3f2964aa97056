"""Optimizers by name, and the op that one parameter's update becomes."""

from __future__ import annotations

from graphs.capture.drafts import Draft, StateUse
from graphs.errors import UnknownNameError
from graphs.opgraph import Phase
from graphs.optimizers import OPTIMIZERS, UPDATE_KIND, Optimizer


def optimizer_named(name: str) -> Optimizer:
    """Raises: UnknownNameError."""
    if not isinstance(name, str) or name not in OPTIMIZERS:  # torch.optim.Adam itself, say
        raise UnknownNameError("optimizer", str(name), sorted(OPTIMIZERS))
    return OPTIMIZERS[name]


def update_draft(use: StateUse, state: int, gradients: list[int], optimizer: Optimizer) -> Draft:
    """The update of one parameter (``use`` has number ``state``), which from now on keeps its gradient and states."""
    use.trained, use.trained_copies = True, (1, optimizer.states)
    return Draft(
        label=f"{use.name.rpartition('.')[2]}.{optimizer.name}",
        kind=f"{UPDATE_KIND}{optimizer.name}",
        module=use.module,
        dtype=use.dtype,
        moved_bytes=optimizer.moved_copies * use.size_bytes,
        phase=Phase.UPDATE,
        inputs=gradients,
        states=[state],
        writes_state=True,
    )
