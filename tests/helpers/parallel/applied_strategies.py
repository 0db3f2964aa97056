"""Models under strategies in forks of this process, one for each rank, and the same models in one piece."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import placement
from graphs.capture.record import default_loss, output_tensors
from graphs.disk import temporary_folder
from graphs.errors import PlacementError, StrategyError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.processes.starting import NoAnswerError, Parent, WorkerEndedError, WorkerFailedError, Workers
from placement.results.result import Result
from placement.runtime.ranks.launch import met_store
from placement.solving.strategy_row import strategy_row
from tests.helpers.placed_models import cpus, with_host

LIMIT_S = 120.0
_REFUSED = "refused: "
Numbers = dict[str, Tensor]


class CrashedError(Exception):
    """A rank has ended with an error that is no sentence, or without one."""


@dataclass(frozen=True)
class Steps:
    """What is run.

    Attributes:
        args, kwargs: of the model, the whole batch.
        train: a training step.
        count: how many of them, each with random numbers seeded by its number.
        optimizer: its class and settings, for more than one step.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    train: bool = True
    count: int = 1
    optimizer: Any = torch.optim.SGD
    settings: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.02, "momentum": 0.9})


def in_one_piece(model: nn.Module, steps: Steps) -> Numbers:
    """The numbers of this very model: losses, gradients and states; or outputs of inference."""
    model.train(steps.train)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = steps.optimizer(parameters, **steps.settings) if steps.train and parameters else None

    def gradients() -> Numbers:
        named = model.named_parameters(remove_duplicate=False)  # as ranks gather them: by all names of what is tied
        return {name: p.grad.clone() for name, p in named if p.grad is not None}

    def step() -> Tensor:
        model.zero_grad()
        loss = default_loss(model(*steps.args, **steps.kwargs))
        loss.backward()
        return loss

    return _numbers(model, steps, step, gradients, model.state_dict, optimizer)


def in_parts(model: nn.Module, steps: Steps, strategy: Strategy) -> Numbers:
    """The training step of this very model on one part of the batch after the other, each with its own statistics.

    All samples have a label, so the loss is the mean of those of parts. Buffers of replicas are left out, which have
    running statistics of their own parts, and counters of steps.
    """
    replicas = next((rule.size for rule in strategy.mesh if rule.name == "dp"), 1)
    parts = strategy.micro_batches * replicas
    model.train()
    torch.manual_seed(0)
    losses = []
    for some in zip(*(arg.chunk(parts) for arg in (*steps.args, *steps.kwargs.values())), strict=True):
        named = dict(zip(steps.kwargs, some[len(steps.args) :], strict=True))
        loss = default_loss(model(*some[: len(steps.args)], **named)) / parts
        loss.backward()
        losses.append(loss.detach())
    found = {"the loss of step 0": torch.stack(losses).sum()}
    found |= {
        f"gradient of {n} in step 0": p.grad
        for n, p in model.named_parameters(remove_duplicate=False)
        if p.grad is not None
    }
    buffers = {f"{name} in the end": b for name, b in model.named_buffers() if b.dtype.is_floating_point}
    return found | (buffers if replicas == 1 else {})


def differences(found: Numbers, expected: Numbers, share: float = 1e-3) -> dict[str, float]:
    """How far losses, gradients, buffers and outputs are off, by name, each relative to its largest entry.

    A gradient or weight that is next to nothing beside the others is measured by a ``share`` of the largest of all;
    infinite is what is missing, or too much.
    """
    gradients = {name: _largest(each) for name, each in expected.items() if name.startswith("gradient")}
    weights = {f"{_weight(name)} in the end" for name in gradients}
    least = dict.fromkeys(gradients, share * max(gradients.values(), default=0.0))
    least |= dict.fromkeys(weights, share * max((_largest(expected[n]) for n in weights & expected.keys()), default=0))
    made = dict.fromkeys(expected.keys() - found.keys(), math.inf)
    for name in found:
        if name not in expected:
            if name.startswith(("gradient", "output")) and found[name].any():
                made[name] = math.inf
            continue
        ours, theirs = found[name].double(), expected[name].detach().double()
        if ours.shape != theirs.shape:
            made[name] = math.inf
        elif theirs.numel():
            scale = max(_largest(theirs), least.get(name, 0.0))
            off = float(torch.where(ours == theirs, 0.0, ours - theirs).abs().max())
            made[name] = off / scale if scale else off
    return made


