"""Records of a trial: the task that its processes get, and the outcome of each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from placement.measuring.models.repeats import Repeats
from placement.measuring.runs.differences import Compared
from placement.measuring.runs.timed_run import TimedRun
from placement.measuring.runs.timeline import RecordedStep
from placement.processes.kept_memory import Usage


@dataclass(frozen=True)
class TrialTask:
    """The task of the processes of a trial.

    Attributes:
        model, train, dims, seed: as of `placement.measuring.runs.trial.try_out`.
        optimizer: of training steps, by name.
        repeats: how often.
        way: of the placement: ``"plain"`` is the model on one device, ``"compiled"`` the same under torch.compile,
            ``"by_module"`` module by module in one process, ``"ranked"`` a share for each device.
        is_compiled: shares run under torch.compile.
        is_calm: the steps that are compared drop nothing: under a strategy each rank draws its own random numbers.
        recorded: steps to be recorded after those that are timed.
        devices: torch device of each device, by name, in the order of ranks.
        halves: number formats of two bytes in the step.
        placement, reference: files of the result and of what the first steps of the plain model compute.
    """

    model: str
    train: bool
    optimizer: str
    dims: Mapping[str, int]
    seed: int
    repeats: Repeats
    way: Literal["plain", "compiled", "by_module", "ranked"]
    is_compiled: bool
    is_calm: bool
    recorded: int
    devices: Mapping[str, str]
    halves: tuple[str, ...]
    placement: str
    reference: str

    @property
    def places(self) -> list[torch.device]:
        """Torch devices in the order of ranks."""
        return [torch.device(place) for place in self.devices.values()]


@dataclass(frozen=True)
class ProcessOutcome:
    """One process's part of a trial.

    Attributes:
        timed: its steps.
        kept_bytes: of parameters and buffers that it has, by device.
        computed: names of the tensors that the plain model computed.
        compared: how far those of the placement are off them.
        given_back: work of the system in a step of the plain model where freed memory goes back to the system; None
            where it always does, or never.
        recorded: steps that were recorded.
    """

    timed: TimedRun
    kept_bytes: Mapping[str, int]
    computed: tuple[str, ...] = ()
    compared: Compared = field(default_factory=dict)
    given_back: Usage | None = None
    recorded: tuple[RecordedStep, ...] = ()
