"""Two branches of ops and the small clusters that tests place them on."""

from __future__ import annotations

from env.cluster import Cluster, Device, both_ways
from graphs.opgraph import Op, OpGraph, Tensor
from graphs.records import HOST

MIB = 2**20


def device(name: str, memory_bytes: int = 100 * MIB, kind: str = "gpu") -> Device:
    return Device(name, kind, memory_bytes, {"float32": 1e12}, 1e12)


def cluster_of(*devices: Device, name: str = "pair") -> Cluster:
    links = [link for d in devices for link in both_ways(d.name, "switch", 1e9, 1e-6)] if len(devices) > 1 else []
    return Cluster(name, devices, tuple(links))


def two_branches(kept_bytes: int = MIB, name: str = "two_branches") -> OpGraph:
    """a feeds b and c of 1 s each, which feed d: two devices take 3 s plus next to nothing, one takes 4 s."""
    ops = [Op(n, kept_bytes=kept_bytes, time_s={"*": 1.0}) for n in "abcd"]
    return OpGraph.build(
        ops, [Tensor("a", 1000, ("b", "c")), Tensor("b", 1000, ("d",)), Tensor("c", 1000, ("d",))], name
    )


PAIR = cluster_of(device("gpu0"), device("gpu1"))


def hosts_of_gpus(
    gpus: int,
    hosts: int = 1,
    memory_bytes: int = 2**40,
    gpu_bytes: int = 2**40,
    bandwidth: float = 1e9,
    one_port: bool = False,
) -> Cluster:
    """Hosts of GPUs, each GPU with a port to a switch and a link of 1 GB/s to the CPU of its host, without latency.

    Args:
        memory_bytes, gpu_bytes: of each host and GPU.
        bandwidth: of the links to the CPUs, bytes/s.
        one_port: the GPUs of a host share one link to the CPU.
    """
    devices, links = [], []
    for h in range(hosts):
        own = [Device(f"host{h}/gpu{d}", "gpu", gpu_bytes, {"float32": 1e12}, 1e12) for d in range(gpus)]
        cpu = Device(f"host{h}/cpu", HOST, memory_bytes, {"float32": 1e9}, 1e9)
        links += [link for gpu in own for link in both_ways(gpu.name, "switch", 1e11, 0.0)]
        port = f"host{h}/port" if one_port else cpu.name
        links += [link for gpu in own for link in both_ways(gpu.name, port, bandwidth, 0.0)]
        links += both_ways(port, cpu.name, bandwidth, 0.0) if one_port else []
        devices += [*own, cpu]
    return Cluster("hosts", tuple(devices), tuple(links))
