"""The models of `strategy_speed.py`, and how torch itself runs each of them on two processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[], Any]
TOKENS, VOCABULARY, HEAD = 128, 1024, 64


class Embedding(nn.Module):
    """Tokens [B, S] -> [B, S, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(TOKENS, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (part(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Head(nn.Module):
    """[B, S, width] -> logits [B * S, vocabulary]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.vocabulary = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.vocabulary(self.norm(x)).flatten(0, 1)


class Residual(nn.Module):
    """Two convolutions and what goes around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
        )
        self.norm_1, self.norm_2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.around = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_2(self.second(F.relu(self.norm_1(self.first(x)))))
        return F.relu(y + self.around(x))


def gpt2(width: int, layers: int = 4) -> nn.Sequential:
    """Tokens [B, S] -> logits."""
    return nn.Sequential(Embedding(width), *(Block(width) for _ in range(layers)), Head(width))


def resnet(width: int) -> nn.Sequential:
    """Images [B, 3, H, W] -> logits of 100 classes."""
    stages = [Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)]
    stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 100))


class WithLoss(nn.Module):
    """What is trained: (inputs, labels) -> loss."""

    def __init__(self, body: nn.Sequential) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.body(inputs), labels.flatten())


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        model: ``"gpt2"`` or ``"resnet"``.
        strategy: ours.
        torch: what torch calls it; schedules of `PIPELINES` run the model's halves, or its quarters, two a process.
        wanted: torch's time over ours, at least.
    """

    model: str
    strategy: str
    torch: str
    wanted: float


CASES = (
    Case("gpt2", "dp2", "DistributedDataParallel", 0.97),
    Case("resnet", "dp2 | statistics=local", "DistributedDataParallel", 0.97),
    Case("gpt2", "pp2 gpipe mb8", "GPipe", 0.97),
    Case("gpt2", "pp2 1f1b mb8", "1F1B", 0.97),
    Case("gpt2", "pp2 interleaved mb8", "Interleaved1F1B", 0.97),
    Case("gpt2", "pp2 zb-h1 mb8", "InterleavedZeroBubble", 0.97),
    Case("gpt2", "pp2 zbv mb8", "ZBVZeroBubble", 0.97),
    Case("gpt2", "tp2", "parallelize_module", 0.97),
    Case("gpt2", "dp2 zero3", "fully_shard", 0.95),
)
MICRO_BATCHES = 8
# Torch's schedules, and the stages of each of two processes.
PIPELINES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "GPipe": ((0,), (1,)),
    "1F1B": ((0,), (1,)),
    "InterleavedZeroBubble": ((0,), (1,)),
    "Interleaved1F1B": ((0, 2), (1, 3)),
    "ZBVZeroBubble": ((0, 3), (1, 2)),
}


def example(name: str, width: int, batch: int, seed: int) -> tuple[WithLoss, tuple[Tensor, Tensor]]:
    """A model, and a batch for it."""
    torch.manual_seed(seed)
    if name == "gpt2":
        tokens = torch.randint(VOCABULARY, (batch, TOKENS + 1))
        return WithLoss(gpt2(width)), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return WithLoss(resnet(width // 8)), (torch.randn(batch, 3, 32, 32), torch.randint(100, (batch,)))


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The same for all: rate 0, so that no run drifts away from the others."""
    kinds: dict[type, list[nn.Parameter]] = {}
    for parameter in model.parameters():  # a fused step takes tensors of one kind
        kinds.setdefault(type(parameter.data), []).append(parameter)
    groups = [{"params": parameters} for parameters in kinds.values()]
    return torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0, fused=True)


def training_step(
    model: nn.Module, batch: tuple[Tensor, ...], within: AbstractContextManager[Any] | None = None
) -> Step:
    """A step of a module that gives the loss."""
    update = optimizer(model)

    def step() -> float:
        update.zero_grad()
        with within or nullcontext():
            loss = model(*batch)
            loss.backward()
        update.step()
        return float(loss.detach())

    return step


def torch_step(case: Case, model: WithLoss, batch: tuple[Tensor, Tensor], rank: int) -> Step:
    """A step as torch runs it in this process, of two in the default process group."""
    own = tuple(tensor.chunk(2)[rank].contiguous() for tensor in batch)
    if case.torch == "DistributedDataParallel":
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return training_step(wrapped, own)
    if case.torch == "fully_shard":
        return _fully_sharded(model, own)
    if case.torch == "parallelize_module":
        return _tensor_parallel(model, batch)
    return _pipelined(case.torch, model, batch, rank)


def _mesh() -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (2,))


def _fully_sharded(model: WithLoss, own: tuple[Tensor, ...]) -> Step:
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh()
    for layer in model.body:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return training_step(model, own)


def _tensor_parallel(model: WithLoss, batch: tuple[Tensor, ...]) -> Step:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = _mesh()
    columns, rows = ("query", "key", "value", "up"), ("out", "down")
    for block in model.body:
        if isinstance(block, Block):
            plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
            parallelize_module(block, mesh, plan)
    return training_step(model, batch)


def _pipelined(schedule: str, model: WithLoss, batch: tuple[Tensor, Tensor], rank: int) -> Step:
    from torch.distributed.pipelining import PipelineStage, schedules

    layers, own = list(model.body), PIPELINES[schedule][rank]
    count = sum(map(len, PIPELINES[schedule]))
    ends = [len(layers) * k // count for k in range(count + 1)]
    parts = [nn.Sequential(*layers[ends[k] : ends[k + 1]]) for k in own]
    stages = [PipelineStage(part, k, count, torch.device("cpu")) for k, part in zip(own, parts, strict=True)]
    made = getattr(schedules, f"Schedule{schedule}")

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels.flatten())

    is_single = not issubclass(made, schedules.PipelineScheduleMulti)
    runner = made(stages[0] if is_single else stages, MICRO_BATCHES, loss_fn=loss_of)
    update, (inputs, labels) = optimizer(nn.ModuleList(parts)), batch

    def step() -> float:
        update.zero_grad()
        losses: list[Tensor] = []
        ends_here = {"target": labels, "losses": losses} if count - 1 in own else {}
        runner.step(*([inputs] if 0 in own else []), **ends_here)
        update.step()
        return float(sum(float(loss.detach()) for loss in losses)) / MICRO_BATCHES

    return step
