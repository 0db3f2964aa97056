"""`SharedModule`: what modules have in common of which each process has a share."""

from __future__ import annotations

from typing import Any

import torch

from graphs.errors import MismatchError
from placement.runtime.modules.shared_states import Path, SharedStates
from placement.runtime.ranks.group import RankGroup


class SharedModule:
    """A process's share of a model: gradients, whole tensors and files, about which all ranks make the same calls."""

    _states: SharedStates
    _ranks: RankGroup

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
