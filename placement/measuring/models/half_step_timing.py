"""One half of the step of a model whose weights are cut in two, which tells how much longer it takes than half as long.

A product with half the output channels is half the work, and yet may take 0.6 of the time. Model: t_half = fixed + (e +
(1 - e) s) (t - fixed), with s, the half's share of the work, and e, the share of the remaining time that every part
pays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from env.cluster import Cluster
from env.device import Device, Link
from graphs.errors import PlacementError, StrategyError
from graphs.opgraph import OpGraph
from graphs.transforms.splitting.sharding import Axis
from graphs.transforms.splitting.splitter import copies_of, split_as
from placement.measuring.models.micro_batch_timing import with_unit_times
from placement.runtime.exchanging.exchanges import Exchange
from placement.runtime.parts.layouts import PartLayout, take
from placement.runtime.program.device_layout import Key
from placement.runtime.program.functional import Functional
from placement.runtime.program.routines import Routine
from placement.runtime.states.state_parts import StatePart, stored

_AXIS = Axis("tp", 2)
_STRATEGY = "tp2 | statistics=local"
_DIGITS = 2  # of `SplitRow.whole_time`: what was measured is not known to more


@dataclass(frozen=True, eq=False)
class HalfStep:
    """The code of the first of two devices between which weights are cut.

    Attributes:
        routine: it takes None, `Imagined` and what its keys say.
        exchanges: with the other device.
        states: what it stores, by name.
        inputs: its part of each argument, by path.
    """

    routine: Routine
    exchanges: tuple[Exchange, ...]
    states: Mapping[str, StatePart]
    inputs: Mapping[str, PartLayout]

    @staticmethod
    def of(step: Functional, place: torch.device) -> HalfStep | None:
        """Halves of a whole step; None where no weights can be cut, or the code not be run on parts."""
        from baselines.strategies.applied import applied  # it loads all transforms
        from graphs.transforms.strategy import Strategy
        from placement.runtime.planning.strategy_plan import StrategyPlan
        from placement.runtime.planning.values import Values
        from placement.runtime.writing.writer import write

        try:
            plan = StrategyPlan(Values(step, applied(step.program.graph, _TWO_DEVICES, Strategy.parse(_STRATEGY))))
            code = write(plan, 0, place)
        except PlacementError:
            return None
        states = {name: part for part in plan.states[0] for name in part.names}
        inputs = {path: plan.input_layout(path, 0) for path in plan.input_paths}
        return HalfStep(code.routine, code.exchanges, states, inputs)

    def parts_of(self, values: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """This device's parts of whole tensors, in memory of its own where a part is not all."""
        found = {}
        for kind, name in self.routine.takes:
            if kind == "drawn":
                continue
            whole = values[kind, name]
            if kind == "state" and name in self.states:
                found[kind, name] = stored(whole, self.states[str(name)])
            elif kind == "input" and name in self.inputs:
                found[kind, name] = take(whole, self.inputs[str(name)]).contiguous()
            else:
                found[kind, name] = whole
        return found


class Imagined:
    """`Collectives` of a device without others: it gets what it gave, or zeros of the shape that it would get."""

    def __init__(self, exchanges: tuple[Exchange, ...], place: torch.device) -> None:
        self._results: dict[int, tuple[torch.Tensor | None, ...]] = {}
        for exchange in exchanges:
            results = []
            for member in exchange.members:
                given, result = member.given(0).local_shape, member.result(0).local_shape
                is_same = given == result
                results.append(None if is_same else torch.zeros(result, dtype=member.dtype, device=place))
            self._results[exchange.number] = tuple(results)

    def start(self, number: int, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """As `Collectives.start`."""
        results = self._results[number]
        return tuple(own if other is None else other for own, other in zip(tensors, results, strict=True))

    def finish(self, handle: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """As `Collectives.finish`."""
        return handle


def with_whole_times(graph: OpGraph, column: int, halves_s: Mapping[int, float]) -> OpGraph:
    """A measured graph whose rows say what halves of ops take in full, of those rows by which weights are cut in two.

    Args:
        column: of its times, beside which the halves were measured.
        halves_s: op -> seconds of its half.
    """
    try:
        copies = copies_of(with_unit_times(graph), [_AXIS])
    except StrategyError:
        return graph
    assert copies is not None  # of an axis of two
    half = split_as(copies)
    here = ~np.isnan(half.graph.time_s[:, 0]) & (half.part == 0)
    work = dict(zip(half.origin[here].tolist(), half.graph.time_s[here, 0].tolist(), strict=True))
    rows = list(graph.split_rows)
    for op, half_s in halves_s.items():
        row, share = copies.mesh[0].row[op], float(copies.op_share[op, 0])
        fixed_s, time_s = float(graph.fixed_s[op, column]), float(graph.time_s[op, column])
        if row is None or share >= 1 or not fixed_s < time_s or not work[op]:
            continue
        taken = (half_s - fixed_s) / (time_s - fixed_s) * share / work[op]
        whole = round(min(max(0.0, (taken - share) / (1 - share)), 1.0), _DIGITS)
        rows[op] = tuple(replace(each, whole_time=whole) if each == row else each for each in rows[op])
    return replace(graph, split_rows=tuple(rows))


def _two_devices() -> Cluster:
    names = "one", "other"
    devices = tuple(Device(name, "cpu", 1 << 60, {"float32": 1e9}, 1e9) for name in names)
    links = tuple(Link(*ends, 1e9) for ends in (names, names[::-1]))
    return Cluster("two devices", devices, links)


_TWO_DEVICES = _two_devices()
