"""What-if: one graph on several clusters, and on more and more devices of one."""

from __future__ import annotations

import json
import math

import pytest

from env.cluster import Cluster, Device, both_ways
from graphs.errors import ClusterError
from graphs.opgraph import Op, OpGraph, Tensor
from placement.what_if import computing, first_devices, parse_sweep, what_if


def cluster(n_gpus: int, memory_bytes: int = 2**30, bytes_per_s: float = 1e12) -> Cluster:
    devices = [Device(f"gpu{i}", "gpu", memory_bytes, {"float32": 1e12}, 1e12) for i in range(n_gpus)]
    devices.append(Device("cpu0", "cpu", memory_bytes, {"float32": 1e9}, 1e10))
    links = [link for d in devices for link in both_ways(d.name, "switch", bytes_per_s, 0.0)]
    return Cluster("box", tuple(devices), tuple(links))


def branches(count: int, kept_bytes: int = 0) -> OpGraph:
    """As many independent ops of one second on any GPU, pinned away from the host."""
    ops = [Op(f"op{i}", kept_bytes=kept_bytes, time_s={"*": 1.0}, pins=("gpu",)) for i in range(count)]
    return OpGraph.build(ops, [Tensor(op.name, 1) for op in ops], "branches")


@pytest.mark.parametrize(
    "text", ["devices", "devices=1", "devices=3..2", "devices=0..2", "gpus=1..2", "devices=1..2.5"]
)
def test_a_sweep_names_what_it_sweeps(text: str) -> None:
    with pytest.raises(ValueError, match=r"devices=FIRST\.\.LAST"):
        parse_sweep(text)


def test_a_sweep_includes_both_ends() -> None:
    assert list(parse_sweep("devices=2..4")) == [2, 3, 4]


def test_fewer_devices_keep_the_host_and_lose_their_links() -> None:
    smaller = first_devices(cluster(3), 2)
    assert [d.name for d in smaller.devices] == ["gpu0", "gpu1", "cpu0"]
    assert {end for link in smaller.links for end in (link.src, link.dst)} == {"gpu0", "gpu1", "cpu0", "switch"}
    assert computing(smaller) == ["gpu0", "gpu1"]
    with pytest.raises(ClusterError, match="has 3 devices to sweep over, got 4"):
        first_devices(cluster(3), 4)


def test_the_curve_says_where_devices_stop_helping() -> None:
    """Three equal branches: the third device is the last that helps."""
    found = what_if(branches(3), [first_devices(cluster(5), n) for n in range(1, 6)], ["heft"], is_sweep=True)
    assert [case.speedup for case in found.cases] == pytest.approx([1, 1.5, 3, 3, 3])
    assert found.verdict() == "Adding devices stops helping at 3: no larger number is 1% faster."
    document = json.loads(found.to_json())
    assert [case["devices"] for case in document["cases"]] == [1, 2, 3, 4, 5]
    assert document["verdict"] == found.verdict()
    assert document["cases"][1]["comparison"]["results"][0]["method"] == "heft"


def test_the_last_device_may_still_help() -> None:
    found = what_if(branches(4), [first_devices(cluster(2), n) for n in (1, 2)], ["heft"], is_sweep=True)
    assert found.verdict() == "The last device, number 2, still helps."


def test_clusters_that_are_too_small_are_rows_with_a_reason() -> None:
    graph = branches(2, kept_bytes=100)
    found = what_if(graph, [cluster(1, memory_bytes=150), cluster(2, memory_bytes=150)], ["heft"])
    assert found.cases[0].objective_s is None
    assert "keep 200 bytes for the whole step, where 150 bytes are free" in (found.cases[0].reason or "")
    assert found.cases[1].objective_s == pytest.approx(1.0)
    assert found.cases[1].speedup is None  # one device of it is not enough
    assert found.verdict() == "Fastest: box."
    nowhere = what_if(graph, [cluster(1, memory_bytes=150)], ["heft"])
    assert nowhere.verdict() == "branches fits on none of these."


def test_throughput_too() -> None:
    found = what_if(branches(4), [cluster(4, bytes_per_s=math.inf)], ["dp_linear"], objective="throughput")
    assert found.cases[0].objective_s == pytest.approx(1.0)
