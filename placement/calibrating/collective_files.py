"""Collectives from the output of nccl-tests."""

from __future__ import annotations

from pathlib import Path

from env.cluster import Cluster
from env.communication.nccl_tests import read_nccl_tests
from env.device import MeasuredCollective
from graphs.errors import ClusterError
from graphs.formatting import format_bytes, format_seconds

_OVER_LINKS = 1.5  # what a data sheet, or a base described by hand, may say too little


def read_collectives(path: str | Path) -> list[MeasuredCollective]:
    """The collectives of a log of nccl-tests.

    Raises:
        ClusterError: it cannot be read, or is no such log.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ClusterError(f"cannot read collectives from {path}: {error.strerror}; check the path.") from None
    except ValueError:
        raise ClusterError(
            f"cannot read collectives from {path}: it is no text; give the output of nccl-tests."
        ) from None
    try:
        return read_nccl_tests(text)
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


def check_collective(one: MeasuredCollective, cluster: Cluster, where: str) -> None:
    """Raises: ClusterError: the cluster has too few devices for it, or none of its links is as fast.

    Every rank takes in, over the links that end at it, what it did not have: all of the tensor but its own part. A
    reduction in the network may spare a reduce-scatter that, and no other.
    """
    devices = len(cluster.compute_devices)
    if one.ranks > devices:
        raise ClusterError(
            f"{where} has collectives among {one.ranks} devices, and cluster {cluster.name!r} has {devices}; name the "
            "cluster of the log with --base."
        )
    into: dict[str, float] = {}
    for link in cluster.links:
        into[link.dst] = into.get(link.dst, 0.0) + (link.nominal_bytes_per_s or link.bandwidth_bytes_per_s)
    most = max((into.get(cluster.devices[k].name, 0.0) for k in cluster.compute_devices.tolist()), default=0.0)
    share = 1.0 / one.ranks if one.kind in ("reduce_scatter", "all_to_all") else 1.0
    for size, seconds in zip(one.sizes, one.seconds, strict=True):
        moved = size * share * (one.ranks - 1) / one.ranks
        if moved > _OVER_LINKS * most * seconds:
            raise ClusterError(
                f"{where} has an {one.kind} of {format_bytes(size)} among {one.ranks} in {format_seconds(seconds)}, "
                f"faster than the links of {cluster.name!r} carry it ({format_bytes(most)}/s into a device); check "
                "the log and --base."
            )
