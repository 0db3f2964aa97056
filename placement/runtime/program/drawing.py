"""`draw`: the random numbers of a step, all of them before it begins."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from graphs.capture.again import set_state
from graphs.capture.trace import value_of
from placement.runtime.program.functional import Functional, uninitialised


def draw(step: Functional, place: torch.device) -> dict[int, torch.Tensor]:
    """The random numbers of a step in program order, so that a seed gives what it gives without a placement.

    Args:
        place: the device whose generator draws them.
    """
    found: dict[fx.Node, torch.Tensor] = {}
    numbered = {}
    for number, node in step.draws:
        first = step.redraws.get(node)
        if "reset" in node.meta:
            set_state(cast("torch.Generator", node.kwargs["generator"]), node.meta["reset"])
        found[node] = numbered[number] = _drawn(node, place) if first is None else found[first].clone()
    return numbered


def _drawn(node: fx.Node, place: torch.device) -> torch.Tensor:
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda given: _without_content(given, place))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": place}  # what map_arg gives cannot be written
    result: torch.Tensor = target(*args, **kwargs)
    return result


def _without_content(node: fx.Node, place: torch.device) -> Any:
    info = value_of(node)
    if not hasattr(info, "layout"):
        return info
    layout = info.layout
    return uninitialised(layout.shape, layout.stride, layout.dtype, place)
