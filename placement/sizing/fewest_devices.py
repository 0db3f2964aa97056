"""The smallest number of devices of a cluster that a strategy fits on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baselines.strategies.searching.space import divisors, has_batch_statistics
from env.cluster import Cluster
from env.resizing import resized
from graphs.errors import ClusterError, StrategyError
from graphs.formatting import format_bytes, format_seconds, show
from graphs.opgraph import OpGraph
from graphs.transforms.recomputing import unmatched
from graphs.transforms.strategy import MeshRule, Strategy

if TYPE_CHECKING:
    from baselines.strategies.searching.records import Estimate

MOST_DEVICES = 1024  # no more are tried
EACH_LAYER = ("*",)  # as `Strategy.recompute`


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


def frugal_strategies(graph: OpGraph, count: int) -> Iterator[Strategy]:
    """Strategies for so many devices that take little memory: each way to cut model and batch.

    Micro-batches of one sample, layers that run again and all storage in parts, where the graph is trained; a batch
    whose statistics count stays whole.
    """
    samples = graph.origin.batch_size or 1
    again = EACH_LAYER if can_recompute(graph) else ()
    has_statistics = has_batch_statistics(graph)
    for tensor in divisors(count):
        for stages in divisors(count // tensor):
            replicas = count // tensor // stages
            if replicas > samples:
                continue
            sizes = {"dp": replicas, "tp": tensor}
            mesh = tuple(MeshRule(name, size) for name, size in sizes.items() if size > 1)
            # Statistics of a batch are put together, and so cannot be taken micro-batch by micro-batch.
            micro_batches = samples // replicas if graph.is_training and not has_statistics else 1
            zero = 3 if replicas > 1 and graph.is_training else 0
            statistics = "sync" if has_statistics and replicas > 1 else "exact"
            yield Strategy(mesh, stages, micro_batches=micro_batches, zero=zero, recompute=again, statistics=statistics)


def can_recompute(graph: OpGraph) -> bool:
    """Whether it has a backward pass, and modules whose forward pass could run again."""
    return graph.is_training and not unmatched(graph, EACH_LAYER)


def _estimates(graph: OpGraph, cluster: Cluster, count: int) -> Iterator[Estimate]:
    from baselines.strategies.searching.estimator import Estimator  # loads all transforms

    estimator = Estimator(graph, cluster)
    for strategy in frugal_strategies(graph, count):
        try:
            yield estimator.estimate(strategy)
        except StrategyError:
            continue
