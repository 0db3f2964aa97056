"""Collectives of a mesh: all groups along an axis at a time, simulated at some sizes and interpolated between."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from parallel.collective_graphs import star

from baselines.strategies.collective_costs import SIZES, CollectiveCosts, SideBySide
from env.cluster import Cluster, both_ways
from env.communication.formulas import ManyRanks, buffer_bytes
from env.communication.times import lone_collective_s, side_by_side
from env.presets.gpus import DEVICES
from graphs.errors import UnknownNameError
from graphs.transforms.collectives import ALGORITHMS

H100 = DEVICES["H100"]

MIB = 2**20


def costs(name: str, *shape: int) -> CollectiveCosts:
    cluster = Cluster.preset(name, rates="peak")
    return CollectiveCosts(cluster, np.arange(np.prod(shape)).reshape(shape))


def hosts(count: int, gpus: int) -> Cluster:
    """Hosts of H100, each with a network adapter of its own."""
    devices, links = [], []
    for h in range(count):
        for g in range(gpus):
            device = replace(H100, name=f"host{h}/gpu{g}")
            devices.append(device)
            links += both_ways(device.name, f"host{h}/switch", 450e9, 1.7e-6)
            links += both_ways(device.name, "network", 50e9, 7e-6)
    return Cluster("hosts", tuple(devices), tuple(links))


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
@pytest.mark.parametrize("algorithm", ["ring", "butterfly", "tree"])
def test_a_group_alone_takes_what_the_simulator_says(kind: str, algorithm: str) -> None:
    found = costs("8xH100-nvswitch", 1, 8)
    for size in SIZES:
        alone = lone_collective_s(found.cluster, range(8), kind, size, algorithm)
        assert found.seconds(kind, 0, size, algorithm) == pytest.approx(alone, rel=1e-12)
    size = 3 * MIB
    between = lone_collective_s(found.cluster, range(8), kind, size, algorithm)
    assert found.seconds(kind, 0, size, algorithm) == pytest.approx(between, rel=1e-3)


def test_the_quickest_algorithm_at_each_size() -> None:
    found = costs("2x8xH100-ib", 1, 16)
    sizes = np.array([0, 1e3, 1e6, 1e9, 1e10])
    each = np.array([found.seconds("all_reduce", 0, sizes, name) for name in ALGORITHMS])
    quickest = found.seconds("all_reduce", 0, sizes)
    np.testing.assert_allclose(quickest, each.min(axis=0))
    assert len(set(each.argmin(axis=0).tolist())) > 1
    assert found.seconds("all_reduce", 0, 1e6) == quickest[2]


def test_groups_that_share_a_port_wait_for_each_other() -> None:
    """Four rings over one port of each host take four times as long as one; inside hosts they do not meet."""
    shared = costs("16xV100-10gbe", 1, 4, 4)
    size = 64 * MIB
    one = lone_collective_s(shared.cluster, [0, 4, 8, 12], "all_reduce", size, "ring")
    assert shared.seconds("all_reduce", 0, size, "ring") == pytest.approx(4 * one, rel=0.05)
    (network,) = shared.networks(0)
    assert isinstance(network, SideBySide)
    assert len(network.groups) == 4
    inside = lone_collective_s(shared.cluster, range(4), "all_reduce", size, "ring")
    assert shared.seconds("all_reduce", 1, size, "ring") == pytest.approx(inside)
    assert len(shared.networks(1)) == 1  # four hosts that look alike


def test_groups_with_ports_of_their_own_do_not() -> None:
    found = costs("2x8xH100-ib", 1, 2, 8)
    alone = lone_collective_s(found.cluster, [0, 8], "all_reduce", 64 * MIB, "ring")
    assert found.seconds("all_reduce", 0, 64 * MIB, "ring") == pytest.approx(alone, rel=1e-9)


def test_stages_may_be_joined_differently() -> None:
    found = costs("8xV100-nvlink", 4, 2)
    seconds = [found.seconds("all_gather", 0, 64 * MIB, stage=stage) for stage in range(4)]
    assert seconds[0] == seconds[2] == pytest.approx(2 * seconds[1], rel=0.01)  # pairs of one and of two NVLinks


def test_one_rank_exchanges_nothing() -> None:
    found = costs("8xH100-nvswitch", 1, 1, 8)
    assert found.seconds("all_reduce", 0, np.array([0.0, 1e9])).tolist() == [0.0, 0.0]
    assert found.networks(0) == ()


def test_many_ranks_are_timed_by_formula() -> None:
    cluster = hosts(32, 4)
    found = CollectiveCosts(cluster, np.arange(128).reshape(1, 32, 4))
    (across,) = found.networks(0)
    assert isinstance(across, ManyRanks)
    assert across.ranks == 32
    assert found.seconds("all_gather", 0, 1e9, "ring") == pytest.approx(31 * 14e-6 + 1e9 * 31 / 32 / 50e9)
    (inside,) = found.networks(1)
    assert isinstance(inside, SideBySide)
    assert len(inside.groups) == 1


def test_one_size_exactly_with_the_buffers_it_needs() -> None:
    found = costs("2x8xH100-ib", 1, 2, 8)
    size = 12 * 2**20
    name = found.quickest("all_reduce", 1, size)
    each = {name: found.exactly("all_reduce", 1, 2**24, name)[0] for name in ALGORITHMS}
    assert each[name] == pytest.approx(min(each.values()))
    seconds, held = found.exactly("all_reduce", 1, size, "ring")
    assert seconds == pytest.approx(found.seconds("all_reduce", 1, size, "ring"), rel=1e-3)
    assert held == pytest.approx(size / 8, abs=8)  # a piece at a time
    assert found.exactly("all_gather", 1, size, "ring")[1] == pytest.approx(size * 7 / 8, abs=8)
    assert costs("2x8xH100-ib", 1, 16).quickest("all_reduce", 0, 10**9) == "hierarchical8"


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
@pytest.mark.parametrize("algorithm", ["ring", "sharded", "butterfly", "hierarchical", "doubling", "tree", "central"])
def test_buffers_by_formula_are_those_of_the_simulator(kind: str, algorithm: str) -> None:
    """For ranks that are powers of two; sums are made as pieces arrive."""
    cluster = star(16, 1e-6, 1e-9, 1e-12)
    for ranks in (4, 16):
        size = 65536 * ranks
        held = int(side_by_side(cluster, [range(ranks)], kind, size, algorithm).peak_bytes.max())
        assert held <= buffer_bytes(kind, algorithm, size, ranks) <= 2 * held


def test_bad_names_are_refused() -> None:
    found = costs("8xH100-nvswitch", 1, 8)
    with pytest.raises(UnknownNameError):
        found.seconds("all_reduce", 0, 1e6, "rings")
    with pytest.raises(UnknownNameError):
        found.seconds("all_sum", 0, 1e6)
