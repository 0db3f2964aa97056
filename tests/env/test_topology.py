"""What `nvidia-smi topo -m` prints, read as a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from env.cluster import Cluster
from env.gym.named import cluster_named
from env.presets.topology import HOW, Topology, is_topology, topology_of
from graphs.errors import ClusterError

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
# Eight H100 on NVSwitch: an adapter for each, the head underlined, as terminals have it.
HGX_H100 = "\n".join(
    [
        "\t\x1b[4m" + "\t".join([*(f"GPU{k}" for k in range(8)), *(f"NIC{k}" for k in range(8))]) + "\tCPU Affinity"
        "\tNUMA Affinity\tGPU NUMA ID\x1b[0m",
        *(
            f"GPU{a}\t"
            + "\t".join(
                [" X " if a == b else "NV18" for b in range(8)] + ["PIX" if a == b else "SYS" for b in range(8)]
            )
            + f"\t{'0-47,96-143' if a < 4 else '48-95,144-191'}\t{a // 4}\t\tN/A"
            for a in range(8)
        ),
        *(f"NIC{a}\t" + "\t".join(["SYS"] * 15) + "\t X \t\t\t\t" for a in range(8)),
    ]
)
DGX1 = """\
        GPU0    GPU1    GPU2    GPU3    GPU4    GPU5    GPU6    GPU7    mlx5_0  mlx5_1  CPU Affinity
GPU0     X      NV1     NV1     NV2     NV2     SYS     SYS     SYS     PIX     SYS     0-19,40-59
GPU1    NV1      X      NV2     NV1     SYS     NV2     SYS     SYS     PIX     SYS     0-19,40-59
GPU2    NV1     NV2      X      NV2     SYS     SYS     NV1     SYS     PHB     SYS     0-19,40-59
GPU3    NV2     NV1     NV2      X      SYS     SYS     SYS     NV1     PHB     SYS     0-19,40-59
GPU4    NV2     SYS     SYS     SYS      X      NV1     NV1     NV2     SYS     PIX     20-39,60-79
GPU5    SYS     NV2     SYS     SYS     NV1      X      NV2     NV1     SYS     PIX     20-39,60-79
GPU6    SYS     SYS     NV1     SYS     NV1     NV2      X      NV2     SYS     PHB     20-39,60-79
GPU7    SYS     SYS     SYS     NV1     NV2     NV1     NV2      X      SYS     PHB     20-39,60-79
mlx5_0  PIX     PIX     PHB     PHB     SYS     SYS     SYS     SYS      X      SYS
mlx5_1  SYS     SYS     SYS     SYS     PIX     PIX     PHB     PHB     SYS      X
"""
BRIDGED = """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity
GPU0     X      NV12    SYS     SYS     0-31,64-95      0
GPU1    NV12     X      SYS     SYS     0-31,64-95      0
GPU2    SYS     SYS      X      NV12    32-63,96-127    1
GPU3    SYS     SYS     NV12     X      32-63,96-127    1
"""
CARDS = """\
        GPU0    GPU1    GPU2    GPU3    NIC0    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      PIX     NODE    SYS     SYS     0-31    0               N/A
