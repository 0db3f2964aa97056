"""Machines by name: those that people train on now, one host or many of them, and those of papers.

Names are patterns, so that there are as many as needed: ``8xH100-nvswitch`` is one host, ``16x8xH100-ib`` sixteen of
them on InfiniBand, ``4xRTX4090-pcie`` four cards in one, ``1xA100`` one GPU alone, and ``2xp5.48xlarge`` two machines
of a cloud by the name it has there. With ``+host`` behind it the CPUs and the memory of each host are a device, too,
for what does not fit into those of the GPUs. Machines of papers have data-sheet rates, peaks that real kernels do not
reach, so their step times are best cases; `Device.compute_efficiency` and `Device.bandwidth_efficiency` take what you
measured.

``machines.toml`` has the figures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from env.device import Device, Link, both_ways, host_of
from env.fabric import Fabric, Protocol
from env.presets.gpus import DEVICES, read_data
from env.presets.parts import (
    ETHERNET_BYTES_PER_S,
    ETHERNET_PORT_S,
    GBIT_BYTES_PER_S,
    LINK_SOURCE,
    NVLINK2_BYTES_PER_S,
    NVLINK_S,
    PCIE_HOP_S,
    QPI_BYTES_PER_S,
    Port,
    Preset,
    adapters_of,
    meshed_host,
    numbered,
    star,
    switched_host,
)
from graphs.errors import ClusterError

MOST_HOSTS = 1024
_MOST_OF_A_HOST = {"nvswitch": 8, "mesh": 8, "pcie": 16}

_READ = "figures as of November 2026"
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


@dataclass(frozen=True)
class NvLinks:
    """NVLinks of a GPU, bytes per second of one of them (nominal), the share that transfers reach, and its slot."""

    count: int
    bytes_per_s: float
    reached: float
    slot: Port


_TABLES = read_data("machines.toml")
PORTS = {name: Port(**table) for name, table in _TABLES["ports"].items()}
_FABRICS = {
    name: Fabric(tuple(Protocol(*row) for row in table["protocols"]), table["overlap"], table["source"])
    for name, table in _TABLES["fabrics"].items()
}
_OMNI_PATHS = 4  # of a host


def _gpu(table: Mapping[str, str]) -> Gpu:
    ports = {key: PORTS[table[key]] for key in ("port", "infiniband", "omni_path") if key in table}
    fabric = _FABRICS[table["fabric"]] if "fabric" in table else None
    return Gpu(DEVICES[table["model"]], table["label"], table["sheet"], table["switch"], fabric=fabric, **ports)


GPUS: dict[str, Gpu] = {name: _gpu(table) for name, table in _TABLES["gpus"].items()}
CLOUD: dict[str, CloudMachine] = {
    name: CloudMachine(gpu, count, adapters, PORTS[adapter], source)
    for name, (gpu, count, adapters, adapter, source) in _TABLES["clouds"].items()
}
NVLINKS = {
    model: NvLinks(count, rate, reached, PORTS[slot])
    for model, (count, rate, reached, slot) in _TABLES["nvlinks"].items()
}
_HOSTS = {model: (DEVICES[host], PORTS[port]) for model, (host, port) in _TABLES["hosts"].items()}
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

_WITH_HOST = "+host"

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
    host, port = _HOSTS.get(made.devices[0].model, _HOSTS["cards"])
    names = list(dict.fromkeys(host_of(gpu.name) for gpu in made.devices))
    cpus = {of: replace(host, name="cpu0" if of is None else f"{of}/cpu0") for of in names}
    links = [link for gpu in made.devices for link in port.between(gpu.name, cpus[host_of(gpu.name)].name)]
    return replace(
        made,
        name=name,
        devices=(*made.devices, *cpus.values()),
        links=(*made.links, *links),
        summary=f"{made.summary}; {host.model} with {host.memory_bytes / 2**30:,.0f} GiB as a device, "
        f"{port.nominal_bytes_per_s / 1e9:.0f} GB/s to each GPU",
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


def _dgx1() -> tuple[tuple[Device, ...], tuple[Link, ...]]:
    """DGX-1: GPUs on NVLink in pairs, and below PCIe switches, two for each of two sockets."""
    pcie, links = PORTS["pcie3"], list[Link]()
    for (a, b), count in DGX1_NVLINKS.items():
        links += both_ways(f"gpu{a}", f"gpu{b}", count * NVLINK2_BYTES_PER_S, NVLINK_S)
    for i in range(8):
        links += pcie.between(f"gpu{i}", f"pcie{i // 2}")
    for switch in range(4):
        links += replace(pcie, latency_s=PCIE_HOP_S).between(f"pcie{switch}", f"socket{switch // 2}")
    links += both_ways("socket0", "socket1", QPI_BYTES_PER_S, PCIE_HOP_S)
    return numbered([_at_peak("V100_SXM2")] * 8), tuple(links)


def _v100_hosts() -> tuple[tuple[Device, ...], tuple[Link, ...]]:
    """PipeDream's cluster A (Narayanan et al., SOSP 2019, section 5.1): hosts of four V100 on 10 Gbit/s Ethernet."""
    hosts = [numbered([_at_peak("V100_PCIE")] * 4, f"host{h}/") for h in range(4)]
    links: list[Link] = []
    for h, gpus in enumerate(hosts):
        links += star((gpu.name for gpu in gpus), f"host{h}/pcie", PORTS["pcie3"])
        links += both_ways(f"host{h}/pcie", "ethernet", ETHERNET_BYTES_PER_S, ETHERNET_PORT_S)
    return tuple(gpu for gpus in hosts for gpu in gpus), tuple(links)


def _pcie_host(models: Sequence[str]) -> tuple[tuple[Device, ...], tuple[Link, ...]]:
    """Every device on one PCIe switch (or root complex) of its own x16 port."""
    found = [_at_peak(name) for name in models]
    gpus = iter(numbered(each for each in found if each.kind == "gpu"))
    devices = tuple(next(gpus) if each.kind == "gpu" else each for each in found)
    return devices, star((device.name for device in devices), "pcie", PORTS["pcie3"])


def _at_peak(name: str) -> Device:
    return replace(DEVICES[name], rates=None)


_JOINED = {"8xV100-nvlink": _dgx1, "16xV100-10gbe": _v100_hosts}


def _paper(name: str) -> Preset:
    table = _TABLES["papers"][name]
    devices, links = _JOINED[name]() if name in _JOINED else _pcie_host(table["devices"])
    return Preset(name, devices, links, table["summary"], f"{table['source']}; {LINK_SOURCE}")


PAPERS: dict[str, Callable[[], Preset]] = {name: partial(_paper, name) for name in _TABLES["papers"]}
