"""Stages of a pipeline: the model's own forward pass, in which a rank computes the modules of its stages alone."""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor

from placement.runtime.torch_runner.batch import Labels

if TYPE_CHECKING:
    from placement.runtime.torch_runner.setup import Setup


class Handover(Exception):
    """Takes what a stage hands to the next one out of the model's forward pass."""


class Stage(nn.Module):
    """The model's own forward pass, in which the modules of other stages have no parameters and do nothing.

    What needs none, such as masks and positions, every stage computes for itself.
    """

    def __init__(self, model: nn.Module, number: int, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.model, self.number = model, number
        self.received: Any = None
        self.criterion: Any = None  # from what the model returns to the loss; None: the last stage gives that
        self.labels: Any = None
        self.has_rehearsed = False
        for other, paths in enumerate(setup.stages):
            for path in paths if other != number else ():
                self._leave_out(path, model.get_submodule(path), other > number)
        if setup.loose:
            for name, stage in setup.loose.items():
                if stage != number:
                    model.get_parameter(name).requires_grad_(False)
        if number:
            first = setup.begins[number] if setup.begins and number in setup.begins else setup.stages[number][0]
            model.get_submodule(first).register_forward_pre_hook(self._begin)
        if setup.begins:
            for path, forward in setup.pieces.get(number, {}).items():
                module = model.get_submodule(path)
                module.forward = functools.partial(forward, module)

    def _leave_out(self, path: str, module: nn.Module, is_later: bool) -> None:
        for inner_path, inner in module.named_modules(prefix=path):
            for name, parameter in list(inner.named_parameters(recurse=False)):
                if self.setup.read_outside and f"{inner_path}.{name}" in self.setup.read_outside:
                    parameter.requires_grad_(False)
                else:
                    vars(inner)[name] = inner._parameters.pop(name).detach().to("meta")  # code asks for its format
        module.forward = self._hand_over if is_later else functools.partial(self._skip, path)

    def _skip(self, path: str, *args: Any, **kwargs: Any) -> Any:
        received = self.received[0] if isinstance(self.received, tuple) else self.received
        return self.setup.returns[path](received) if self.setup.returns and path in self.setup.returns else received

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.received, *args[1:]

    def _hand_over(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        raise Handover(tensor.contiguous())  # as torch.distributed sends tensors

    def hand_over_pieces(self) -> None:
        """Hand over what a piece of a module returns, where the next stage begins inside it."""
        path = self.setup.begins.get(self.number + 1)
        if path is not None and path in self.setup.pieces.get(self.number, {}):
            self.model.get_submodule(path).register_forward_hook(self._end)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # Copies: PipelineStage detaches what it sent in place, and this stage may read it, too.
        sent = [t.clone(memory_format=torch.contiguous_format) for t in (output if type(output) is tuple else [output])]
        raise Handover(tuple(sent) if len(sent) > 1 else sent[0])

    def forward(self, *received: torch.Tensor, **inputs: Any) -> Any:
        self.received = received[0] if len(received) == 1 else received or None
        for tensor in received:
            if tensor.requires_grad:
                tensor.register_hook(torch.Tensor.contiguous)  # as torch.distributed sends gradients
        with self.labels if self.setup.labels else contextlib.nullcontext():
            return self._run(inputs)

    def _run(self, inputs: dict[str, Any]) -> Any:
        # PipelineStage finds out shapes in a first call, on memory that nobody wrote, which is to change nothing.
        modules = () if self.has_rehearsed else self.model.modules()
        kept = [(table, table.copy()) for m in modules for table in (m._buffers, vars(m))]
        for buffers, _ in kept[::2]:
            buffers.update({name: b if b is None else b.clone() for name, b in buffers.items()})
        try:
            output = self.model(**inputs)
        except Handover as handover:
            return handover.args[0]
        finally:
            self.has_rehearsed = True
            for table, before in kept:
                table.update(before)
        return output if self.criterion is None else self.criterion(output).reshape(1)


class Pipeline(nn.Module):
    """The stages of this rank, in the order of the strategy."""

    def __init__(self, stages: dict[int, nn.Module], mesh: DeviceMesh, setup: Setup) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
        self.schedule = make_schedule(stages, mesh, setup)
        if setup.labels:
            self.labels = Labels(mesh, setup)
            for stage in stages.values():
                stage.__dict__["labels"] = self.labels


def own_modules(model: nn.Module, paths: Iterable[str], setup: Setup) -> list[nn.Module]:
    """The modules that are computed here: those of other stages have no parameters."""
    found = [model.get_submodule(path) for path in paths]
    if setup.stages:
        return [module for module in found if next(module.parameters(), None) is not None]
    return found


def own_stages(model: nn.Module, mesh: DeviceMesh, setup: Setup) -> dict[int, Stage]:
    """The stages of this rank, by number, each with a copy of the model."""
    mine = [number for number, rank in enumerate(setup.rank_of_stage) if rank == mesh["pp"].get_local_rank()]
    return {number: Stage(copy.deepcopy(model), number, setup) for number in mine}


def make_schedule(stages: dict[int, nn.Module], mesh: DeviceMesh, setup: Setup) -> Any:
    """The schedule in which the stages of this rank run their micro-batches."""
    device = torch.empty(0, device=mesh.device_type).device
    known: dict[str, Any] = {"group": mesh.get_group("pp")}
    if setup.styles:
        known["get_mesh"] = lambda names, _: mesh[names]  # where a stage hands over a DTensor
    ready = [PipelineStage(stage, number, len(setup.stages), device, **known) for number, stage in stages.items()]
    if not setup.order:
        own = ready[0] if setup.has_one_stage else ready
        return getattr(pipelining, setup.schedule)(own, setup.micro_batches, loss_fn=lambda loss, _: loss.sum())
    runtime = _PipelineScheduleRuntime(ready, setup.micro_batches, loss_fn=lambda loss, _: loss.sum())
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:  # an order that torch has no class for
        file.write(setup.order)
        file.flush()
        runtime._load_csv(file.name)
    return runtime


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def add_tied(pipeline: Any, mesh: DeviceMesh, setup: Setup) -> None:
    """Give all copies of a parameter that several stages have the sum of their gradients, so that they stay equal."""
    device = torch.empty(0, device=mesh.device_type).device
    for names, shape, dtype in setup.tied:
        total = torch.zeros(shape, device=device, dtype=getattr(torch, dtype))
        named = [pair for stage in pipeline.stages.values() for pair in stage.model.named_parameters()]
        copies: list[Any] = [p for name, p in named if name in names and p.requires_grad]
        for p in copies:
            if isinstance(p.grad, DTensor):
                p.grad = p.grad.redistribute(placements=p.placements)
            total[: len(local(p.grad))] += local(p.grad)
        dist.all_reduce(total, group=mesh.get_group("pp"))
        for p in copies:
            local(p.grad).copy_(total[: len(local(p.grad))])
