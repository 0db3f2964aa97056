"""Collectives timed on a cluster, contention and all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel.collective_graphs import star

from env.cluster import Cluster
from env.communication.formulas import Interconnect, collective_s
from env.communication.times import collective_times, host_size, lone_collective, quickest, side_by_side
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.errors import ClusterError, UnknownNameError
from graphs.transforms.collectives import ALGORITHMS, reduce
from graphs.transforms.collectives.rounds import KINDS
from graphs.transforms.derived import Collective


def test_on_a_switch_of_full_ports_the_times_are_the_formulas() -> None:
    found = collective_times(star(4, 1e-6, 1e-9, 1e-11), sizes=(4096, 2**20))
    network = Interconnect(1e-6, 1e-9, 1e-11)
    assert set(found.seconds) == set(ALGORITHMS)
    for name, seconds in found.seconds.items():
        assert seconds == pytest.approx([collective_s("all_reduce", name, size, 4, network) for size in found.sizes])


def test_few_bytes_want_few_rounds_and_many_bytes_want_pieces() -> None:
    found = collective_times(star(8, 1e-6, 1e-9, 1e-12), sizes=(8, 2**20))
    assert found.best == ("doubling", "butterfly")
    assert found.crossings == ((8, "doubling"), (2**20, "butterfly"))


def test_equally_quick_algorithms_cross_nowhere() -> None:
    found = collective_times(
        star(2, 1e-6, 1e-9, 0.0), sizes=tuple(2**k for k in range(10, 20)), algorithms=("ring", "butterfly")
    )
    assert found.crossings == ((1024, "ring"),)


def test_contention_is_seen() -> None:
    """Four hosts share a slow port each: among 16 devices a butterfly crowds them, a hierarchy does not."""
    cluster = Cluster.preset("16xV100-10gbe")
    size = 2**26
    found = collective_times(cluster, sizes=(size,))
    network = Interconnect.among(cluster, range(16))
    assert found.seconds["butterfly"][0] > 1.5 * collective_s("all_reduce", "butterfly", size, 16, network)
    assert found.best == ("hierarchical4",)


def test_hosts_are_found_by_their_links() -> None:
    assert host_size(Cluster.preset("2x8xH100-ib"), range(16)) == 8
    assert host_size(Cluster.preset("2x8xH100-ib"), range(8)) == 0
    assert host_size(Cluster.preset("2x8xH100-ib"), range(12)) == 0
    assert host_size(Cluster.preset("8xA100-nvswitch"), range(8)) == 0


def test_the_quickest_is_found_for_each_collective_apart() -> None:
    cluster = Cluster.preset("16xV100-10gbe")
    listed = [Collective(kind, "dp", tuple(range(p)), size) for kind, p, size in CASES]
    devices: list[range] = [range(16), range(16), range(4)]
    assert quickest(cluster, listed, devices, ALGORITHMS) == ("tree", "hierarchical4", "butterfly")


CASES = (("all_reduce", 16, 1000), ("all_reduce", 16, 10**8), ("all_gather", 4, 10**8))


def test_cpus_beside_other_devices_take_no_part() -> None:
    found = collective_times(Cluster.preset("2xK40-pcie"), sizes=(1024,), algorithms=("ring",))
    assert found.devices == ("gpu0", "gpu1")


def test_bad_input() -> None:
    with pytest.raises(ClusterError, match="'1xV100' has one device that computes; a collective needs two or more"):
        collective_times(Cluster.preset("1xV100"))
    with pytest.raises(ClusterError, match=r"9 ranks were asked for .* which has 8 devices that compute; give 2 to 8"):
        collective_times(Cluster.preset("8xA100-nvswitch"), 9)
    with pytest.raises(UnknownNameError, match="unknown algorithm 'rings'"):
        collective_times(Cluster.preset("8xA100-nvswitch"), algorithms=("rings",))


@pytest.mark.parametrize(
    ("kind", "algorithm", "in_place", "share"),
    [
        # What was given and the buffer of one transfer, beside it or in place.
        ("all_reduce", "ring", True, 1 / 8),
        ("all_reduce", "ring", False, 1 + 1 / 8),
        ("all_reduce", "sharded", True, 1 / 8),
        ("all_reduce", "butterfly", True, 1 / 2),
        ("reduce_scatter", "ring", False, 1 + 1 / 8),
        # Its own piece and those of all others, which arrive one after the other.
        ("all_gather", "ring", False, 1),
        # A server holds what arrives while it adds up.
        ("all_reduce", "central", True, 2),
    ],
)
def test_memory_of_a_collective(kind: str, algorithm: str, in_place: bool, share: float) -> None:
    size = 720720
    derived = reduce(lone_collective(kind, 8, size, in_place=in_place), algorithm)
    score = Simulator(Problem(derived.graph, star(8, 1e-6, 1e-9, 1e-10))).score(Plan(derived.part))
    assert score.peak_bytes.max() == pytest.approx(share * size)


@given(
    kind=st.sampled_from(KINDS),
    algorithm=st.sampled_from(ALGORITHMS),
    ranks=st.integers(2, 4),
    groups=st.integers(1, 2),
    size_bytes=st.integers(0, 2**31),
    preset=st.sampled_from(("8xH100-nvswitch", "16xV100-10gbe", "8xK40-pcie")),
)
def test_a_collective_made_once_scores_at_any_size_as_if_made_for_it(
    kind: str, algorithm: str, ranks: int, groups: int, size_bytes: int, preset: str
) -> None:
    cluster = Cluster.preset(preset, rates="peak")
    devices = cluster.compute_devices[: ranks * groups]
    found = side_by_side(cluster, devices.reshape(groups, ranks).tolist(), kind, size_bytes, algorithm)
    derived = reduce(lone_collective(kind, ranks, size_bytes, in_place=True, groups=groups), algorithm)
    wanted = Simulator(Problem(derived.graph, cluster)).score(Plan(devices[derived.part]))
    assert found.step_time_s == wanted.step_time_s
    for key in ("busy_s", "peak_bytes", "link_bytes"):
        assert np.array_equal(getattr(found, key), getattr(wanted, key))
