"""`Alternative`: another way to run the graph, which a search over strategies has scored beside its answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from graphs.transforms.strategy import Strategy

ONE_DEVICE = "one device"
SAVING = ""  # the family of strategies on one device: micro-batches, layers that run again
DDP, FSDP = "ddp", "fsdp"  # over all devices with nothing else, as most scripts have them
PLACEMENT = "placement"  # of the graph as it is, each op whole on one of the devices


@dataclass(frozen=True)
class Alternative:
    """A way to run the graph, scored.

    Attributes:
        name: `ONE_DEVICE`, `PLACEMENT`, `DDP`, `FSDP`, or the family of its strategy, by names of
            `baselines.strategies.searching.families.FAMILIES`.
        strategy: ``none`` for a placement of the graph as it is.
        step_time_s: seconds; None where it does not fit.
        peak_bytes: memory of the fullest device; None where it does not fit.
        device: the name of the one of `ONE_DEVICE`, where not all devices are like it; else "".
    """

    name: str
    strategy: Strategy
    step_time_s: float | None
    peak_bytes: int | None
    device: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields, the strategy as its text."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"strategy": self.strategy.text}

    def speedup(self, single_s: float | None) -> float | None:
        """How many times faster than the best single device takes; None where either does not fit."""
        if single_s is None or self.step_time_s is None:
            return None
        return single_s / self.step_time_s if self.step_time_s > 0 else 1.0


@dataclass(frozen=True)
class Rung:
    """One step of the ladder from plain replicas to the answer.

    Attributes:
        name: in `baselines.strategies.searching.ladder.RUNGS`.
        step_time_s: seconds.
        peak_bytes: memory of the fullest device, which it needs.
        fits: whether every device has as much.
        is_estimated: the figures are estimates, and no scores.
    """

    name: str
    strategy: Strategy
    step_time_s: float
    peak_bytes: int
    fits: bool
    is_estimated: bool


@dataclass(frozen=True)
class KeptTo:
    """The tool that an answer keeps to, and what it costs to keep to it.

    Attributes:
        tool: its name, a key of `placement.exporters.registry.EXPORTERS`.
        faster: text of the fastest strategy found that the tool cannot run, where it is faster than the answer; or "".
        faster_s: its step time; None without one.
        lacks: why the tool cannot run it; "" without one.
    """

    tool: str
    faster: str = ""
    faster_s: float | None = None
    lacks: str = ""


def listed(found: Iterable[Alternative]) -> tuple[Alternative, ...]:
    """Fastest first, each once; what does not fit comes last."""
    return tuple(sorted(dict.fromkeys(found), key=lambda one: (one.step_time_s is None, one.step_time_s or 0.0)))


def best_of_each(found: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """The fastest of each name, in the order given."""
    first: dict[str, Alternative] = {}
    for one in found:
        first.setdefault(one.name, one)
    return tuple(first.values())


def on_one_device(found: Iterable[Alternative]) -> Alternative | None:
    """One device; where the graph as it is fits on none, its fastest strategy on one; None where none fits."""
    fitting = [one for one in found if one.step_time_s is not None and one.name in (ONE_DEVICE, SAVING)]
    return min(fitting, key=lambda one: (one.name != ONE_DEVICE, one.step_time_s), default=None)


def single_s(found: Iterable[Alternative]) -> float | None:
    """The step time of `on_one_device`; None where none fits."""
    one = on_one_device(found)
    return None if one is None else one.step_time_s


def front(found: Iterable[Alternative]) -> tuple[Alternative, ...]:
    """Alternatives that no other one beats both in time and in memory, fastest first."""
    kept: list[Alternative] = []
    for one in sorted(found, key=lambda one: (one.step_time_s or 0.0, one.peak_bytes or 0)):
        if one.peak_bytes is not None and (not kept or one.peak_bytes < (kept[-1].peak_bytes or 0)):
            kept.append(one)
    return tuple(kept)
