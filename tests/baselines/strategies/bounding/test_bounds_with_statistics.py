"""Bounds where norms keep the statistics of the batch: parts read twice or exchange, and stages wait for each other."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from parallel.every_strategy import meshes
from torch import nn

from baselines.strategies.searching.bound import ALL, strategy_bounds
from baselines.strategies.searching.families import family_of
from baselines.strategies.searching.scoring import scored
from env.cluster import Cluster, Device, both_ways
from graphs import OpGraph
from graphs.capture import capture
from graphs.errors import PlacementError
from graphs.transforms.strategy import Strategy


class Block(nn.Module):
    """Two convolutions with norms, the second depthwise, and a shortcut."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after)
        self.deep, self.last = nn.Conv2d(after, after, 3, padding=1, groups=after), nn.BatchNorm2d(after)
        self.beside = nn.Sequential(nn.Conv2d(before, after, 1), nn.BatchNorm2d(after))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.last(self.deep(torch.relu(self.norm(self.first(images))))) + self.beside(images))


@cache
def step(kind: str) -> OpGraph:
    """A training step: of a chain of norms, or of blocks."""
    chain = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    inner = chain if kind == "chain" else [Block(8, 8) for _ in range(4)]
    body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *inner)
    model = nn.Sequential(body, nn.Flatten(), nn.Linear(8 * 64, 4))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.model(images), labels)

    return capture(Loss(), (torch.zeros(8, 3, 8, 8), torch.zeros(8, dtype=torch.int64)), train=True)


def network(hosts: int, each: int, bandwidth: float, latency_s: float, launch_s: float) -> Cluster:
    names = [f"host{h}/gpu{d}" for h in range(hosts) for d in range(each)]
    devices = tuple(Device(name, "gpu", 2**40, {"float32": 1e9}, 1e9, launch_overhead_s=launch_s) for name in names)
    links = [link for name in names for link in both_ways(name, "switch", bandwidth, latency_s)]
    return Cluster("network", devices, tuple(links))


def test_norms_count_where_replicas_are_of_several_devices() -> None:
    graph = step("chain")
    slow, quick = (network(1, 4, 1e9, latency_s, 1e-6) for latency_s in (1e-5, 0.0))
    for family in ("hybrid", "placed"):
        # Six norms at least, forward and backward, put statistics together, or something else is exchanged.
        assert strategy_bounds(graph, slow)[family] > strategy_bounds(graph, quick)[family] + 6e-5


def strategies(count: int) -> list[Strategy]:
    texts = [
        "dp{0}",
        "dp{0} zero3",
        "tp{0}",
        "dp{0} tp on *first*",
        "tp{0} on *.norm",
        "hp{0}",
        "dp{0} tp on model.0.*",
    ]
    found = [text.format(count) for text in texts]
    flat = [Strategy(mesh, statistics="sync") for mesh in list(meshes(count))[::2]]
    staged = [Strategy.parse(f"pp{count} {order} mb1") for order in ("1f1b", "zbv")]
    few = count // 2
    staged += [Strategy.parse(f"pp2 {order} mb1 | dp{few} | statistics=sync") for order in ("gpipe", "v-half")]
    staged += [Strategy.parse(f"{axis}{few} | placed2 | statistics=sync") for axis in ("dp", "tp", "hp")]
    return [*(Strategy.parse(f"{text} | statistics=sync") for text in found), *flat, *staged]


@pytest.mark.parametrize("kind", ["chain", "blocks"])
@pytest.mark.parametrize(("bandwidth", "latency_s", "launch_s"), [(1e7, 1e-5, 1e-6), (1e9, 1e-4, 1e-4)])
def test_no_strategy_beats_a_bound(kind: str, bandwidth: float, latency_s: float, launch_s: float) -> None:
    graph, cluster = step(kind), network(1, 4, bandwidth, latency_s, launch_s)
    bounds, count = strategy_bounds(graph, cluster), 0
    for strategy in strategies(4):
        try:
            step_s = scored(graph, cluster, strategy).step_time_s
        except PlacementError:
            continue
        count += 1
        assert bounds[ALL] <= step_s, strategy.text
        assert bounds[family_of(strategy) or ALL] <= step_s, strategy.text
    assert count > 10


def test_statistics_cost_launches_bytes_and_exchanges() -> None:
    """Of a chain of norms the bound counts what they take beside their share of the work, or what does without."""
    graph, cluster = step("chain"), network(1, 4, 1e8, 1e-4, 1e-6)
    step_s = scored(graph, cluster, Strategy.parse("dp4 zero3 | statistics=sync")).step_time_s
    kept, local = (strategy_bounds(graph, cluster, keeps)["zero3"] for keeps in (True, False))
    assert 1.03 * local < kept <= step_s


def test_branches_do_not_fill_stages_whose_batch_is_whole() -> None:
    """Stages of blocks with branches: one stage works after the other all the same."""
    graph, cluster = step("blocks"), network(1, 2, 1e30, 0.0, 1e-3)
    bounds = strategy_bounds(graph, cluster)
    for order in ("1f1b", "zbv"):
        step_s = scored(graph, cluster, Strategy.parse(f"pp2 {order} mb1")).step_time_s
        assert 0.6 * step_s < bounds[f"pp {order}"] <= step_s
