"""`StrategyModule`: the share of a model under a strategy or a placement that one process runs, one for each device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from graphs.capture.record import Loss, argument_leaves
from graphs.errors import MismatchError
from placement.inputs.call_arguments import check_call, tensors_of
from placement.runtime.modules.evaluation import OtherStep, evaluation_plan, forward_program
from placement.runtime.modules.rank_program import RankProgram
from placement.runtime.modules.wrapper import OpByOpWrapper
from placement.runtime.parts.samples import OwnSamples, set_own_samples
from placement.runtime.planning.placement_plan import forward_plan, resized_plan
from placement.runtime.planning.strategy_plan import StrategyPlan
from placement.runtime.program.device_layout import Key
from placement.runtime.program.named_tensors import NamedTensors
from placement.runtime.program.variants import Variants
from placement.runtime.ranks.process_group import ProcessGroup
from placement.runtime.states.gradients import add_gradients
from placement.runtime.states.initial_values import initial_values
from placement.runtime.states.local_tensors import lent, outlines_of
from placement.runtime.states.state_parts import stored
from placement.runtime.storing.rank_states import RankStates
from placement.runtime.storing.tensor_files import Path


class StrategyModule(OpByOpWrapper):
    """A drop-in for the model in a program that runs once per device.

    It has the model's modules, and of its parameters and buffers what this rank stores, under their own keys:
    ``parameters()`` is what this rank's optimizer takes. All ranks make the same calls. An argument is the whole batch,
    the same on all ranks, or this rank's own samples of it (`placement.shard_of`). With one seed on all ranks
    dropout draws for each sample what it draws on one device.

    Where updates are offloaded, parameters lie on the host, with their gradients and what the optimizer makes for them,
    and a step begins with a copy on the device, or parameters are copied for each use.

    Under a placement other batch sizes and lengths are captured when they first come, as far as the model runs the same
    ops for them; a strategy is for the sizes that it was made for.

    Args:
        model: gives what it has to this module; with its parameters on ``meta``, each process makes only its own.
        plan: what all ranks do.
        group: the processes.
        place: the torch device of this one.
        loss: the model was captured with.
    """

    def __init__(
        self, model: nn.Module, plan: StrategyPlan, group: ProcessGroup, place: torch.device, loss: Loss | None = None
    ) -> None:
        super().__init__(model, plan.values.step.program)
        self._plan, self._group, self._place = plan, group, place
        self._is_trained = plan.values.step.program.train
        self._tensors = NamedTensors(model)
        self._program = RankProgram(plan, group, place, self._tensors.get)
        self._outlines = outlines_of(model)
        self._states = RankStates(model, plan.states, group, place)
        # The first of tied names, under which this rank's module has a parameter of the plan.
        self._own_names = {name: state.name for state in self._states.table[group.rank] for name in state.names}
        self._evaluations: dict[str, OtherStep] = {}  # by what is no tensor among the arguments
        given, program = partial(lent, model, self._outlines), plan.values.step.program
        self._variants = Variants(model, program, plan, resized_plan, forward_plan, loss, given)
        self._placed_steps: dict[StrategyPlan, OtherStep] = {}
        set_own_samples(OwnSamples.of(self._program.input_parts))
        if not self._is_trained:
            self.eval()

    @property
    def rank(self) -> int:
        """The number of this process, that of its device."""
        return self._group.rank

    def train(self, mode: bool = True) -> StrategyModule:
        """As of any module; what evaluation has gathered is freed.

        Raises:
            MismatchError: training of a model that was captured for inference.
        """
        if mode and not self._is_trained:
            raise MismatchError("the model was captured for inference; capture it with train=True to train it.")
        super().train(mode)
        if mode:
            for step in (*self._evaluations.values(), *self._placed_steps.values()):
                step.free()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MismatchError(
            "a process's share of a model cannot be copied or pickled; save() writes the model, gathered_state_dict() "
            "gives its tensors."
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Run the ops between two exchanges under torch.compile, whose options it takes."""
        super().compile(*args, **kwargs)
        assert self._compile_run is not None
        self._program.compile(self._compile_run)
        for step in (*self._evaluations.values(), *self._placed_steps.values()):
            step.compile(self._compile_run)

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
        if not self._is_trained:
            raise MismatchError("the result is for inference; step() expects one of a training step (train=True).")
        if not self.training:
            raise MismatchError("the model is in evaluation mode; step() trains it, call train() first.")
        leaves = self._leaves(args, kwargs)
        self._check_gradients(tensors_of(leaves))
        given = self._run(args, kwargs, leaves)
        gradients = {self._own_names[key[1]]: value for key, value in given.items() if key[0] == "gradient"}
        # One that was frozen since gets none, as without a strategy.
        trained = {name: value for name, value in gradients.items() if self.get_parameter(name).requires_grad}
        add_gradients(self, trained, in_whole=self._plan.storage.keeps_gradients)
        loss: torch.Tensor = given["loss", 0]
        return loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the model for the global batch, on every rank; of a training step in evaluation mode only.

        They have no gradients: `step` runs both passes, and the loss that the model was captured with.

        Raises:
            MismatchError: training mode, other arguments than captured, or the strategy cannot run evaluation.
            RankError: the run has failed, here or on another rank.
        """
        if self._is_trained and self.training:
            raise MismatchError(
                "in training mode step() runs the forward and backward passes together, with the loss that the model "
                "was captured with; to run the model alone call eval() first, or apply a result for inference."
            )
        leaves = self._leaves(args, kwargs)
        other = self._other_step(args, kwargs, leaves)
        if other is not None:
            return other.outputs(leaves)
        return self._program.outputs(self._program.run(self._program.checked(leaves)))

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Mapping[str, Any]) -> dict[Key, Any]:
        """The results of the planned step, or of the one that goes with these arguments."""
        other = self._other_step(args, kwargs, leaves)
        return self._program.run(self._program.checked(leaves)) if other is None else other.run(leaves)

    def _other_step(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Mapping[str, Any]
    ) -> OtherStep | None:
        """The step for these arguments in this mode, captured when it is first needed; None for the planned one."""
        if not self._plan.is_placement:
            return self._evaluation(args, kwargs, leaves) if self._is_trained and not self.training else None
        plan = self._variants.get(args, kwargs, leaves, self.training)
        if plan is not self._plan and plan not in self._placed_steps:
            self._placed_steps[plan] = self._beside(plan)
        return self._placed_steps.get(plan)

    def _evaluation(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Mapping[str, Any]) -> OtherStep:
        """The forward pass under a strategy."""
        settings = repr([(path, leaf) for path, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)])
        if settings not in self._evaluations:
            given = lent(self._model, self._outlines)
            precision = self._plan.values.step.program.graph.origin.precision
            parts = self._program.input_parts
            program = forward_program(self._model, args, kwargs, leaves, parts, given, precision)
            self._evaluations[settings] = self._beside(evaluation_plan(program, self._plan))
        return self._evaluations[settings]

    def _beside(self, plan: StrategyPlan) -> OtherStep:
        made = OtherStep(plan, self._group, self._place, self._states, self._tensors)
        if self._compile_run is not None:
            made.compile(self._compile_run)
        return made

    def _leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Leaves of the arguments, by path, once this rank's parameters are there."""
        self._states.check_filled()
        check_call(self._model, args, kwargs)
        return argument_leaves(self._model, args, kwargs)

    # -- gradients and checkpoints ----------------------------------------------------------------------------

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, by the norm over all ranks. All ranks call it."""
        return self._states.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def gathered_gradients(self) -> dict[str, torch.Tensor]:
        """``grad`` of the whole model's parameters by their own keys, 0 where there is none yet, on the CPU of rank 0.

        An empty dict elsewhere. All ranks call it.
        """
        return self._states.gathered_gradients()

    def gathered_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state dict with its own keys, on the CPU of rank 0; an empty one elsewhere. All call it."""
        return self._states.gathered_state_dict()

    def whole(self, name: str) -> torch.Tensor:
        """One parameter or buffer, whole, on the CPU of every rank. All ranks call it."""
        return self._states.whole(name)

    def own_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of a tensor like a parameter or buffer; None for one that others store."""
        state = next((state for state in self._states.table[self.rank] if name in state.names), None)
        return None if state is None else stored(tensor, state)

    def reset_parameters(self, seed: int = 0) -> None:
        """Give this rank's parameters and buffers the values with which the model itself begins, as after ``to_empty``.

        Every rank draws the same, one module after the other in the order of `named_modules`, so that no more than one
        is whole at a time; `placement.runtime.states.initial_values` says how a model gives itself values. All ranks
        call it, before the first step.

        Args:
            seed: of torch's random numbers meanwhile.
        """
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, value in initial_values(self._model, self._outlines):
                own, mine = self._tensors.get(name), self.own_part(name, value)
                if own is not None and mine is not None:
                    own.copy_(mine)

    def save(self, path: Path) -> None:
        """Write the whole model to a safetensors file with its own keys, in one step. All ranks call it.

        Raises:
            CheckpointError: on every rank: the file cannot be written.
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
            CheckpointError: on every rank: a file cannot be written.
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
