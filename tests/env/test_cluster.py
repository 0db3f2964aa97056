"""Clusters: rules, routes, TOML, and what the presets claim about real machines."""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from strategies import clusters

from env.bounds.bounds import lower_bound
from env.checking.checker import audit
from env.checking.reference_loads import reference_loads
from env.checking.reference_times import op_times
from env.cluster import ROUTE_BYTES, UNLIMITED_BYTES, Cluster, Device, Link, both_ways
from env.plan import Plan
from env.presets import PRESETS
from env.presets.machines import DGX1_NVLINKS
from env.problem import Problem
from env.published import neurips_cluster
from env.simulation.simulator import Simulator
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
        ({"memory_bytes": 2**62}, "memory_bytes = 4611686018427387904; expected a whole number of bytes below"),
        ({"memory_bytes": 10**400}, "memory_bytes = 1000"),
        ({"launch_overhead_s": 10**400}, "launch_overhead_s = 1000"),
        ({"memory_bytes_per_s": 10**400}, "memory_bytes_per_s = 1000"),
        ({"reserved_bytes": 11}, "device 'a' has reserved_bytes = 11; expected at most memory_bytes, 10"),
        ({"reserved_bytes": -1}, "reserved_bytes = -1"),
        ({"compute_efficiency": 0.0}, "compute_efficiency = 0.0; expected a number above 0 and at most 1"),
        ({"bandwidth_efficiency": 1.5}, "bandwidth_efficiency = 1.5; expected a number above 0 and at most 1"),
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


def paths_between(cluster: Cluster, source: str, target: str) -> list[list[int]]:
    """All simple paths as numbers of links, those around other devices if there are any."""
    found = [
        (nodes[1:-1], [cluster.graph.edges[edge]["index"] for edge in itertools.pairwise(nodes)])
        for nodes in nx.all_simple_paths(cluster.graph, source, target)
    ]
    around = [links for between, links in found if not set(between) & set(cluster.device_index)]
    return around or [links for _, links in found]


def rank_of(cluster: Cluster, path: list[int]) -> tuple[int, int, list[int]]:
    """docs/score.md, "Route": nanoseconds for 1 MiB, then the number of links, then the links; free ones are none."""
    links = [cluster.links[i] for i in path]
    latency_ns = sum(round(link.latency_s * 1e9) for link in links)
    slowest_ns = max(round(ROUTE_BYTES / link.bandwidth_bytes_per_s * 1e9) for link in links)
    counted = [i for i in path if not cluster.links[i].is_free]
    return latency_ns + slowest_ns, len(counted), counted


@st.composite
def networks(draw: st.DrawFn) -> Cluster:
    """Up to 3 devices and 4 switches, links drawn at random from few bandwidths and latencies, so that ties abound."""
    names = ["a", "b", "c"][: draw(st.integers(2, 3))]
    ends = [*names, *["s", "t", "u", "v"][: draw(st.integers(0, 4))]]
    pairs = draw(st.lists(st.sampled_from(list(itertools.permutations(ends, 2))), unique=True, max_size=16))
    ring = list(itertools.pairwise([*draw(st.permutations(ends)), ends[0]]))
    ring = [pair for pair in ring if pair not in pairs and pair[0] != pair[1]]
    links = [
        Link(
            src,
            dst,
            draw(st.sampled_from([math.inf, 1e9, 2e9, 3e9, 2e12])),
            draw(st.sampled_from([0.0, 0.1e-6, 0.2e-6, 0.3e-6, 4e-10, 1e-3])),
        )
        for src, dst in draw(st.permutations([*pairs, *ring]))
    ]
    try:
        return Cluster("random", tuple(map(device, names)), tuple(links))
    except ClusterError:
        reject()


