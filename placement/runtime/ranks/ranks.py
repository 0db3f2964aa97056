"""`RankModule`: the share of a placed model that one process runs, one process for each device."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from graphs.capture.record import Loss, argument_leaves
from graphs.errors import MismatchError
from placement.inputs.call_arguments import tensors_of
from placement.runtime.in_process.wrapper import OpByOpWrapper
from placement.runtime.program.compiled_runs import Compile
from placement.runtime.program.layout import DeviceLayout
from placement.runtime.program.named_tensors import NamedTensors
from placement.runtime.program.variants import Variants
from placement.runtime.ranks import checkpoints
from placement.runtime.ranks.local_tensors import check_filled, keep_local, keepers, lent, outlines_of
from placement.runtime.ranks.meeting import check_size
from placement.runtime.ranks.passes import CompiledPass, Differentiable, Pass
from placement.runtime.ranks.process_group import ProcessGroup, join

Path = str | os.PathLike[str]


class RankModule(OpByOpWrapper):
    """A drop-in for the model in a program that runs once per device.

    It has the model's modules and of its parameters and buffers those that are placed on this rank, under their own
    keys; ``parameters()`` is what this rank's optimizer takes. All ranks make the same calls with arguments of the same
    shapes; only the rank that an argument is placed on reads it. Every rank gets the outputs, sent by the rank where
    they arise, so that every rank can compute the loss and call ``backward()`` on it; `step` saves that way. With one
    seed on all ranks dropout draws what it draws without a placement.

    Args:
        model: gives what it has to this module: what other ranks keep is taken out of it and freed.
        layout: where the ops run; device d is rank d.
        group: the processes.
        loss: as it was captured with.
    """

    def __init__(self, model: nn.Module, layout: DeviceLayout, group: ProcessGroup, loss: Loss | None = None) -> None:
        super().__init__(model, layout)
        check_size(group.size, len(layout.places))
        _check_same(group, layout)
        self._group, self._pairs = group, group.pairs(layout.places[group.rank])
        self._compiled: dict[tuple[int, str, Compile | None], CompiledPass] = {}
        self._ties = {name: state.names for state in layout.step.program.states for name in state.names}
        outlines = outlines_of(model)
        self._new = keep_local(model, keepers(model, layout), group.rank, layout.places[group.rank])
        self._variants = Variants(model, layout, loss, lambda: lent(model, outlines))
        self._tensors = NamedTensors(model)
        self._take_mode()

    @property
    def rank(self) -> int:
        """The number of this process, that of its device."""
        return self._group.rank

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the model, on every rank.

        Raises:
            MismatchError: other arguments than captured.
            RankError: the run has failed, here or on another rank.
        """
        leaves = argument_leaves(self._model, args, kwargs)
        layout, inputs = self._variants.get(args, kwargs, leaves, self.training), tensors_of(leaves)
        program = layout.step.program
        assert program.trace.outputs is not None
        if not (program.train and torch.is_grad_enabled()):
            return program.trace.outputs.filled(self._pass(layout, "forward", inputs).forward())
        self._check_gradients(inputs)
        own = {name: p for name, p in self.named_parameters() if p.requires_grad}
        # A rank without parameters takes part in the backward pass all the same.
        anchor = torch.zeros((), requires_grad=True)
        passed = self._pass(layout, "both", inputs)
        tensors = Differentiable.apply(passed, tuple(own), anchor, *own.values())  # type: ignore[no-untyped-call]
        return program.trace.outputs.filled(tensors)

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward pass, the loss that was captured, and backward pass, as planned.

        Adds to ``grad`` of this rank's parameters. The loss comes to every rank, the outputs to none.

        Returns:
            The loss, a tensor of one number.

        Raises:
            MismatchError: the model was captured for inference, or with other arguments, or it is in evaluation mode.
            RankError: the run has failed, here or on another rank.
        """
        if not self._layout.step.program.train:
            raise MismatchError("the placement is for inference; step() expects one of a training step (train=True).")
        if not self.training:
            raise MismatchError("the model is in evaluation mode; step() trains it, call train() first.")
        leaves = argument_leaves(self._model, args, kwargs)
        layout, inputs = self._variants.get(args, kwargs, leaves, True), tensors_of(leaves)
        self._check_gradients(inputs)
        loss, gradients = self._pass(layout, "step", inputs).step()
        add_gradients(self, gradients)
        return loss

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()

    # -- checkpoints ------------------------------------------------------------------------------------------

    def gathered_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state dict with its own keys, on the CPU of rank 0; an empty one elsewhere. All call it."""
        return checkpoints.gather(self._group, self.state_dict())

    def save(self, path: Path) -> None:
        """Write the whole model to a safetensors file with its own keys, in one step. All ranks call it.

        Rank 0 writes, tensor by tensor, so that no process has to hold the model.

        Raises:
            CheckpointError: on every rank: the file cannot be written.
        """
        checkpoints.save(self._group, path, self.state_dict())

    def load(self, path: Path) -> None:
        """Read this rank's parameters and buffers, and nothing else, from a safetensors file. All ranks call it.

        Raises:
            MismatchError: a tensor is missing or of another shape.
            GraphFileError: it cannot be read.
        """
        checkpoints.load(path, self.state_dict(keep_vars=True), self._ties)

    def save_optimizer(self, path: Path, optimizer: torch.optim.Optimizer) -> None:
        """As `save`, the state of an optimizer of this rank's parameters: ``name/slot`` of each of them."""
        state = checkpoints.optimizer_state(self, optimizer)
        without = [name for name, p in self.named_parameters() if not optimizer.state.get(p)]
        checkpoints.save(self._group, path, state, checkpoints.kept_by(self._group, optimizer, without))

    def load_optimizer(self, path: Path, optimizer: torch.optim.Optimizer) -> None:
        """Read back what `save_optimizer` wrote; the placement may be another one by now."""
        checkpoints.load_optimizer(path, self, optimizer)

    # -- running ----------------------------------------------------------------------------------------------

    def _pass(self, layout: DeviceLayout, kind: str, inputs: Mapping[str, torch.Tensor]) -> Pass:
        if self._new:
            check_filled(self._model, self._new)
            self._new = []
        key = id(layout), kind, self._compile_run  # the variants keep their layouts
        if key not in self._compiled:
            self._compiled[key] = CompiledPass(layout, kind, self._compile_run)
        return Pass(self._group, self._compiled[key], self._tensors, inputs, self._pairs)


