"""Models, and placements on two GPUs, of which device maps are made."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import placement
from env.cluster import Cluster, Device, both_ways
from graphs.opgraph import Op, OpGraph
from graphs.opgraph import Tensor as Edge
from placement.results.answer import order_by_device
from placement.results.result import Result


def cluster_of(*kinds: str) -> Cluster:
    """Devices d0, d1, ... of these kinds, of 1 FLOP/s each, all linked."""
    devices = tuple(Device(f"d{i}", kind, 10**9, {"float32": 1.0}, 1e9) for i, kind in enumerate(kinds))
    pairs = itertools.combinations(devices, 2)
    return Cluster("test", devices, tuple(link for a, b in pairs for link in both_ways(a.name, b.name, 1e9, 0.0)))


GPUS = cluster_of("gpu", "gpu")


def placed(graph: OpGraph, devices: Sequence[int], cluster: Cluster = GPUS) -> Result:
    """A result with this placement, each colocation group where its first op is. Its figures are of another one."""
    numbers = np.array(devices, dtype=np.int64)
    for group in set(graph.colocation.tolist()) - {-1}:
        members = np.flatnonzero(graph.colocation == group)
        numbers[members] = numbers[members[0]]
    names = [cluster.devices[d].name for d in numbers]
    alone = placement.optimize(graph, cluster, "single_device", seed=0)
    answer = dataclasses.replace(
        alone.answered(),
        placement=dict(zip(graph.op_names, names, strict=True)),
        order=order_by_device(graph, cluster, numbers, graph.topological_order.tolist()),
    )
    return dataclasses.replace(alone, answer=answer)


def placed_model(
    model: nn.Module, args: tuple[Tensor, ...], where: Callable[[str], int], train: bool = False
) -> Result:
    """A model with each op where a function of its module says."""
    graph = placement.capture(model, args, train=train)
    return placed(graph, [where(module) for module in graph.modules])


def line(*ops: tuple[str, float, int], **options: Any) -> Result:
    """Ops in a row, (module, FLOPs, device), that keep bytes."""
    records = [Op(f"op{i}", flops=flops, kept_bytes=8, module=module) for i, (module, flops, _) in enumerate(ops)]
    edges = [Edge(a.name, 8, (b.name,)) for a, b in itertools.pairwise(records)]
    return placed(OpGraph.build(records, edges), [device for *_, device in ops], **options)


def places(model: nn.Module, device_map: dict[str, int | str]) -> dict[str, int | str]:
    """Where each parameter and buffer goes; each must be covered by one entry."""
    found = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, _ in named:
        entries = [e for e in device_map if e in ("", name) or name.startswith(f"{e}.")]
        assert len(entries) == 1, (name, entries)
        found[name] = device_map[entries[0]]
    return found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x))
        return out


class Stack(nn.Module):
    """Two layers between parameters of the model itself, and a module that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.shift = nn.Parameter(torch.zeros(4))
        self.pooler = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + self.shift


def second_half(module: str) -> int:
    return int(module in ("", "layers.0.down", "layers.1", "layers.1.up", "layers.1.down"))
