"""`StrategyModule`: the share of a model under a strategy that one process runs, one process for each device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from graphs.capture.record import argument_leaves
from graphs.capture.trace import value_of
from graphs.errors import MismatchError
from placement.inputs.call_arguments import check_data, check_kinds, tensors_of
from placement.runtime.in_process.wrapper import ModelWrapper
from placement.runtime.program.drawing import draw
from placement.runtime.program.layout import Key
from placement.runtime.program.named_tensors import NamedTensors
from placement.runtime.program.routines import sent_tags
from placement.runtime.ranks.endpoint import RankEndpoint
from placement.runtime.ranks.process_group import ProcessGroup, check_size
from placement.runtime.ranks.ranks import add_gradients, refuse_copy
from placement.runtime.ranks.tensor_files import Path
from placement.runtime.sharded.agreement import SameRandomNumbers, check_same_plan
from placement.runtime.sharded.exchanging.collectives import Collectives
from placement.runtime.sharded.layouts import PartLayout
from placement.runtime.sharded.plan import StrategyPlan
from placement.runtime.sharded.storing.rank_states import RankStates
from placement.runtime.sharded.storing.samples import OwnSamples, own_arguments, set_own_samples
from placement.runtime.sharded.storing.states import stored
from placement.runtime.sharded.writing.writer import write
from placement.runtime.transport.channels import channels_of

_FIRST_TAG = 7 << 24  # beyond those of placements


class StrategyModule(ModelWrapper):
    """A drop-in for the model in a program that runs once per device.

    It has the model's modules, and of its parameters and buffers what this rank stores, under their own keys:
    ``parameters()`` is what this rank's optimizer takes. All ranks make the same calls. An argument is the global
    batch, the same on all ranks, or this rank's own samples of it (`placement.shard_of`). With one seed on all ranks
    dropout draws for each sample what it draws on one device.

    Args:
        model: gives what it has to this module; with its parameters on ``meta``, each process makes only its own.
        plan: what all ranks do.
        group: the processes.
        place: the torch device of this one.
    """

    def __init__(self, model: nn.Module, plan: StrategyPlan, group: ProcessGroup, place: torch.device) -> None:
        super().__init__(model)
        check_size(group.size, plan.n_ranks)
        check_same_plan(group, plan)
        self._frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        self._plan, self._group, self._place = plan, group, place
        program = plan.values.step.program
        self._program = program
        self._code = write(plan, group.rank)
        self._states = RankStates(model, plan.states, group, place)
        self._tensors = NamedTensors(model)
        self._names = {name: state.name for state in self._states.table[group.rank] for name in state.names}
        op_names = tuple(program.graph.op_names)
        self._op_names = op_names
        self._channels = channels_of(self._code.transfers, op_names, _FIRST_TAG)
        self._sent = sent_tags(self._code.routine)
        self._collectives = Collectives(group, self._code.exchanges, place)
        self._pairs = group.pairs(place)
        drawing = [torch.device(value_of(node).layout.device) for _, node in plan.values.step.draws]
        self._random = SameRandomNumbers(group, drawing[0] if drawing else None)
        set_own_samples(OwnSamples.of(self._input_parts))
        if not program.train:
            self.eval()

    @property
    def rank(self) -> int:
        """The number of this process, that of its device."""
        return self._group.rank

    @cached_property
    def _input_parts(self) -> dict[str, PartLayout]:
        """The part of each argument that is this rank's own, by path."""
        return {path: self._plan.input_layout(path, self.rank) for path in self._plan.input_paths}

    def train(self, mode: bool = True) -> StrategyModule:
        """As of any module.

        Raises:
            MismatchError: training of a model that was captured for inference.
        """
        if mode and not self._program.train:
            raise MismatchError("the model was captured for inference; capture it with train=True to train it.")
        super().train(mode)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()

    # -- running ----------------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward pass, the loss that was captured, and backward pass, as the strategy says.

        Adds to ``grad`` of this rank's parameters.

        Returns:
            The loss of the global batch, a tensor of one number, on every rank.

        Raises:
            MismatchError: the model was captured for inference, or with other arguments, or it is in evaluation mode.
            RankError: the run has failed, here or on another rank.
        """
        if not self._program.train:
            raise MismatchError("the strategy is for inference; step() expects one of a training step (train=True).")
        if not self.training:
            raise MismatchError("the model is in evaluation mode; step() trains it, call train() first.")
        given = self._run(args, kwargs)
        gradients = {self._own_name(key[1]): value for key, value in given.items() if key[0] == "gradient"}
        # One that was frozen since gets none, as without a strategy.
        trained = {name: value for name, value in gradients.items() if self.get_parameter(name).requires_grad}
        add_gradients(self, trained)
        loss: torch.Tensor = given["loss", 0]
        return loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the model for the global batch, on every rank.

        Raises:
            MismatchError: the strategy is for training, whose steps `step` runs, or other arguments than captured.
            RankError: the run has failed, here or on another rank.
        """
        if self._program.train:
            raise MismatchError(
                "the strategy is for training, and step() runs its forward and backward passes together; to run the "
                "model alone, load gathered_state_dict() into it, or apply a strategy for inference."
            )
        given = self._run(args, kwargs)
        outputs = self._program.trace.outputs
        assert outputs is not None
        return outputs.filled([given["output", number] for number in range(len(outputs.nodes))])

    def _own_name(self, name: str) -> str:
        """The name under which this rank's module has a parameter of the plan."""
        return next(own for own, first in self._names.items() if first == self._names.get(name, name))

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Key, Any]:
        """Run this rank's routine; its results by key."""
        self._states.check_filled()
        leaves = argument_leaves(self._model, args, kwargs)
        check_kinds(self._program, leaves)
        given = tensors_of(leaves)
        check_data(given)
        if self._program.train:
            self._check_gradients(given)
        inputs = own_arguments(self._input_parts, given)
        group, routine = self._group, self._code.routine
        group.drain()
        endpoint = RankEndpoint(group, self._channels, self._place, self._pairs)
        endpoint.begin(self._sent)
        self._random.begin()
        drawn = draw(self._plan.values.step)
        taken = [self._looked_up(key, inputs, drawn) for key in routine.takes]
        with torch.no_grad(), group.running(routine, self._op_names):
            results = routine.run(endpoint, self._collectives, *taken)
        self._random.check()
        group.drain()
        return dict(zip(routine.gives, results, strict=True))

    def _looked_up(
        self, key: Key, inputs: Mapping[str, torch.Tensor], drawn: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        kind, name = key
        if kind == "input":
            return inputs[name].to(self._place)
        if kind == "drawn":
            return drawn[name].to(self._place)
        found = self._tensors.get(name)
        return (self._program.constants[name] if found is None else found).to(self._place)

    # -- gradients and checkpoints ----------------------------------------------------------------------------

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, by the norm over all ranks. All ranks call it."""
        return self._states.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def gathered_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state dict with its own keys, on the CPU of rank 0; an empty one elsewhere. All call it."""
        return self._states.gathered_state_dict()

    def whole(self, name: str) -> torch.Tensor:
        """One parameter or buffer, whole, on the CPU of every rank. All ranks call it."""
        return self._states.whole(name)

    def own_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """What this rank stores of a tensor like a parameter or buffer; None for one that others store."""
        state = next((state for state in self._states.table[self.rank] if name in state.names), None)
        return None if state is None else stored(tensor, state)

    def save(self, path: Path) -> None:
        """Write the whole model to a safetensors file with its own keys, in one step. All ranks call it.

        Raises:
            OSError: on every rank: the file cannot be written.
        """
        self._states.save(path)

    def load(self, path: Path) -> None:
        """Read what this rank stores from a safetensors file, whoever wrote it. All ranks call it.

        Raises:
            MismatchError: on every rank: a tensor is missing or of another shape, or the file is none.
        """
        self._states.load(path)

    def save_optimizer(self, path: Path, optimizer: torch.optim.Optimizer | None) -> None:
        """As `save`, the state of an optimizer of this rank's parameters: ``name/slot`` of each of them."""
        self._states.save_optimizer(path, optimizer)

    def load_optimizer(self, path: Path, optimizer: torch.optim.Optimizer | None) -> None:
        """Read back what `save_optimizer` wrote, under this strategy or another."""
        self._states.load_optimizer(path, optimizer)

    def save_run(self, folder: Path, optimizer: torch.optim.Optimizer | None, **facts: Any) -> None:
        """Save model, optimizer and its settings, random numbers and facts for `load_run`. All ranks call it.

        Raises:
            OSError: on every rank: a file cannot be written.
            MismatchError: a fact is no plain data.
        """
        self._states.save_run(folder, optimizer, **facts)

    def load_run(self, folder: Path, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
        """Go on with what `save_run` saved, under this strategy or another. All ranks call it.

        Returns:
            The facts; None where nothing has been saved yet.

        Raises:
            MismatchError: on every rank: the run is of another model or optimizer.
        """
        return self._states.load_run(folder, optimizer)
