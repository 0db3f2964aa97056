"""Machines of papers on placement, and others of their time: devices and links at the rates of data sheets, no fabric.

All rates are peaks that real kernels do not reach, so step times are best cases; `Device.compute_efficiency` and
`Device.bandwidth_efficiency` take what you measured.
"""

from __future__ import annotations

from collections.abc import Callable

from env.device import Device, Link, both_ways
from env.gpus import A100_PCIE, CASCADE_LAKE, HASWELL, K40, P100, T4, V100_PCIE, V100_SXM2
from env.presets.parts import (
    ETHERNET_BYTES_PER_S,
    ETHERNET_PORT_S,
    LINK_SOURCE,
    NVLINK2_BYTES_PER_S,
    NVLINK_S,
    PCIE3_BYTES_PER_S,
    PCIE_HOP_S,
    PCIE_PORT_S,
    QPI_BYTES_PER_S,
    Preset,
    at_peak,
    star,
)

_V100_SOURCE = "NVIDIA V100 data sheet, 2020"
_K40_SOURCE = "NVIDIA Tesla K40 board specification BD-06902, 2013"
_HASWELL_SOURCE = "Intel ARK, Xeon E5-2699 v3, 2014: 18 cores x 2.3 GHz x 32 float32 FLOP per cycle, 4 x DDR4-2133"

# GPU pairs of a DGX-1 with V100 and how many NVLinks join them (`nvidia-smi topo -m`; NVIDIA DGX-1 white paper
# WP-08437, 2017, figure 5). Two fully joined quads; every GPU has one partner in the other quad, and six links in all.
DGX1_NVLINKS = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2,
    (1, 2): 2, (1, 3): 1, (1, 5): 2,
    (2, 3): 2, (2, 6): 1,
    (3, 7): 1,
    (4, 5): 1, (4, 6): 1, (4, 7): 2,
    (5, 6): 2, (5, 7): 1,
    (6, 7): 2,
}  # fmt: skip


def _pcie_host(name: str, devices: tuple[Device, ...], summary: str, source: str) -> Preset:
    """Every device on one PCIe switch (or root complex) of its own x16 port."""
    links = star((d.name for d in devices), "pcie", PCIE3_BYTES_PER_S, PCIE_PORT_S)
    return Preset(name, devices, links, summary, f"{source}; {LINK_SOURCE}")


def _v100_and_cpu() -> Preset:
    return _pcie_host(
        "1xV100",
        (*at_peak([V100_PCIE]), HASWELL),
        "one V100 (16 GB) and its host CPU over PCIe 3.0",
        f"{_V100_SOURCE}; {_HASWELL_SOURCE}; host memory assumed",
    )


def _k40s(count: int) -> Preset:
    # Mirhoseini et al. 2018 (ICLR, "A hierarchical model for device placement"): one Haswell CPU and up to eight K40.
    return _pcie_host(
        f"{count}xK40-pcie",
        (*at_peak([K40] * count), HASWELL),
        f"{count} K40 (12 GB) and their host CPU over PCIe 3.0, as in the device placement papers of 2018",
        f"{_K40_SOURCE}; {_HASWELL_SOURCE}; one PCIe switch and the host's memory size assumed",
    )


def _v100s_pcie() -> Preset:
    return _pcie_host("4xV100-pcie", at_peak([V100_PCIE] * 4), "4 V100 (16 GB) on one PCIe 3.0 switch", _V100_SOURCE)


def _dgx1() -> Preset:
    gpus = at_peak([V100_SXM2] * 8)
    links = [
        link
        for (a, b), count in DGX1_NVLINKS.items()
        for link in both_ways(f"gpu{a}", f"gpu{b}", count * NVLINK2_BYTES_PER_S, NVLINK_S)
    ]
    for i in range(8):
        links += both_ways(f"gpu{i}", f"pcie{i // 2}", PCIE3_BYTES_PER_S, PCIE_PORT_S)
    for switch in range(4):
        links += both_ways(f"pcie{switch}", f"socket{switch // 2}", PCIE3_BYTES_PER_S, PCIE_HOP_S)
    links += both_ways("socket0", "socket1", QPI_BYTES_PER_S, PCIE_HOP_S)
    return Preset(
        "8xV100-nvlink",
        gpus,
        tuple(links),
        "DGX-1: 8 V100 (16 GB), uneven NVLink 2 mesh, the other pairs over PCIe and QPI",
        f"{_V100_SOURCE}; NVIDIA DGX-1 white paper WP-08437, 2017; {LINK_SOURCE}",
    )


def _v100_hosts() -> Preset:
    # PipeDream's cluster A (Narayanan et al., SOSP 2019, section 5.1): hosts of four V100 on PCIe, 10 Gbit/s Ethernet.
    hosts = [at_peak([V100_PCIE] * 4, f"host{h}/") for h in range(4)]
    links: list[Link] = []
    for h, gpus in enumerate(hosts):
        links += star((gpu.name for gpu in gpus), f"host{h}/pcie", PCIE3_BYTES_PER_S, PCIE_PORT_S)
        links += both_ways(f"host{h}/pcie", "ethernet", ETHERNET_BYTES_PER_S, ETHERNET_PORT_S)
    return Preset(
        "16xV100-10gbe",
        tuple(gpu for gpus in hosts for gpu in gpus),
        tuple(links),
        "4 hosts of 4 V100 (16 GB): PCIe 3.0 inside, one 10 Gbit/s Ethernet port per host between",
        f"{_V100_SOURCE}; PipeDream, SOSP 2019, cluster A; Ethernet payload and latency assumed; {LINK_SOURCE}",
    )


def _mixed() -> Preset:
    return _pcie_host(
        "mixed-gpus",
        at_peak([A100_PCIE, V100_PCIE, V100_PCIE, P100]),
        "one A100 (40 GB), two V100 (16 GB) and one P100 (12 GB) on one PCIe 3.0 switch",
        f"NVIDIA A100 data sheet, 2021; {_V100_SOURCE}; NVIDIA P100 PCIe data sheet, 2016",
    )


def _cpu_gpu() -> Preset:
    return _pcie_host(
        "cpu-gpu",
        (CASCADE_LAKE, *at_peak([T4])),
        "a server CPU and one T4 (16 GB) over PCIe 3.0",
        "NVIDIA T4 data sheet, 2019; Xeon Platinum 8259CL: 24 cores x 2.5 GHz x 64 float32 FLOP per cycle, "
        "6 x DDR4-2933; host memory assumed",
    )


PAPERS: dict[str, Callable[[], Preset]] = {
    "1xV100": _v100_and_cpu,
    "2xK40-pcie": lambda: _k40s(2),
    "4xK40-pcie": lambda: _k40s(4),
    "8xK40-pcie": lambda: _k40s(8),
    "4xV100-pcie": _v100s_pcie,
    "8xV100-nvlink": _dgx1,
    "16xV100-10gbe": _v100_hosts,
    "mixed-gpus": _mixed,
    "cpu-gpu": _cpu_gpu,
}
