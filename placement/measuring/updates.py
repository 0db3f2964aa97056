"""What an optimizer's step costs, parameter by parameter."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch

from placement.measuring.speeds import synchronise

Times = dict[int, list[float]]  # op -> seconds in each step
_LR = 1e-6

# As a training script makes them: torch's own choice between its implementations. By the names that capture knows.
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "sgd": torch.optim.SGD,
}


def update_times_s(
    updates: Sequence[tuple[int, torch.Tensor, torch.Tensor]],
    optimizer: str,
    place: torch.device,
    steps: int,
    together: Callable[[], None],
) -> Times:
    """Seconds that the updates of parameters take out of one optimizer's step over all of them.

    An optimizer for each parameter, one after the other, tells how they compare; a single optimizer for all, what they
    take in sum. What the many have too much of, their fixed cost, is taken off each alike.

    Args:
        updates: (op, parameter, its gradient); the parameters are changed.
        optimizer: a key of `OPTIMIZERS`.
        steps: how often it steps; as many warm-up steps as parameters need to have their state come before.
        together: called before each step, to wait for other workers.
    """
    if not updates:
        return {}
    parameters = []
    for _, parameter, gradient in updates:
        parameter.requires_grad_(True).grad = gradient
        parameters.append(parameter)
    make = OPTIMIZERS[optimizer]
    singles = [make([parameter], lr=_LR) for parameter in parameters]
    rows = [_stepped(singles, place, together) for _ in range(steps + 2)][2:]
    del singles
    whole = [make(parameters, lr=_LR)]
    sum_s = statistics.median([_stepped(whole, place, together)[0] for _ in range(steps + 2)][2:])
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    fixed_s = _fixed_s(medians, sum_s)
    scale = sum_s / sum(s - fixed_s for s in medians)
    return {op: [max(0.0, row[i] - fixed_s) * scale for row in rows] for i, (op, _, _) in enumerate(updates)}


def _fixed_s(singles_s: Sequence[float], sum_s: float) -> float:
    """What each of several steps has too much; it leaves a tenth of the shortest at least."""
    n = len(singles_s)
    too_much_s = (sum(singles_s) - sum_s) / (n - 1) if n > 1 else 0.0
    return min(max(0.0, too_much_s), 0.9 * min(singles_s))


def _stepped(
    optimizers: Sequence[torch.optim.Optimizer], place: torch.device, together: Callable[[], None]
) -> list[float]:
    """Seconds of one step of each."""
    together()
    synchronise(place)
    stamps = [time.perf_counter()]
    for optimizer in optimizers:
        cast(Any, optimizer).step()
        synchronise(place)
        stamps.append(time.perf_counter())
    return [after - before for before, after in pairwise(stamps)]
