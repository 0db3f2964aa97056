"""`SharedStates`: the parameters and buffers that ranks have of one model, and all that they do together about them."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import safetensors
import torch
from safetensors.torch import save
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from graphs.disk import write_atomically
from graphs.errors import CheckpointError, MismatchError
from placement.runtime.ranks.group import RankGroup

Path = str | os.PathLike[str]


class SharedStates(ABC):
    """A rank's share of a model's tensors, whole ones or parts (`DTensor`); all ranks make the same calls.

    Args:
        ranks: the processes.
        outlines: a twin on ``meta`` of every parameter and buffer of the whole model, by name; tied ones have one.
        keys: of its state dict.
    """

    def __init__(self, ranks: RankGroup, outlines: Mapping[str, torch.Tensor], keys: Sequence[str]) -> None:
        self._ranks, self.outlines, self._keys = ranks, outlines, keys
        told = ranks.told([name for name, _ in self.entries()], "which parameters it has")
        # The lowest rank that has each.
        self._home = {name: rank for rank in range(len(told) - 1, -1, -1) for name in told[rank]}

    @abstractmethod
    def entries(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every parameter and buffer that this rank has, tied ones under each name."""

    @abstractmethod
    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` on the whole model; the norm before clipping, on every rank."""

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
        outline = self.outlines[name]
        memory = torch.empty(outline.shape, dtype=outline.dtype, device="cpu") if own is None else whole_of(own)
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
        return self._gathered(list(self.outlines), own)

    def _gathered(self, names: Sequence[str], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of the names that some rank has, on rank 0."""
        formats = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in own.items()}
        known = {name: format_ for told in self._ranks.told(formats) for name, format_ in told.items()}
        found: dict[str, torch.Tensor] = {}
        tied: dict[int, str] = {}  # by the twin that tied ones share
        rank = self._ranks.rank
        for name in names:
            if name not in known:
                continue
            outline, source = self.outlines[name], self._home[name]
            first = tied.setdefault(id(outline), name)
            if first != name:
                if rank == 0:
                    found[name] = found[first].clone()
                continue
            mine = whole_of(own[name]) if name in own else None  # all ranks that have parts of it gather it
            if rank not in (0, source):
                continue
            if mine is None:
                mine = torch.empty(outline.shape, dtype=getattr(torch, known[name]), device="cpu")
            self._ranks.pass_on(mine, source, 0, f"{name!r}")
            if rank == 0:
                found[name] = mine
        return found

    # -- files ------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the whole model to a safetensors file with its own keys, in one step.

        Raises:
            CheckpointError: on every rank: the file cannot be written.
        """
        whole = self.gathered_state_dict()
        self._ranks.agreed(lambda: written(path, save(whole, {"format": "pt"})) if self._ranks.rank == 0 else None)

    def load(self, path: Path) -> None:
        """Read what this rank has, and nothing else, from such a file, whoever wrote it.

        Raises:
            MismatchError: on every rank: a tensor is missing or of another shape, or the file is none.
        """
        mine: dict[int, tuple[torch.Tensor, list[str]]] = {}  # tied ones may be there under one of their names
        for name, tensor in self.kept().items():
            mine.setdefault(id(tensor), (tensor, []))[1].append(name)
        self._ranks.meet("load()")

        def read() -> list[torch.Tensor]:
            with _opened(path) as file:
                return [_read(file, names, tensor) for tensor, names in mine.values()]

        for (tensor, _), value in zip(mine.values(), self._ranks.agreed(read), strict=True):
            fill(tensor, value)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on the CPU, with the parts of all ranks that have some; all of these call it."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return torch.empty(whole.shape, dtype=whole.dtype, device="cpu").copy_(whole.detach())


def part_of(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Of a whole value, the part that this rank has of a tensor like it."""
    if not isinstance(tensor, DTensor):
        return value
    mesh = tensor.device_mesh
    made = distribute_tensor(value.to(mesh.device_type), mesh, tensor.placements, src_data_rank=None)
    return made.to_local()


@torch.no_grad()
def fill(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor, of which this rank may have a part alone, a whole value."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    own.copy_(part_of(value, tensor))


def written(path: Path, content: bytes | str) -> None:
    """Write a file in one step.

    Raises:
        CheckpointError: it cannot be written; says what to do.
    """
    try:
        write_atomically(path, content)
    except OSError as error:
        raise CheckpointError(unwritten(error)) from None


def unwritten(error: OSError) -> str:
    """The sentence for a file that cannot be written."""
    advice = {errno.ENOENT: "make the folder", errno.ENOSPC: "free some space", errno.EDQUOT: "free some space"}
    way_out = ", or ".join(filter(None, (advice.get(error.errno or 0), "save it elsewhere")))
    return f"cannot write {error.filename or 'a checkpoint'}: {error.strerror or error}; {way_out}."


def _read(file: Any, names: Sequence[str], like: torch.Tensor) -> torch.Tensor:
    """The tensor of a safetensors file that is there under one of these names."""
    known = set(file.keys())
    name = next((name for name in names if name in known), None)
    if name is None:
        raise MismatchError(f"the checkpoint has no {names[0]!r}; expected one of this model.")
    found: torch.Tensor = file.get_tensor(name)
    if found.shape != like.shape:
        raise MismatchError(
            f"the checkpoint has {name!r} of shape {tuple(found.shape)}; expected {tuple(like.shape)}, of this model."
        )
    return found


def _opened(path: Path) -> Any:
    name = os.fspath(path)
    if os.path.isdir(path):
        raise MismatchError(
            f"{name} is a folder; expected a safetensors file, or load_run() for a folder of save_run()."
        )
    try:
        return safetensors.safe_open(name, framework="pt", device="cpu")
    except FileNotFoundError:
        raise MismatchError(f"there is no checkpoint {name}; check the path on every host.") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise MismatchError(f"cannot read {name} as a safetensors file: {error}.") from None