@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(st.one_of(clusters(min_devices=2, max_devices=4), networks()))
def test_a_route_is_the_least_of_all_paths_by_time_then_links_then_their_numbers(cluster: Cluster) -> None:
    for (a, b), route in cluster.routes.items():
        paths = paths_between(cluster, cluster.devices[a].name, cluster.devices[b].name)
        best = min(rank_of(cluster, path) for path in paths)
        assert list(route.links) == best[2]
        links = [cluster.links[i] for i in route.links]
        assert route.latency_s == sum(link.latency_s for link in links)
        assert route.bandwidth_bytes_per_s == min((link.bandwidth_bytes_per_s for link in links), default=math.inf)


def test_of_equally_fast_paths_that_with_fewer_links_and_then_the_lower_numbers_is_the_route() -> None:
    devices = (device("a"), device("b"))

    def route(*links: tuple[str, str, float]) -> tuple[int, ...]:
        return (
            Cluster("ties", devices, tuple(Link(x, y, 1e9, s) for x, y, s in (*links, ("b", "a", 0.0))))
            .routes[0, 1]
            .links
        )

    # 0.1 + 0.2 is not 0.3 in floating point, but is as fast.
    assert route(("a", "s", 0.1e-6), ("s", "b", 0.2e-6), ("a", "b", 0.3e-6)) == (2,)
    assert route(("a", "t", 1e-6), ("a", "s", 1e-6), ("s", "b", 1e-6), ("t", "b", 1e-6)) == (0, 3)
    assert route(("s", "b", 1e-6), ("t", "b", 1e-6), ("a", "t", 1e-6), ("a", "s", 1e-6)) == (2, 1)


def test_a_path_of_more_latency_to_a_switch_may_be_the_better_way_beyond_it() -> None:
    links = (Link("a", "s", 1e9, 1e-6), Link("a", "t", 1e12, 1e-4), Link("t", "s", 1e12, 1e-4), Link("s", "b", 1e12))
    cluster = Cluster("crossing", (device("a"), device("b")), (*links, Link("b", "a", 1e12)))
    assert cluster.routes[0, 1].links == (1, 2, 3)


def test_a_thousand_devices_behind_switches_and_a_mesh_of_64_have_routes() -> None:
    tree = [link for i in range(1024) for link in both_ways(f"d{i}", f"leaf{i // 64}", 1e10 + i, 1e-6)]
    tree += [link for i in range(16) for spine in "xy" for link in both_ways(f"leaf{i}", spine, 1e10, 1e-6)]
    cluster = Cluster("tree", tuple(device(f"d{i}") for i in range(1024)), tuple(tree))
    assert len(cluster.routes) == 1024 * 1023
    assert [cluster.links[i].dst for i in cluster.routes[0, 1023].links] == ["leaf0", "x", "leaf15", "d1023"]
    pairs = itertools.permutations(range(64), 2)
    mesh = tuple(Link(f"d{a}", f"d{b}", 1e9 + k, 1e-6) for k, (a, b) in enumerate(pairs))
    routes = Cluster("mesh", tuple(device(f"d{i}") for i in range(64)), mesh).routes
    assert all(len(route.links) == 1 for route in routes.values())


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


# -- memory and rates that ops get --------------------------------------------------------------------------------


def test_a_reserve_is_memory_that_no_placement_may_fill() -> None:
    cluster = Cluster("small", (device("a", reserved_bytes=4),))
    for kept, fits in ((6, True), (7, False)):
        graph = OpGraph.build([Op("x", kept_bytes=kept, time_s={"*": 1.0})], [])
        problem = Problem(graph, cluster)
        assert problem.capacity_bytes.tolist() == [6]
        assert Simulator(problem).score(Plan([0])).feasible == fits
        assert reference_loads(graph, cluster, Plan([0])).feasible == fits
        assert (lower_bound(problem).memory_reason is None) == fits
        said = "device a holds up to 7 bytes, but its memory is 6 bytes beside the 4 bytes reserved."
        assert audit(graph, cluster, Plan([0])).problems == (() if fits else (said,))


def test_efficiencies_scale_the_roofline_alone() -> None:
    half = device("a", compute_efficiency=0.5, bandwidth_efficiency=0.25, launch_overhead_s=1.0)
    ops = [Op("c", flops=3.0), Op("m", bytes_moved=3.0), Op("t", time_s={"*": 7.0})]
    assert Problem(OpGraph.build(ops, []), Cluster("one", (half,))).op_s[:, 0].tolist() == [7.0, 13.0, 7.0]
    assert op_times(ops, (half,), [0, 0, 0], None) == [7.0, 13.0, 7.0]


