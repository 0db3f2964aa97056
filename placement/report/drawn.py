"""`Drawn`: ops and devices that a page draws one by one. Very large problems have more than that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphs.arrays import BoolArray
from graphs.opgraph import FloatArray, IntArray, OpGraph

if TYPE_CHECKING:
    from env.cluster import Cluster
    from env.simulation.simulator import Schedule

MAX_OPS = 60_000  # that have a bar each, of some 60 bytes
MAX_BARS = 40_000  # of a graph with more
MAX_TRANSFERS = 20_000  # of a schedule
MAX_DEVICES = 64
_Schedules = Sequence["Schedule"]


@dataclass(frozen=True, eq=False)
class Drawn:
    """Drawn parts of a graph and a cluster (n ops, b bars, D devices, p of them on the page).

    Attributes:
        bar_of: int64 [n], the bar of the timeline that stands for each op.
        op: int64 [b], the op that gives a bar its name and colours: of several the one that takes the most time.
        count: int64 [b], ops of each.
        devices: int64 [p], by number; all, or those that compute the most.
        place: int64 [D], where a device is on the page; others are at p, together.
        links: int64, numbers of those between the devices on the page.
    """

    bar_of: IntArray
    op: IntArray
    count: IntArray
    devices: IntArray
    place: IntArray
    links: IntArray

    @staticmethod
    def of(graph: OpGraph, cluster: Cluster, schedules: _Schedules, busy_s: FloatArray) -> Drawn:
        """Drawn parts for schedules, best first, or none; ``busy_s`` float64 [D] tells devices that compute."""
        n_devices = cluster.n_devices
        devices, links = np.arange(n_devices), np.arange(len(cluster.links))
        if n_devices > MAX_DEVICES:
            devices = np.sort(np.argsort(-busy_s, kind="stable")[:MAX_DEVICES])
            there = devices.tolist()
            links = np.array(sorted({i for a in there for b in there if a != b for i in cluster.routes[a, b].links}))
        place = np.full(n_devices, len(devices))
        place[devices] = np.arange(len(devices))
        bar_of, op = np.arange(graph.n_ops), np.arange(graph.n_ops)
        if graph.n_ops > MAX_OPS and schedules:
            bar_of, op = together(schedules[0], place < len(devices), MAX_BARS)
        elif graph.n_ops > MAX_OPS:  # nothing fits, and there is no timeline
            bar_of = bar_of * MAX_BARS // graph.n_ops
            op = np.searchsorted(bar_of, np.arange(MAX_BARS))
        return Drawn(bar_of, op, np.bincount(bar_of), devices, place, links.astype(np.int64))

    @property
    def has_others(self) -> bool:
        """Whether there are devices that are not on the page."""
        return len(self.place) > len(self.devices)

    def names(self, graph: OpGraph) -> list[str]:
        """Names of bars: one op's, and how many more there are."""
        rows = zip(self.op.tolist(), self.count.tolist(), strict=True)
        return [graph.op_names[i] + (f" and {count - 1:,} more" if count > 1 else "") for i, count in rows]

    def spans(self, schedule: Schedule) -> tuple[FloatArray, FloatArray]:
        """float64 [b] each: when bars begin and end; equal on devices that are not on the page."""
        start_s, end_s = np.full(len(self.op), np.inf), np.zeros(len(self.op))
        np.minimum.at(start_s, self.bar_of, schedule.op_start_s)
        np.maximum.at(end_s, self.bar_of, schedule.op_end_s)
        is_there = self.place[schedule.device[self.op]] < len(self.devices)
        return start_s, np.where(is_there, end_s, start_s)

    def transfers(self, schedule: Schedule) -> IntArray:
        """Numbers of those between devices on the page, in their order; where there are many, the longest."""
        ends = self.place[np.stack([schedule.transfer_source, schedule.transfer_target])]
        there = np.flatnonzero((ends < len(self.devices)).all(axis=0))
        if len(there) <= MAX_TRANSFERS:
            return there
        seconds = (schedule.transfer_end_s - schedule.transfer_start_s)[there]
        return np.sort(there[np.argsort(-seconds, kind="stable")[:MAX_TRANSFERS]])

    def routes(self, cluster: Cluster) -> list[list[int]]:
        """Links on the page from each device to each, as the page numbers both."""
        number = {link: k for k, link in enumerate(self.links.tolist())}
        ends = [*self.devices.tolist(), *([None] if self.has_others else [])]
        return [
            [] if a is None or b is None or a == b else [number[link] for link in cluster.routes[a, b].links]
            for a in ends
            for b in ends
        ]

    def left_out(self, graph: OpGraph, schedules: _Schedules) -> str:
        """Parts that are not drawn one by one, in words; "" where all are."""
        texts = []
        if len(self.op) < graph.n_ops:
            texts.append(f"{len(self.op):,} bars for {graph.n_ops:,} ops")
        most = max((len(schedule.transfer_tensor) for schedule in schedules), default=0)
        if most > MAX_TRANSFERS:
            texts.append(f"of up to {most:,} transfers the {MAX_TRANSFERS:,} that take the longest")
        if self.has_others:
            texts.append(f"of {len(self.place):,} devices the {len(self.devices)} that compute the most")
        return "; ".join(texts)


def together(schedule: Schedule, is_drawn: BoolArray, most: int) -> tuple[IntArray, IntArray]:
    """At most so many bars, and one more for each device, of ops that follow one another on a device.

    A bar has no idle time in it but what is too short to be seen. All ops of a device that is not drawn are one bar;
    ``is_drawn``: bool [D].

    Returns:
        int64 [n], the bar of each op, and int64 [b], the op of each bar that takes the most time.
    """
    n, device = len(schedule.device), schedule.device
    start_s, end_s = schedule.op_start_s, schedule.op_end_s
    order = np.lexsort((end_s, start_s, device))
    is_first, gap_s = np.ones(n, dtype=np.bool_), np.zeros(n)
    is_first[1:] = device[order][1:] != device[order][:-1]
    gap_s[1:] = start_s[order][1:] - end_s[order][:-1]
    # Gaps of a device add up to a step at most, so no more than half of the bars begin after one as long as this.
    visible_s = 2 * int(is_first.sum()) * float(end_s.max(initial=0.0)) / most
    can_begin = is_drawn[device[order]]
    is_first |= can_begin & (gap_s > visible_s)
    place = np.arange(n) - np.maximum.accumulate(np.where(is_first, np.arange(n), 0))
    is_first |= can_begin & (place % -(-2 * n // most) == 0)
    bar_of = np.empty(n, dtype=np.int64)
    bar_of[order] = np.cumsum(is_first) - 1
    longest = np.lexsort((start_s - end_s, bar_of))  # by bar, and in it the longest first
    return bar_of, longest[np.searchsorted(bar_of[longest], np.arange(int(is_first.sum())))]


def link_seconds(cluster: Cluster, schedule: Schedule) -> FloatArray:
    """float64 [L]: how long transfers are on each link, one after the other."""
    n_devices, result = cluster.n_devices, np.zeros(len(cluster.links))
    pair = schedule.transfer_source * n_devices + schedule.transfer_target
    seconds: Any = np.bincount(pair, schedule.transfer_end_s - schedule.transfer_start_s, n_devices * n_devices)
    for both in np.flatnonzero(seconds).tolist():
        source, target = divmod(both, n_devices)
        result[list(cluster.routes[source, target].links)] += seconds[both]
    return result
