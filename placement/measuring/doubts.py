"""`MeasuredMachine`: this machine's figures, and whether they are likely to be others the next time."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from env.cluster import Cluster
from placement.measuring.figures import LEAST_SHARE, MOST_APART, MOST_LINK_SPREAD, MOST_OTHERS, MOST_SPREAD
from placement.measuring.links import LinkSpeed
from placement.measuring.speeds import DeviceSpeed

_DOUBTFUL = "; doubtful: "  # in the source of a cluster, before the reasons
_MOST_DOUBTS = 3


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
            "this machine again with `placement clusters --measure` while it does nothing else.",
            stacklevel=3,
        )


def with_doubts(found: MeasuredMachine) -> MeasuredMachine:
    """The same, its cluster saying why the figures are likely to be others the next time, where they are."""
    doubts = _doubts(found)
    if not doubts:
        return found
    return replace(found, cluster=replace(found.cluster, source=f"{found.cluster.source}{_DOUBTFUL}{doubts}."))


def is_doubtful(cluster: Cluster) -> bool:
    """Whether a measured cluster says of itself that its figures may be others the next time."""
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
