"""One timed run: a step of a model, whole or this process's share of it, run until its median is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import thread_time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from placement.measuring.models.repeats import Repeats, run_steps, seconds_of
from placement.processes.kept_memory import Usage, peak_bytes
from placement.runtime.ranks.launch import tell

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class TimedRun:
    """Measurements of one process.

    Attributes:
        step_s: seconds of each step that counts.
        waited_s: of these, seconds in which the thread that runs the steps had no processor, since it waited.
        dropped: steps before them, which warmed up.
        usage: mean work of the system in a step.
        peak_bytes: most memory that the process ever had.
    """

    step_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    dropped: int
    usage: Usage
    peak_bytes: int


def timed_run(
    step: Callable[[], object],
    repeats: Repeats,
    group: ProcessGroup | None = None,
    places: Sequence[torch.device] = (),
    everybody: ProcessGroup | None = None,
) -> TimedRun:
    """Run a step until that is enough, in all processes of a group together.

    Args:
        group: of gloo; None of one process.
        places: devices whose work is waited for.
        everybody: a larger group that keeps step with this one; its others call this with a step of nothing.
    """
    waited_s: list[float] = []  # within the steps: waiting for the others between two of them is no part of either
    usage = [Usage.now()]  # before the first step, and after each
    met = everybody or group

    def timed() -> float:
        computed_s = thread_time()
        seconds = seconds_of(step, places)
        waited_s.append(max(0.0, seconds - (thread_time() - computed_s)))
        usage.append(Usage.now())
        return seconds

    def all_gather(seconds: float) -> list[float]:
        if met is None:
            return [seconds]
        mine = torch.tensor([seconds], dtype=torch.float64, device="cpu")
        found = [torch.empty_like(mine) for _ in range(met.size())]
        dist.all_gather(found, mine, group=met)
        return [float(each) for each in found]

    times_s, warm_up = run_steps(timed, repeats, all_gather, tell)
    return TimedRun(
        step_s=tuple(times_s[warm_up:]),
        waited_s=tuple(waited_s[warm_up:]),
        dropped=warm_up,
        usage=usage[-1].since(usage[warm_up], len(times_s) - warm_up),
        peak_bytes=peak_bytes(),
    )


def together_s(runs: Sequence[TimedRun]) -> list[float]:
    """Seconds of each step of several processes, which is over when the last of them has ended it."""
    return [max(times) for times in zip(*(run.step_s for run in runs), strict=True)]
