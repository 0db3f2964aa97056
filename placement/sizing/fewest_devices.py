"""The smallest number of devices of a cluster that a strategy fits on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baselines.strategies.searching.space import frugal_strategies
from env.cluster import Cluster
from env.resizing import resized
from graphs.errors import ClusterError, StrategyError
from graphs.formatting import format_bytes, format_seconds, show
from graphs.opgraph import OpGraph

if TYPE_CHECKING:
    from baselines.strategies.searching.records import Estimate

MOST_DEVICES = 1024  # no more are tried


@dataclass(frozen=True)
class FewestDevices:
    """The smallest number of devices found for a graph.

    Attributes:
        devices: that the cluster has.
        at_least: fewer cannot hold what is kept, however it is cut.
        count: on so many a strategy fits; None where on none that was tried.
        tried: the largest number tried.
        estimate: of the fastest frugal strategy that fits; where none does, of the one that lacks least on `tried`.
    """

    graph: str
    cluster: str
    devices: int
    at_least: int
    count: int | None
    tried: int
    estimate: Estimate | None

    def headline(self) -> str:
        """The advice in a sentence."""
        graph, cluster = show(self.graph), show(self.cluster)
        if self.estimate is None:
            return f"{graph} has no strategy for devices like those of {cluster}; at least {self.at_least} are needed."
        if self.count is None:
            return (
                f"{graph} fits on no number of devices like those of {cluster} up to {self.tried}: "
                f"{self.estimate.strategy} lacks {format_bytes(self.estimate.missing_bytes)} on one."
            )
        devices = "devices" if self.count > 1 else "device"
        fewer = f" Fewer than {self.at_least} cannot hold what is kept." if self.at_least > 1 else ""
        return (
            f"{graph} fits on {self.count} {devices} like those of {cluster}, with strategy {self.estimate.strategy}, "
            f"about {format_seconds(self.estimate.step_time_s)} a step.{fewer}"
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


def fewest_devices(graph: OpGraph, cluster: Cluster, most: int = MOST_DEVICES, more_than: int = 0) -> FewestDevices:
    """Try more and more devices of a cluster, and hosts like its own, until a frugal strategy is estimated to fit.

    Args:
        most: devices to try.
        more_than: so many are known not to do.
    """
    usable = max(cluster.devices[d].usable_bytes for d in cluster.compute_devices.tolist())
    at_least = max(1, -(-int(graph.kept_bytes.sum()) // max(1, usable)))
    tried, found, has = 0, None, len(cluster.compute_devices)
    for count in range(max(at_least, more_than + 1), most + 1):
        try:
            fewer = resized(cluster, count)
        except ClusterError:  # it has no hosts to repeat
            break
        estimates = list(_estimates(graph, fewer, count))
        tried, best = count, min(estimates, key=lambda e: (e.missing_bytes, e.step_time_s), default=None)
        found = best or found
        if best is not None and best.fits:
            return FewestDevices(graph.name, cluster.name, has, at_least, count, tried, best)
    return FewestDevices(graph.name, cluster.name, has, at_least, None, tried or at_least, found)


def _estimates(graph: OpGraph, cluster: Cluster, count: int) -> Iterator[Estimate]:
    from baselines.strategies.searching.estimator import Estimator  # loads all transforms

    estimator = Estimator(graph, cluster)
    for strategy in frugal_strategies(graph, count):
        try:
            yield estimator.estimate(strategy)
        except StrategyError:
            continue
