"""Presets by pattern, at the rates of data sheets, and what their collectives take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from env.cluster import Cluster
from env.communication.as_used import AsUsed
from env.device import MeasuredCollective
from env.presets import COMPARED, PRESETS, compared, is_preset
from env.presets.gpus import DEVICES
from graphs.errors import ClusterError, UnknownNameError

T4 = DEVICES["T4"]


@pytest.mark.parametrize(
    ("name", "gpus", "hosts"),
    [
        ("3x8xH100-ib", 24, 3),
        ("1x8xB200-ib", 8, 1),
        ("2x8xA100-opa", 16, 2),
        ("16x8xA100-40gb-ib", 128, 16),
        ("4xH100-nvswitch", 4, 1),
        ("6xRTX4090-pcie", 6, 1),
        ("3xMI300X", 3, 1),
        ("1xH100-96gb", 1, 1),
        ("1xRTX4090", 1, 1),
        ("p5.48xlarge", 8, 1),
        ("2xp4d.24xlarge", 16, 2),
        ("2xa2-highgpu-8g", 16, 2),
        ("2xg5.12xlarge", 8, 2),
        ("ND96asr_v4", 8, 1),
    ],
)
def test_patterns_of_names(name: str, gpus: int, hosts: int) -> None:
    assert is_preset(name)
    cluster = Cluster.preset(name)
    assert (cluster.name, cluster.n_devices, len(set(cluster.host_number.tolist()))) == (name, gpus, hosts)
    assert len(cluster.compute_devices) == gpus
    assert cluster.source.endswith("November 2026")


@pytest.mark.parametrize(
    "name",
    [
        "0xH100",
        "9xH100-nvswitch",
        "2xH100",
        "2x4xH100-ib",
        "2x8xL40S-ib",
        "4xL40S",
        "4xL40S-nvswitch",
        "x8",
        "2x1xV100",
    ],
)
def test_names_that_are_none(name: str) -> None:
    assert not is_preset(name)
    with pytest.raises(UnknownNameError, match=f"unknown cluster '{name}'"):
        Cluster.preset(name)


def test_unknown_presets_and_rates_have_near_names() -> None:
    near = "did you mean '8xH100-nvswitch'[?] `placement clusters` lists them; 16x8xH100-ib, .* and the like"
    with pytest.raises(UnknownNameError, match=near):
        Cluster.preset("8xH100-nvswich")
    with pytest.raises(ClusterError, match="has 5000 hosts; expected at most 1024"):
        Cluster.preset("5000x8xH100-ib")
    with pytest.raises(UnknownNameError, match="unknown rates 'peaks', did you mean 'peak'"):
        Cluster.preset("1xH100", rates="peaks")


@pytest.mark.parametrize(
    ("name", "hash_"),
    [
        ("8xA100-nvswitch", "0d9022abb613b6f8"),
        ("8xH100-nvswitch", "be27a7a98f22dbf6"),
        ("2x8xH100-ib", "34222f07c856cd04"),
        ("1xH100+host", "19f6e9e793b5d13d"),
    ],
)
def test_at_peak_they_are_what_they_were_before_there_were_rates(name: str, hash_: str) -> None:
    peak = Cluster.preset(name, rates="peak")
    assert peak == Cluster.preset(name).at_peak()
    assert peak.hash.startswith(hash_)
    assert Cluster.preset(name).hash != peak.hash


@pytest.mark.parametrize("name", PRESETS)
def test_at_peak_nothing_says_what_is_reached(name: str) -> None:
    peak = Cluster.preset(name, rates="peak")
    assert peak.fabric is None
    assert all(link.nominal_bytes_per_s is None for link in peak.links)
    assert peak.at_peak() == peak


def test_memory_is_left_to_the_allocator_where_rates_are_known() -> None:
    (device, *_), (peak, *_) = (
        Cluster.preset("8xH100-nvswitch", rates=rates).devices for rates in ("measured", "peak")
    )
    assert device.reserved_bytes - peak.reserved_bytes == int(0.07 * device.memory_bytes)


def bus_bytes_per_s(name: str, kind: str, groups: list[list[int]], size: float) -> float:
    """As nccl-tests define it: bytes that go through the port of each rank, by seconds."""
    found = AsUsed.of(Cluster.preset(name), np.array(groups))
    assert found is not None
    p = len(groups[0])
    share = {"all_reduce": 2 * (p - 1) / p, "all_to_all": (p - 1) / p**2}.get(kind, (p - 1) / p)
    return share * size / float(found.seconds(kind, size))


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "measured"),
    # Of 512 MiB, that each rank gives to an all-to-all.
    [
        ("8xH100-nvswitch", "all_reduce", 8, 445e9),
        ("8xH100-nvswitch", "all_reduce", 4, 350e9),
        ("8xH100-nvswitch", "all_gather", 8, 335e9),
        ("8xH100-nvswitch", "reduce_scatter", 2, 249e9),
        ("8xH100-nvswitch", "all_to_all", 8, 315e9),
        ("8xA100-nvswitch", "all_reduce", 8, 222e9),
        ("8xA100-nvswitch", "all_gather", 2, 150e9),
        ("8xA100-nvswitch", "all_to_all", 4, 195e9),
    ],
)
def test_large_collectives_reach_what_was_measured(name: str, kind: str, ranks: int, measured: float) -> None:
    size = 2**29 * (ranks if kind == "all_to_all" else 1)
    assert bus_bytes_per_s(name, kind, [[*range(ranks)]], size) == pytest.approx(measured, rel=0.08)


def test_small_collectives_take_microseconds() -> None:
    for name, kind, ranks, measured in (
        ("8xH100-nvswitch", "all_reduce", 8, 16e-6),
        ("8xH100-nvswitch", "all_gather", 8, 10.5e-6),
        ("8xA100-nvswitch", "all_reduce", 8, 22e-6),
        ("8xA100-nvswitch", "reduce_scatter", 2, 10e-6),
    ):
        found = AsUsed.of(Cluster.preset(name), np.arange(ranks)[None])
        assert found is not None
        assert float(found.seconds(kind, 8192)) == pytest.approx(measured, rel=0.25)


def test_hosts_of_whole_groups_use_all_ports_and_strided_ones_their_own() -> None:
    size, whole = 2**30, [[*range(16)]]
    pairs = [[g, g + 8] for g in range(8)]
    assert bus_bytes_per_s("2x8xH100-ib", "all_gather", whole, size) == pytest.approx(320e9, rel=0.1)
    assert bus_bytes_per_s("2x8xH100-ib", "all_gather", pairs, size) == pytest.approx(46e9, rel=0.1)
    assert bus_bytes_per_s("2x8xA100-ib", "all_reduce", whole, size) == pytest.approx(180e9, rel=0.1)
    # Two GPUs share an adapter of 100 Gbit/s, or all eight do.
    assert bus_bytes_per_s("2xp4d.24xlarge", "all_gather", pairs, size) == pytest.approx(0.75 * 12.5e9 / 2, rel=0.1)
    assert bus_bytes_per_s("2xa2-highgpu-8g", "all_gather", pairs, size) == pytest.approx(0.75 * 12.5e9 / 8, rel=0.1)


def test_how_far_off_public_runs_were_is_said_in_one_place() -> None:
    assert compared([T4]) == "not compared with public runs yet"
    for runs in COMPARED.values():
        assert compared([runs.device, runs.device]) == str(runs)
        for changed in (runs.device.rates and replace(runs.device.rates, floor_s=1.0), None):
            assert compared([replace(runs.device, rates=changed)]) == "not compared with public runs yet"


def test_rates_that_are_no_name_are_refused_in_a_sentence() -> None:
    for rates in (None, 3, "peek"):
        with pytest.raises(UnknownNameError, match="unknown rates"):
            Cluster.preset("1xH100", rates=rates)  # type: ignore[arg-type]


def test_peaks_leave_no_measured_collectives() -> None:
    known = MeasuredCollective("all_reduce", 2, (1024,), (1.0,))
    cluster = replace(Cluster.preset("2xH100-nvswitch"), collectives=(known,))
    assert cluster.at_peak() == Cluster.preset("2xH100-nvswitch", rates="peak")
