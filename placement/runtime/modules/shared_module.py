"""`SharedModule`: what modules have in common of which each process has a share."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_

from graphs.errors import MismatchError
from placement.runtime.modules.local_tensors import initial_values
from placement.runtime.modules.run_folder import load_run, save_run, written
from placement.runtime.ranks.group import RankGroup

Path = str | os.PathLike[str]


class SharedModule:
    """A process's share of a model: gradients, whole tensors and files, about which all ranks make the same calls."""

    _ranks: RankGroup
    _outline: nn.Module  # the model, perhaps on ``meta`` or without what other ranks have
    _is_trained: bool
    training: bool

    def _share(self, outlines: Mapping[str, torch.Tensor], keys: Sequence[str]) -> None:
        """Tell the other ranks what is here, and hear what they have.

        Args:
            outlines: a twin on ``meta`` of every parameter and buffer of the whole model, by name; tied ones have one.
            keys: of its state dict.
        """
        self._outlines, self._keys = outlines, keys
        told = self._ranks.told([name for name, _ in self._entries()], "which parameters it has")
        # The lowest rank that has each.
        self._home = {name: rank for rank in range(len(told) - 1, -1, -1) for name in told[rank]}

    def _entries(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every parameter and buffer that this rank has, tied ones under each name."""
        raise NotImplementedError

    def _kept(self) -> dict[str, torch.Tensor]:
        """Of the state dict, by its keys, what this rank has."""
        return {name: tensor for name, tensor in self._entries() if name in self._keys}

    @property
    def rank(self) -> int:
        """The number of this process, that of its device."""
        return self._ranks.rank

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MismatchError(
            "a process's share of a model cannot be copied or pickled; save() writes the model, gathered_state_dict() "
            "gives its tensors."
        )

    # -- parts ------------------------------------------------------------------------------------------------

    def own_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of a tensor like a parameter or buffer; None for one that others have."""
        own = dict(self._entries()).get(name)
        return None if own is None else part_of(tensor, own)

    def reset_parameters(self, seed: int = 0) -> None:
        """Give this rank's parameters and buffers the values with which the model itself begins, as after ``to_empty``.

        Every rank draws the same, one module after the other in the order of `named_modules`, so that no more than one
        is whole at a time; `placement.runtime.modules.local_tensors.initial_values` says how a model gives itself
        values. All ranks call it, before the first step.

        Args:
            seed: of torch's random numbers meanwhile.
        """
        own = dict(self._entries())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, value in initial_values(self._outline, self._outlines):
                if name in own:
                    fill(own[name], value.detach())

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` on the whole model; the norm before clipping, on every rank.

        All ranks call it.

        Raises:
            MismatchError: the norm is none of a positive number, or not finite.
        """
        if not norm_type > 0:
            raise MismatchError(f"norm_type is {norm_type}; expected a positive number, or inf.")
        self._ranks.meet("clip_grad_norm_()")
        firsts = {id(outline): name for name, outline in reversed([*self._outlines.items()])}  # of tied ones
        own: dict[nn.Parameter, str] = {
            tensor: firsts[id(self._outlines[name])]
            for name, tensor in self._entries()
            if isinstance(tensor, nn.Parameter) and tensor.grad is not None
        }
        norms = {name: float(_norm(tensor.grad, norm_type)) for tensor, name in own.items()}
        told = {
            name: norm for each in self._ranks.told(norms, "the norms of its gradients") for name, norm in each.items()
        }
        ordered = torch.tensor([told[name] for name in self._outlines if name in told], device="cpu")
        total = _norm(ordered, norm_type) if len(ordered) else torch.zeros((), device="cpu")
        if error_if_nonfinite and not total.isfinite():
            raise MismatchError(f"the norm of the gradients is {total.item()}; expected a finite one, skip the step.")
        for tensor in own:
            clip_grads_with_norm_([tensor], max_norm, total.to(tensor.device), foreach=False)
        return total

    # -- whole tensors ----------------------------------------------------------------------------------------

    def whole(self, name: str) -> torch.Tensor:
        """One parameter or buffer, whole, on the CPU of every rank. All ranks call it.

        Raises:
            MismatchError: there is none of that name.
        """
        if name not in self._home:
            raise MismatchError(f"the model has no parameter or buffer {name!r}; expected a key of its state_dict().")
        self._ranks.meet(f"whole({name!r})")
        own = dict(self._entries()).get(name)
        outline = self._outlines[name]
        memory = torch.empty(outline.shape, dtype=outline.dtype, device="cpu") if own is None else whole_of(own)
        return self._ranks.spread(memory, self._home[name], f"whole({name!r})")

    def gathered_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state dict with its own keys, on the CPU of rank 0; an empty one elsewhere. All call it."""
        self._ranks.meet("gathered_state_dict()")
        return self._gathered(self._keys, dict(self._entries()))

    def gathered_gradients(self) -> dict[str, torch.Tensor]:
        """``grad`` of the whole model's parameters by their own keys, 0 where there is none yet, on the CPU of rank 0.

        An empty dict elsewhere. All ranks call it.
        """
        self._ranks.meet("gathered_gradients()")
        own = {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in self._entries()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        }
        return self._gathered(list(self._outlines), own)

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
            outline, source = self._outlines[name], self._home[name]
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
        """Write the whole model to a safetensors file with its own keys, in one step. All ranks call it.

        Raises:
            CheckpointError: on every rank: the file cannot be written.
        """
        whole = self.gathered_state_dict()
        self._ranks.agreed(lambda: written(path, save(whole, {"format": "pt"})) if self._ranks.rank == 0 else None)

    def load(self, path: Path) -> None:
        """Read what this rank has, and nothing else, from such a file, whoever wrote it. All ranks call it.

        Raises:
            MismatchError: on every rank: a tensor is missing or of another shape, or the file is none.
        """
        mine: dict[int, tuple[torch.Tensor, list[str]]] = {}  # tied ones may be there under one of their names
        for name, tensor in self._kept().items():
            mine.setdefault(id(tensor), (tensor, []))[1].append(name)
        self._ranks.meet("load()")

        def read() -> list[torch.Tensor]:
            with _opened(path) as file:
                return [_read(file, names, tensor) for tensor, names in mine.values()]

        for (tensor, _), value in zip(mine.values(), self._ranks.agreed(read), strict=True):
            fill(tensor, value)

    def save_run(self, folder: Path, optimizer: Any | None, **facts: Any) -> None:
        """Save model, optimizer and its settings, random numbers and facts for `load_run`. All ranks call it.

        Raises:
            CheckpointError: on every rank: a file cannot be written.
            MismatchError: a fact is no plain data, or the optimizer's state is in no checkpoint.
        """
        if optimizer is not None:
            _check_optimizer(optimizer)
        with self._among_ranks("a checkpoint"):
            save_run(self._ranks, self._kept(), pathlib.Path(folder), optimizer, facts)

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
            return load_run(self._ranks, self._kept(), pathlib.Path(folder), optimizer)

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
    """True if an error says that another process has ended, or does not answer."""
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


def _norm(vector: Any, norm_type: float) -> torch.Tensor:
    dtype = torch.promote_types(vector.dtype, torch.float32)
    norm = torch.linalg.vector_norm(vector, norm_type, dtype=dtype)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


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
