"""A `Cluster` as JSON values, for files that hold one beside other things."""

from __future__ import annotations

import math
from typing import Any

from env.cluster import Cluster, Device, Link, MeasuredCollective
from env.fabric import fabric_from_dict
from env.rates import Rates
from graphs.errors import ClusterError

UNLIMITED = "inf"  # JSON has no infinity, which a link without a bandwidth limit needs


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Everything of a cluster; `cluster_from_dict` of it equals the cluster."""
    collectives = [each.to_dict() for each in cluster.collectives]
    return {
        "name": cluster.name,
        "summary": cluster.summary,
        "source": cluster.source,
        "communication": cluster.communication,
        "devices": [_plain(device.to_dict()) for device in cluster.devices],
        "links": [_plain(link.to_dict()) for link in cluster.links],
        **({"collectives": collectives} if collectives else {}),
        **({} if cluster.fabric is None else {"fabric": cluster.fabric.to_dict()}),
    }


def cluster_from_dict(data: Any) -> Cluster:
    """Read what `cluster_to_dict` wrote.

    Raises:
        ClusterError: a missing or unknown key, a wrong type, or a broken rule of `Cluster`.
    """
    try:
        devices = tuple(_device(_number(entry)) for entry in data["devices"])
        links = tuple(Link(**_number(entry)) for entry in data["links"])
        collectives = tuple(MeasuredCollective(**entry) for entry in data.get("collectives", ()))
        about = {key: data[key] for key in ("name", "summary", "source", "communication")}
        fabric = fabric_from_dict(data["fabric"]) if "fabric" in data else None
        return Cluster(devices=devices, links=links, collectives=collectives, fabric=fabric, **about)
    except (TypeError, KeyError, AttributeError) as error:
        raise ClusterError(f"the cluster is incomplete or has a wrong type ({error}).") from None


def _device(entry: dict[str, Any]) -> Device:
    if "rates" in entry:
        entry = entry | {"rates": Rates.from_dict(f"device {entry.get('name')!r}", entry["rates"])}
    return Device(**entry)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return UNLIMITED if value == math.inf else value


def _number(entry: Any) -> dict[str, Any]:
    result = {key: _number(value) if isinstance(value, dict) else value for key, value in entry.items()}
    return {key: math.inf if value == UNLIMITED and _is_rate(key) else value for key, value in result.items()}


def _is_rate(key: str) -> bool:
    return key not in ("name", "kind", "model", "src", "dst")
