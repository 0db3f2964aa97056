"""`StrategyStates`: the tensors that one rank has of a model, and what ranks do about them together."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_

from graphs.errors import MismatchError
from placement.runtime.modules.local_tensors import entries
from placement.runtime.modules.own_states import written
from placement.runtime.ranks.group import Ranks
from placement.runtime.setups.setup import Setup

Path = str | os.PathLike[str]


class StrategyStates:
    """A rank's share of a model's tensors; all ranks make the same calls.

    Args:
        run: what the torch runner has made of the model.
        outlines: a twin on ``meta`` of every parameter and buffer of the whole model, by name.
        keys: of its state dict.
    """

    def __init__(
        self, run: nn.Module, setup: Setup, ranks: Ranks, outlines: Mapping[str, torch.Tensor], keys: list[str]
    ) -> None:
        self._run, self._setup, self._ranks = run, setup, ranks
        self._outlines, self._keys = outlines, keys
        told = ranks.told([name for name, _ in self.entries()], "which parameters it has")
        # The lowest rank that has each.
        self._home = {name: rank for rank in range(len(told) - 1, -1, -1) for name in told[rank]}

    def models(self) -> list[tuple[nn.Module, tuple[str, ...]]]:
        """The models inside of wrappers, each with the modules that other ranks compute."""
        stages = self._setup.stages
        if not stages:
            return [(getattr(self._run, "module", self._run), ())]
        found = []
        for number, stage in self._run.stages.items():  # type: ignore[union-attr,operator]
            others = [path for other, paths in enumerate(stages) for path in paths if other != int(number)]
            found.append((stage.model, tuple(others)))
        return found

    def entries(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every parameter and buffer that this rank answers for, tied ones under each name."""
        seen = set()
        for model, others in self.models():
            for name, tensor in entries(model):
                is_others = any(name.startswith(f"{path}.") for path in others)
                if not is_others and name not in seen:
                    seen.add(name)
                    yield name, tensor

    def kept(self) -> dict[str, torch.Tensor]:
        """Of the state dict, by its keys, what this rank has."""
        return {name: tensor for name, tensor in self.entries() if name in self._keys}

    # -- whole tensors ----------------------------------------------------------------------------------------

    def whole(self, name: str) -> torch.Tensor:
        """One parameter or buffer, on the CPU of every rank.

        Raises:
            MismatchError: there is none of that name.
        """
        if name not in self._home:
            raise MismatchError(f"the model has no parameter or buffer {name!r}; expected a key of its state_dict().")
        self._ranks.meet(f"whole({name!r})")
        own = dict(self.entries()).get(name)
        memory = self._memory(name, self._outlines[name].dtype) if own is None else whole_of(own)
        return self._ranks.spread(memory, self._home[name], f"whole({name!r})")

    def gathered_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state dict with its own keys, on the CPU of rank 0; an empty one elsewhere."""
        self._ranks.meet("gathered_state_dict()")
        return self._gathered(self._keys, dict(self.entries()))

    def gathered_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the whole model by its own keys, on the CPU of rank 0; an empty dict elsewhere."""
        self._ranks.meet("gathered_gradients()")
        own = {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in self.entries()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        }
        names = {name for told in self._ranks.told(list(own), "which gradients it has") for name in told}
        return self._gathered([name for name in self._outlines if name in names], own)

    def _gathered(self, names: list[str], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        formats = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in own.items()}
        known = {name: format_ for told in reversed(self._ranks.told(formats)) for name, format_ in told.items()}
        found: dict[str, torch.Tensor] = {}
        tied: dict[int, str] = {}  # by the twin that tied ones share
        rank = self._ranks.rank
        for name in names:
            if name not in self._home:
                continue
            first, source = tied.setdefault(id(self._outlines[name]), name), self._home[name]
            if first != name:
                if rank == 0:
                    found[name] = found[first].clone()
                continue
            mine = whole_of(own[name]) if name in own else None  # all ranks that have parts of it gather it
            if rank not in (0, source):
                continue
            memory = mine if mine is not None else self._memory(name, getattr(torch, known[name]))
            self._ranks.pass_on(memory, source, 0, f"{name!r}")
            if rank == 0:
                found[name] = memory
        return found

    def _memory(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self._outlines[name].shape, dtype=dtype)

    # -- gradients --------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, by the norm over all ranks."""
        own = {
            name: tensor
            for name, tensor in self.entries()
            if isinstance(tensor, nn.Parameter) and tensor.grad is not None
        }
        norms = []
        counted = set()
        for name, tensor in own.items():
            norm = torch.linalg.vector_norm(tensor.grad, norm_type, dtype=torch.float32)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            if id(tensor) not in counted and self._answers_for(name):
                norms.append(norm.cpu())
            counted.add(id(tensor))
        total = torch.linalg.vector_norm(torch.stack(norms) if norms else torch.zeros(1), norm_type)
        total = self._over_stages(total, norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {float(total)}")
        for tensor in dict.fromkeys(own.values()):
            clip_grads_with_norm_([tensor], max_norm, total.to(tensor.device), foreach=False)
        return total

    def _answers_for(self, name: str) -> bool:
        """Whether the stages of this rank, and not those of an earlier one, count the gradient of a parameter."""
        if not self._setup.stages:
            return True
        tied = next((names for names, *_ in self._setup.tied if name in names), {name})
        of_ranks = math.prod(self._setup.mesh.values()) // self._setup.mesh.get("pp", 1)
        first = min(self._home[other] for other in tied if other in self._home)
        return first // of_ranks == self._ranks.rank // of_ranks

    def _over_stages(self, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        if not self._setup.stages:
            return norm
        of_ranks = math.prod(self._setup.mesh.values()) // self._setup.mesh.get("pp", 1)
        told = torch.tensor(self._ranks.told(float(norm), "the norm of its gradients"))[::of_ranks]
        return torch.linalg.vector_norm(told, norm_type)

    # -- files ------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the whole model to a safetensors file with its own keys.

        Raises:
            CheckpointError: on every rank: the file cannot be written.
        """
        whole = self.gathered_state_dict()
        self._ranks.agreed(lambda: written(path, save(_apart(whole))) if self._ranks.rank == 0 else None)

    def load(self, path: Path) -> None:
        """Read this rank's parts from a safetensors file, whoever wrote it.

        Raises:
            MismatchError: on every rank: a tensor is missing or of another shape, or the file is none.
        """
        self._ranks.meet("load()")
        found = self._ranks.agreed(lambda: self._read(path))
        with torch.no_grad():
            for name, tensor in self.kept().items():
                fill(tensor, found[name])

    def _read(self, path: Path) -> dict[str, torch.Tensor]:
        """Raises: MismatchError: no file of this model."""
        try:
            with safetensors.safe_open(path, "pt") as file:
                known = set(file.keys())
                found = {name: file.get_tensor(name) for name in self.kept() if name in known}
        except (OSError, safetensors.SafetensorError) as error:
            raise MismatchError(f"cannot read {os.fspath(path)!r} as a safetensors file: {error}.") from None
        for name, tensor in self.kept().items():
            got = tuple(found[name].shape) if name in found else None
            if got != tuple(tensor.shape):
                raise MismatchError(
                    f"{os.fspath(path)!r} has {'nothing' if got is None else f'shape {got}'} for {name!r}; expected "
                    f"shape {tuple(tensor.shape)}, of this model."
                )
        return found


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU, with the parts of all ranks that have some; all of these call it."""
    whole = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return torch.empty(whole.shape, dtype=whole.dtype).copy_(whole)


def part_of(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Of a whole value, the part that this rank has of a tensor like it."""
    if not isinstance(tensor, DTensor):
        return value
    made = distribute_tensor(
        value.to(tensor.device_mesh.device_type), tensor.device_mesh, tensor.placements, src_data_rank=None
    )
    return made.to_local()


@torch.no_grad()
def fill(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor, of which this rank may have a part alone, a whole value."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    own.copy_(part_of(value, tensor))


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that share no memory, as files of safetensors have them."""
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process has ended, or does not answer."""
    words = ("Connection closed by peer", "Connection reset", "timed out", "Timed out", "Broken pipe", "NCCL", "Socket")
    is_of_ranks = isinstance(error, dist.DistBackendError)
    return is_of_ranks or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))


def check_optimizer(optimizer: Any) -> None:
    """Raises: MismatchError: an optimizer whose state cannot be saved."""
    if not hasattr(optimizer, "state"):
        raise MismatchError(
            "the state of this optimizer is on the host or in parts that no checkpoint has yet; save the model alone, "
            "with optimizer=None."
        )
