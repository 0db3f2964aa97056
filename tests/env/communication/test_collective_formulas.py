"""Formulas of collectives against the simulator."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from parallel.collective_graphs import star, step_s

from env.cluster import Cluster
from env.communication.formulas import EXPANDED_RANKS, Interconnect, ManyRanks, collective_s, fused_s
from env.communication.times import lone_collective, lone_collective_s
from graphs.transforms.collectives import ALGORITHMS, KINDS, carried_out_by, reduce
from graphs.transforms.derived import Collective

RANKS = range(2, 17)
UNITS = (720720, 720720 * 1000)  # every number of ranks divides them
NETWORKS = (
    Interconnect(3.4e-6, 1 / 300e9),
    Interconnect(5e-5, 1 / 1.18e9, 3 / 900e9),
    Interconnect(1e-6, 1 / 450e9, 3 / 100e9),  # adding up takes longer than sending
    Interconnect(0.0, 1e-9, 1e-10),
)


OWN = [(kind, a) for kind in KINDS for a in ALGORITHMS if carried_out_by(kind, a) == a] + [("all_to_all", "ring")]


@pytest.mark.parametrize(("kind", "algorithm"), OWN)
def test_on_an_idle_network_the_simulator_finds_the_formula(kind: str, algorithm: str) -> None:
    for ranks, network in product(RANKS, NETWORKS):
        cluster = star(ranks, network.latency_s, network.s_per_byte, network.adding_s_per_byte)
        for size in (ranks * unit for unit in UNITS):
            found = step_s(reduce(lone_collective(kind, ranks, size), algorithm), cluster)
            assert found == pytest.approx(collective_s(kind, algorithm, size, ranks, network), rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_formulas_are_those_of_the_textbook(ranks: int) -> None:
    """Thakur et al. 2005, where all ranks work side by side."""
    n, p, a, b, g = 1e6, ranks, 3e-6, 1e-10, 2e-11
    network = Interconnect(a, b, g)
    lg, power = int(np.ceil(np.log2(p))), p & (p - 1) == 0
    moved = 2 * n * (p - 1) / p * b + n * (p - 1) / p * g
    assert collective_s("all_reduce", "ring", n, p, network) == pytest.approx(2 * (p - 1) * a + moved)
    assert collective_s("all_reduce", "sharded", n, p, network) == pytest.approx(2 * (p - 1) * a + moved)
    assert collective_s("all_reduce", "butterfly", n, p, network) == pytest.approx(2 * lg * a + moved)
    assert collective_s("all_reduce", "tree", n, p, network) == pytest.approx(lg * (2 * a + 2 * n * b + n * g))
    assert collective_s("all_gather", "ring", n, p, network) == pytest.approx((p - 1) * a + n * (p - 1) / p * b)
    assert collective_s("broadcast", "tree", n, p, network) == pytest.approx(lg * (a + n * b))
    if power:
        assert collective_s("all_reduce", "doubling", n, p, network) == pytest.approx(lg * (a + n * b + n * g))
    # A transfer holds its route for its latency, too: p - 1 of them, where the textbook counts one each way.
    server = collective_s("all_reduce", "central", n, p, Interconnect(a, b))
    assert server == pytest.approx(2 * ((p - 1) * n * b + a) + 2 * (p - 2) * a)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 12])
def test_hierarchical_with_groups_of_any_size(group: int) -> None:
    network = Interconnect(1e-5, 1e-9, 1e-10)
    derived = reduce(lone_collective("all_reduce", 12, 720720), f"hierarchical{group}")
    cluster = star(12, network.latency_s, network.s_per_byte, network.adding_s_per_byte)
    expected = collective_s("all_reduce", f"hierarchical{group}", 720720, 12, network)
    assert step_s(derived, cluster) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("kind", "algorithm"), OWN)
def test_fused_is_expanded_on_an_idle_network(kind: str, algorithm: str) -> None:
    network = NETWORKS[1]
    for ranks in (2, 7, 16):
        cluster = star(ranks, network.latency_s, network.s_per_byte, network.adding_s_per_byte)
        before = lone_collective(kind, ranks, 720720 * ranks)
        seconds = np.array([collective_s(kind, algorithm, 720720 * ranks, ranks, network)])
        fused = step_s(reduce(before, algorithm, fused_s=seconds), cluster)
        assert fused == pytest.approx(step_s(reduce(before, algorithm), cluster), rel=1e-9)


def test_only_collectives_of_many_ranks_are_fused() -> None:
    many = EXPANDED_RANKS + 1
    cluster = star(many, 1e-6, 1e-9, 0.0)
    listed = [Collective("all_reduce", "dp", tuple(range(p)), 1000) for p in (EXPANDED_RANKS, many)]
    seconds = fused_s(cluster, listed, ["ring"] * 2, [range(EXPANDED_RANKS), range(many)])
    assert np.isnan(seconds[0])
    assert seconds[1] == pytest.approx(collective_s("all_reduce", "ring", 1000, many, Interconnect(1e-6, 1e-9)))
    fused = reduce(lone_collective("all_reduce", many, 1000), "ring", fused_s=seconds[1:])
    assert step_s(fused, cluster) == seconds[1]


@pytest.mark.parametrize(("preset", "host", "tolerance"), [("2x8xH100-ib", 8, 1e-9), ("16xV100-10gbe", 4, 1e-3)])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_hosts_have_figures_inside_and_across(kind: str, preset: str, host: int, tolerance: float) -> None:
    """As spelt out; where hosts have one port, adding up hides behind the transfers of others, which no formula has."""
    cluster = Cluster.preset(preset, rates="peak")
    network = ManyRanks.of(cluster, np.arange(16)[None], host)
    for size in (16 * 65536, 720720000):
        found = network.seconds(kind, f"hierarchical{host}", size)
        spelt_out = lone_collective_s(cluster, range(16), kind, size, f"hierarchical{host}")
        assert found == pytest.approx(spelt_out, rel=tolerance)


def test_groups_side_by_side_share_links() -> None:
    """Four rings among hosts of one port, of which one alone would have all of it."""
    cluster = Cluster.preset("16xV100-10gbe")
    groups = np.arange(16).reshape(4, 4).T
    four, one = ManyRanks.of(cluster, groups, 0), ManyRanks.of(cluster, groups[:1], 0)
    assert four.seconds("all_gather", "ring", 1e9) == pytest.approx(4 * one.seconds("all_gather", "ring", 1e9))
    flat = collective_s("all_gather", "ring", 1e9, 4, Interconnect.among(cluster, groups[0].tolist()))
    assert one.seconds("all_gather", "ring", 1e9) == pytest.approx(flat)


def test_the_figures_of_a_cluster() -> None:
    network = Interconnect.among(Cluster.preset("8xA100-nvswitch", rates="peak"), range(8))
    assert network.latency_s == pytest.approx(3.4e-6)
    assert network.s_per_byte == pytest.approx(1 / 300e9)
    assert network.adding_s_per_byte == pytest.approx(3 / 2039e9)
    hosts = Interconnect.among(Cluster.preset("2x8xH100-ib", rates="peak"), [0, 8])
    assert (hosts.latency_s, hosts.s_per_byte) == pytest.approx((14e-6, 1 / 50e9))
