"""The smallest number of devices of a cluster that a strategy fits on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baselines import prices
from baselines.budget import Budget
from baselines.strategies.searching.records import ANY_TOOL, ToolLimits
from baselines.strategies.searching.space import frugal_strategies, less_frugal
from env.cluster import Cluster
from env.resizing import resized
from graphs.errors import ClusterError, StrategyError
from graphs.formatting import format_bytes, format_seconds, show
from graphs.opgraph import OpGraph

if TYPE_CHECKING:
    from baselines.strategies.estimating.estimate import Estimate
    from graphs.transforms.strategy import Strategy

MOST_DEVICES = 1024  # no more are tried


@dataclass(frozen=True)
class FewestDevices:
    """The smallest number of devices found for a graph.

    Attributes:
        devices: that the cluster has.
        at_least: fewer cannot hold what is kept, however it is cut.
        count: on so many a strategy fits; None where on none that was tried.
        tried: the largest number tried.
        estimate: of the fastest strategy that fits; where none does, of the one that lacks least on `tried`.
        is_whole: whether all frugal strategies were looked at, where none fits.
        stack: a word for how its ops become kernels, or "".
    """

    graph: str
    cluster: str
    devices: int
    at_least: int
    count: int | None
    tried: int
    estimate: Estimate | None
    is_whole: bool = True
    stack: str = ""

    def headline(self) -> str:
        """The advice in a sentence."""
        graph, cluster = show(self.graph), show(self.cluster)
        if self.estimate is None:
            return (
                f"At least {self.at_least} devices like the largest of {cluster} are needed for what {graph} keeps; "
                f"how many would do was not tried, as {cluster} has unlike devices or hosts and cannot be made larger."
            )
        if self.count is None:
            fits = f"{graph} fits on no number of devices like those of {cluster} up to {self.tried}"
            if not self.is_whole:
                fits = (
                    f"No strategy that there was time for fits {graph} on {self.tried} devices like those of {cluster}"
                )
            lacks = format_bytes(self.estimate.missing_bytes)
            return f"{fits}: {self.estimate.strategy} lacks {lacks} on one."
        devices = "devices" if self.count > 1 else "device"
        fewer = f" Fewer than {self.at_least} cannot hold what is kept." if self.at_least > 1 else ""
        how = "as it is" if self.estimate.strategy.is_none else f"with strategy {self.estimate.strategy}"
        stack = f" {self.stack}" if self.stack else ""
        return (
            f"{graph} fits on {self.count} {devices} like those of {cluster}, {how}, about "
            f"{format_seconds(self.estimate.step_time_s)} a step{stack}.{fewer}"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        found = self.estimate
        return {
            "cluster": self.cluster,
            "at_least": self.at_least,
            "count": self.count,
            "tried": self.tried,
            "strategy": None if found is None else found.strategy.text,
            "step_time_s": None if found is None else found.step_time_s,
            "peak_bytes": None if found is None else found.peak_bytes,
            "missing_bytes": None if found is None else found.missing_bytes,
        }


def fewest_devices(
    graph: OpGraph, cluster: Cluster, most: int = MOST_DEVICES, tool: ToolLimits = ANY_TOOL
) -> FewestDevices:
    """Try more and more devices of a cluster, and hosts like its own, until a frugal strategy is estimated to fit.

    Args:
        most: devices to try.
        tool: limits of what runs the strategy, as far as its words say.
    """
    search = _Search(graph, cluster, tool)
    tried, found = 0, None
    for count in range(search.at_least, most + 1):
        estimates = search.frugal(count)
        if estimates is None:
            break
        best = min(estimates, key=lambda e: (e.missing_bytes, e.step_time_s), default=None)
        tried, found = count, best or found
        if best is not None and best.fits:
            return search.found(count, count, fastest_that_fits(graph, resized(cluster, count), count, tool))
    return search.found(None, tried or search.at_least, found)


def enough_devices(
    graph: OpGraph, cluster: Cluster, most: int, more_than: int, seconds: float, tool: ToolLimits = ANY_TOOL
) -> FewestDevices:
    """As `fewest_devices`, in so many seconds of work: by halves, and any strategy that fits is enough.

    The largest number comes first, which is twice what is needed at least where that is more than `most`. Where the
    seconds run out fewer devices may do. `more_than`: so many are known not to do.
    """
    budget, search = Budget(seconds), _Search(graph, cluster, tool)
    most = max(most, min(2 * search.at_least, MOST_DEVICES))
    found, is_whole = None, True
    if max(search.at_least, more_than) <= most:
        found, is_whole = search.one_that_fits(most, budget)
    if found is None or not found.fits:
        return search.found(None, search.at_least if found is None else most, found, is_whole)
    too_few, count = max(search.at_least - 1, more_than), most
    while too_few + 1 < count and not budget.over():
        half = (too_few + count) // 2
        other, _ = search.one_that_fits(half, budget)
        if other is not None and other.fits:
            found, count = other, half
        else:
            too_few = half
    return search.found(count, count, found)


@dataclass(frozen=True)
class _Search:
    """Frugal strategies over numbers of devices of one cluster."""

    graph: OpGraph
    cluster: Cluster
    tool: ToolLimits

    @property
    def at_least(self) -> int:
        """Fewer devices cannot hold what is kept."""
        usable = max(self.cluster.devices[d].usable_bytes for d in self.cluster.compute_devices.tolist())
        return int(max(1, -(-int(self.graph.kept_bytes.sum()) // max(1, usable))))

    def frugal(self, count: int) -> Iterator[Estimate] | None:
        """Estimates of the frugal strategies for so many devices; None where the cluster has no hosts to repeat."""
        try:
            return _estimates(self.graph, resized(self.cluster, count), frugal_strategies(self.graph, count), self.tool)
        except ClusterError:
            return None

    def one_that_fits(self, count: int, budget: Budget) -> tuple[Estimate | None, bool]:
        """The first frugal strategy that fits, else the one that lacks least, and whether all were looked at."""
        best: Estimate | None = None
        for estimate in self.frugal(count) or ():
            if best is None or estimate.missing_bytes < best.missing_bytes:
                best = estimate
            budget.spend(1, prices.estimate_s(self.graph))
            if best.fits or budget.over():
                return best, False
        return best, True

    def found(self, count: int | None, tried: int, best: Estimate | None, is_whole: bool = True) -> FewestDevices:
        """The answer."""
        names, has = (self.graph.name, self.cluster.name), len(self.cluster.compute_devices)
        return FewestDevices(*names, has, self.at_least, count, tried, best, is_whole)


def fastest_that_fits(graph: OpGraph, cluster: Cluster, count: int, tool: ToolLimits = ANY_TOOL) -> Estimate | None:
    """The fastest by estimate of the frugal strategies for so many devices and those that save less, if one fits."""
    kinds = (_estimates(graph, cluster, ways, tool) for ways in less_frugal(graph, count))
    fitting = [next((one for one in estimates if one.fits), None) for estimates in kinds]
    return min((one for one in fitting if one is not None), key=lambda one: one.step_time_s, default=None)


def _estimates(
    graph: OpGraph, cluster: Cluster, strategies: Iterable[Strategy], tool: ToolLimits
) -> Iterator[Estimate]:
    from baselines.strategies.estimating.estimator import Estimator  # loads all transforms

    estimator = Estimator(graph, cluster)
    for strategy in strategies:
        if not tool.lacks(strategy):
            with contextlib.suppress(StrategyError):
                yield estimator.estimate(strategy)
