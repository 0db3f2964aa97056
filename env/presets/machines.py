"""Machines that people train on now, one host or many of them: names are patterns, so that there are as many as needed.

``8xH100-nvswitch`` is one host, ``16x8xH100-ib`` sixteen of them on InfiniBand, ``4xRTX4090-pcie`` four cards in one,
``1xA100`` one GPU alone, and ``2xp5.48xlarge`` two machines of a cloud by the name it has there. With ``+host`` behind
it the CPUs and the memory of each host are a device, too, for what does not fit into those of the GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from env.device import Device, Link, host_of
from env.fabric import Fabric
from env.gpus import (
    A10G,
    A100_PCIE,
    A100_PCIE_80,
    A100_SXM4,
    A100_SXM4_40,
    B200,
    CASCADE_LAKE,
    DGX_A100_HOST,
    DGX_H100_HOST,
    H100,
    H100_HBM2E,
    H200,
    L40S,
    MI300X,
    RTX_4090,
    T4,
    V100_PCIE,
)
from env.presets.figures import NCCL_A100, NCCL_B200, NCCL_H100
from env.presets.parts import (
    A100_PORT_BYTES_PER_S,
    B200_PORT_BYTES_PER_S,
    CLOUD_REACHED,
    GBIT_BYTES_PER_S,
    H100_PORT_BYTES_PER_S,
    HDR_BYTES_PER_S,
    INFINIBAND_PORT_S,
    INFINIBAND_REACHED,
    INFINITY_BYTES_PER_S,
    INFINITY_REACHED,
    NDR_BYTES_PER_S,
    NVLINK_REACHED,
    NVLINK_S,
    PCIE3_BYTES_PER_S,
    PCIE4_BYTES_PER_S,
    PCIE5_BYTES_PER_S,
    PCIE_PORT_S,
    Port,
    Preset,
    adapters_of,
    meshed_host,
    switched_host,
)
from graphs.errors import ClusterError

MOST_HOSTS = 1024
_MOST_OF_A_HOST = {"nvswitch": 8, "mesh": 8, "pcie": 16}

_READ = "figures as of November 2026"
_NVIDIA = "NVIDIA data sheet"
_REACHED = "what links reach: microsoft/vidur @ 7d475133, NCCL 2.27 topo.h and tuning.cc, else assumed"


@dataclass(frozen=True)
class Gpu:
    """A GPU and how those of one host are joined.

    Attributes:
        label: for people.
        sheet: where the figures of the GPU and its ports come from.
        switch: ``"nvswitch"``; ``"pcie"``; ``"mesh"``, each pair by a link of its own.
        port: of each GPU to the switch, or of each pair.
        fabric: what collectives reach; None: by algorithm over the links.
        infiniband: one port for each GPU, in machines that their vendor sells; None: not known.
        omni_path: each of the links of a host, as in France's Jean Zay, where BLOOM was trained; None: not known.
    """

    model: Device
    label: str
    sheet: str
    switch: str
    port: Port
    fabric: Fabric | None = None
    infiniband: Port | None = None
    omni_path: Port | None = None


@dataclass(frozen=True)
class CloudMachine:
    """A machine of a cloud: so many GPUs of a kind, and its network.

    Attributes:
        gpu: name in `GPUS`.
        count: GPUs in it.
        adapters: of its network.
        adapter: each of them.
        source: where the figures come from.
    """

    gpu: str
    count: int
    adapters: int
    adapter: Port
    source: str


_HDR, _NDR, _OPA = (
    Port(rate, INFINIBAND_REACHED, INFINIBAND_PORT_S)
    for rate in (HDR_BYTES_PER_S, NDR_BYTES_PER_S, 100 * GBIT_BYTES_PER_S)
)
_OMNI_PATHS = 4  # of a host
_A100_PORT, _H100_PORT, _B200_PORT = (
    Port(rate, NVLINK_REACHED, NVLINK_S / 2)
    for rate in (A100_PORT_BYTES_PER_S, H100_PORT_BYTES_PER_S, B200_PORT_BYTES_PER_S)
)
_PCIE3, _PCIE4, _STAGED = (
    Port(rate, 1.0, PCIE_PORT_S) for rate in (PCIE3_BYTES_PER_S, PCIE4_BYTES_PER_S, PCIE4_BYTES_PER_S / 2)
)
_INFINITY = Port(INFINITY_BYTES_PER_S, INFINITY_REACHED, PCIE_PORT_S * 2)

GPUS: dict[str, Gpu] = {
    "A100": Gpu(A100_SXM4, "A100 (80 GB)", f"{_NVIDIA} A100, 2021", "nvswitch", _A100_PORT, NCCL_A100, _HDR, _OPA),
    "A100-40gb": Gpu(
        A100_SXM4_40, "A100 (40 GB)", f"{_NVIDIA} A100, 2021", "nvswitch", _A100_PORT, NCCL_A100, _HDR, _OPA
    ),
    "H100": Gpu(H100, "H100 (80 GB)", f"{_NVIDIA} H100, 2023", "nvswitch", _H100_PORT, NCCL_H100, _NDR),
    "H100-96gb": Gpu(
        H100_HBM2E,
        "H100 (96 GB HBM2e, 500 W)",
        f"{_NVIDIA} H100, 2023; pytorch/torchtitan @ b5bcd76c",
        "nvswitch",
        _H100_PORT,
        NCCL_H100,
        _NDR,
    ),
    "H200": Gpu(H200, "H200 (141 GB)", f"{_NVIDIA} H200, 2024", "nvswitch", _H100_PORT, NCCL_H100, _NDR),
    "B200": Gpu(B200, "B200 (180 GB)", f"{_NVIDIA} DGX B200, 2024", "nvswitch", _B200_PORT, NCCL_B200, _NDR),
    "MI300X": Gpu(MI300X, "MI300X (192 GB)", "AMD Instinct MI300X data sheet, 2023", "mesh", _INFINITY),
    "A100-pcie": Gpu(A100_PCIE_80, "A100 PCIe (80 GB)", f"{_NVIDIA} A100, 2021", "pcie", _PCIE4),
    "A100-40gb-pcie": Gpu(A100_PCIE, "A100 PCIe (40 GB)", f"{_NVIDIA} A100, 2021", "pcie", _PCIE4),
    "V100-pcie": Gpu(V100_PCIE, "V100 (16 GB)", f"{_NVIDIA} V100, 2020", "pcie", _PCIE3),
    "L40S-pcie": Gpu(L40S, "L40S (48 GB)", f"{_NVIDIA} L40S, 2023", "pcie", _PCIE4),
    "A10G-pcie": Gpu(A10G, "A10G (24 GB)", "AWS G5 instances, 2021", "pcie", _STAGED),
    "RTX4090-pcie": Gpu(RTX_4090, "RTX 4090 (24 GB)", "NVIDIA Ada white paper, 2022", "pcie", _STAGED),
    "T4-pcie": Gpu(T4, "T4 (16 GB)", f"{_NVIDIA} T4, 2019", "pcie", _PCIE3),
}


def _gbit(rate: float, reached: float = CLOUD_REACHED) -> Port:
    return Port(rate * GBIT_BYTES_PER_S, reached, INFINIBAND_PORT_S)


_AWS, _GCP, _AZURE = "AWS instance types, 2025", "Google Cloud GPU machine types, 2025", "Azure ND series, 2025"
CLOUD: dict[str, CloudMachine] = {
    "p4d.24xlarge": CloudMachine("A100-40gb", 8, 4, _gbit(100), _AWS),
    "p4de.24xlarge": CloudMachine("A100", 8, 4, _gbit(100), _AWS),
    "p5.48xlarge": CloudMachine("H100", 8, 8, _gbit(400), _AWS),
    "p5e.48xlarge": CloudMachine("H200", 8, 8, _gbit(400), _AWS),
    "p5en.48xlarge": CloudMachine("H200", 8, 8, _gbit(400), _AWS),
    "p6-b200.48xlarge": CloudMachine("B200", 8, 8, _gbit(400), _AWS),
    "a2-highgpu-8g": CloudMachine("A100-40gb", 8, 1, _gbit(100), _GCP),
    "a2-ultragpu-8g": CloudMachine("A100", 8, 1, _gbit(100), _GCP),
    "a3-highgpu-8g": CloudMachine("H100", 8, 4, _gbit(200), _GCP),
    "a3-megagpu-8g": CloudMachine("H100", 8, 8, _gbit(200), _GCP),
    "a3-ultragpu-8g": CloudMachine("H200", 8, 8, _gbit(400), _GCP),
    "a4-highgpu-8g": CloudMachine("B200", 8, 8, _gbit(400), _GCP),
    "ND96asr_A100_v4": CloudMachine("A100-40gb", 8, 8, _HDR, _AZURE),
    "ND96amsr_A100_v4": CloudMachine("A100", 8, 8, _HDR, _AZURE),
    "ND96isr_H100_v5": CloudMachine("H100", 8, 8, _NDR, _AZURE),
    "ND96isr_H200_v5": CloudMachine("H200", 8, 8, _NDR, _AZURE),
    "g4dn.12xlarge": CloudMachine("T4-pcie", 4, 1, _gbit(50), _AWS),
    "g5.12xlarge": CloudMachine("A10G-pcie", 4, 1, _gbit(40), _AWS),
    "g5.48xlarge": CloudMachine("A10G-pcie", 8, 1, _gbit(100), _AWS),
    "g6e.12xlarge": CloudMachine("L40S-pcie", 4, 1, _gbit(100), _AWS),
    "g6e.48xlarge": CloudMachine("L40S-pcie", 8, 1, _gbit(400), _AWS),
}
# The same machines, as their cloud calls them where it leaves the GPU out.
_ALIASES = {"ND96asr_v4": "ND96asr_A100_v4"}

# Those that lists show; others of the same patterns are made where they are asked for.
SHOWN = (
    *(f"1x{name}" for name in ("A100", "A100-40gb", "H100", "H200", "B200", "MI300X", "L40S", "A10G", "RTX4090", "T4")),
    *(f"8x{name}-nvswitch" for name in ("A100", "A100-40gb", "H100", "H100-96gb", "H200", "B200")),
    *(f"{hosts}x8x{name}-ib" for name in ("A100", "H100") for hosts in (2, 8)),
    "8xMI300X",
    *(f"{count}xRTX4090-pcie" for count in (2, 4, 8)),
    *(f"{count}xL40S-pcie" for count in (2, 4, 8)),
    "4xA10G-pcie",
    "4xT4-pcie",
    *CLOUD,
)
PATTERNS = (
    "16x8xH100-ib",
    "2xp5.48xlarge",
    "4xH100-nvswitch",
    "6xRTX4090-pcie",
    "1xH100+host",
)  # for what else there is

# The CPUs and memory beside GPUs, and the link of each of these to them: of machines that their vendor sells, and for
# cards those of a cloud machine, an assumption. That each GPU has 16 lanes of its own to the host is one, too.
_DGX_A100, _DGX_H100 = (DGX_A100_HOST, PCIE4_BYTES_PER_S), (DGX_H100_HOST, PCIE5_BYTES_PER_S)
_HOSTS = {
    **dict.fromkeys((A100_SXM4.model, A100_SXM4_40.model), _DGX_A100),
    **dict.fromkeys((H100.model, H100_HBM2E.model, H200.model, B200.model, MI300X.model), _DGX_H100),
    **dict.fromkeys((T4.model, V100_PCIE.model), (CASCADE_LAKE, PCIE3_BYTES_PER_S)),
}
_OF_CARDS = CASCADE_LAKE, PCIE4_BYTES_PER_S
_WITH_HOST = "+host"

_COUNTED = re.compile(r"([1-9]\d{0,5})x(.+)")
_HOSTS_OF_EIGHT = re.compile(r"8x(.+)-(ib|opa)")


def maker_of(name: str) -> Callable[[], Preset] | None:
    """Maker of the machine of a name, None where no pattern fits."""
    if name.endswith(_WITH_HOST):
        without = maker_of(name.removesuffix(_WITH_HOST))
        return None if without is None else partial(_with_hosts, name, without)
    found = _COUNTED.fullmatch(name)
    count, rest = (int(found[1]), found[2]) if found else (1, name)
    machine = CLOUD.get(_ALIASES.get(rest, rest))
    if machine is not None:
        return partial(_cloud, name, machine, count)
    if found is None:
        return None
    hosts = _HOSTS_OF_EIGHT.fullmatch(rest)
    gpu = GPUS.get(hosts[1] if hosts else rest.removesuffix("-nvswitch"))
    if hosts:
        network = None if gpu is None else gpu.omni_path if hosts[2] == "opa" else gpu.infiniband
        return None if gpu is None or network is None else partial(_on_network, name, gpu, network, count)
    if count == 1:
        alone = GPUS.get(rest, GPUS.get(f"{rest}-pcie"))
        return partial(_one, name, alone) if alone is not None else None
    if gpu is None or rest.endswith("-nvswitch") != (gpu.switch == "nvswitch"):
        return None
    return partial(_made, name, gpu, count) if count <= _MOST_OF_A_HOST[gpu.switch] else None


def _with_hosts(name: str, without: Callable[[], Preset]) -> Preset:
    """A machine whose hosts are devices, each with a link to every GPU beside those that join the GPUs."""
    made = without()
    host, rate = _HOSTS.get(made.devices[0].model, _OF_CARDS)
    names = list(dict.fromkeys(host_of(gpu.name) for gpu in made.devices))
    cpus = {of: replace(host, name="cpu0" if of is None else f"{of}/cpu0") for of in names}
    links = [
        link
        for gpu in made.devices
        for link in Port(rate, 1.0, PCIE_PORT_S).between(gpu.name, cpus[host_of(gpu.name)].name)
    ]
    return replace(
        made,
        name=name,
        devices=(*made.devices, *cpus.values()),
        links=(*made.links, *links),
        summary=f"{made.summary}; {host.model} with {host.memory_bytes / 2**30:,.0f} GiB as a device, "
        f"{rate / 1e9:.0f} GB/s to each GPU",
        source=f"{made.source}; hosts: NVIDIA DGX data sheets, 2021 and 2023, Intel ARK; links to them PCIe, NCCL 2.27",
    )


def _one(name: str, gpu: Gpu) -> Preset:
    return Preset(name, (replace(gpu.model, name="gpu0"),), (), f"one {gpu.label}", f"{gpu.sheet}; {_READ}")


def _made(name: str, gpu: Gpu, count: int) -> Preset:
    devices, links = _host(gpu, count, "")
    inside = {
        "nvswitch": f"on NVSwitch, {gpu.port.nominal_bytes_per_s / 1e9:.0f} GB/s per port",
        "mesh": f"joined in pairs, {gpu.port.nominal_bytes_per_s / 1e9:.0f} GB/s each",
        "pcie": f"on PCIe, {gpu.port.nominal_bytes_per_s / 1e9:.0f} GB/s per slot",
    }[gpu.switch]
    return Preset(name, devices, tuple(links), f"{count} {gpu.label} {inside}", _source(gpu), gpu.fabric)


def _on_network(name: str, gpu: Gpu, port: Port, hosts: int) -> Preset:
    rate = f"{port.nominal_bytes_per_s / GBIT_BYTES_PER_S:.0f} Gbit/s"
    inside = f"{hosts} hosts of 8 {gpu.label}: NVSwitch inside"
    if port is gpu.omni_path:
        summary = f"{inside}, {_OMNI_PATHS} Omni-Path links of {rate} per host between"
        return _hosts(name, gpu, (8, hosts, _OMNI_PATHS), port, "omnipath", summary, _source(gpu))
    summary = f"{inside}, one {rate} InfiniBand port per GPU between"
    return _hosts(name, gpu, (8, hosts, 8), port, "infiniband", summary, _source(gpu))


def _cloud(name: str, machine: CloudMachine, hosts: int) -> Preset:
    gpu = GPUS[machine.gpu]
    rate = f"{machine.adapter.nominal_bytes_per_s / GBIT_BYTES_PER_S:.0f} Gbit/s"
    network = f"{machine.adapters} x {rate}" if machine.adapters > 1 else rate
    source = f"{machine.source}; {_source(gpu)}"
    if hosts == 1:
        made = _made(name, gpu, machine.count)
        return replace(made, summary=f"{made.summary}; network {network}", source=source)
    inside = {"nvswitch": "NVSwitch", "mesh": "a mesh", "pcie": "PCIe"}[gpu.switch]
    summary = f"{hosts} machines of {machine.count} {gpu.label}: {inside} inside, {network} between"
    shape = machine.count, hosts, machine.adapters
    return _hosts(name, gpu, shape, machine.adapter, "network", summary, source)


def _hosts(
    name: str, gpu: Gpu, shape: tuple[int, int, int], adapter: Port, network: str, summary: str, source: str
) -> Preset:
    """Equal hosts of GPUs, by `shape`: (GPUs of a host, hosts, adapters of a host).

    Raises:
        ClusterError: more than `MOST_HOSTS`.
    """
    count, hosts, adapters = shape
    if hosts > MOST_HOSTS:
        raise ClusterError(f"cluster {name!r} has {hosts} hosts; expected at most {MOST_HOSTS}.")
    devices: list[Device] = []
    links: list[Link] = []
    for h in range(hosts):
        prefix = f"host{h}/" if hosts > 1 else ""
        own, inside = _host(gpu, count, prefix)
        devices += own
        links += inside
        if hosts > 1:
            links += adapters_of(own, adapters, adapter, prefix, network)
    return Preset(name, tuple(devices), tuple(links), summary, source, gpu.fabric)


def _host(gpu: Gpu, count: int, prefix: str) -> tuple[tuple[Device, ...], list[Link]]:
    if gpu.switch == "mesh":
        return meshed_host(gpu.model, count, gpu.port, prefix)
    return switched_host(gpu.model, count, gpu.port, f"{prefix}{gpu.switch}", prefix)


def _source(gpu: Gpu) -> str:
    collectives = gpu.fabric.source if gpu.fabric is not None else "by algorithm"
    return f"{gpu.sheet}; {_REACHED}; collectives: {collectives}; {_READ}"
