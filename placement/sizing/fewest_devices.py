"""The smallest number of devices of a cluster that a strategy fits on."""

from __future__ import annotations

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
    from baselines.strategies.estimating.estimator import Estimator
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
        if self.count is None and not self.is_whole:
            return (
                f"No strategy that there was time for fits {graph} on {self.tried} devices like those of {cluster}: "
                f"{self.estimate.strategy} lacks {format_bytes(self.estimate.missing_bytes)} on one."
            )
        if self.count is None:
            return (
                f"{graph} fits on no number of devices like those of {cluster} up to {self.tried}: "
                f"{self.estimate.strategy} lacks {format_bytes(self.estimate.missing_bytes)} on one."
            )
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
    graph: OpGraph, cluster: Cluster, most: int = MOST_DEVICES, more_than: int = 0, tool: ToolLimits = ANY_TOOL
) -> FewestDevices:
    """Try more and more devices of a cluster, and hosts like its own, until a frugal strategy is estimated to fit.

    Args:
        most: devices to try.
        more_than: so many are known not to do.
        tool: limits of what runs the strategy, as far as its words say.
    """
    from baselines.strategies.estimating.estimator import Estimator  # loads all transforms

    at_least = _at_least(graph, cluster)
    tried, found, has = 0, None, len(cluster.compute_devices)
    for count in range(max(at_least, more_than + 1), most + 1):
        try:
            fewer = resized(cluster, count)
        except ClusterError:  # it has no hosts to repeat
            break
        estimates = list(_estimates(Estimator(graph, fewer), frugal_strategies(graph, count), tool))
        tried, best = count, min(estimates, key=lambda e: (e.missing_bytes, e.step_time_s), default=None)
        found = best or found
        if best is not None and best.fits:
            best = fastest_that_fits(graph, fewer, count, tool)
            return FewestDevices(graph.name, cluster.name, has, at_least, count, tried, best)
    return FewestDevices(graph.name, cluster.name, has, at_least, None, tried or at_least, found)


def enough_devices(
    graph: OpGraph, cluster: Cluster, most: int, more_than: int, seconds: float, tool: ToolLimits = ANY_TOOL
) -> FewestDevices:
    """As `fewest_devices`, in so many seconds of work: by halves, and any strategy that fits is enough.

    The largest number comes first, which is twice what is needed at least where that is more than `most`. Where they
    run out fewer may do.
    """
    budget = Budget(seconds)
    at_least, has = _at_least(graph, cluster), len(cluster.compute_devices)
    most = max(most, min(2 * at_least, MOST_DEVICES))
    found, is_whole = None, True
    if max(at_least, more_than) <= most:
        found, is_whole = _one_that_fits(graph, cluster, most, budget, tool)
    if found is None or not found.fits:
        tried = at_least if found is None else most
        return FewestDevices(graph.name, cluster.name, has, at_least, None, tried, found, is_whole)
    too_few, count = max(at_least - 1, more_than), most
    while too_few + 1 < count and not budget.over():
        half = (too_few + count) // 2
        other, _ = _one_that_fits(graph, cluster, half, budget, tool)
        if other is not None and other.fits:
            found, count = other, half
        else:
            too_few = half
    return FewestDevices(graph.name, cluster.name, has, at_least, count, count, found)


def _one_that_fits(
    graph: OpGraph, cluster: Cluster, count: int, budget: Budget, tool: ToolLimits
) -> tuple[Estimate | None, bool]:
    """The first frugal strategy that fits, else the one that lacks least, and whether all were looked at."""
    from baselines.strategies.estimating.estimator import Estimator  # loads all transforms

    best: Estimate | None = None
    try:
        estimator = Estimator(graph, resized(cluster, count))
        for estimate in _estimates(estimator, frugal_strategies(graph, count), tool):
            if best is None or estimate.missing_bytes < best.missing_bytes:
                best = estimate
            budget.spend(1, prices.estimate_s(graph))
            if best.fits or budget.over():
                return best, False
    except ClusterError:  # it has no hosts to repeat
        return None, True
    return best, True


def _at_least(graph: OpGraph, cluster: Cluster) -> int:
    """Fewer devices cannot hold what is kept."""
    usable = max(cluster.devices[d].usable_bytes for d in cluster.compute_devices.tolist())
    return int(max(1, -(-int(graph.kept_bytes.sum()) // max(1, usable))))


def fastest_that_fits(graph: OpGraph, cluster: Cluster, count: int, tool: ToolLimits = ANY_TOOL) -> Estimate | None:
    """The fastest by estimate of the frugal strategies for so many devices and those that save less, if one fits."""
    from baselines.strategies.estimating.estimator import Estimator  # loads all transforms

    estimator = Estimator(graph, cluster)
    fitting = (
        next((one for one in _estimates(estimator, ways, tool) if one.fits), None) for ways in less_frugal(graph, count)
    )
    return min((one for one in fitting if one is not None), key=lambda one: one.step_time_s, default=None)


def _estimates(estimator: Estimator, strategies: Iterable[Strategy], tool: ToolLimits) -> Iterator[Estimate]:
    for strategy in strategies:
        if tool.lacks(strategy):
            continue
        try:
            yield estimator.estimate(strategy)
        except StrategyError:
            continue
