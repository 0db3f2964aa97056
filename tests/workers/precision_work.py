"""What the processes of test_precision_processes.py do: a transformer trained in a precision, beside torch's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from parallel.transformer import Transformer, batch
from torch import nn
from torch.distributed import init_process_group
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import placement
from graphs.capture import capture
from placement.runtime.ranks.process_group import ProcessGroup
from tests.helpers.placed_models import cpus

STEPS = 3


def transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


def ours(strategy: str, precision: str | None, model: nn.Module | None = None) -> dict[str, Any]:
    """Losses and gradients of the first step, and parameters after all, by placement."""
    model = model or transformer()
    graph = capture(model, batch(), train=True, precision=precision)
    result = placement.optimize(graph, cpus(2), strategy=strategy, seed=0)
    placed = placement.apply(model, result, batch())
    optimizer = AdamW(placed.parameters(), lr=0.01)
    losses, gradients = [], {}
    for step in range(STEPS):
        losses.append(float(placed.step(*batch(step))))
        gradients = placed.gathered_gradients() if step == 0 else gradients
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "gradients": gradients, "after": placed.gathered_state_dict()}


def torch_s(model: nn.Module, rank: int) -> dict[str, Any]:
    """The same of a model that torch has sharded or replicated: each rank has its half of the batch."""
    optimizer = AdamW(model.parameters(), lr=0.01)
    losses, gradients = [], {}
    for step in range(STEPS):
        loss = model(*(part.chunk(2)[rank] for part in batch(step)))
        loss.backward()
        mean = loss.detach().float()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / 2)
        gradients = gradients or {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "gradients": gradients,
        "after": {name: _whole(parameter) for name, parameter in model.named_parameters()},
    }


def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def fsdp(reduce: torch.dtype) -> nn.Module:
    """FSDP2 with a mixed precision policy, each layer and the rest."""
    model, policy = transformer(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


class Autocast(nn.Module):
    """The model under autocast, as its forward says itself."""

    def __init__(self) -> None:
        super().__init__()
        self.model = transformer()

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = self.model(words, labels)
        return loss


def off(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of any tensor, of the largest entry of all."""
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items()) / largest


PAIRS: dict[str, Callable[[], tuple[dict[str, Any], nn.Module]]] = {
    "mixed": lambda: (ours("dp2 zero3", "mixed"), fsdp(torch.float32)),
    "mixed-bf16-reduce": lambda: (ours("dp2 zero3", "mixed-bf16-reduce"), fsdp(torch.bfloat16)),
    "autocast": lambda: (ours("dp2", None, Autocast()), DistributedDataParallel(Autocast())),
}


def compared(task: dict[str, str], group: ProcessGroup) -> dict[str, Any]:
    """Differences of ours from torch's."""
    torch.set_num_threads(1)
    store = f"file://{Path(task['folder']) / 'meeting'}"
    init_process_group("gloo", init_method=store, rank=group.rank, world_size=group.size)
    made, reference = PAIRS[task["pair"]]()
    expected = torch_s(reference, group.rank)
    if group.rank:
        return {}
    expected["gradients"], expected["after"] = (
        {key.removeprefix("module."): tensor for key, tensor in expected[part].items()}
        for part in ("gradients", "after")
    )
    return {
        "losses": (made["losses"], expected["losses"]),
        "gradients": off(made["gradients"], expected["gradients"]),
        "after": off(made["after"], expected["after"]),
        "formats": sorted({str(tensor.dtype) for part in ("gradients", "after") for tensor in made[part].values()}),
    }
