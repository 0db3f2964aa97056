"""Routes among many devices: found one by one they are those of the tables, and groups of them are seen as they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from strategies import clusters

from env import routes as limits
from env.cluster import Cluster
from env.communication import times
from env.communication.formulas import Interconnect
from env.communication.times import host_size
from env.resizing import one_of_each, resized
from env.routes import Routes, pairs_among

HOSTS = Cluster.preset("2x8xH100-ib")


@given(clusters(min_devices=2, max_devices=5))
def test_routes_found_one_by_one_are_those_of_the_tables(cluster: Cluster) -> None:
    tables, single = Routes(cluster), Routes(cluster)
    source, target = (each.reshape(-1) for each in np.indices((cluster.n_devices, cluster.n_devices)))
    wanted = tables.latency_s[source, target], tables.bandwidth_bytes_per_s[source, target]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "TABLE_DEVICES", 0)
        for ours, theirs in zip(single.figures_of(source, target), wanted, strict=True):
            assert ours.tolist() == theirs.tolist()
        found = single.links_of(source, target)
    for ours, theirs in zip(found, tables.links_of(source, target), strict=True):
        assert ours.tolist() == theirs.tolist()
    assert all(single[pair] == tables[pair] for pair in tables)


@pytest.mark.parametrize("devices", [range(16), range(8), range(12), range(0, 16, 2), [*range(0, 16, 8), *range(1, 9)]])
def test_hosts_of_many_devices_are_seen_by_their_neighbours(devices: range, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = host_size(HOSTS, devices)
    monkeypatch.setattr(times, "PAIRED_DEVICES", 0)
    assert host_size(HOSTS, devices) == wanted


def test_of_many_devices_some_pairs_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    every = pairs_among(np.arange(16))
    assert sorted(zip(*(each.tolist() for each in every), strict=True)) == [*itertools.permutations(range(16), 2)]
    wanted = Interconnect.among(HOSTS, range(16))
    monkeypatch.setattr(limits, "PAIRED_DEVICES", 4)
    source, target = pairs_among(np.arange(16))
    assert len(source) < 16 * 15
    assert (source != target).all()
    assert Interconnect.among(HOSTS, range(16)) == wanted


def test_ten_thousand_devices_have_routes_before_there_are_tables_of_them() -> None:
    cluster = resized(HOSTS, 10_240)
    assert cluster.routes[0, 10_239].links
    assert cluster.alike.max() == 0
    assert cluster.routes.figures_of(np.array([0, 0]), np.array([1, 8]))[1].tolist() == [
        HOSTS.routes[0, 1].bandwidth_bytes_per_s,
        HOSTS.routes[0, 8].bandwidth_bytes_per_s,
    ]
    assert "_tables" not in vars(cluster.routes)
    assert one_of_each(cluster).n_devices == 1
