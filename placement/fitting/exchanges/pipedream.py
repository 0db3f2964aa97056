"""Pipelines with stale weights: each worker is a pipeline that begins mini-batches before earlier ones have ended."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graphs.errors import FitError
from placement.fitting.exchanges.averaging import Exchange
from placement.fitting.participants import Compute, Participant, Updated

if TYPE_CHECKING:
    from placement.fitting.participants import MethodParts, Role
    from placement.fitting.task import WeightLayout


@dataclass(frozen=True)
class PipeDream(Exchange):
    """Narayanan et al. 2019, section 3.3: which weights each stage of a full pipeline reads, not how fast it is.

    With t updates made, stage s of n, counted from 1, runs the forward pass of the next mini-batch on its weights of
    update t - n + s: as many mini-batches as that lie between its forward and its backward pass. Parameters are dealt
    out to stages in their order, as evenly as their number allows. Workers' gradients are averaged, as those of a
    replicated pipeline; the time of a gradient is that of the worker's plan.

    Attributes:
        stages: of the pipeline; 1 is synchronous SGD.
        stashing: 1: a backward pass reads the weights of its forward pass. 0: those that there are by then, which
            gives the gradient of no function.
        vertical_sync: 1: all stages read the weights of one update, t - n + 1: SGD with a fixed delay.
    """

    name = "pipedream"
    ranges = (("stages", 1, math.inf), ("stashing", 0, 1), ("vertical_sync", 0, 1))

    stages: int = 4
    stashing: int = 1
    vertical_sync: int = 0

    def misfit(self, method: MethodParts, workers: int) -> str | None:
        if self.vertical_sync > self.stashing:
            return "pipedream:vertical_sync=1 reads weights that only stashing keeps; leave stashing=0 out."
        return None

    def delays(self) -> tuple[int, ...]:
        """Number of updates that each stage's forward pass is behind."""
        most = self.stages - 1
        return tuple(most if self.vertical_sync else most - stage for stage in range(self.stages))

    def participant(self, role: Role) -> Participant:
        weights, updater, compressor = role.start.clone(), role.updater(), role.compressor()
        slices, delays = _stage_slices(role.layout, self.stages), self.delays()
        kept = deque([weights.clone()], maxlen=self.stages)  # the newest last
        version = 0
        while True:
            behind = [min(delay, version) for delay in delays]
            forward = torch.cat([kept[-1 - delay][part] for part, delay in zip(slices, behind, strict=True)])
            backward = None if self.stashing else weights
            computed = yield Compute(forward, version - max(behind), backward_weights=backward)
            mean = yield from compressor.mean(computed.gradient, role.everybody)
            updater.update(weights, mean)
            kept.append(weights.clone())
            version += 1
            staleness = sum(behind) / len(behind)
            yield Updated(version, staleness, weights if role.number == 0 else None)


def _stage_slices(layout: WeightLayout, stages: int) -> list[slice]:
    """The part of the flat vector that each stage has."""
    count = len(layout.slices)
    if stages > count:
        raise FitError(f"{stages} stages were asked for, but the model has {count} parameters; choose fewer stages.")
    firsts = [layout.slices[count * stage // stages].start for stage in range(stages)]
    return [slice(a, b) for a, b in zip(firsts, [*firsts[1:], layout.size], strict=True)]
