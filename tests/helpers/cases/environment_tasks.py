"""Clusters and tasks that several tests of environments take."""

from __future__ import annotations

from environment_cases import small_cluster

from env.cluster import Cluster


def gpus(memory_bytes: int) -> Cluster:
    """The two GPUs of the small cluster alone."""
    cluster = small_cluster(memory_bytes)
    return Cluster("gpus", cluster.devices[1:], cluster.links[-2:])
