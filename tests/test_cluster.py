"""Clusters: rules, routes, TOML, and what the presets claim about real machines."""

from __future__ import annotations

import itertools
import math
import tomllib
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from strategies import clusters

from env.cluster import ROUTE_BYTES, UNLIMITED_BYTES, Cluster, Device, Link, both_ways
from env.presets import DGX1_NVLINKS, PRESETS
from env.problem import Problem
from env.published import neurips_cluster
from graphs.errors import ClusterError, InfeasibleError, UnknownNameError
from graphs.opgraph import Op, OpGraph, Tensor


def device(name: str = "a", **changes: object) -> Device:
    fields: dict[str, object] = {
        "name": name,
        "kind": "gpu",
        "memory_bytes": 10,
        "peak_flops": {"float32": 1.0},
        "memory_bytes_per_s": 1.0,
    }
    return Device(**{**fields, **changes})  # type: ignore[arg-type]


# -- rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_flops": {"float32": 0.0}}, "float32 = 0.0"),
        ({"peak_flops": {"float16": 1.0}}, "no float32"),
        ({"memory_bytes_per_s": math.nan}, "memory_bytes_per_s = nan"),
        ({"memory_bytes": -1}, "memory_bytes = -1"),
        ({"launch_overhead_s": math.inf}, "launch_overhead_s = inf"),
        ({"memory_bytes": "16GB"}, "device 'a' has memory_bytes = '16GB'; expected a finite number, 0 or more"),
        ({"memory_bytes": 1.5}, r"device 'a' has memory_bytes = 1\.5; expected a whole number"),
        ({"memory_bytes": True}, "memory_bytes = True"),
        ({"peak_flops": 14e12}, "device 'a' has peak_flops = 14000000000000.0; expected FLOP/s by dtype"),
        ({"peak_flops": {"float32": "1"}}, "float32 = '1'; expected a number above 0"),
        ({"kind": 3}, "device 'a' has kind = 3; expected a name in quotes"),
        ({"name": ""}, "name = ''"),
    ],
)
def test_a_device_without_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        device(**changes)