def rank_module(model: nn.Module, layout: DeviceLayout, *, loss: Loss | None = None) -> RankModule:
    """This process's share of a model under ``torchrun``, `launch` or an initialised process group.

    Args:
        model: the whole model, or one on ``meta``, of which only this rank's share gets memory.
        layout: where its ops run.
        loss: it was captured with.

    Raises:
        MismatchError: another number of processes than devices.
        RankError: the processes cannot reach each other.
    """
    return RankModule(model, layout, join(len(layout.places)), loss)


def add_gradients(model: nn.Module, gradients: Mapping[str, torch.Tensor], in_whole: bool = False) -> None:
    """Add gradients to ``grad`` of the parameters of those names.

    Args:
        in_whole: they are parts of whole gradients, and may keep the memory of these.
    """
    counts: dict[int, int] = {}
    for gradient in gradients.values():
        if gradient.layout is torch.strided:
            memory = gradient.untyped_storage().data_ptr()
            counts[memory] = counts.get(memory, 0) + 1
    for name, gradient in gradients.items():
        parameter = model.get_parameter(name)
        if parameter.grad is not None:
            parameter.grad += gradient
            continue
        if gradient.layout is not torch.strided:
            parameter.grad = gradient
            continue
        storage = gradient.untyped_storage()
        is_alone = counts[storage.data_ptr()] == 1 and (in_whole or storage.nbytes() == gradient.nbytes)
        # As autograd: the gradient itself where nothing else is in its memory, and strides like the parameter's.
        if is_alone and gradient.stride() == parameter.stride():
            parameter.grad = gradient
        else:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)


def refuse_copy() -> NoReturn:
    """Raises: MismatchError: a share of a model is to be copied or pickled."""
    raise MismatchError(
        "a process's share of a model cannot be copied or pickled; save() writes the model, gathered_state_dict() "
        "gives its tensors."
    )


def _check_same(group: ProcessGroup, layout: DeviceLayout) -> None:
    """Raises: MismatchError: the ranks have different placements, and would wait for each other for ever."""
    plan = [layout.step.program.graph.op_names, layout.device, layout.order, layout.start_s]
    digest = hashlib.sha256(repr([list(part) for part in plan]).encode()).hexdigest()
    if len(set(group.all_gather(digest, "its plan"))) > 1:
        raise MismatchError(
            "the ranks have different placements; place the model once, save the result, and give every rank that file."
        )
