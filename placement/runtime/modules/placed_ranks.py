"""`PlacedRanks`: the share of a placed model that one process runs, one for each device."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from graphs.capture.record import Loss, argument_leaves
from graphs.errors import MismatchError
from placement.inputs.call_arguments import check_call, tensors_of
from placement.runtime.modules.initial_values import initial_values
from placement.runtime.modules.local_tensors import lent
from placement.runtime.modules.own_states import OwnStates
from placement.runtime.modules.rank_step import RankStep
from placement.runtime.modules.shared_module import SharedModule
from placement.runtime.modules.shared_states import Path
from placement.runtime.modules.wrapper import OpByOpWrapper
from placement.runtime.program.derived_layout import nearest, same_ops
from placement.runtime.program.device_layout import DeviceLayout, Key
from placement.runtime.program.named_tensors import NamedTensors
from placement.runtime.program.variants import Variants
from placement.runtime.ranks.group import RankGroup, joined
from placement.runtime.ranks.meeting import check_size
from placement.runtime.ranks.transfers import direct_ways
from placement.runtime.states.gradients import add_gradients


class PlacedRanks(SharedModule, OpByOpWrapper):
    """A drop-in for the model in a program that runs once per device.

    It has the model's modules, and of its parameters and buffers those that this rank's ops need, under their own keys:
    ``parameters()`` is what this rank's optimizer takes. All ranks make the same calls, with the whole batch. With one
    seed on all ranks dropout draws what it draws on one device.

    Other batch sizes and lengths are captured when they first come, as far as the model runs the same ops for them, and
    so is evaluation of a model placed for training.

    Args:
        model: gives what it has to this module; with its parameters on ``meta``, each process makes only its own.
        layout: what every device does; the device of a number is the rank of that number.
        ranks: the processes.
        place: the torch device of this one.
        loss: the model was captured with.

    Raises:
        MismatchError: there are not as many ranks as devices, or they have different placements.
    """

    _states: OwnStates

    def __init__(
        self,
        model: torch.nn.Module,
        layout: DeviceLayout,
        ranks: RankGroup,
        place: torch.device,
        loss: Loss | None = None,
    ) -> None:
        super().__init__(model, layout.step.program)
        check_size(ranks.size, len(layout.places))
        _check_same(ranks, layout)
        self._layout, self._ranks, self._place = layout, ranks, place
        self._is_trained = layout.step.program.train
        self._tensors = NamedTensors(model)
        self._states = OwnStates(model, layout, ranks, place)
        self._ways = direct_ways(ranks, place)
        self._steps: dict[DeviceLayout, RankStep] = {}
        whole = partial(lent, model, self._states.outlines)
        self._variants = Variants(model, layout.step.program, layout, same_ops, nearest, loss, whole)
        if not self._is_trained:
            self.eval()

    def train(self, mode: bool = True) -> PlacedRanks:
        """As of any module.

        Raises:
            MismatchError: training of a model that was captured for inference.
        """
        self._check_train(mode)
        super().train(mode)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Run the ops between two transfers under torch.compile, whose options it takes."""
        super().compile(*args, **kwargs)
        self._steps.clear()

    # -- running ----------------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward pass, the loss that was captured, and backward pass, as placed.

        Adds to ``grad`` of this rank's parameters.

        Returns:
            The loss, a tensor of one number, on every rank.

        Raises:
            MismatchError: the model was captured for inference, or with other arguments, or it is in evaluation mode.
            RankError: the run has failed, here or on another rank.
        """
        self._check_step()
        given, _ = self._run(args, kwargs)
        gradients = {key[1]: value for key, value in given.items() if key[0] == "gradient"}
        # One that was frozen since gets none, as without a placement.
        trained = {name: value for name, value in gradients.items() if self._tensors[name].requires_grad}
        add_gradients(self, trained)
        loss: torch.Tensor = given["loss", 0]
        return loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the model, on every rank; of a training step in evaluation mode only.

        They have no gradients: `step` runs both passes, and the loss that the model was captured with.

        Raises:
            MismatchError: training mode, or other arguments than captured.
            RankError: the run has failed, here or on another rank.
        """
        self._check_forward()
        given, step = self._run(args, kwargs)
        return step.outputs(given)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[Key, Any], RankStep]:
        """The results of the step for these arguments in this mode, which is captured when it is first needed."""
        self._states.check_filled()
        check_call(self._model, args, kwargs)
        leaves = argument_leaves(self._model, args, kwargs)
        if self.training:
            self._check_gradients(tensors_of(leaves))
        layout = self._variants.get(args, kwargs, leaves, self.training)
        if layout not in self._steps:
            self._steps[layout] = self._made(layout)
        step = self._steps[layout]
        return step.run(leaves), step

    def _made(self, layout: DeviceLayout) -> RankStep:
        """The code of this rank for a layout."""
        step = RankStep(layout, self._ranks, self._ways, self._place, self._tensors.get)
        if self._compile_run is not None:
            step.compile(self._compile_run)
        return step

    # -- gradients and checkpoints ----------------------------------------------------------------------------

    def own_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of a tensor like a parameter or buffer: all of it, or None for one that others have."""
        return tensor if self._tensors.get(name) is not None else None

    def reset_parameters(self, seed: int = 0) -> None:
        """Give this rank's parameters and buffers the values with which the model itself begins, as after ``to_empty``.

        Every rank draws the same, one module after the other in the order of `named_modules`, so that no more than one
        is whole at a time; `placement.runtime.modules.initial_values` says how a model gives itself values. All ranks
        call it, before the first step.

        Args:
            seed: of torch's random numbers meanwhile.
        """
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, value in initial_values(self._model, self._states.outlines):
                own = self._tensors.get(name)
                if own is not None:
                    own.copy_(value)

    def load_run(self, folder: Path, optimizer: Any | None) -> dict[str, Any] | None:
        found = super().load_run(folder, optimizer)
        if found is not None:
            self._states.forget_start()
        return found


def placed_ranks(
    model: torch.nn.Module, layout: DeviceLayout, place: torch.device | None = None, loss: Loss | None = None
) -> PlacedRanks:
    """The share of a placed model that this process runs, one of as many as the layout has devices.

    Args:
        place: the torch device of this process; by default as the layout says.

    Raises:
        MismatchError: there are other processes than devices.
        RankError: the processes cannot reach each other.
    """
    ranks = joined(len(layout.places))
    return PlacedRanks(model, layout, ranks, place or layout.places[ranks.rank], loss)


def _check_same(ranks: RankGroup, layout: DeviceLayout) -> None:
    """Raises: MismatchError: the ranks have different placements, and would wait for each other for ever."""
    text = repr((layout.step.program.graph.op_names, list(layout.device), [list(ops) for ops in layout.order]))
    digests = ranks.told(zlib.crc32(text.encode()), "what is placed there")
    if len(set(digests)) > 1:
        raise MismatchError(
            "the ranks have different placements or models; find one result, save it, and give every rank that file."
        )
