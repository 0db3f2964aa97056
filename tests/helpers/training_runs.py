"""Training runs that are cut off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphs.opgraph import Op, OpGraph, Tensor
from placement.learning.session import Status


def fans(width: int = 6, name: str = "fans") -> OpGraph:
    """A source, `width` ops of different length, a sink: the best split is not proven by the bound."""
    middle = [Op(f"m{k}", time_s={"*": 1.0 + 0.37 * k}) for k in range(width)]
    ops = [Op("in", time_s={"*": 0.1}), *middle, Op("out", time_s={"*": 0.1})]
    names = tuple(op.name for op in middle)
    return OpGraph.build(ops, [Tensor("in", 1000, names), *(Tensor(n, 1000, ("out",)) for n in names)], name)


def after(count: int, action: Callable[[], Any]) -> Callable[[Status], None]:
    """A progress callback that acts once so many placements are scored."""

    def told(status: Status) -> None:
        if status.update.samples == count:
            action()

    return told


class Killed(BaseException):
    """What ends a run without a chance to put anything in order."""


def kill() -> None:
    raise Killed