def test_a_memory_fraction_replaces_the_reserve_but_where_memory_is_not_modelled() -> None:
    devices = device("a", memory_bytes=10, reserved_bytes=9), device("b", memory_bytes=UNLIMITED_BYTES)
    cluster = Cluster("two", devices, both_ways("a", "b", 1.0, 0.0))
    assert [d.usable_bytes for d in cluster.with_memory_fraction(0.75).devices] == [7, UNLIMITED_BYTES]
    assert [d.usable_bytes for d in cluster.with_memory_fraction(1).devices] == [10, UNLIMITED_BYTES]
    for wrong in (0, -1, 1.1, math.nan, "most"):
        with pytest.raises(ClusterError, match=r"memory fraction = .*; expected a number above 0 and at most 1"):
            cluster.with_memory_fraction(wrong)  # type: ignore[arg-type]


def test_files_and_hashes_from_before_these_fields_stay_as_they_are() -> None:
    plain, later = device("a"), device("a", reserved_bytes=1)
    assert "reserved_bytes" not in Cluster("c", (plain,)).to_toml()
    assert "reserved_bytes = 1\n" in Cluster("c", (later,)).to_toml()
    assert Cluster("c", (plain,)).hash != Cluster("c", (later,)).hash
    assert neurips_cluster(2, 1, 1e9).hash == "f4d5b874975c839ee969a2d38b71b1215a5515621419a1c71fc05adf644cce24"


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


def test_large_rates_are_written_as_people_write_them() -> None:
    text = Cluster.preset("8xH100-nvswitch").to_toml()
    assert "memory_bytes_per_s = 3.35e12\n" in text
    assert "000000.0" not in text


@settings(max_examples=50)
@given(clusters())
def test_every_cluster_survives_toml(cluster: Cluster) -> None:
    data = tomllib.loads(cluster.to_toml())
    assert Cluster.from_dict(data) == cluster
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict(), allow_nan=False))) == cluster


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
        ("x = " + "[" * 3000 + "]" * 3000, "is not a TOML cluster file: it nests deeper than 200 brackets"),
        ("x = " + "9" * 5000, "is not a TOML cluster file"),
        ("x = { " + "a." * 200_000 + "a = 1 }", "a key has more than 200 parts"),
        (DEVICE_TOML % "a" + f"launch_overhead_s = {'9' * 400}\n", "launch_overhead_s = .* expected a finite number"),
        (
            (DEVICE_TOML % "a").replace("memory_bytes =", f"memory_bytes = {'9' * 30} #", 1),
            "expected a whole number of bytes below 2",
        ),
        ((DEVICE_TOML % "a").replace("bytes_per_s =", f"bytes_per_s = {'9' * 400} #", 1), "expected a number above 0"),
        ("", "no devices"),
        ("colour = 1", "unknown field 'colour'"),
        ("devices = 3", "devices is 3; expected"),
        ("devices = ['a']", "expected tables"),
        (DEVICE_TOML % "a" + "speed = 3\n", "unknown field 'speed'"),
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
        assert 1e11 < d.peak_flops["float32"] < 2e14
        assert d.peak_flops.get("float16", math.inf) > d.peak_flops["float32"]
        assert 5e10 < d.memory_bytes_per_s < 1e13
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
    infiniband = Cluster.preset("2x8xH100-ib", rates="peak")
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


def test_whole_numbers_beyond_64_bits_are_numbers() -> None:
    device = Device("a", "gpu", 10**9, {"float32": 10**30}, 10**30, launch_overhead_s=10**30)
    graph = OpGraph.build([Op("op", flops=1.0, bytes_moved=1.0, kernels=0)], [])
    assert Problem(graph, Cluster("one", (device,))).op_s[0, 0] == pytest.approx(1e-30)
