"""Models placed at random on CPU devices, and their comparison with the same models unplaced."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from env.cluster import Cluster, Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.capture import Program, capture_program
from graphs.capture.record import default_loss, output_tensors
from placement.runtime.modules.placed_module import PlacedModule
from placement.runtime.program.device_layout import DeviceLayout
from placement.runtime.program.functional import functional as functional_of


def cpus(n: int) -> Cluster:
    """A cluster of that many equal CPU devices."""
    devices = tuple(Device(f"cpu{i}", "cpu", 1 << 40, {"float32": 1e10}, 1e10, 5e-6) for i in range(n))
    links = [link for i in range(n) for j in range(i) for link in both_ways(f"cpu{j}", f"cpu{i}", 1e9, 1e-4)]
    return Cluster("cpus", devices, tuple(links))


def with_host(n: int) -> Cluster:
    """The same as accelerators, and a CPU beside them."""
    cluster = cpus(n)
    devices = tuple(replace(device, name=f"part{d}", kind="accelerator") for d, device in enumerate(cluster.devices))
    host = cluster.devices[0]
    ends = {device.name: own.name for device, own in zip(cluster.devices, devices, strict=True)}
    links = [replace(link, src=ends[link.src], dst=ends[link.dst]) for link in cluster.links]
    links += [link for device in devices for link in both_ways(device.name, host.name, 1e9, 1e-4)]
    return Cluster("with host", (*devices, host), tuple(links))


def random_layout(program: Program, n_devices: int, seed: int) -> DeviceLayout:
    """Every colocation group on a device of its own choice."""
    problem = Problem(program.graph, cpus(n_devices))
    chosen = np.random.default_rng(seed).integers(n_devices, size=problem.n_units)
    device = chosen[problem.unit_of]
    _, schedule = Simulator(problem).schedule(Plan(device))
    order = [[int(op) for op in schedule.order if device[op] == d] for d in range(n_devices)]
    places = [torch.device("cpu")] * n_devices
    return DeviceLayout(functional_of(program), device.tolist(), order, schedule.op_start_s.tolist(), places)


def placed_at_random(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    train: bool = True,
    n_devices: int = 3,
    seed: int = 0,
) -> PlacedModule:
    """The model, captured and placed; its parameters are the model's own."""
    program = capture_program(model, args, kwargs, train=train)
    return PlacedModule(model.train(train), random_layout(program, n_devices, seed))


class Strided(nn.Module):
    """Views that need the strides they were captured with, and a sum of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(36, 6)
        self.side, self.top = nn.Linear(7, 6), nn.Linear(6, 5)

    def forward(self, image: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.top(self.head(self.conv(image).flatten(1))[:, None] + self.side(table))


def strided() -> tuple[Strided, list[tuple[torch.Tensor, ...]], Callable[[torch.Tensor], torch.Tensor]]:
    """The model, the arguments it is captured with and others of other strides, and a loss of other strides too.

    It is captured with the sum of its outputs as its loss, which sends one number to all of them.
    """
    torch.manual_seed(8)
    images, tables = torch.randn(2, 2, 5, 5, 3), torch.randn(2, 4, 7)
    labels = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    captured = images[0].permute(0, 3, 1, 2).contiguous(), tables[:1].expand(2, 4, 7)
    calls = [captured, (images[1].permute(0, 3, 1, 2), tables)]
    return Strided(), calls, lambda output: functional.cross_entropy(output.transpose(1, 2), labels)


def check_equal(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    train: bool,
    seeds: Sequence[int] = (0, 1),
    n_devices: int = 3,
    steps: int = 2,
    tolerance: float = 0.0,
    loss: Callable[[Any], torch.Tensor] = default_loss,
) -> None:
    """Outputs, gradients (accumulated over steps) and buffers are those of the unplaced model.

    Args:
        tolerance: largest difference, relative to the largest absolute value of a tensor; 0 for equal bits.
    """
    keywords = kwargs or {}
    program = capture_program(model, args, keywords, train=train, loss=loss)
    for seed in seeds:
        plain, inner = copy.deepcopy(model).train(train), copy.deepcopy(model).train(train)
        placed = PlacedModule(inner, random_layout(program, n_devices, seed))
        for step in range(steps):
            with torch.set_grad_enabled(train):
                torch.manual_seed(step)
                expected = plain(*args, **keywords)
                torch.manual_seed(step)
                found = placed(*args, **keywords)
            assert type(found) is type(expected)
            _check_tensors(output_tensors(expected), output_tensors(found), tolerance)
            if train:
                loss(expected).backward()
                loss(found).backward()
        mine, theirs = dict(inner.named_parameters()), dict(plain.named_parameters())
        assert {n for n, p in mine.items() if p.grad is None} == {n for n, p in theirs.items() if p.grad is None}
        graded = [n for n, p in theirs.items() if p.grad is not None]
        gradients: list[Any] = [theirs[n].grad for n in graded]
        # One that is nothing but rounding is measured by the largest of all.
        least = max((1e-3 * float(g.abs().max()) for g in gradients if g.numel() and not g.is_sparse), default=0.0)
        _check_tensors(gradients, [mine[n].grad for n in graded], tolerance, least)
        _check_tensors(list(plain.buffers()), list(inner.buffers()), tolerance)


def _check_tensors(expected: Sequence[Any], found: Sequence[Any], tolerance: float, least: float = 0.0) -> None:
    assert len(expected) == len(found)
    for mine, theirs in zip(expected, found, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        if not torch.equal(mine, theirs):
            difference = (mine.detach().double() - theirs.detach().double()).abs().max()
            assert difference <= tolerance * max(float(mine.detach().double().abs().max()), least)
