"""A training run in a folder, to go on from after an interruption: model, optimizer, and what else the script needs.

Tensors are in torch's distributed checkpoints (DCP), one folder for each moment: ``model.NAME`` and
``optim.state.NAME.SLOT``. `run.json` names the folder and is written last, so that a run that ends while it saves is
found as it was saved before.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import pickle
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from graphs.disk import write_atomically
from graphs.errors import CheckpointError, MismatchError
from placement.runtime.ranks.group import RankGroup

_FORMAT = 2
_MODEL, _SLOTS = "model.", "optim.state."
Optimizer = torch.optim.Optimizer | None


def save_run(
    ranks: RankGroup, own: Mapping[str, torch.Tensor], folder: Path, optimizer: Optimizer, facts: Mapping[str, Any]
) -> None:
    """Save all of a run; of the moment before nothing is left then. All ranks call it.

    Args:
        own: what of the model's state dict this rank answers for.
        optimizer: of parameters of this rank; None where it has none.
        facts: plain data, such as a step or the state of a scheduler.

    Raises:
        CheckpointError: on every rank: a file cannot be written; what was there stays.
        MismatchError: a fact would come back from JSON as something else.
    """
    for name, fact in facts.items():
        if not _is_plain(fact):
            raise MismatchError(
                f"{name!r} does not come back the same from JSON; pass numbers, text, lists, and dicts with text as "
                "keys."
            )
    ranks.meet("save_run()")
    before = _told_run(ranks, folder)
    number = 0 if before is None else before["number"] + 1
    settings = next((each for each in ranks.told(_settings(optimizer)) if each is not None), None)
    tensors = {f"{_MODEL}{name}": tensor.detach() for name, tensor in own.items()} | _slots(own, optimizer)

    def begin() -> None:
        if ranks.rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for leftover in folder.glob("step-*"):
                    if before is None or leftover.name != _name(before["number"]):
                        shutil.rmtree(leftover)
            except OSError as error:
                raise CheckpointError(unwritten(error)) from None

    ranks.agreed(begin)
    ranks.agreed(lambda: _write(ranks, tensors, folder / _name(number)))
    random = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
    tied = {name: first for each in ranks.told(_tied(own)) for name, first in each.items()}
    run = {"format": _FORMAT, "number": number, "facts": dict(facts), "groups": settings}
    run |= {"random": random, "tied": tied}

    def finish() -> None:
        if ranks.rank == 0:
            written(folder / "run.json", json.dumps(run))
            if before is not None:
                shutil.rmtree(folder / _name(before["number"]), ignore_errors=True)

    ranks.agreed(finish)


def load_run(
    ranks: RankGroup, own: Mapping[str, torch.Tensor], folder: Path, optimizer: Optimizer
) -> dict[str, Any] | None:
    """Go on with what `save_run` saved, on these devices or others. All ranks call it.

    Args:
        own: what of the model's state dict this rank has; several may have one.

    Returns:
        The facts; None where no run has been saved.

    Raises:
        MismatchError: on every rank: the run is of another model or optimizer, or its files are not what they should.
    """
    ranks.meet("load_run()")
    run = _told_run(ranks, folder)
    if run is None:
        return None
    at = folder / _name(run["number"])

    def read() -> tuple[dict[str, str], dict[str, torch.Tensor], torch.Tensor]:
        known = _metadata(at)
        _check_groups(run["groups"], optimizer, folder)
        slots = {key.rpartition(".")[2] for key in known.state_dict_metadata}
        is_amsgrad = optimizer is not None and any(group.get("amsgrad") for group in run["groups"])
        if is_amsgrad and "exp_avg_sq" in slots and "max_exp_avg_sq" not in slots:
            raise MismatchError(f"the run in {folder} has amsgrad = True without its state; save the run again.")
        slots_of = _saved_names(known, own, optimizer, run.get("tied", {}))
        return slots_of, _memory(known, own, optimizer, at, slots_of), _random(run["random"], folder)

    # All is read and found right before anything is changed.
    slots_of, found, random = ranks.agreed(read)
    ranks.agreed(lambda: _load(ranks, found, at))
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(found[f"{_MODEL}{name}"])
    if optimizer is not None:
        _fill(optimizer, own, found, run["groups"], slots_of)
    torch.set_rng_state(random)
    facts: dict[str, Any] = run["facts"]
    return facts


def _name(number: int) -> str:
    return f"step-{number}"


def written(path: str | os.PathLike[str], content: bytes | str) -> None:
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


# -- tensors ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _waiting(ranks: RankGroup) -> Iterator[None]:
    """Torch's checkpoints at work; its warning that one process is alone says what is meant."""
    with ranks.waiting(None, "a checkpoint"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        yield


def _write(ranks: RankGroup, tensors: Mapping[str, torch.Tensor], at: Path) -> None:
    """Raises: CheckpointError: a rank cannot write."""
    with _waiting(ranks):
        try:
            save(dict(tensors), checkpoint_id=str(at), process_group=ranks.group, no_dist=ranks.group is None)
        except CheckpointException as error:
            raise CheckpointError(_of_ranks(error)) from None
        except OSError as error:
            raise CheckpointError(unwritten(error)) from None


def _load(ranks: RankGroup, found: dict[str, Any], at: Path) -> None:
    """Fill tensors from a checkpoint.

    Raises:
        MismatchError: it cannot be read.
    """
    with _waiting(ranks):
        try:
            load(
                found, storage_reader=CheckpointReader(str(at)), process_group=ranks.group, no_dist=ranks.group is None
            )
        except CheckpointException as error:
            raise MismatchError(f"cannot read {at}: {_of_ranks(error)}") from None


def _of_ranks(error: Any) -> str:
    """What went wrong on the first rank on which something did."""
    rank, (reason, _) = next(iter(error.failures.items()))
    if isinstance(reason, OSError):
        return f"rank {rank}: {unwritten(reason)}"
    return f"rank {rank}: {type(reason).__name__}: {str(reason).partition(chr(10))[0].rstrip('.')}."


def _metadata(at: Path) -> Metadata:
    """What a checkpoint has.

    Raises:
        MismatchError: it is none.
    """
    try:
        return CheckpointReader(str(at)).read_metadata()
    except Exception as error:  # whatever a file holds that is none
        raise MismatchError(f"cannot read {at} as a distributed checkpoint: {type(error).__name__}: {error}.") from None


def _tied(own: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Names of tensors that have an earlier one, with that: a tied weight's state is saved under its first name."""
    firsts = _first_names(own)
    return {name: firsts[id(tensor)] for name, tensor in own.items() if firsts[id(tensor)] != name}


def _saved_names(
    known: Metadata, own: Mapping[str, torch.Tensor], optimizer: Optimizer, tied: Mapping[str, str]
) -> dict[str, str]:
    """The name under which a checkpoint has the state of each parameter of an optimizer: its own or a tied one."""
    saved = {key.removeprefix(_SLOTS).rpartition(".")[0] for key in known.state_dict_metadata if key.startswith(_SLOTS)}
    found = {}
    for name in _trained(own, optimizer):
        first = tied.get(name, name)
        alike = [name, first, *(other for other, of in tied.items() if of == first)]
        found[name] = next((each for each in alike if each in saved), name)
    return found


def _memory(
    known: Metadata, own: Mapping[str, torch.Tensor], optimizer: Optimizer, at: Path, slots_of: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Memory on the CPU for what this rank reads of a checkpoint, by key; ``slots_of`` as of `_saved_names`.

    Raises:
        MismatchError: the checkpoint is of another model.
    """
    entries = {key: each for key, each in known.state_dict_metadata.items() if isinstance(each, TensorStorageMetadata)}
    wanted = {f"{_MODEL}{name}": tuple(tensor.shape) for name, tensor in own.items()}
    for key, shape in wanted.items():
        if key not in entries or tuple(entries[key].size) != shape:
            got = f"shape {tuple(entries[key].size)}" if key in entries else "nothing"
            raise MismatchError(f"the run in {at.parent} has {got} for {key!r}; expected shape {shape}, of this model.")
    like = {f"{_MODEL}{name}": tensor for name, tensor in own.items()}  # which says what part of it is read
    if optimizer is not None:
        trained = {f"{_SLOTS}{slots_of[name]}.": parameter for name, parameter in _trained(own, optimizer).items()}
        slots = {key: tuple(each.size) for key, each in entries.items() if key.startswith(tuple(trained)) and trained}
        wanted |= slots
        like |= {key: each for key in slots for start, each in trained.items() if key.startswith(start)}
    return {key: _empty(shape, like[key], entries[key].properties.dtype) for key, shape in wanted.items()}


def _empty(shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory for this rank's part of a tensor, if it has a part alone of one like it, else for all of it on the CPU."""
    if isinstance(like, DTensor) and shape == tuple(like.shape):
        return torch.empty_like(like.detach(), dtype=dtype)
    return torch.empty(shape, dtype=dtype, device="cpu")


def _slots(own: Mapping[str, torch.Tensor], optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The state of an optimizer, by key."""
    found = {}
    for name, parameter in _trained(own, optimizer).items():
        assert optimizer is not None
        for slot, value in optimizer.state.get(parameter, {}).items():
            found[f"{_SLOTS}{name}.{slot}"] = torch.as_tensor(value).detach()
    return found


def _fill(
    optimizer: torch.optim.Optimizer,
    own: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    groups: list[dict[str, Any]],
    slots_of: Mapping[str, str],
) -> None:
    """Give an optimizer its state and the settings of its groups; ``slots_of`` as of `_saved_names`."""
    names = {id(parameter): name for name, parameter in _trained(own, optimizer).items()}
    state: dict[int, dict[str, torch.Tensor]] = {}
    filled, number = [], 0
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        known = {name: value for name, value in group.items() if name != "params"}
        told = {name: _as_known(value, known.get(name)) for name, value in settings.items()}
        filled.append({**known, **told, "params": list(range(number, number + len(group["params"])))})
        for parameter in group["params"]:
            prefix = f"{_SLOTS}{slots_of[names[id(parameter)]]}."
            slots = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
            if slots:
                state[number] = slots
            number += 1
    optimizer.load_state_dict({"state": state, "param_groups": filled})


def _first_names(own: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """By their ids, the first name of each tensor."""
    return {id(tensor): name for name, tensor in reversed([*own.items()])}


def _trained(own: Mapping[str, torch.Tensor], optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The parameters of an optimizer, by the first name of each.

    Raises:
        MismatchError: one of them is not this rank's.
    """
    names = _first_names(own)
    parameters = [] if optimizer is None else [each for group in optimizer.param_groups for each in group["params"]]
    if any(id(parameter) not in names for parameter in parameters):
        raise MismatchError(
            "the optimizer has parameters that this process does not have; make it of placed.parameters()."
        )
    return {names[id(parameter)]: parameter for parameter in parameters}


# -- settings --------------------------------------------------------------------------------------------------------


def _told_run(ranks: RankGroup, folder: Path) -> dict[str, Any] | None:
    """Content of `run.json` as rank 0 reads it, on every rank; None where there is none."""
    own = ranks.agreed(lambda: _read(folder / "run.json") if ranks.rank == 0 else None)
    found: dict[str, Any] | None = ranks.told(own)[0]
    return found


def _read(path: Path) -> dict[str, Any] | None:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise MismatchError(f"cannot read {path}: {error}.") from None
    is_run = isinstance(run, dict) and run.get("format") == _FORMAT and isinstance(run.get("number"), int)
    tied = run.get("tied", {}) if is_run else {}
    is_run = is_run and isinstance(tied, dict) and all(isinstance(first, str) for first in tied.values())
    if not is_run or not {"facts", "groups", "random"} <= set(run):
        raise MismatchError(f"{path} is no run of this version; expected what save_run() writes, format {_FORMAT}.")
    return dict(run)


def _random(text: str, folder: Path) -> torch.Tensor:
    """The state of random numbers.

    Raises:
        MismatchError: it is none.
    """
    try:
        state = torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
        torch.Generator().set_state(state)
    except (ValueError, RuntimeError, TypeError):
        raise MismatchError(f"{folder / 'run.json'} has no state of random numbers; save the run again.") from None
    return state


def _check_groups(groups: Any, optimizer: Optimizer, folder: Path) -> None:
    """Raises: MismatchError: these are no settings of the optimizer's groups."""
    if optimizer is None:
        return
    own = _settings(optimizer) or []
    if not isinstance(groups, list) or len(groups) != len(own):
        raise MismatchError(
            f"the run in {folder} has other groups of parameters; make the optimizer with the same ones."
        )
    for saved, settings in zip(groups, own, strict=True):
        missing = sorted(set(settings) - set(saved if isinstance(saved, dict) else ()))
        if missing:
            raise MismatchError(
                f"the run in {folder} has no {missing[0]!r} for a group of parameters; expected a run of "
                f"{type(optimizer).__name__}."
            )
        for name, known in settings.items():
            is_number = isinstance(saved[name], float | int) and abs(saved[name]) <= sys.float_info.max
            if isinstance(known, float | int) and (
                not is_number or isinstance(saved[name], bool) != isinstance(known, bool)
            ):
                raise MismatchError(f"the run in {folder} has {name} = {saved[name]!r:.60}; save the run again.")


def _settings(optimizer: Optimizer) -> list[dict[str, Any]] | None:
    """Settings of an optimizer's groups beside their parameters, as far as they are plain data."""
    if optimizer is None:
        return None
    found = []
    for group in optimizer.param_groups:
        others = {name: value for name, value in group.items() if name != "params"}
        plain = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in others.items()}
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}
        found.append({name: value for name, value in listed.items() if _is_plain(value)})
    return found


def _as_known(value: Any, known: Any) -> Any:
    """A setting as the optimizer has it: JSON has neither tuples nor tensors."""
    if isinstance(known, torch.Tensor):
        return known.detach().clone().fill_(value)
    return tuple(value) if isinstance(value, list) else value


def _is_plain(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


# -- reading -----------------------------------------------------------------------------------------------------------


# What an index is made of, beside formats of numbers (`torch.float32`): none of it does anything.
_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "BytesStorageMetadata"),
        *("TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath"),
}


class CheckpointReader(FileSystemReader):
    """A reader of checkpoints that somebody else may have made."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata: Metadata = _Index(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_format = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_format and name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"its index names {module}.{name}, which belongs in none")
        return super().find_class(module, name)
