"""What the processes of test_limited_memory.py do: train, under strategies, what is too much memory for one process."""

from __future__ import annotations

import gc
import re
import resource
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from baselines.strategies.applied import applied
from graphs.capture import capture_program
from graphs.transforms.strategy import Strategy
from placement.runtime.modules.strategy_module import StrategyModule
from placement.runtime.planning.strategy_plan import StrategyPlan
from placement.runtime.planning.values import Values
from placement.runtime.program.functional import functional
from placement.runtime.ranks.process_group import ProcessGroup
from placement.runtime.writing.writer import write
from tests.helpers.placed_models import cpus

LAYERS, WIDTH = 24, 768
STATE_BYTES = LAYERS * WIDTH * WIDTH * 4 * 4  # parameters, gradients, and two numbers of Adam's for each
LIMIT_BYTES = STATE_BYTES * 4 // 5
X = torch.linspace(-1.0, 1.0, 4 * WIDTH).view(4, WIDTH)


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)))


def squares(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().sum()


def trained(strategies: list[str], group: ProcessGroup) -> list[dict[str, Any]]:
    """For each strategy the losses under the limit, beside those of one process without it."""
    torch.set_num_threads(1)
    unlimited = _whole()
    return [{**_trained(strategy, group), "unlimited": unlimited} for strategy in strategies]


def _trained(strategy: str, group: ProcessGroup) -> dict[str, Any]:
    with torch.device("meta"):
        empty = model()
    program = capture_program(empty, (X,), {}, train=True, loss=squares)
    plan = StrategyPlan(Values(functional(program), applied(program.graph, cpus(2), Strategy.parse(strategy))))
    write(plan, group.rank)  # what planning takes is no part of training
    with _limited():
        losses = _placed(empty, plan, group)
        gc.collect()
        try:
            _whole()
            fits = True
        except (RuntimeError, MemoryError):
            fits = False
    return {"losses": losses, "fits": fits}


@contextmanager
def _limited() -> Iterator[None]:
    """No more private memory than there is now and the limit."""
    gc.collect()
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(found[1]) * 1024 + LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _placed(empty: nn.Module, plan: StrategyPlan, group: ProcessGroup) -> list[float]:
    placed = StrategyModule(empty, plan, group, torch.device("cpu"))
    for name, parameter in placed.named_parameters():
        own = placed.own_part(name, _filled(name))
        assert own is not None
        parameter.data.copy_(own)
    losses = _losses(placed, lambda: placed.step(X))
    empty.to("meta")  # frees what it shares with the placed one
    return losses


def _whole() -> list[float]:
    with torch.device("meta"):
        whole = model()
    whole.to_empty(device="cpu")
    for name, parameter in whole.named_parameters():
        parameter.data.copy_(_filled(name))

    def step() -> torch.Tensor:
        loss = squares(whole(X))
        loss.backward()
        return loss.detach()

    return _losses(whole, step)


def _filled(name: str) -> torch.Tensor:
    """The values of one parameter, whoever has it."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(WIDTH, WIDTH, generator=generator) * WIDTH**-0.5


def _losses(module: nn.Module, step: Callable[[], torch.Tensor]) -> list[float]:
    adam = torch.optim.Adam(module.parameters(), lr=1e-4, fused=True)
    found = []
    for _ in range(2):
        found.append(float(step()))
        adam.step()
        adam.zero_grad()
    return found
