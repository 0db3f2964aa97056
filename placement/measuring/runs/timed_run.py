"""One timed run: a step of a model, whole or this process's share of it, run until its median is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placement.measuring.models.repeats import Repeats, run_steps, seconds_of
from placement.processes.kept_memory import Usage, peak_bytes

if TYPE_CHECKING:
    import torch

    from placement.runtime.ranks.process_group import ProcessGroup


@dataclass(frozen=True)
class TimedRun:
    """Measurements of one process.

    Attributes:
        step_s: seconds of each step that counts.
        waited_s: of these, seconds spent waiting for other processes.
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
    group: ProcessGroup,
    places: Sequence[torch.device] = (),
    everybody: ProcessGroup | None = None,
) -> TimedRun:
    """Run a step until that is enough, in all processes of a group together.

    Args:
        places: devices whose work is waited for.
        everybody: a larger group that keeps step with this one; its others call this with a step of nothing.
    """
    waited_s: list[float] = []  # within the steps: waiting for the others between two of them is no part of either
    usage = [Usage.now()]  # before the first step, and after each

    def timed() -> float:
        waited_before = group.waited_s
        seconds = seconds_of(step, places)
        waited_s.append(group.waited_s - waited_before)
        usage.append(Usage.now())
        return seconds

    def all_gather(seconds: float) -> list[float]:
        met = everybody or group
        return [float(text) for text in met.all_gather(repr(seconds))] if met.size > 1 else [seconds]

    times_s, warm_up = run_steps(timed, repeats, all_gather, group.report)
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
