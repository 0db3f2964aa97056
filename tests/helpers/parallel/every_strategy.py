"""All strategies of a small graph on a small cluster, and clusters on which exchanging costs next to nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from env.cluster import Cluster
from env.device import Device, both_ways
from graphs.opgraph import OpGraph
from graphs.transforms.axes import AXES, GROUPS
from graphs.transforms.strategy import ORDERS, MeshRule, Strategy

SYNCHRONOUS = tuple(order for order in ORDERS if order != "pipedream")


def quick_network(speeds: Sequence[float], launch_s: float = 0.0, memory_bytes: int = 2**60) -> Cluster:
    """Devices of these speeds, FLOP/s and bytes/s alike, on a switch that takes hardly any time."""
    devices = [
        Device(f"gpu{d}", "gpu", memory_bytes, {"float32": speed}, speed, launch_s) for d, speed in enumerate(speeds)
    ]
    links = [link for device in devices for link in both_ways(device.name, "switch", 1e30, 0.0)]
    return Cluster("quick", tuple(devices), tuple(links))


def meshes(places: int) -> Iterator[tuple[MeshRule, ...]]:
    """Every mesh of up to two axes, of tensor parallelism also with sequences, of up to so many places.

    Among them data parallelism that cuts the weights of modules of odd and of no number, e.g. ``1`` or ``head``.
    """
    rules = [MeshRule(name, size) for name in AXES if name != GROUPS for size in range(2, places + 1)]
    rules += [MeshRule("tp", size, sequence=True) for size in range(2, places + 1)]
    rules += [MeshRule("dp", size, tensor_modules=("*[13579]", "*[a-z]")) for size in range(2, places + 1)]
    yield ()
    for rule in rules:
        yield (rule,)
    for a, b in itertools.combinations(rules, 2):
        cuts_twice = bool(a.tensor_modules or b.tensor_modules) and "tp" in (a.name, b.name)
        if a.name != b.name and a.size * b.size <= places and not cuts_twice:
            yield a, b


def every_strategy(graph: OpGraph, cluster: Cluster, micro_batches: Sequence[int] = (1, 2, 4)) -> Iterator[Strategy]:
    """Meshes, stages, orders, micro-batches, ZeRO, also in groups, with all of the forward pass again or none of it."""
    devices = len(cluster.compute_devices)
    for mesh in meshes(devices):
        places = Strategy(mesh).devices
        has_dp = any(rule.name == "dp" for rule in mesh)
        for stages in range(1, devices // places + 1):
            for order in SYNCHRONOUS if stages > 1 else ("1f1b",):
                for m, zero in itertools.product(micro_batches, range(4) if has_dp else (0,)):
                    strategy = Strategy(mesh, stages, order, micro_batches=m, zero=zero, statistics="local")
                    for one in dict.fromkeys((strategy, strategy.grouped(2, zero))):
                        yield one
                        yield replace(one, recompute=("*",))
