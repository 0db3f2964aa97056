"""Optimizers by name, and the op that one parameter's update becomes."""

from __future__ import annotations

from graphs.capture.drafts import Draft, StateUse
from graphs.errors import UnknownNameError
from graphs.opgraph import Phase
from graphs.recipes import OPTIMIZERS, UPDATE_KIND, Optimizer, Precision, number_bytes


def optimizer_named(name: str) -> Optimizer:
    """Raises: UnknownNameError."""
    if not isinstance(name, str) or name not in OPTIMIZERS:  # torch.optim.Adam itself, say
        raise UnknownNameError("optimizer", str(name), sorted(OPTIMIZERS))
    return OPTIMIZERS[name]


def update_draft(
    use: StateUse, state: int, gradients: list[int], optimizer: Optimizer, precision: Precision | None
) -> Draft:
    """The update of one parameter (``use`` has number ``state``), which from now on keeps its gradient and states."""
    gradient = state_bytes = use.size_bytes
    has_masters = False
    if precision is not None and use.dtype == precision.parameter:
        count = use.size_bytes // number_bytes(precision.parameter)
        gradient, state_bytes = count * number_bytes(precision.gradient), count * number_bytes(precision.state)
        has_masters = precision.has_masters
    use.trained, use.gradient_bytes = True, gradient
    use.optimizer_bytes = optimizer.remembered_copies(has_masters) * state_bytes
    return Draft(
        label=f"{use.name.rpartition('.')[2]}.{optimizer.name}",
        kind=f"{UPDATE_KIND}{optimizer.name}",
        module=use.module,
        dtype=use.dtype,
        moved_bytes=optimizer.moved_bytes(use.size_bytes, gradient, state_bytes, has_masters),
        phase=Phase.UPDATE,
        inputs=gradients,
        states=[state],
        writes_state=True,
    )
