"""`RankStates`: the parameters and buffers of one rank, and all that ranks do together about theirs."""

from __future__ import annotations

import pathlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from placement.runtime.states.local_tensors import check_filled
from placement.runtime.states.state_parts import StateTable, completed, local_states
from placement.runtime.storing import checkpoints, runs
from placement.runtime.storing.agreement import check_same_parameters, check_same_start, first_values
from placement.runtime.storing.clipping import clip_grad_norm_, counted
from placement.runtime.storing.gathering import gathered, whole_tensor
from placement.runtime.storing.tensor_files import Path

if TYPE_CHECKING:
    from collections.abc import Callable

    from placement.runtime.ranks.process_group import ProcessGroup


class RankStates:
    """A rank's part of a model; all ranks make the same calls.

    Any optimizer takes ``model.parameters()``. One that treats every entry by itself does on parts what it does on
    whole tensors, fused or not: SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, ASGD, RMSprop, Rprop. One
    that looks at whole tensors or at several does not: Adafactor (means of rows and columns), Muon (matrices),
    LBFGS, and LAMB and its like (norms of tensors).

    Args:
        model: whole, or on ``meta``; what other ranks store is taken out of it and freed.
        table: what each rank stores; what it leaves out goes to rank 0.
        group: the processes.
        place: the device of this rank.

    Attributes:
        table: with every parameter and buffer of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        table: StateTable,
        group: ProcessGroup,
        place: torch.device,
    ) -> None:
        self._model, self._group = model, group
        self.table = completed(table, model)
        self._start = first_values(model)
        self._new = local_states(model, self.table, group.rank, place)
        self._is_checked = False
        self._counted = counted(self.table, group.rank)

    def check_filled(self) -> None:
        """Refuse what was on ``meta`` and got no values since, and what ranks store alike with other values.

        All ranks call it; only the first call looks.

        Raises:
            MismatchError: names one of them.
        """
        if not self._is_checked:
            check_filled(self._model, self._new)
            check_same_start(self._group, self._start)
            check_same_parameters(self._group, self.table, self._own())
            self._new, self._is_checked = [], True

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` on the whole model; the norm before clipping."""
        talk = partial(self._group.all_gather, about="the norm of its gradients")
        return clip_grad_norm_(talk, self._counted, self._model, max_norm, norm_type, error_if_nonfinite)

    def whole(self, name: str) -> torch.Tensor:
        """One parameter or buffer, whole, on the CPU of every rank.

        Raises:
            MismatchError: there is none of that name.
        """
        return whole_tensor(self._group, self.table, self._own(), name)

    def gathered_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state dict with its own keys, on the CPU of rank 0; an empty one elsewhere."""
        return gathered(self._group, self.table, self._own())

    def gathered_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the whole model by its own keys, on the CPU of rank 0; an empty dict elsewhere."""
        own = {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in self._own().items()
            if isinstance(tensor, nn.Parameter)
        }
        return gathered(self._group, self.table, own)

    def save(self, path: Path) -> None:
        """Write the whole model to a safetensors file with its own keys, in one step.

        Rank 0 writes, tensor by tensor, so that no process has to hold the model.

        Raises:
            CheckpointError: on every rank: the file cannot be written.
        """
        checkpoints.save(self._group, path, self.table, self._model)

    def load(self, path: Path) -> None:
        """Read what this rank stores, and nothing else, from such a file, whoever wrote it.

        Raises:
            MismatchError: on every rank: a tensor is missing or of another shape, or the file is none.
        """
        self.loading(path)()

    def loading(self, path: Path) -> Callable[[], None]:
        """As `load`, which the function that is returned does, once the file is known to be all right."""
        fill = checkpoints.loading(self._group, path, self.table, self._model)

        def read() -> None:
            fill()
            self._start = {}  # whatever the model was made with

        return read

    def save_optimizer(self, path: Path, optimizer: torch.optim.Optimizer | None) -> None:
        """As `save`, the state of an optimizer: ``name/slot`` of each parameter, in whole tensors.

        Args:
            optimizer: of this rank's parameters; None where there are none.
        """
        checkpoints.save_optimizer(self._group, path, self.table, self._model, optimizer)

    def load_optimizer(self, path: Path, optimizer: torch.optim.Optimizer | None) -> None:
        """Read back what `save_optimizer` wrote; the strategy may have changed."""
        self.loading_optimizer(path, optimizer)()

    def loading_optimizer(self, path: Path, optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
        """As `load_optimizer`, in two steps as `loading`."""
        return checkpoints.loading_optimizer(self._group, path, self.table, self._model, optimizer)

    def save_run(self, folder: Path, optimizer: torch.optim.Optimizer | None, **facts: Any) -> None:
        """Save all that a run needs to go on: the model, the optimizer with its settings, random numbers, and facts.

        Whenever the run ends, `load_run` finds it as it was at the end of the last call.

        Args:
            folder: of the run; made if need be.
            facts: plain data, such as ``step=7`` or ``scheduler=scheduler.state_dict()``.

        Raises:
            CheckpointError: on every rank: a file cannot be written.
            MismatchError: a fact is no plain data.
        """
        runs.save_run(self._group, self, pathlib.Path(folder), optimizer, facts)

    def load_run(self, folder: Path, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
        """Go on with what `save_run` saved; the facts, None where there is nothing yet.

        Raises:
            MismatchError: on every rank: the run is of another model or optimizer.
        """
        return runs.load_run(self._group, self, pathlib.Path(folder), optimizer)

    def _own(self) -> dict[str, torch.Tensor]:
        return checkpoints.own_tensors(self.table[self._group.rank], self._model)
