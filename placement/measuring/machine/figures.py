"""Measured figures and how far they are to be trusted: their spread, and what other processes took meanwhile."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from placement.processes.processes import usable_cores

if TYPE_CHECKING:
    from env.cluster import Cluster
    from placement.measuring.machine.links import LinkSpeed
    from placement.measuring.machine.speeds import DeviceSpeed

MOST_SPREAD = 0.25
MOST_LINK_SPREAD = 0.5  # of a transfer, in which two processes take part
LEAST_SHARE = 0.9
MOST_OTHERS = 0.1
MOST_APART = 2.0  # what equal devices may differ by; slow and fast cores of one CPU do by less
_DOUBTFUL = "; doubtful: "  # in the source of a cluster, before the reasons
_MOST_DOUBTS = 3

AllGather = Callable[[float], list[float]]


def spread(samples: Sequence[float]) -> float:
    """Interquartile range; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return third - first


def relative_spread(samples: Sequence[float]) -> float:
    """Interquartile range by the median; 0 for fewer than two samples."""
    median = statistics.median(samples)
    return spread(samples) / median if median > 0 else 0.0


@dataclass(frozen=True)
class Figure:
    """One number that was measured.

    Attributes:
        value: of the median sample.
        spread: interquartile range of the samples by their median.
        share: of a core, that the process had while it measured.
        is_apart: it differs from those of equal devices more than they can.
    """

    value: float
    spread: float
    share: float = 1.0
    is_apart: bool = False

    @property
    def is_doubtful(self) -> bool:
        """True if it is likely to be another one the next time."""
        return self.is_apart or self.spread > MOST_SPREAD or self.share < LEAST_SHARE

    @classmethod
    def of(cls, samples: Sequence[float], share: float = 1.0) -> Figure:
        """The median and spread of some samples."""
        return cls(statistics.median(samples), relative_spread(samples), share)


def alone(value: float) -> list[float]:
    """An `AllGather` for where nobody else measures."""
    return [value]


def settled(measure: Callable[[], Figure | None], retries: int, all_gather: AllGather = alone) -> Figure | None:
    """Measure, and measure again as long as the figure of any worker is doubtful; the best one of this worker.

    All workers begin at the same time, and do so again.

    Args:
        measure: the figure; None where the device has none.
        retries: how often to measure again at most.
        all_gather: what each worker gives here, by rank, once all are there.
    """
    best: Figure | None = None
    for _ in range(1 + retries):
        all_gather(0.0)
        figure = measure()
        values = all_gather(figure.value if figure is not None else 0.0)
        if figure is not None:
            figure = replace(figure, is_apart=max(values) > MOST_APART * min(values))
            best = figure if best is None else min(best, figure, key=_doubt)
        if not any(all_gather(float(best is not None and best.is_doubtful))):
            break
    return best


def _doubt(figure: Figure) -> tuple[bool, float, float]:
    return figure.is_doubtful, -figure.share, figure.spread


# -- the rest of the machine -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CoreTime:
    """Processor time since some point in the past.

    Attributes:
        clock_s: when this was.
        busy_s: that the cores which this process may use were not idle, in all; what a hypervisor took counts.
        own_s: that this process and the children it has waited for computed.
    """

    clock_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> CoreTime | None:
        """None where the system does not tell (only Linux does)."""
        try:
            text = Path("/proc/stat").read_text(encoding="ascii")
        except OSError:
            return None
        busy_s = busy_core_s(text, usable_cores(), os.sysconf("SC_CLK_TCK"))
        return None if busy_s is None else cls(time.perf_counter(), busy_s, sum(os.times()[:4]))

    def others(self, now: CoreTime | None, n_cores: int) -> float:
        """The share of so many cores that other processes had until then."""
        if now is None or now.clock_s <= self.clock_s:
            return 0.0
        others_s = (now.busy_s - self.busy_s) - (now.own_s - self.own_s)
        return min(1.0, max(0.0, others_s / ((now.clock_s - self.clock_s) * n_cores)))


def busy_core_s(text: str, cores: Sequence[int], ticks_per_s: int) -> float | None:
    """Seconds in which some cores were not idle, by the text of ``/proc/stat``; None where it does not list them."""
    total, wanted = 0, {f"cpu{core}" for core in cores}
    for line in text.splitlines():
        name, *numbers = line.split()
        if name in wanted and len(numbers) >= 8:
            wanted.discard(name)
            user, nice, system, _idle, _wait, interrupts, soft, stolen = map(int, numbers[:8])
            total += user + nice + system + interrupts + soft + stolen
    return None if wanted else total / ticks_per_s


# -- a machine -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredMachine:
    """This machine as it was measured.

    Attributes:
        cluster: the figures; ``source`` says where they are doubtful.
        speeds: the same of each device by name, with their spreads.
        links: the same of each link, by the names of its ends.
        others: the share of the processor time that other processes had meanwhile; None where that cannot be told.
        file: of the cache; None where it could not be written.
        is_cached: whether these figures are in it; else earlier ones, which are not doubtful, have stayed there.
    """

    cluster: Cluster
    speeds: Mapping[str, DeviceSpeed]
    links: Mapping[tuple[str, str], LinkSpeed]
    others: float | None = None
    file: Path | None = None
    is_cached: bool = False


def warn_of_doubts(cluster: Cluster) -> None:
    """Warn where the figures of a measured cluster are doubtful."""
    if is_doubtful(cluster):
        warnings.warn(
            f"the figures of cluster {cluster.name!r} are doubtful: {cluster.source.partition(_DOUBTFUL)[2]} Measure "
            "this machine again with `placement calibrate` while it does nothing else.",
            stacklevel=3,
        )


def with_doubts(found: MeasuredMachine) -> MeasuredMachine:
    """The same, its cluster saying why the figures are likely to be others the next time, where they are."""
    doubts = _doubts(found)
    if not doubts:
        return found
    return replace(found, cluster=replace(found.cluster, source=f"{found.cluster.source}{_DOUBTFUL}{doubts}."))


def is_doubtful(cluster: Cluster) -> bool:
    """True if a measured cluster says of itself that its figures may be others the next time."""
    return _DOUBTFUL in cluster.source


def _doubts(found: MeasuredMachine) -> str:
    doubts = []
    if found.others is not None and found.others > MOST_OTHERS:
        doubts.append(f"other processes had {found.others:.0%} of the processor time")
    models = {device.name: device.model for device in found.cluster.devices}
    of_equal: dict[tuple[str, str], list[float]] = {}
    for name, speed in found.speeds.items():
        for what, figure in speed.figures().items():
            of_equal.setdefault((models[name], what), []).append(figure.value)
            if figure.spread > MOST_SPREAD or figure.share < LEAST_SHARE:
                share = f" and had {figure.share:.0%} of a core" if figure.share < LEAST_SHARE else ""
                doubts.append(f"{what} of {name} has a spread of {figure.spread:.0%}{share}")
    for (model, what), values in of_equal.items():
        if max(values) > MOST_APART * min(values):
            times = max(values) / min(values)
            doubts.insert(0, f"{what} differs by a factor of {times:.1f} between equal devices ({model})")
    for (source, target), link in found.links.items():
        if link.spread > MOST_LINK_SPREAD:
            doubts.append(f"{source} to {target} has a spread of {link.spread:.0%}")
    more = f" and {len(doubts) - _MOST_DOUBTS} more" if len(doubts) > _MOST_DOUBTS else ""
    return "; ".join(doubts[:_MOST_DOUBTS]) + more
