"""Families of strategies, as people name them: data parallel, ZeRO, tensor parallel, pipelines, and their mixtures."""

from __future__ import annotations

from graphs.transforms.axes import AXES
from graphs.transforms.strategy import ORDERS, PLACED, Strategy

HYBRID = "hybrid"
IN_PARTS = ""  # on one device: its micro-batches, and what it recomputes
PIPELINES = tuple(f"pp {order}" for order in ORDERS if order != "pipedream")
_ZERO = ("zero1", "zero2", "zero3")
FAMILIES = (
    *dict.fromkeys(("dp", *_ZERO, "tp", *sorted(axis.family for axis in AXES.values()))),
    *PIPELINES,
    PLACED,
    HYBRID,
)


def family_of(strategy: Strategy) -> str:
    """The family of a strategy that uses several devices; micro-batches and recomputation belong to every family.

    Data parallelism that cuts the weights of some modules is a mixture.

    Returns:
        A name of `FAMILIES`; `IN_PARTS` for a strategy of one device.
    """
    if strategy.is_placed:
        return PLACED
    if any(rule.tensor_modules for rule in strategy.mesh):
        return HYBRID
    names = {AXES[rule.name].family for rule in strategy.mesh if rule.size > 1}
    if strategy.stages > 1:
        names.add(f"pp {strategy.order}")
    if len(names) > 1:
        return HYBRID
    name = next(iter(names), IN_PARTS)
    return f"zero{strategy.zero}" if name == "dp" and strategy.zero else name
