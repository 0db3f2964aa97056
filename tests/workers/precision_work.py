"""What the processes of test_precision_processes.py do: a transformer trained in a precision, beside torch's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


def ours(strategy: str, precision: str | None, model: nn.Module | None = None, folder: str = "") -> dict[str, Any]:
    """Losses and gradients of the first step, and parameters after all, by placement.

    With a folder the run is saved after the first step, and goes on in another module.
    """
    model = model or transformer()
    graph = capture(model, batch(), train=True, precision=precision)
    result = placement.optimize(graph, cpus(2), strategy=strategy, seed=0)
    placed, optimizer = _begun(model, result, precision)
    losses, gradients = [], {}
    for step in range(STEPS):
        if folder and step == 1:
            placed.save_run(folder, optimizer)
            placed, optimizer = _begun(Transformer(), result, precision)
            placed.load_run(folder, optimizer)
        losses.append(float(placed.step(*batch(step))))
        gradients = placed.gathered_gradients() if step == 0 else gradients
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "gradients": gradients, "after": placed.gathered_state_dict()}


def _begun(model: nn.Module, result: placement.Result, precision: str | None) -> tuple[Any, torch.optim.Optimizer]:
    placed = placement.apply(model, result, batch())
    optimizer = AdamW(placed.parameters(), lr=0.01)
    return placed, placement.with_masters(optimizer) if precision == "master" else optimizer


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


def megatron(rank: int) -> dict[str, Any]:
    """Bfloat16 parameters, gradients added up in float32 over both halves, float32 copies that AdamW updates."""
    model = transformer().to(torch.bfloat16)
    parameters = dict(model.named_parameters())
    masters = {name: parameter.detach().float() for name, parameter in parameters.items()}
    optimizer, losses, first = AdamW(masters.values(), lr=0.01), [], {}
    for step in range(STEPS):
        halves = [model(*(part.chunk(2)[half] for part in batch(step))) for half in range(2)]
        sent = [torch.autograd.grad(loss / 2, list(parameters.values())) for loss in halves]
        for master, one, other in zip(masters.values(), *sent, strict=True):
            master.grad = one.float() + other.float()
        losses.append(sum(float(loss.detach()) for loss in halves) / 2)
        first = first or {name: master.grad.clone() for name, master in masters.items()}
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters.values(), masters.values(), strict=True):
                parameter.copy_(master)
    return {"losses": losses, "gradients": first, "after": {name: p.detach() for name, p in parameters.items()}}


Pair = tuple[dict[str, Any], Callable[[int], dict[str, Any]]]
PAIRS: dict[str, Callable[[str], Pair]] = {
    "mixed": lambda _: (ours("dp2 zero3", "mixed"), partial(torch_s, fsdp(torch.float32))),
    "mixed-bf16-reduce": lambda _: (ours("dp2 zero3", "mixed-bf16-reduce"), partial(torch_s, fsdp(torch.bfloat16))),
    "autocast": lambda _: (ours("dp2", None, Autocast()), partial(torch_s, DistributedDataParallel(Autocast()))),
    "master": lambda folder: (ours("dp2 zero1", "master", folder=f"{folder}/run"), megatron),
}


def compared(task: dict[str, str], group: ProcessGroup) -> dict[str, Any]:
    """Differences of ours from torch's."""
    torch.set_num_threads(1)
    store = f"file://{Path(task['folder']) / 'meeting'}"
    init_process_group("gloo", init_method=store, rank=group.rank, world_size=group.size)
    made, reference = PAIRS[task["pair"]](task["folder"])
    expected = reference(group.rank)
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
        "formats": [sorted({str(tensor.dtype) for tensor in made[part].values()}) for part in ("gradients", "after")],
    }
