"""Orders of one device: a step fits where one of them does, and holds what PyTorch holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from strategies import problems
from torch import nn
from torch.utils.checkpoint import checkpoint

from baselines.placers.single_device import least_memory_order, program_order, single_device
from baselines.strategies.applied import applied
from env.cluster import Cluster, Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.capture import capture
from graphs.errors import InfeasibleError
from graphs.opgraph import Op, OpGraph, Tensor
from graphs.transforms.strategy import Strategy
from placement.solving.solver import Solver


def cluster(memory_bytes: float, count: int = 1) -> Cluster:
    devices = tuple(Device(f"gpu{k}", "gpu", int(memory_bytes), {"float32": 1e12}, 1e12) for k in range(count))
    return Cluster("small", devices, tuple(link for d in devices for link in both_ways(d.name, "s", 1e10, 1e-6)))


class Layers(nn.Module):
    """Narrow layers; their activations are all that counts."""

    def __init__(self, again: bool = False, count: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU()) for _ in range(count))
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x.sum()


def peak_bytes(problem: Problem, plan: Plan) -> int:
    return int(Simulator(problem).score(plan).peak_bytes.max())


@pytest.mark.parametrize(("again", "tensors"), [(False, 12), (True, 13)])
def test_one_device_holds_what_the_program_holds(again: bool, tensors: int) -> None:
    """Of each layer one activation of 64 kB waits; gradients of weights are made as soon as they can be."""
    graph = capture(Layers(again), (torch.zeros(1024, 16),), train=True)
    kept, each = int(graph.kept_bytes.sum()), 1024 * 16 * 4
    problem = Problem(graph, cluster(kept + tensors * each + 100))
    plan = single_device(problem, 0)
    found = Solver(graph, cluster(1e9), 0, "latency", "longest_path", search=False).solve("single_device")
    assert max((found.peak_bytes or {}).values()) == peak_bytes(problem, plan)


def test_replicas_hold_what_the_program_holds_where_memory_is_free() -> None:
    graph = capture(Layers(), (torch.zeros(4096, 16),), train=True)
    what = applied(graph, cluster(1e9, 4), Strategy.parse("dp4"))
    assert peak_bytes(what.problem, what.plan) <= graph.kept_bytes.sum() + 13 * 1024 * 16 * 4


def branches(count: int) -> OpGraph:
    """All wide tensors are written before the first one is read, each into a narrow one."""
    wide = [Op(f"wide{k}", flops=1.0) for k in range(count)]
    narrow = [Op(f"narrow{k}", flops=1.0) for k in range(count)]
    tensors = [Tensor(f"wide{k}", 100, (f"narrow{k}",)) for k in range(count)]
    tensors += [Tensor(f"narrow{k}", 1, ("end",)) for k in range(count)]
    return OpGraph.build([*wide, *narrow, Op("end", flops=1.0)], tensors)


def test_another_order_is_tried_where_the_programs_does_not_fit() -> None:
    problem = Problem(branches(8), cluster(110))
    assert peak_bytes(problem, Plan(np.zeros(17, np.int64), program_order(problem.graph))) == 801
    assert peak_bytes(problem, single_device(problem, 0)) <= 110
    with pytest.raises(InfeasibleError):
        single_device(Problem(branches(8), cluster(100)), 0)


@given(problems())
def test_an_order_of_little_memory_is_one_of_all_ops(problem: Problem) -> None:
    graph = problem.graph
    order = least_memory_order(graph)
    assert sorted(order.tolist()) == list(range(graph.n_ops))
    producer, consumer, _ = graph.edge_list
    assert (order[producer] < order[consumer]).all()
