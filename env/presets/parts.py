"""Parts of presets: the rates of links, and hosts and switches of equal devices.

Link figures, per direction:

* NVLink and NVSwitch ports: nominal. Machines of now have beside that what transfers reach: 0.78 of
  it, as sends from GPU to GPU do on DGX A100 and H100 (microsoft/vidur @ 7d475133, profiling of send/receive: 228 to
  271 of 300 GB/s, 348 of 450 GB/s). Copies between V100s reach 96 % (Dell, "Deep Learning with NVIDIA" reference
  guide, 2018, table 3); those keep the nominal rate.
* InfiniBand: nominal, and 0.92 of it reached, an assumption: NCCL's bus bandwidth of many hosts over their number of
  ports.
* Adapters of clouds (EFA, GPUDirect-TCPX): 0.75 of nominal reached, an assumption.
* PCIe, QPI and Ethernet at the payload rate that copies reach, which is well below nominal. PCIe 3.0 x16: 12 GB/s of
  15.75, PCIe 4.0 x16: 24 of 31.5, PCIe 5.0 x16: 48 of 63, an assumption in the same proportion; one socket to the other
  over Broadwell's QPI: 6 GB/s of 19.2 per link (NCCL 2.27, src/graph/topo.h). 10 Gbit
  Ethernet: 1.18 GB/s of 1.25, what TCP in 1,500 byte frames leaves (1,448 of 1,538 bytes).
* GPUs that cannot read each other's memory over PCIe (RTX 4090, A10G) send through that of the host: half the rate, an
  assumption.
* AMD's Infinity Fabric between MI300X: 64 GB/s a link nominal (AMD Instinct MI300X platform data sheet, 2023); 48
  reached, an assumption.
* Latency of a whole route: NVLink 3.4 us, PCIe 5.7 us, InfiniBand 14 us (NCCL 2.27, src/graph/tuning.cc, ring, Simple
  protocol). Half of it on each side of a switch. TCP over Ethernet: 50 us, an assumption.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from env.device import Device, Link, both_ways
from env.fabric import Fabric

NVLINK2_BYTES_PER_S = 25e9  # one link; nominal
PCIE4_BYTES_PER_S = 24e9  # x16; payload
QPI_BYTES_PER_S = 6e9  # payload
GBIT_BYTES_PER_S = 1e9 / 8
ETHERNET_BYTES_PER_S = 1.18e9  # 10 Gbit/s; payload

NVLINK_S = 3.4e-6
PCIE_HOP_S = 0.5e-6  # from one PCIe switch or socket to the next; an assumption
ETHERNET_PORT_S = 50e-6 / 2

LINK_SOURCE = "links: NVLink, InfiniBand nominal; PCIe, QPI and latencies NCCL 2.27 topo.h and tuning.cc"


@dataclass(frozen=True)
class Preset:
    """The fields of the `env.cluster.Cluster` that `Cluster.preset` makes of it."""

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    summary: str
    source: str
    fabric: Fabric | None = None


@dataclass(frozen=True)
class Port:
    """A device's or adapter's way to a switch.

    Attributes:
        nominal_bytes_per_s: of the data sheet, in each direction.
        reached: share of that which transfers reach.
        latency_s: on this side of the switch.
    """

    nominal_bytes_per_s: float
    reached: float
    latency_s: float

    def between(self, a: str, b: str) -> tuple[Link, Link]:
        """The two directions of a link."""
        nominal = self.nominal_bytes_per_s
        return both_ways(a, b, nominal * self.reached, self.latency_s, nominal if self.reached < 1 else None)


def numbered(models: Iterable[Device], prefix: str = "") -> tuple[Device, ...]:
    """Devices of these models, numbered."""
    return tuple(replace(model, name=f"{prefix}gpu{i}") for i, model in enumerate(models))


def star(names: Iterable[str], switch: str, port: Port) -> tuple[Link, ...]:
    """Each of these on a port of its own of one switch."""
    return tuple(link for name in names for link in port.between(name, switch))


def switched_host(
    model: Device, count: int, port: Port, switch: str, prefix: str = ""
) -> tuple[tuple[Device, ...], list[Link]]:
    """Equal GPUs, each on a port of its own of one switch."""
    devices = numbered([model] * count, prefix)
    return devices, [link for gpu in devices for link in port.between(gpu.name, switch)]


def meshed_host(model: Device, count: int, port: Port, prefix: str = "") -> tuple[tuple[Device, ...], list[Link]]:
    """Equal GPUs, of which each pair has a link of its own."""
    devices = numbered([model] * count, prefix)
    return devices, [link for a, b in combinations(devices, 2) for link in port.between(a.name, b.name)]


def adapters_of(devices: Sequence[Device], count: int, port: Port, prefix: str, network: str) -> list[Link]:
    """Network adapters of a host, each for as many of its GPUs in a row; each GPU's own port where there are as many.

    The link between an adapter and each of its GPUs is as fast as PCIe 4.0.
    """
    if count == len(devices):
        return [link for gpu in devices for link in port.between(gpu.name, network)]
    links: list[Link] = []
    for number, gpu in enumerate(devices):
        links += both_ways(gpu.name, f"{prefix}adapter{number * count // len(devices)}", PCIE4_BYTES_PER_S, PCIE_HOP_S)
    for number in range(count):
        links += port.between(f"{prefix}adapter{number}", network)
    return links
