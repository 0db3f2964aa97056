"""`SharedModule`: what modules have in common of which each process has a share."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from graphs.errors import MismatchError
from placement.runtime.modules.run_folder import load_run, save_run
from placement.runtime.modules.shared_states import Path, SharedStates
from placement.runtime.ranks.group import RankGroup


class SharedModule:
    """A process's share of a model: gradients, whole tensors and files, about which all ranks make the same calls."""

    _states: SharedStates
    _ranks: RankGroup
    _is_trained: bool
    training: bool

    @property
    def rank(self) -> int:
        """The number of this process, that of its device."""
        return self._ranks.rank

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MismatchError(
            "a process's share of a model cannot be copied or pickled; save() writes the model, gathered_state_dict() "
            "gives its tensors."
        )

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

    def save(self, path: Path) -> None:
        """Write the whole model to a safetensors file with its own keys, in one step. All ranks call it.

        Raises:
            CheckpointError: on every rank: the file cannot be written.
        """
        self._states.save(path)

    def load(self, path: Path) -> None:
        """Read what this rank has from a safetensors file, whoever wrote it. All ranks call it.

        Raises:
            MismatchError: on every rank: a tensor is missing or of another shape, or the file is none.
        """
        self._states.load(path)

    def save_run(self, folder: Path, optimizer: Any | None, **facts: Any) -> None:
        """Save model, optimizer and its settings, random numbers and facts for `load_run`. All ranks call it.

        Raises:
            CheckpointError: on every rank: a file cannot be written.
            MismatchError: a fact is no plain data, or the optimizer's state is in no checkpoint.
        """
        if optimizer is not None:
            _check_optimizer(optimizer)
        with self._among_ranks("a checkpoint"):
            save_run(self._ranks, self._states.kept(), pathlib.Path(folder), optimizer, facts)

    def load_run(self, folder: Path, optimizer: Any | None) -> dict[str, Any] | None:
        """Go on with what `save_run` saved, under this strategy or another. All ranks call it.

        Returns:
            The facts; None where nothing has been saved yet.

        Raises:
            MismatchError: on every rank: the run is of another model or optimizer.
        """
        if optimizer is not None:
            _check_optimizer(optimizer)
        with self._among_ranks("a checkpoint"):
            return load_run(self._ranks, self._states.kept(), pathlib.Path(folder), optimizer)

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_train(self, mode: bool) -> None:
        if mode and not self._is_trained:
            raise MismatchError("the model was captured for inference; capture it with train=True to train it.")

    def _check_step(self) -> None:
        if not self._is_trained:
            raise MismatchError("the result is for inference; step() expects one of a training step (train=True).")
        if not self.training:
            raise MismatchError("the model is in evaluation mode; step() trains it, call train() first.")

    def _check_forward(self) -> None:
        if self._is_trained and self.training:
            raise MismatchError(
                "in training mode step() runs the forward and backward passes together, with the loss that the model "
                "was captured with; to run the model alone call eval() first, or apply a result for inference."
            )

    @contextmanager
    def _among_ranks(self, what: str) -> Iterator[None]:
        """Raises: RankError: another rank has ended, and why; what goes wrong here is raised as it is."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, MismatchError) or not _is_lost(error):
                raise
            self._ranks.lost(None, what, error)
        except ValueError as error:
            raise MismatchError(f"{str(error).rstrip('.')}.") from error


def _is_lost(error: BaseException) -> bool:
    """Whether an error says that another process has ended, or does not answer."""
    words = ("Connection closed by peer", "Connection reset", "timed out", "Timed out", "Broken pipe", "NCCL", "Socket")
    is_of_ranks = isinstance(error, dist.DistBackendError)
    return is_of_ranks or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))


def _check_optimizer(optimizer: Any) -> None:
    """Raises: MismatchError: an optimizer whose state cannot be saved."""
    if not hasattr(optimizer, "state"):
        raise MismatchError(
            "the state of this optimizer is on the host or in parts that no checkpoint has yet; save the model alone, "
            "with optimizer=None."
        )
