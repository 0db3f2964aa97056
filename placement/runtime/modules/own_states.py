"""`OwnStates`: the parameters and buffers of one rank of a placement, and all that ranks do together about theirs."""

from __future__ import annotations

import errno
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors
import torch
from safetensors.torch import save
from torch import nn

from graphs.disk import write_atomically
from graphs.errors import CheckpointError, MismatchError
from placement.runtime.modules.local_tensors import Unfilled, check_filled, entries, outlines_of, slot_of
from placement.runtime.program.device_layout import DeviceLayout
from placement.runtime.ranks.group import Ranks

Path = str | os.PathLike[str]
_N_COMPARED = 256  # first entries of a parameter; made under another seed all entries differ


class OwnStates:
    """A rank's share of a model; all ranks make the same calls.

    Args:
        model: whole, or on ``meta``; what other ranks have is taken out of it and freed.
        layout: says which devices have each state, its home first; those that no op uses go to the first.

    Attributes:
        outlines: a twin on ``meta`` of every parameter and buffer of the whole model, by name.
        home: the rank that answers for each of them.
    """

    def __init__(self, model: nn.Module, layout: DeviceLayout, ranks: Ranks, place: torch.device) -> None:
        self._model, self._ranks = model, ranks
        self.outlines = outlines_of(model)
        self._keys = list(model.state_dict())
        keepers = _keepers(model, layout)
        self.home = {name: devices[0] for name, devices in keepers.items()}
        self._start = {
            name: _first(each) for name, each in model.named_parameters() if each.numel() and not each.is_meta
        }
        self._new = _kept(model, {name for name, devices in keepers.items() if ranks.rank in devices}, place)
        self._is_checked = False

    def check_filled(self) -> None:
        """Refuse what was on ``meta`` and got no values since, and models that ranks have made with other values.

        All ranks call it; only the first call looks.

        Raises:
            MismatchError: names one of them.
        """
        if self._is_checked:
            return
        check_filled(self._model, self._new)
        told = self._ranks.told(self._start, "the first step")
        for rank, found in enumerate(told):
            other = next((name for name, mine in self._start.items() if found.get(name, mine) != mine), None)
            if other is not None:
                raise MismatchError(
                    f"rank {rank} has other values of parameter {other!r} than rank {self._ranks.rank}; make the model "
                    "under one seed on all ranks (torch.manual_seed), or load one checkpoint."
                )
        self._new, self._start, self._is_checked = [], {}, True

    def own(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers for which this rank answers, by name."""
        return {name: each for name, each in entries(self._model) if self.home[name] == self._ranks.rank}

    def kept(self, is_own: bool) -> dict[str, torch.Tensor]:
        """Of the state dict, by its keys, what this rank has, or answers for."""
        found = self.own() if is_own else dict(entries(self._model))
        return {name: each for name, each in found.items() if name in self._keys}

    # -- whole tensors ----------------------------------------------------------------------------------------

    def whole(self, name: str) -> torch.Tensor:
        """One parameter or buffer, on the CPU of every rank.

        Raises:
            MismatchError: there is none of that name.
        """
        if name not in self.outlines:
            raise MismatchError(f"the model has no parameter or buffer {name!r}; expected a key of its state_dict().")
        self._ranks.meet(f"whole({name!r})")
        own = self.own().get(name)
        memory = _like(self.outlines[name]) if own is None else _on_cpu(own)
        return self._ranks.spread(memory, self.home[name], f"whole({name!r})")

    def gathered_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state dict with its own keys, on the CPU of rank 0; an empty one elsewhere."""
        self._ranks.meet("gathered_state_dict()")
        return self._gathered([key for key in self._keys if key in self.outlines], self.own())

    def gathered_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the whole model by its own keys, on the CPU of rank 0; an empty dict elsewhere."""
        self._ranks.meet("gathered_gradients()")
        own = {
            name: torch.zeros_like(each) if each.grad is None else each.grad
            for name, each in self.own().items()
            if isinstance(each, nn.Parameter) and each.requires_grad
        }
        formats = dict(
            pair for told in self._ranks.told({n: str(g.dtype) for n, g in own.items()}) for pair in told.items()
        )
        names = [name for name in self.outlines if name in formats]
        return self._gathered(names, own, {name: getattr(torch, formats[name].partition(".")[2]) for name in names})

    def _gathered(
        self,
        names: list[str],
        own: Mapping[str, torch.Tensor],
        formats: Mapping[str, torch.dtype] | None = None,
    ) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        rank = self._ranks.rank
        tied: dict[int, str] = {}  # by the twin that tied ones share
        for name in names:
            outline, source = self.outlines[name], self.home[name]
            first = tied.setdefault(id(outline), name)
            if first != name:
                if rank == 0:
                    found[name] = found[first].clone()
                continue
            if rank not in (0, source):
                continue
            dtype = (formats or {}).get(name, outline.dtype)
            memory = _on_cpu(own[name]) if rank == source else _like(outline, dtype)
            self._ranks.pass_on(memory, source, 0, f"{name!r}")
            if rank == 0:
                found[name] = memory
        return found

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` on the whole model; the norm before clipping, on every rank.

        Raises:
            MismatchError: the norm is none of a positive number, or not finite.
        """
        if not norm_type > 0:
            raise MismatchError(f"norm_type is {norm_type}; expected a positive number, or inf.")
        self._ranks.meet("clip_grad_norm_()")
        graded = {n: each for n, each in self.own().items() if isinstance(each, nn.Parameter) and each.grad is not None}
        # Tied parameters have one gradient.
        first = {id(each): name for name, each in reversed(graded.items())}
        norms = {name: float(_norm(graded[name].grad, norm_type)) for name in first.values()}
        told = {name: norm for each in self._ranks.told(norms) for name, norm in each.items()}
        ordered = torch.tensor([told[name] for name in self.outlines if name in told], device="cpu")
        total = _norm(ordered, norm_type) if len(ordered) else torch.zeros((), device="cpu")
        if error_if_nonfinite and not total.isfinite():
            raise MismatchError(f"the norm of the gradients is {total.item()}; expected a finite one, skip the step.")
        if graded:
            parameters = [graded[name] for name in first.values()]
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total.to(parameters[0].device))
        return total

    # -- files ------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the whole model to a safetensors file with its own keys, in one step.

        Raises:
            CheckpointError: on every rank: the file cannot be written.
        """
        whole = self.gathered_state_dict()

        def write() -> None:
            if self._ranks.rank == 0:
                written(path, save(whole, {"format": "pt"}))

        self._ranks.agreed(write)

    def load(self, path: Path) -> None:
        """Read what this rank has, and nothing else, from such a file, whoever wrote it.

        Raises:
            MismatchError: on every rank: a tensor is missing or of another shape, or the file is none.
        """
        mine: dict[int, tuple[torch.Tensor, list[str]]] = {}  # tied ones may be there under one of their names
        for name, tensor in self.kept(is_own=False).items():
            mine.setdefault(id(tensor), (tensor, []))[1].append(name)
        self._ranks.meet("load()")

        def read() -> list[torch.Tensor]:
            with _opened(path) as file:
                return [_read(file, names, tensor) for tensor, names in mine.values()]

        found = self._ranks.agreed(read)
        with torch.no_grad():
            for (tensor, _), values in zip(mine.values(), found, strict=True):
                tensor.copy_(values)
        self.forget_start()

    def forget_start(self) -> None:
        """The values that the model was made with count no more: it has others."""
        self._start = {}


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


def _keepers(model: nn.Module, layout: DeviceLayout) -> dict[str, tuple[int, ...]]:
    """The devices that have each parameter and buffer of a model, by each of its names."""
    found: dict[str, tuple[int, ...]] = {}
    for index, state in enumerate(layout.step.program.states):
        found.update(dict.fromkeys(state.names, layout.keepers(index)))
    by_object: dict[int, tuple[int, ...]] = {}
    for name, tensor in entries(model):
        if name in found:
            by_object[id(tensor)] = found[name]
    return {name: by_object.get(id(tensor), (0,)) for name, tensor in entries(model)}


def _kept(model: nn.Module, names: set[str], place: torch.device) -> list[Unfilled]:
    """Leave a model those tensors, on a device; the others become None, and their memory is freed.

    Modules and `nn.Parameter` objects stay what they are. Tensors on ``meta`` get memory, floating-point ones filled
    with NaN.

    Returns:
        Those that were on ``meta``.
    """
    made: dict[int, torch.Tensor] = {}
    new: list[Unfilled] = []
    released: list[torch.Tensor] = []
    for name, tensor in list(entries(model)):
        owner, kind, last = slot_of(model, name)
        if name not in names:
            owner.__dict__[kind][last] = None
            released.append(tensor)
            continue
        if id(tensor) not in made:
            made[id(tensor)] = _filled(tensor, place) if tensor.is_meta else tensor
            tensor.data = tensor.data if tensor.is_meta else tensor.data.to(place)
        owner.__dict__[kind][last] = made[id(tensor)]
        if tensor.is_meta:
            new.append(Unfilled(name, made[id(tensor)], made[id(tensor)]._version))
    for tensor in released:  # whoever else holds it (nn.LSTM's list, say)
        if id(tensor) not in made and not tensor.is_meta:
            tensor.data = tensor.data.new_empty(0)
            tensor.grad = None
    return new


def _filled(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
    memory.fill_(math.nan if memory.is_floating_point() else 0)
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


def _first(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().reshape(-1)[:_N_COMPARED].contiguous().cpu().view(torch.uint8).numpy().data)


def _norm(vector: Any, norm_type: float) -> torch.Tensor:
    dtype = torch.promote_types(vector.dtype, torch.float32)
    return torch.as_tensor(torch.linalg.vector_norm(vector, norm_type, dtype=dtype))


def _like(outline: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(outline.shape, dtype=dtype or outline.dtype, device="cpu")


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, in one dense piece."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
