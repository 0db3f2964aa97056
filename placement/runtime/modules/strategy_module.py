"""`StrategyModule`: the share of a model under a strategy that one process runs, one for each device."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from graphs.capture.record import Loss
from graphs.errors import MismatchError
from graphs.recipes import Precision
from placement.inputs.call_arguments import check_call
from placement.runtime.modules.local_tensors import (
    Unfilled,
    check_alike,
    check_batches,
    entries,
    outlines_of,
    without_values,
)
from placement.runtime.modules.shared_module import SharedModule
from placement.runtime.program.variants import is_number
from placement.runtime.ranks.group import RankGroup
from placement.runtime.samples import OwnSamples, set_own_samples
from placement.runtime.setups.module_tree import is_under
from placement.runtime.torch_runner.batch import borders
from placement.runtime.torch_runner.optimizers import give_memory, make_optimizer
from placement.runtime.torch_runner.parallel import parallelize
from placement.runtime.torch_runner.setup import Setup
from placement.runtime.torch_runner.stages import local
from placement.runtime.torch_runner.step import loss_of, run_forward, run_step


class StrategyModule(SharedModule, nn.Module):
    """A drop-in for the model in a program that runs once per device, made of torch's own parts.

    Its parameters are those that this rank has of the model's, under the model's names, some of them as `DTensor`:
    ``parameters()`` is what this rank's optimizer takes. All ranks make the same calls. An argument is the whole batch,
    the same on all ranks, or this rank's own samples of it (`placement.shard_of`).

    Args:
        model: gives what it has to this module; with its parameters on ``meta``, each process makes only its own.
        setup: what the strategy says to this model.
        mesh: of the processes, with the setup's axes.
        place: the torch device of this one.
        loss: the model was captured with.
        train: whether it was captured for training.
        precision: in which it was captured, if any was named.
    """

    def __init__(
        self,
        model: nn.Module,
        setup: Setup,
        mesh: DeviceMesh,
        place: torch.device,
        loss: Loss | None = None,
        train: bool = True,
        precision: Precision | None = None,
    ) -> None:
        super().__init__()
        self._setup, self._mesh, self._place = setup, mesh, place
        self._criterion, self._is_trained = loss or loss_of, train
        self._input_dtype = None
        if precision is not None and not setup.has_policy and precision.activation != "float32":
            self._input_dtype = getattr(torch, precision.activation)
        self._ranks = RankGroup.of(mesh.mesh.flatten().tolist())
        self._signature = inspect.signature(model.forward)
        outlines, keys = outlines_of(model), list(model.state_dict())
        self._is_first = True
        check_alike(self._ranks, model, setup)
        # Without memory for parameters: what the model says about calls, and about how its values begin.
        memo: dict[int, Any] = {id(tensor): outlines[name] for name, tensor in entries(model)}
        self.__dict__["_outline"] = copy.deepcopy(model, memo)
        self.training = model.training
        hooked = taken_hooks(model)
        missing = set() if setup.is_cut else give_memory(model, place, setup)
        run = parallelize(model, mesh, setup)
        made: set[int] = set()  # ids, as names in here are those of wrappers
        if setup.is_cut:
            names = give_memory(run, place, setup)
            made = {id(tensor) for name, tensor in entries(run) if name in names}
        self.__dict__["_run"] = run  # its names are not this module's
        self._share(outlines, keys)
        self._hooks: dict[Any, Hooks] = {tensor: hooked[name] for name, tensor in self._entries() if name in hooked}
        # Those without values yet, and how often their memory had been written then.
        known = self._entries()
        found = [(name, local(tensor)) for name, tensor in known if name in missing or id(tensor) in made]
        self._unfilled = [Unfilled(name, own, own._version) for name, own in found]
        ends = borders(mesh, setup) if setup.cuts_batch else []
        set_own_samples(OwnSamples(setup.batch, ends[0], ends[-1]) if ends else OwnSamples())
        if not train:
            self.eval()

    def train(self, mode: bool = True) -> StrategyModule:
        """As of any module.

        Raises:
            MismatchError: training of a model that was captured for inference.
        """
        self._check_train(mode)
        self._run.train(mode)
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_outline" not in self.__dict__ or "_home" not in self.__dict__:
                raise
            return getattr(self._models()[0][0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        outline = self.__dict__.get("_outline")
        if outline is None or not is_number(outline, name) or "_home" not in self.__dict__:
            super().__setattr__(name, value)
        elif self._setup.stages:
            raise MismatchError(f"stages have {name!r} of the model in their code; place the model with its new value.")
        else:
            setattr(self._models()[0][0], name, value)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(4)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Run the model, or each stage, under torch.compile, whose options it takes."""
        for model, _ in self._models():
            model.compile(*args, **kwargs)

    # -- tensors ----------------------------------------------------------------------------------------------

    def _models(self) -> list[tuple[nn.Module, tuple[str, ...]]]:
        """The models inside of wrappers, each with the modules and parameters that other ranks answer for."""
        stages = self._setup.stages
        if not stages:
            return [(self._run.module if isinstance(self._run, DistributedDataParallel) else self._run, ())]
        found = []
        for number, stage in self._run.stages.items():
            others = [path for other, paths in enumerate(stages) for path in paths if other != int(number)]
            others += [name for name, trained_by in self._setup.loose.items() if trained_by != int(number)]
            found.append((stage.model, tuple(others)))
        return found

    def _entries(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every parameter and buffer that this rank answers for, tied ones under each name."""
        seen = set()
        for model, others in self._models():
            for name, tensor in entries(model):
                is_others = any(is_under(name, path) for path in others)
                if not is_others and name not in seen:
                    seen.add(name)
                    yield name, tensor

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """What this rank has of the model's parameters, under their names there."""
        yield from self._named(nn.Parameter, prefix, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What this rank has of the model's buffers, under their names there."""
        yield from self._named(torch.Tensor, prefix, remove_duplicate)

    def _named(self, kind: type, prefix: str, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        seen = set()
        for name, tensor in self._entries():
            is_one = isinstance(tensor, nn.Parameter) is (kind is nn.Parameter)
            if is_one and not (remove_duplicate and id(tensor) in seen):
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, tensor

    def get_parameter(self, target: str) -> nn.Parameter:
        """A parameter of this rank by its name in the model."""
        found = dict(self.named_parameters(remove_duplicate=False)).get(target)
        if found is None:
            raise AttributeError(f"rank {self.rank} has no parameter {target!r}")
        return found

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """What this rank has of the model's state dict."""
        return {name: tensor.detach() for name, tensor in self._kept().items()}

    # -- running ----------------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward pass, the loss that was captured, and backward pass, as the strategy says.

        Adds to ``grad`` of this rank's parameters.

        Returns:
            The loss of the global batch, a tensor of one number, on every rank.

        Raises:
            MismatchError: the model was captured for inference, or with other arguments, or it is in evaluation mode.
            RankError: the run has failed on another rank.
        """
        self._check_step()
        inputs = self._inputs(args, kwargs)
        self._check_batch(inputs)
        if self._is_first:
            check_batches(self._ranks, inputs, self._setup.batch)
            self._is_first = False
        before = {p: p.grad for p in self.parameters() if p.grad is not None}
        for p in before:
            p.grad = None
        with self._among_ranks("a step"):
            loss = run_step(self._run, self._mesh, inputs, self._setup, self._criterion)
        for p, hooks in self._hooks.items():
            p.grad = None if p.grad is None else hooks.changed(p.grad)
        for p, gradient in before.items():
            p.grad = gradient if p.grad is None else p.grad + gradient
        for p, hooks in self._hooks.items():
            for hook in hooks.on_accumulated if p.grad is not None else ():
                hook(p)
        return loss.detach()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the model for the global batch, on every rank; of a training step in evaluation mode only.

        They have no gradients: `step` runs both passes, and the loss that the model was captured with.

        Raises:
            MismatchError: training mode, or other arguments than the model takes.
            RankError: the run has failed on another rank.
        """
        self._check_forward()
        inputs = self._inputs(args, kwargs)
        with self._among_ranks("a forward pass"):
            return run_forward(self._run, self._mesh, inputs, self._setup)

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, on this rank's device."""
        unfilled = next((name for name, own, version in self._unfilled if own._version == version and len(own)), None)
        if unfilled is not None:
            raise without_values(unfilled)
        self._unfilled = []
        check_call(self._outline, args, kwargs)
        given: dict[str, Any] = {}
        for name, value in self._signature.bind_partial(*args, **kwargs).arguments.items():
            kind = self._signature.parameters[name].kind
            if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
                raise MismatchError(
                    f"forward() of the model takes {name!r} by place alone; give its arguments names, by which stages "
                    "and replicas get theirs."
                )
            given.update(value if kind == inspect.Parameter.VAR_KEYWORD else {name: value})
        return {name: tree_map(self._here, value) for name, value in given.items()}

    def _here(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_meta:
            raise MismatchError("an argument is on meta, without data; give tensors that have data.")
        return value.to(self._place, self._input_dtype if value.is_floating_point() else None)

    def _check_batch(self, inputs: dict[str, Any]) -> None:
        """Raises: MismatchError: no argument has the samples that the strategy divides, or some the own, others all."""
        setup = self._setup
        if not (setup.cuts_batch or setup.own_samples):
            return
        ends = borders(self._mesh, setup)
        own = ends[-1] - ends[0]
        sizes = {
            len(leaf): name
            for name, value in inputs.items()
            for leaf in tree_leaves(value)
            if isinstance(leaf, torch.Tensor) and leaf.ndim
        }
        if not sizes.keys() & {setup.batch, own}:
            raise MismatchError(
                f"the arguments have {', '.join(map(str, sorted(sizes))) or 'no tensors'} in dimension 0; expected "
                f"{setup.batch}, the batch that the strategy divides, or {own}, this process's own part."
            )
        if setup.cuts_batch and own != setup.batch and {setup.batch, own} <= sizes.keys():
            raise MismatchError(
                f"argument {sizes[own]!r} has {own} in dimension 0, this process's own part of the batch, and "
                f"{sizes[setup.batch]!r} has {setup.batch}, all of it; give both in the same way (what is not by "
                "samples, such as a mask, with a first dimension of 1)."
            )

    # -- gradients, optimizer and checkpoints -----------------------------------------------------------------

    def optimizer(self, kind: Any, **settings: Any) -> Any:
        """An optimizer of this rank's parameters, with its state where the strategy says: in parts, or on the host.

        Args:
            kind: a class such as `torch.optim.AdamW`.
            settings: of it.
        """
        return make_optimizer(self._run, self._mesh, self._setup, kind, **settings)


class Hooks(NamedTuple):
    """The hooks of one parameter: on its gradient, and on the parameter when that has been added."""

    on_gradient: tuple[Callable[[Tensor], Tensor | None], ...]
    on_accumulated: tuple[Callable[[Tensor], None], ...]

    def changed(self, gradient: Tensor) -> Tensor:
        """What they make of the gradient of a step."""
        for hook in self.on_gradient:
            found = hook(gradient)
            gradient = gradient if found is None else found
        return gradient


def taken_hooks(model: nn.Module) -> Mapping[str, Hooks]:
    """Those of each parameter that has some, by each of its names. The parameters have them no more."""
    found: dict[int, Hooks] = {}
    named: list[tuple[str, Any]] = list(model.named_parameters(remove_duplicate=False))
    for _, parameter in named:
        kinds = [parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}]
        if id(parameter) not in found and any(kinds):
            found[id(parameter)] = Hooks(*(tuple(hooks.values()) for hooks in kinds))
            for hooks in kinds:
                hooks.clear()
    return {name: found[id(parameter)] for name, parameter in named if id(parameter) in found}
