"""The levels of a cluster's network."""

from __future__ import annotations

import math

import networkx as nx
import numpy as np
import pytest
from cases.partitioned_graphs import hosts, row
from hypothesis import given
from strategies import clusters

from baselines.network_levels import NetworkLevel, network_levels
from env.cluster import Cluster
from env.problem import Problem

# -- network levels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("4xV100-pcie", [NetworkLevel(4, 12e9)]),
        ("16xV100-10gbe", [NetworkLevel(4, 12e9), NetworkLevel(4, 1.18e9)]),
        ("2x8xH100-ib", [NetworkLevel(8, 450e9), NetworkLevel(2, 50e9)]),
        ("8xV100-nvlink", [NetworkLevel(8, 50e9)]),  # double links make a ring of all eight
    ],
)
def test_levels_of_real_machines(preset: str, expected: list[NetworkLevel]) -> None:
    problem = Problem(row([1.0]), Cluster.preset(preset, rates="peak"))
    levels, devices = network_levels(problem, np.arange(problem.cluster.n_devices))
    assert list(levels) == expected
    assert devices.tolist() == list(range(problem.cluster.n_devices))


@given(clusters(min_devices=1, max_devices=5))
def test_a_level_hangs_together_at_its_bandwidth(cluster: Cluster) -> None:
    problem = Problem(row([1.0]), cluster)
    levels, devices = network_levels(problem, np.arange(cluster.n_devices))
    assert sorted(devices.tolist()) == list(range(cluster.n_devices))
    both = np.minimum(problem.bandwidth_bytes_per_s, problem.bandwidth_bytes_per_s.T)
    sizes = {1} if cluster.n_devices > 1 else set()
    expected = [] if sizes else [NetworkLevel(1, math.inf)]
    for least in sorted({both[a, b] for a in range(cluster.n_devices) for b in range(a)}, reverse=True):
        joined = nx.Graph()
        joined.add_nodes_from(range(cluster.n_devices))
        joined.add_edges_from(np.argwhere(both >= least).tolist())
        counts = {len(part) for part in nx.connected_components(joined)}
        if len(counts) == 1 and max(counts) > max(sizes):
            expected.append(NetworkLevel(max(counts) // max(sizes), least))
            sizes |= counts
    assert list(levels) == expected


def test_levels_of_parts_of_a_cluster() -> None:
    problem = Problem(row([1.0]), hosts(2, 3, inside=8.0, between=1.0))
    levels, devices = network_levels(problem, np.arange(6))
    assert list(levels) == [NetworkLevel(3, 8.0), NetworkLevel(2, 1.0)]
    assert devices.tolist() == [0, 2, 4, 1, 3, 5]
    levels, devices = network_levels(problem, np.array([0, 1, 2]))  # two of one host, one of the other
    assert list(levels) == [NetworkLevel(3, 1.0)]
    levels, devices = network_levels(problem, np.array([4]))
    assert (list(levels), devices.tolist()) == ([NetworkLevel(1, math.inf)], [4])
