"""One Ray cluster of two cores for all tests of this folder that need one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Address of a Ray cluster with two cores and 128 MiB of shared memory, to which this process is not connected."""
    pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own: files that it leaves to Python to close
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 2, "object_store_memory": 128 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        yield cluster.address
        cluster.shutdown()
