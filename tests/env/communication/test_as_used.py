"""Figures of a fabric: what collectives take by kind, ranks, size and route, and what shares a port."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baselines.strategies.collective_costs import CollectiveCosts
from env.cluster import Cluster, Device, Fabric, Link, MeasuredCollective, Protocol, both_ways
from env.communication.as_used import AsUsed
from env.communication.times import collective_times, lone_collective_s
from env.resizing import part_of, resized
from graphs.errors import ClusterError

MIB = 2**20
# Soon and slow, late and quick; a third for five ranks of a host or more.
REDUCE = (
    Protocol("all_reduce", 10e-6, 1e-6, 5e-6, 100e9),
    Protocol("all_reduce", 40e-6, 2e-6, 10e-6, 200e9, copy_bytes_per_s=500e9),
    Protocol("all_reduce", 60e-6, 0.0, 10e-6, 400e9, least_ranks=5),
)
FABRIC = Fabric(
    (*REDUCE, Protocol("all_gather", 20e-6, 1e-6, 10e-6, 200e9), Protocol("all_to_all", 20e-6, 1e-6, 10e-6, 200e9)),
    overlap=1.25,
    source="made up",
)


def hosts(count: int, gpus: int = 8, adapters: int = 8, rate: float = 50e9) -> Cluster:
    """Hosts with a fabric, whose devices share network adapters in turns."""
    devices: list[Device] = []
    links: list[Link] = []
    for h in range(count):
        for g in range(gpus):
            devices.append(Device(f"host{h}/gpu{g}", "gpu", 2**40, {"float32": 1e13}, 1e12))
            links += both_ways(f"host{h}/gpu{g}", f"host{h}/switch", 300e9, 1e-6)
            links += both_ways(f"host{h}/gpu{g}", f"host{h}/adapter{g * adapters // gpus}", 100e9, 1e-6)
        for a in range(adapters):
            links += both_ways(f"host{h}/adapter{a}", "network", rate, 5e-6)
    return Cluster("hosts", tuple(devices), tuple(links), fabric=FABRIC)


def seconds(cluster: Cluster, groups: list[list[int]], kind: str, size: float) -> float:
    found = AsUsed.of(cluster, np.array(groups))
    assert found is not None
    return float(found.seconds(kind, size))


def test_the_least_of_a_few_lines_inside_a_host() -> None:
    cluster = hosts(1)
    small, large = 2**10, 2**30
    assert seconds(cluster, [[0, 1, 2, 3]], "all_reduce", small) == pytest.approx(13e-6 + 1.5 * small / 100e9)
    late = 46e-6 + 1.5 * large / 200e9 + large / 4 / 500e9
    assert seconds(cluster, [[0, 1, 2, 3]], "all_reduce", large) == pytest.approx(late)
    assert seconds(cluster, [[*range(8)]], "all_reduce", large) == pytest.approx(60e-6 + 1.75 * large / 400e9)
    gathered = 27e-6 + 7 / 8 * large / 200e9
    for kind in ("all_gather", "reduce_scatter"):
        assert seconds(cluster, [[*range(8)]], kind, large) == pytest.approx(gathered)
    # A rank gives an eighth of all bytes, and keeps an eighth of that.
    assert seconds(cluster, [[*range(8)]], "all_to_all", large) == pytest.approx(27e-6 + 7 / 64 * large / 200e9)


def test_ports_between_hosts_carry_less() -> None:
    large = 2**30
    one = hosts(2, adapters=1)
    # All sixteen share one port of each host: a ring goes through it once.
    ring = 20e-6 + 14e-6 + 10e-6 + 15 / 16 * large / 50e9
    assert seconds(one, [[*range(16)]], "all_gather", large) == pytest.approx(ring)
    # Eight pairs over the two hosts share it, too; a pair alone does not.
    pairs = [[g, g + 8] for g in range(8)]
    alone, together = (seconds(one, each, "all_gather", large) for each in (pairs[:1], pairs))
    assert alone == pytest.approx(30e-6 + large / 2 / 50e9)
    assert together == pytest.approx(30e-6 + 8 * large / 2 / 50e9)
    # With a port for each rank strided groups do not meet, and a group of whole hosts uses all of them.
    many = hosts(2)
    assert seconds(many, pairs, "all_gather", large) == pytest.approx(alone)
    assert seconds(many, [[*range(16)]], "all_gather", large) == pytest.approx(44e-6 + 15 / 16 * large / 200e9)
    # Two devices for an adapter.
    assert seconds(hosts(2, adapters=4), pairs, "all_gather", large) == pytest.approx(30e-6 + 2 * large / 2 / 50e9)


def test_what_leaves_a_host_of_an_all_to_all_waits_for_its_ports() -> None:
    large = 2**30
    found = seconds(hosts(2, rate=5e9), [[*range(16)]], "all_to_all", large)
    assert found == pytest.approx(20e-6 + 14e-6 + 10e-6 + 8 * (large / 16) * (8 / 16) / 40e9)


def test_a_token_whose_experts_are_on_one_host_goes_there_once() -> None:
    """With eight rows of a token, as DeepEP sends them: by hand, with shares that some row goes to each place."""
    given, known = 2**30 / 16, hosts(2, rate=5e9)
    found = AsUsed.of(known, np.array([[*range(16)]]))
    assert found is not None
    assert float(found.seconds("all_to_all", 2**30)) == pytest.approx(44e-6 + 8 * given * (8 / 16) / 40e9)
    on_host = 2 * (1 - (1 / 2) ** 8) / 8
    once = replace(found, copies=8.0)
    assert float(once.seconds("all_to_all", 2**30)) == pytest.approx(44e-6 + on_host * 8 * given * (8 / 16) / 40e9)
    inside = AsUsed.of(known, np.array([[*range(8)]]))
    assert inside is not None
    on_rank = 8 * (1 - (7 / 8) ** 8) / 8
    moved = on_rank * 7 / 64 * 2**30 / 200e9
    assert float(replace(inside, copies=8.0).seconds("all_to_all", 2**30)) == pytest.approx(27e-6 + moved)


def test_hosts_add_steps_of_a_tree_to_sums_and_of_a_ring_to_others() -> None:
    cluster = hosts(8)
    group = [[*range(64)]]
    assert seconds(cluster, group, "all_reduce", 0) == pytest.approx(10e-6 + 7e-6 + 6 * 5e-6)
    assert seconds(cluster, group, "all_gather", 0) == pytest.approx(20e-6 + 56e-6 + 7 * 10e-6)


def test_measured_tables_win() -> None:
    inside = MeasuredCollective("all_gather", 2, (MIB, 4 * MIB), (1e-3, 4e-3), hosts=1)
    across = replace(inside, seconds=(2e-3, 8e-3), hosts=2)
    cluster = replace(hosts(2, adapters=1), collectives=(inside, across))
    assert seconds(cluster, [[0, 1]], "all_gather", 2 * MIB) == pytest.approx(2e-3)
    assert seconds(cluster, [[0, 8]], "all_gather", 2 * MIB) == pytest.approx(4e-3)
    assert seconds(cluster, [[0, 8], [1, 9]], "all_gather", 2 * MIB) == pytest.approx(8e-3), "they share a port"
    plain = seconds(replace(cluster, collectives=()), [[0, 1]], "all_reduce", MIB)
    assert seconds(cluster, [[0, 1]], "all_reduce", MIB) == plain
    assert AsUsed.of(cluster, np.array([[0]])) is None
    assert AsUsed.of(replace(cluster, collectives=(), fabric=None), np.array([[0, 1]])) is None


def test_of_hosts_that_are_not_alike_the_worst_counts() -> None:
    found = AsUsed.of(hosts(2), np.array([[0, 1, 2, 8]]))
    assert found is not None
    assert (found.ranks, found.hosts, found.across_bytes_per_s) == (4, 2, 50e9)


def test_simulator_and_estimates_agree() -> None:
    cluster = hosts(2)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for size in (0, 3 * MIB, 2**28):
            expected = seconds(cluster, [[*range(16)]], kind, size)
            assert lone_collective_s(cluster, range(16), kind, size, "tree") == pytest.approx(expected)
            grid = np.arange(16).reshape(1, 16)
            assert CollectiveCosts(cluster, grid).seconds(kind, 0, size) == pytest.approx(expected)
            beside = CollectiveCosts(cluster, grid, ("dp",))
            assert beside.seconds(kind, 0, size) == pytest.approx(1.25 * expected)
            assert beside.exactly(kind, 0, size, beside.quickest(kind, 0, size))[0] == pytest.approx(1.25 * expected)
    assert len(set(collective_times(cluster, 16, sizes=(MIB,)).seconds.values())) == 1


def test_many_ranks() -> None:
    cluster = hosts(80)
    costs = CollectiveCosts(cluster, np.arange(640).reshape(1, 80, 8))
    size = 2**30
    ring = 20e-6 + 79 * 10e-6 + 79 / 80 * size / 50e9
    assert costs.seconds("all_gather", 0, size) == pytest.approx(ring)
    assert costs.seconds("all_gather", 1, size) == pytest.approx(27e-6 + 7 / 8 * size / 200e9)


def test_files_keep_it(tmp_path: Path) -> None:
    links = tuple(replace(link, nominal_bytes_per_s=1.25 * link.bandwidth_bytes_per_s) for link in hosts(1).links)
    cluster = replace(hosts(1), links=links, collectives=(MeasuredCollective("all_gather", 4, (8,), (1e-6,), hosts=2),))
    (tmp_path / "c.toml").write_text(cluster.to_toml(), encoding="utf-8")
    as_json = json.loads(json.dumps(cluster.to_dict(), allow_nan=False))
    for again in (Cluster.from_toml(tmp_path / "c.toml"), Cluster.from_dict(as_json)):
        assert (again, again.hash) == (cluster, cluster.hash)
    assert replace(cluster, fabric=None).hash != cluster.hash
    assert resized(cluster, 4).fabric == part_of(cluster, np.arange(2)).fabric == FABRIC
    assert [link.at_peak().bandwidth_bytes_per_s for link in links[:2]] == [375e9] * 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kind": "gossip"}, "kind = 'gossip'; expected one of all_reduce"),
        ({"base_s": -1.0}, "base_s = -1.0"),
        ({"bus_bytes_per_s": 0.0}, "bus_bytes_per_s = 0.0"),
        ({"bus_bytes_per_s": math.inf}, "bus_bytes_per_s = inf; expected a finite number"),
        ({"least_ranks": 0}, "least_ranks = 0"),
    ],
)
def test_wrong_protocols_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ClusterError, match=sentence):
        replace(REDUCE[0], **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fabric = 3", "the fabric is 3; expected an object with protocols"),
        ("[fabric]\noverlap = 0.5\nprotocols = []", "overlap = 0.5; expected a number of 1 or more"),
        ("[fabric]\nprotocols = []", "the fabric has no protocols"),
        ("[fabric]\nspeed = 3", "the fabric has unknown field 'speed'"),
        ("[[fabric.protocols]]\nkind = 'all_reduce'", "entry 1 of protocols of the fabric has no 'base_s'"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "c.toml").write_text(f"name = 'x'\n{text}\n", encoding="utf-8")
    with pytest.raises(ClusterError, match=sentence):
        Cluster.from_toml(tmp_path / "c.toml")


def test_wrong_figures_of_links_and_tables_are_refused() -> None:
    with pytest.raises(ClusterError, match="nominal_bytes_per_s = -5; expected a number above 0"):
        both_ways("a", "b", 6, 0.0, -5)
    with pytest.raises(ClusterError, match="hosts = 3; expected 0, or a whole number of hosts that divides 4 ranks"):
        MeasuredCollective("all_gather", 4, (8,), (1e-6,), hosts=3)