def test_whole_numbers_of_bytes_may_be_written_as_floats() -> None:
    given = device(memory_bytes=16e9)
    assert given == device(memory_bytes=16_000_000_000)
    assert type(given.memory_bytes) is int


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src": 3}, "src = 3; expected a name in quotes"),
        (
            {"bandwidth_bytes_per_s": "fast"},
            "link a -> b has bandwidth_bytes_per_s = 'fast'; expected a number above 0",
        ),
        ({"latency_s": "1us"}, "link a -> b has latency_s = '1us'; expected a finite number"),
        ({"exclusive": "no"}, "link a -> b has exclusive = 'no'; expected true or false"),
    ],
)
def test_a_mistyped_link_is_refused(changes: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"src": "a", "dst": "b", "bandwidth_bytes_per_s": 1.0}
    with pytest.raises(ClusterError, match=message):
        Link(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_link_to_a_mistyped_device_is_refused() -> None:
    devices = (device("gpu0"), device("gpu1"))
    joined = both_ways("gpu0", "gpu1", 1.0, 0.0)
    with pytest.raises(ClusterError, match=r"ends at 'gpu00', which is no device and joins nothing else; .*'gpu0'"):
        Cluster("mistyped", devices, (*joined, *both_ways("gpu1", "gpu00", 1.0, 0.0)))
    Cluster("a spare port", devices, (*joined, *both_ways("gpu1", "switch", 1.0, 0.0)))
    Cluster("an odd switch", devices, (*both_ways("gpu0", "gpu00", 1.0, 0.0), *both_ways("gpu1", "gpu00", 1.0, 0.0)))


def test_a_link_without_sense_is_refused() -> None:
    with pytest.raises(ClusterError, match="bandwidth_bytes_per_s = 0"):
        Link("a", "b", 0.0)
    with pytest.raises(ClusterError, match="latency_s = -1"):
        Link("a", "b", 1.0, -1.0)


def test_a_cluster_without_sense_is_refused() -> None:
    with pytest.raises(ClusterError, match="no devices"):
        Cluster("empty", ())
    with pytest.raises(ClusterError, match="two devices named 'a'"):
        Cluster("twice", (device(), device()))
    with pytest.raises(ClusterError, match="two links for 'a -> b'"):
        Cluster("twice", (device("a"), device("b")), (*both_ways("a", "b", 1.0, 0.0), Link("a", "b", 2.0)))
    with pytest.raises(ClusterError, match="no route from 'b' to 'a'"):
        Cluster("one way", (device("a"), device("b")), (Link("a", "b", 1.0),))


def test_ops_that_suit_no_device_are_named() -> None:
    cluster = Cluster("one", (device(),))
    with pytest.raises(InfeasibleError, match=r"op 'x' may only run on cpu, .*kinds gpu; names a\."):
        Problem(OpGraph.build([Op("x", pins=("cpu",))], []), cluster)
    both = Cluster("two", (device("a"), device("b", kind="cpu")), both_ways("a", "b", 1.0, 0.0))
    ops = [Op("x", pins=("cpu",), colocation=1), Op("y", pins=("gpu",), colocation=1)]
    with pytest.raises(InfeasibleError, match="ops 'x', 'y' must run on one device"):
        Problem(OpGraph.build(ops, []), both)


@pytest.mark.parametrize("pin", ["b", "V100", "cpu"])
def test_a_pin_names_a_device_a_model_or_a_kind(pin: str) -> None:
    devices = (device("a"), device("b", kind="cpu", model="V100"))
    graph = OpGraph.build([Op("x", pins=(pin,)), Op("y", pins=(pin, "a")), Op("z")], [])
    problem = Problem(graph, Cluster("two", devices, both_ways("a", "b", 1.0, 0.0)))
    assert problem.allowed.tolist() == [[False, True], [True, True], [True, True]]


# -- routes -----------------------------------------------------------------------------------------------------


def paths_between(cluster: Cluster, source: str, target: str) -> list[list[Link]]:
    """All simple paths, those around other devices if there are any."""
    found = [
        (nodes[1:-1], [cluster.graph.edges[edge]["link"] for edge in itertools.pairwise(nodes)])
        for nodes in nx.all_simple_paths(cluster.graph, source, target)
    ]
    around = [links for between, links in found if not set(between) & set(cluster.device_index)]
    return around or [links for _, links in found]


def time_of(links: list[Link]) -> float:
    return sum(link.latency_s for link in links) + ROUTE_BYTES / min(link.bandwidth_bytes_per_s for link in links)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(clusters(min_devices=2, max_devices=4))
def test_a_route_is_the_fastest_path_with_the_fewest_links(cluster: Cluster) -> None:
    for (a, b), route in cluster.routes.items():
        paths = paths_between(cluster, cluster.devices[a].name, cluster.devices[b].name)
        fastest_s = min(map(time_of, paths))
        assert route.latency_s + ROUTE_BYTES / route.bandwidth_bytes_per_s == pytest.approx(fastest_s, rel=1e-9)
        fast = [[link for link in path if not link.is_free] for path in paths if time_of(path) <= fastest_s + 1e-9]
        assert [cluster.links[i] for i in route.links] in fast


def test_devices_pass_tensors_on_only_where_there_is_no_other_way() -> None:
    devices = (device("a"), device("b"), device("c"))
    chain = Cluster("chain", devices, (*both_ways("a", "b", 9.0, 0.0), *both_ways("b", "c", 9.0, 0.0)))
    assert len(chain.routes[0, 2].links) == 2
    detour = (*chain.links, *both_ways("a", "hub", 1.0, 5.0), *both_ways("c", "hub", 1.0, 5.0))
    assert Cluster("detour", devices, detour).routes[0, 2].bandwidth_bytes_per_s == 1.0


def test_devices_that_share_a_memory_exchange_tensors_for_free() -> None:
    cluster = Cluster("shared", (device("a"), device("b")), both_ways("a", "b", math.inf, 0.0))
    assert cluster.routes[0, 1].links == ()
    graph = OpGraph.build([Op("x"), Op("y")], [Tensor("x", 100, ("y",), transfer_s=3.0)])
    assert Problem(graph, cluster).transfer_s(0, 0, 1) == 0.0


# -- TOML -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_toml(name: str, tmp_path: Path) -> None:
    cluster = Cluster.preset(name)
    path = tmp_path / "cluster.toml"
    path.write_text(cluster.to_toml(), encoding="utf-8")
    again = Cluster.from_toml(path)
    assert again == cluster
    assert again.hash == cluster.hash
    assert (again.summary, again.source) == (cluster.summary, cluster.source)
    assert again.routes == cluster.routes


@settings(max_examples=50, deadline=None, derandomize=True)
@given(clusters())
def test_every_cluster_survives_toml(cluster: Cluster) -> None:
    data = tomllib.loads(cluster.to_toml())
    assert [Device(**entry) for entry in data["devices"]] == list(cluster.devices)
    assert [Link(**entry) for entry in data.get("links", [])] == list(cluster.links)


DEVICE_TOML = """
[[devices]]
name = "%s"
kind = "gpu"
memory_bytes = 1
peak_flops = { float32 = 1.0 }
memory_bytes_per_s = 1.0
"""


def test_a_short_file_with_a_link_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        DEVICE_TOML % "a" + DEVICE_TOML % "b" + '[[links]]\nbetween = ["a", "b"]\nbandwidth_bytes_per_s = 2.0\n',
        encoding="utf-8",
    )
    cluster = Cluster.from_toml(path)
    assert cluster.name == "mine"
    assert set(cluster.routes) == {(0, 1), (1, 0)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices = [", "is not a TOML cluster file"),
        ("x = " + "[" * 3000 + "]" * 3000, "is not a TOML cluster file: it nests too deeply"),
        ("x = " + "9" * 5000, "is not a TOML cluster file"),
        (DEVICE_TOML % "a" + f"launch_overhead_s = {'9' * 400}\n", "launch_overhead_s = .* expected a finite number"),
        (
            (DEVICE_TOML % "a").replace("memory_bytes =", f"memory_bytes = {'9' * 30} #", 1),
            "expected a whole number of bytes below",
        ),
        ((DEVICE_TOML % "a").replace("bytes_per_s =", f"bytes_per_s = {'9' * 400} #", 1), "expected a number above 0"),
        ("", "no devices"),
        ("colour = 1", "unknown key 'colour'"),
        ("devices = 3", "devices is 3; expected"),
        ("devices = ['a']", "expected tables"),
        (DEVICE_TOML % "a" + "speed = 3\n", "unknown key 'speed'"),
        ('[[devices]]\nname = "a"\n', "device 'a' has no 'kind'; expected at least name, kind, memory_bytes"),
        ('[[devices]]\nkind = "gpu"\n', "device number 1 has no 'name'"),
        (DEVICE_TOML % "a" + '[[links]]\nsrc = "a"\n', r"the link a -> \? has no 'dst'"),
        (DEVICE_TOML % "a" + '[[links]]\nbetween = ["a", "b"]\n', "link between a and b has no 'bandwidth_bytes"),
        (DEVICE_TOML % "a" + '[[links]]\nbetween = ["a"]\nbandwidth_bytes_per_s = 1.0\n', "expected two names"),
    ],
)
def test_a_file_without_sense_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster.from_toml(path)
    assert "wrong.toml" in str(caught.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot read cluster file .*none\.toml"):
        Cluster.from_toml(tmp_path / "none.toml")


def test_an_unknown_preset_gets_a_hint() -> None:
    with pytest.raises(UnknownNameError, match="did you mean '4xV100-pcie'"):
        Cluster.preset("4xV100-pci")


# -- real machines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_what_it_is_and_where_its_figures_come_from(name: str) -> None:
    cluster = Cluster.preset(name)
    assert cluster.name == name
    assert cluster.summary
    assert cluster.source
    for d in cluster.devices:
        assert d.kind in ("gpu", "cpu")
        assert d.name.split("/")[-1].startswith(d.kind)
        assert d.model
        assert 1e11 < d.peak_flops["float32"] < 1e14
        assert d.peak_flops.get("float16", math.inf) > d.peak_flops["float32"]
        assert 5e10 < d.memory_bytes_per_s < 5e12
        assert d.launch_overhead_s > 0
    for route in cluster.routes.values():
        assert 1e9 < route.bandwidth_bytes_per_s < 1e12
        assert 1e-6 < route.latency_s < 1e-4


@pytest.mark.parametrize(
    ("name", "gpus", "cpus"),
    [
        ("1xV100", 1, 1),
        ("2xK40-pcie", 2, 1),
        ("4xK40-pcie", 4, 1),
        ("8xK40-pcie", 8, 1),
        ("4xV100-pcie", 4, 0),
        ("8xV100-nvlink", 8, 0),
        ("8xA100-nvswitch", 8, 0),
        ("8xH100-nvswitch", 8, 0),
        ("2x8xH100-ib", 16, 0),
        ("16xV100-10gbe", 16, 0),
        ("mixed-gpus", 4, 0),
        ("cpu-gpu", 1, 1),
    ],
)
def test_presets_have_the_devices_their_names_say(name: str, gpus: int, cpus: int) -> None:
    kinds = [d.kind for d in Cluster.preset(name).devices]
    assert (kinds.count("gpu"), kinds.count("cpu")) == (gpus, cpus)


def test_dgx1_is_a_hybrid_cube_mesh() -> None:
    links = [0] * 8
    for (a, b), count in DGX1_NVLINKS.items():
        links[a] += count
        links[b] += count
    assert links == [6] * 8  # a V100 has six NVLinks
    mesh = nx.Graph(list(DGX1_NVLINKS))
    assert all(degree == 4 for _, degree in mesh.degree)
    assert all((a, b) in DGX1_NVLINKS for quad in (range(4), range(4, 8)) for a in quad for b in quad if a < b)
    assert nx.diameter(mesh) == 2


def test_dgx1_routes_over_nvlink_where_it_can_and_over_pcie_elsewhere() -> None:
    cluster = Cluster.preset("8xV100-nvlink")
    for (a, b), route in cluster.routes.items():
        count = DGX1_NVLINKS.get((min(a, b), max(a, b)), 0)
        if count:
            assert len(route.links) == 1
            assert route.bandwidth_bytes_per_s == count * 25e9
        else:
            assert route.bandwidth_bytes_per_s == 6e9  # the two sockets' link
            between = {cluster.links[i].dst for i in route.links[:-1]}
            assert {"socket0", "socket1"} < between


def test_hosts_share_one_ethernet_port_but_have_an_infiniband_port_per_gpu() -> None:
    ethernet = Cluster.preset("16xV100-10gbe")
    assert set(ethernet.routes[0, 4].links) & set(ethernet.routes[1, 5].links)
    infiniband = Cluster.preset("2x8xH100-ib")
    assert not set(infiniband.routes[0, 8].links) & set(infiniband.routes[1, 9].links)
    assert infiniband.routes[0, 8].bandwidth_bytes_per_s == 50e9
    assert infiniband.routes[0, 1].bandwidth_bytes_per_s == 450e9


def test_mixed_gpus_are_unequal_in_speed_and_memory() -> None:
    devices = Cluster.preset("mixed-gpus").devices
    assert len({d.peak_flops["float32"] for d in devices}) == 3
    assert len({d.memory_bytes for d in devices}) == 3


@pytest.mark.parametrize("cpus", [0, 1, 3])
def test_neurips_transfers_cost_one_hop_per_accelerator(cpus: int) -> None:
    cluster = neurips_cluster(2, cpus, 16e9)
    ops = [Op("x", time_s={"accelerator": 1.0, "cpu": 2.0}), Op("y", time_s={"accelerator": 1.0, "cpu": 2.0})]
    problem = Problem(OpGraph.build(ops, [Tensor("x", 0, ("y",), transfer_s=0.25)]), cluster)
    assert problem.op_s.tolist() == [[1.0, 1.0] + [2.0] * cpus] * 2
    assert problem.transfer_s(0, 0, 1) == 0.5
    for cpu in range(2, 2 + cpus):
        assert problem.transfer_s(0, 0, cpu) == problem.transfer_s(0, cpu, 0) == 0.25
        assert cluster.devices[cpu].memory_bytes == UNLIMITED_BYTES
        for other in range(2, 2 + cpus):
            assert problem.transfer_s(0, cpu, other) == 0.0


def test_neurips_devices_without_sense_are_refused() -> None:
    for wrong in ((0, 0, 1.0), (-1, 2, 1.0), (1, 1, -5.0), (1, 1, math.nan)):
        with pytest.raises(ClusterError, match="at least one device"):
            neurips_cluster(*wrong)
