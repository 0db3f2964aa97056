"""The step of a model in micro-batches on one device, which tells what every part of an op takes in full.

Each part is launched as the whole op is, and reads the same weights, so n parts take longer than the whole: n times
what is fixed, and W times the rest of its time t, where W is their work in whole ops (1, or a little more). Their sum
is measured, and so fixed = (sum - W t) / (n - W).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from env.cluster import Cluster
from env.device import Device
from graphs.errors import PlacementError
from graphs.opgraph import OpGraph
from graphs.records import ANY_DEVICE
from graphs.transforms.splitting.splitter import BATCH, chunk
from placement.runtime.program.functional import Functional
from placement.runtime.program.routines import Routine

_MICRO_BATCHES = (4, 2)  # as many as leave two samples to each: statistics of a single one do not exist


@dataclass(frozen=True, eq=False)
class MicroBatchStep:
    """One device's code for a step in micro-batches.

    Attributes:
        routine: it takes None, `Nobody` and what its keys say.
        copies: op -> how many parts of it run in a step; what is not cut is left out.
        work: op -> what these parts do together, in work of the whole op: 1, or more where they do some of it twice.
    """

    routine: Routine
    copies: Mapping[int, int]
    work: Mapping[int, float]

    @staticmethod
    def of(step: Functional, place: torch.device) -> MicroBatchStep | None:
        """Parts of a whole step; None where its batch is unknown, or too small, or cannot be cut."""
        from baselines.strategies.applied import applied  # it loads all transforms
        from graphs.transforms.strategy import Strategy
        from placement.runtime.planning.strategy_plan import StrategyPlan
        from placement.runtime.planning.values import Values
        from placement.runtime.writing.writer import write

        graph = step.program.graph
        for number in _MICRO_BATCHES:
            if 2 * number > _samples(graph):
                continue
            try:  # some models cannot be cut, or not be run in parts
                strategy = Strategy.parse(f"mb{number} | statistics=local")
                routine = write(StrategyPlan(Values(step, applied(graph, _ONE_DEVICE, strategy))), 0, place).routine
                return MicroBatchStep(routine, *_counted(graph, chunk(with_unit_times(graph), number)))
            except PlacementError:
                continue
        return None

    def fixed_s(self, whole_s: Mapping[int, float], parts_s: Mapping[int, float]) -> dict[int, float]:
        """The fixed part of each op that is cut, from one run of the whole and one in parts; noise may make it < 0."""
        return {
            op: (parts_s[op] - self.work[op] * whole_s[op]) / (self.copies[op] - self.work[op])
            for op in self.copies
            if op in whole_s and op in parts_s
        }


class Nobody:
    """`Collectives` of a device that is alone: an exchange gives what it got."""

    def start(self, number: int, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """As `Collectives.start`."""
        return tensors

    def finish(self, handle: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """As `Collectives.finish`."""
        return handle


_ONE_DEVICE = Cluster("one device", (Device("one", "cpu", 1 << 60, {"float32": 1e9}, 1e9),), ())


def _samples(graph: OpGraph) -> int:
    """In the batch; 0 where no input says so."""
    rows = (row for kind, rows in zip(graph.kinds, graph.split_rows, strict=True) if kind == "input" for row in rows)
    return max((row.extent for row in rows if row.axis == BATCH), default=0)


def with_unit_times(graph: OpGraph) -> OpGraph:
    """The graph as if each of its ops took a second, so that times of parts are shares of the work."""
    ones = np.ones((graph.n_ops, 1))
    return replace(graph, time_keys=(ANY_DEVICE,), time_s=ones, fixed_s=0 * ones)


def _counted(graph: OpGraph, cut: Any) -> tuple[dict[int, int], dict[int, float]]:
    """`MicroBatchStep.copies` and ``work``, by a graph whose ops all took a second before it was cut."""
    is_copy = ~np.isnan(cut.graph.time_s[:, 0])
    origin = cut.origins[cut.origin_ptr[:-1]][is_copy]
    copies = np.bincount(origin, minlength=graph.n_ops)
    work = np.bincount(origin, cut.graph.time_s[is_copy, 0], minlength=graph.n_ops)
    parted = np.flatnonzero(copies - work > 0.5).tolist()
    return {op: int(copies[op]) for op in parted}, {op: float(work[op]) for op in parted}