def _weight(gradient: str) -> str:
    return gradient.removeprefix("gradient of ").partition(" in step ")[0]


def _largest(tensor: Tensor) -> float:
    finite = tensor.detach()[tensor.isfinite()]  # a mask has entries of minus infinity
    return float(finite.abs().max()) if finite.numel() else 0.0


def by_ranks(model: nn.Module, graph: OpGraph, strategy: str, steps: Steps) -> Numbers:
    """The numbers of a copy of a model under a strategy, as `in_one_piece` has them, put together from all ranks.

    Args:
        graph: of the model, captured.

    Raises:
        PlacementError: the strategy is refused, in a sentence.
        CrashedError: it ended in another way.
    """
    parsed = Strategy.parse(strategy)
    cluster = with_host(parsed.devices) if parsed.offload else cpus(parsed.devices)
    result = strategy_row(graph, cluster, parsed).result
    if result.answer is None:
        raise StrategyError(result.reason or "there is no answer.")
    with temporary_folder() as folder:
        life = partial(_life, model, result, steps, str(folder / "store"), parsed.devices)
        workers = Workers.forked([partial(life, rank) for rank in range(parsed.devices)])
        try:
            found = workers.collect(LIMIT_S)[0]
        except WorkerFailedError as error:
            if str(error).startswith(_REFUSED):
                raise StrategyError(str(error).removeprefix(_REFUSED)) from None
            raise CrashedError(str(error)) from None
        except WorkerEndedError as error:
            raise CrashedError(f"rank {error.rank} ended with code {error.code}") from None
        except NoAnswerError:
            raise CrashedError(f"nothing has come in {LIMIT_S:.0f} s") from None
        finally:
            workers.end()
    return {name: torch.as_tensor(array) for name, array in found.items()}


def _life(model: nn.Module, result: Result, steps: Steps, store: str, size: int, rank: int, parent: Parent) -> None:
    """The life of a rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=met_store(store), rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S)
    )
    try:
        parent.answer(_of_rank(model, result, steps))
    except PlacementError as error:
        parent.fail(f"{_REFUSED}{error}")
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        parent.fail(f"{type(error).__name__}: {line}")
    dist.barrier()  # whoever leaves first would end what others are in


def _of_rank(model: nn.Module, result: Result, steps: Steps) -> dict[str, Any]:
    devices = {device.name: "cpu" for device in result.cluster.devices}
    model = copy.deepcopy(model).train(steps.train)
    placed: Any = placement.apply(model, result, steps.args, steps.kwargs, devices=devices)
    optimizer = placed.optimizer(steps.optimizer, **steps.settings) if steps.train else None

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = placed.step(*steps.args, **steps.kwargs)
        return loss

    found = _numbers(placed, steps, step, placed.gathered_gradients, placed.gathered_state_dict, optimizer)
    return {
        name: tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
        for name, tensor in found.items()
    }


def _numbers(model: Any, steps: Steps, step: Any, gradients: Any, states: Any, optimizer: Any) -> Numbers:
    numbers: Numbers = {}
    if not steps.train:
        torch.manual_seed(0)
        with torch.no_grad():
            output = model(*steps.args, **steps.kwargs)
        return {f"output {n}": tensor.detach().clone() for n, tensor in enumerate(output_tensors(output))}
    for number in range(steps.count):
        torch.manual_seed(number)
        numbers[f"the loss of step {number}"] = step().detach().clone()
        made = gradients()
        numbers |= {f"gradient of {name} in step {number}": tensor.clone() for name, tensor in made.items()}
        if optimizer is not None:
            optimizer.step()
    return numbers | {f"{name} in the end": tensor.detach().clone() for name, tensor in states().items()}
