"""Two branches of ops and the small clusters that tests place them on; and problems whose memory is tight."""

from __future__ import annotations

import itertools
import math

import numpy as np

from env.cluster import Cluster, Device, Link, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from env.simulation.simulator import Simulator
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


def tight_graph(seed: int, n_ops: int = 7, n_devices: int = 2) -> tuple[OpGraph, Cluster]:
    """Chains and branches of ops that keep a lot, on devices with hardly more memory than that in all."""
    rng = np.random.default_rng(seed)
    kept, workspace = rng.integers(0, 30, n_ops), rng.integers(0, 8, n_ops)
    ops = [
        Op(f"o{i}", time_s={"*": float(rng.integers(1, 9))}, kept_bytes=int(k), workspace_bytes=int(w))
        for i, (k, w) in enumerate(zip(kept, workspace, strict=True))
    ]
    tensors = []
    for i in range(n_ops - 1):
        readers = sorted(set(rng.integers(i + 1, n_ops, int(rng.integers(1, 3))).tolist()))
        tensors.append(Tensor(f"o{i}", int(rng.integers(1, 12)), tuple(f"o{r}" for r in readers)))
    share = kept.sum() / n_devices * 1.05 + rng.integers(5, 20)
    devices = tuple(
        Device(f"d{i}", "gpu", int(share * rng.uniform(0.8, 1.2)), {"float32": 1.0}, 1.0) for i in range(n_devices)
    )
    pairs = itertools.permutations([device.name for device in devices], 2)
    links = tuple(Link(a, b, float(rng.uniform(2, 8)), 0.1) for a, b in pairs)
    return OpGraph.build(ops, tensors, f"tight{seed}"), Cluster("tight", devices, links)


def planted(seed: int, n_ops: int, n_devices: int) -> Problem:
    """A problem in which a random placement fits to the byte."""
    graph, cluster = tight_graph(seed, n_ops, n_devices)
    device = np.random.default_rng(seed).integers(n_devices, size=n_ops)
    peak_bytes = Simulator(Problem(graph, cluster)).score(Plan(device)).peak_bytes.tolist()
    devices = tuple(
        Device(d.name, d.kind, size, d.peak_flops, 1.0) for d, size in zip(cluster.devices, peak_bytes, strict=True)
    )
    return Problem(graph, Cluster("planted", devices, cluster.links))


def best_of_all_s(problem: Problem) -> float:
    """The best value of all placements under the default priority, infinite where none fits."""
    scorer, choices = Scorer(problem), range(problem.cluster.n_devices)
    placements = itertools.product(choices, repeat=problem.graph.n_ops)
    return min((scorer.value(Plan(device)) for device in placements), default=math.inf)