GPU1    PIX      X      NODE    SYS     SYS     0-31    0               N/A
GPU2    NODE    NODE     X      SYS     SYS     0-31    0               N/A
GPU3    SYS     SYS     SYS      X      PHB     32-63   1               N/A
NIC0    SYS     SYS     SYS     PHB      X
"""


def listed(name: str, count: int) -> str:
    return "".join(f"GPU {k}: {name} (UUID: GPU-00000000-0000-0000-0000-00000000000{k})\n" for k in range(count))


def read(text: str, folder: Path) -> Cluster:
    file = folder / "host.txt"
    file.write_text(text + LEGEND, encoding="utf-8")
    return cluster_named(str(file))


def test_an_nvswitch_is_that_of_the_preset(tmp_path: Path) -> None:
    found = read(listed("NVIDIA H100 80GB HBM3", 8) + HGX_H100, tmp_path)
    assert (found.name, found.hash) == ("host", Cluster.preset("8xH100-nvswitch").hash)
    assert found.summary == "8 x H100-SXM5-80GB, joined by NV18"
    assert topology_of(HGX_H100).affinities[::4] == ("0-47,96-143", "48-95,144-191")


def test_hosts_one_behind_the_other_are_joined_by_a_network(tmp_path: Path) -> None:
    host = listed("NVIDIA H100 80GB HBM3", 8) + HGX_H100 + LEGEND
    found = read(f"{host}{host}network 8 x 400 Gb/s\n", tmp_path)
    preset = Cluster.preset("2x8xH100-ib")
    assert found.devices == preset.devices
    links = {replace(link, src=name(link.src), dst=name(link.dst)) for link in found.links}
    assert links == set(preset.links)
    assert found.fabric == preset.fabric
    few = read(f"{listed('NVIDIA L40S', 4)}{CARDS}{host}network: 2 x 25 Gb/s", tmp_path)
    assert [device.name for device in few.devices][3:5] == ["host0/gpu3", "host1/gpu0"]
    assert "4 x L40S" in few.summary
    with pytest.raises(ClusterError, match="matrices of 2 hosts, and nothing says what joins these"):
        read(host + host, tmp_path)


def name(end: str) -> str:
    return "infiniband" if end == "network" else end


def test_an_uneven_mesh_has_the_links_of_each_pair(tmp_path: Path) -> None:
    found = read(listed("Tesla V100-SXM2-32GB", 8) + DGX1, tmp_path)
    expected = Cluster.preset("8xV100-nvlink").routes
    np.testing.assert_allclose(found.routes.bandwidth_bytes_per_s, expected.bandwidth_bytes_per_s)
    assert {device.memory_bytes for device in found.devices} == {32 * 2**30}
    assert found.summary == "8 x V100-SXM2-32GB, joined by NV1, NV2 and SYS"


def test_bridges_join_pairs_of_cards(tmp_path: Path) -> None:
    found = read(listed("NVIDIA A100 80GB PCIe", 4) + BRIDGED, tmp_path)
    rate = found.routes.bandwidth_bytes_per_s / 1e9
    assert rate[0, 1] == rate[2, 3] == pytest.approx(0.78 * 300)
    assert rate[0, 2] == rate[1, 3] == 16.0  # from socket to socket
    assert found.fabric is None


def test_pcie_is_a_tree_of_switches(tmp_path: Path) -> None:
    found = read(listed("NVIDIA L40S", 4) + CARDS, tmp_path)
    assert [(link.src, link.dst) for link in found.links[::2]] == [
        ("gpu0", "pcie0"),
        ("gpu1", "pcie0"),
        ("pcie0", "socket0"),
        ("gpu2", "socket0"),
        ("socket0", "sockets"),
        ("gpu3", "sockets"),
    ]
    rate = found.routes.bandwidth_bytes_per_s / 1e9
    assert rate[0, 1] == rate[0, 2] == 24.0
    assert rate[0, 3] == 16.0
    latency = found.routes.latency_s
    assert latency[0, 1] < latency[0, 2] < latency[0, 3]


def test_gpus_may_differ_and_one_needs_no_links(tmp_path: Path) -> None:
    names = listed("NVIDIA L40S", 3) + "GPU 3: NVIDIA A10G (UUID: GPU-1)\n"
    assert [device.model for device in read(names + CARDS, tmp_path).devices] == [*["L40S"] * 3, "A10G"]
    alone = read(listed("NVIDIA H200", 1) + "\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n", tmp_path)
    assert (alone.n_devices, alone.links) == (1, ())


def test_a_cluster_of_a_topology_is_written_as_toml(tmp_path: Path) -> None:
    found = read(listed("NVIDIA L40S", 4) + CARDS, tmp_path)
    (tmp_path / "mine.toml").write_text(found.to_toml())
    assert Cluster.from_toml(tmp_path / "mine.toml") == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CARDS, "which they are; put the lines of `nvidia-smi -L`"),
        (listed("NVIDIA L40S", 3) + CARDS, "which they are"),
        (listed("NVIDIA RTX 6000 Ada Generation", 4) + CARDS, "no figures of GPU 'NVIDIA RTX 6000 Ada Generation'"),
        (listed("NVIDIA L40S", 4) + "\n".join(CARDS.splitlines()[:3]), "no complete row for GPU2"),
        (listed("NVIDIA L40S", 4) + CARDS.replace("PIX      X ", "PHB      X "), "PIX from GPU0 to GPU1 and PHB back"),
        (
            listed("NVIDIA L40S", 4) + CARDS.replace("NODE    SYS     SYS     0-31", "OK      SYS     SYS     0-31"),
            "'OK'",
        ),
        (listed("NVIDIA A100-SXM4-80GB", 4) + CARDS, "shows no NVLink at GPU0, a A100-SXM4-80GB"),
        (listed("Tesla V100-SXM2-16GB", 8) + HGX_H100, "NV18 at GPU0"),
    ],
)
def test_what_is_none_is_refused_in_a_sentence(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as error:
        read(text, tmp_path)
    assert words in str(error.value)
    assert str(error.value).startswith(f"{tmp_path / 'host.txt'}: ")
    assert "\n" not in str(error.value)


def test_other_texts_are_none() -> None:
    assert not is_topology(Cluster.preset("2xL40S-pcie").to_toml())
    assert not is_topology("GPU0: 80 GB\n")
    with pytest.raises(ClusterError, match="no matrix"):
        topology_of("nothing")
    assert "nvidia-smi topo -m" in HOW
    assert Topology((), (("X",),), ("",)).size == 1
    with pytest.raises(ClusterError, match="cannot read"):
        Cluster.from_topology("missing.txt")
