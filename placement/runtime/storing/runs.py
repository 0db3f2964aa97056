"""A training run in a folder, to go on from after an interruption: model, optimizer, and what else the script needs.

The files of one moment belong together: `run.json` names them and is written last, so that a run that ends while it
saves is found as it was saved before.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from graphs.disk import write_atomically
from graphs.errors import MismatchError
from placement.runtime.storing.checkpoints import together
from placement.runtime.storing.tensor_files import agree

if TYPE_CHECKING:
    from placement.runtime.ranks.process_group import ProcessGroup
    from placement.runtime.storing.rank_states import RankStates

_FORMAT = 1
_FIELDS = {"number", "facts", "groups", "random"}


def save_run(
    group: ProcessGroup,
    states: RankStates,
    folder: Path,
    optimizer: torch.optim.Optimizer | None,
    facts: Mapping[str, Any],
) -> None:
    """Save all of a run; of the moment before nothing is left then. All ranks call it.

    Saved are the model, the state of the optimizer, the settings of its groups (learning rates), the state of torch's
    random numbers on the CPU of rank 0, and facts: plain data, such as a step or the state of a scheduler.

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
    settings = next((each for each in _told(group, _settings(optimizer)) if each is not None), None)
    before = _read_together(group, folder)
    number = 0 if before is None else before["number"] + 1
    agree(group, lambda: folder.mkdir(parents=True, exist_ok=True))
    model_file, optimizer_file = _files(folder, number)
    states.save(model_file)
    states.save_optimizer(optimizer_file, optimizer)
    random = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
    run = {"format": _FORMAT, "number": number, "facts": dict(facts), "groups": settings, "random": random}

    def finish() -> None:
        write_atomically(folder / "run.json", json.dumps(run))
        for file in () if before is None else _files(folder, before["number"]):
            file.unlink(missing_ok=True)
        for leftover in folder.glob(".*.safetensors.*.tmp"):  # of a run that was killed while it saved
            leftover.unlink(missing_ok=True)

    agree(group, finish)


def load_run(
    group: ProcessGroup, states: RankStates, folder: Path, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any] | None:
    """Go on with what `save_run` saved, under this strategy or another. All ranks call it.

    Returns:
        The facts; None where no run has been saved.

    Raises:
        MismatchError: on every rank: the run is of another model or optimizer, or its files are not what they should.
    """
    run = _read_together(group, folder)
    if run is None:
        return None
    groups = run["groups"] or []

    def check() -> torch.Tensor:
        if optimizer is not None:
            _check_settings(groups, optimizer, folder)
        return _random(run["random"], folder)

    # All is read and found right before anything is changed.
    random = together(group, check)
    model_file, optimizer_file = _files(folder, run["number"])
    changes = states.loading(model_file), states.loading_optimizer(optimizer_file, optimizer)
    for change in changes:
        change()
    if optimizer is not None:
        for settings, each in zip(groups, optimizer.param_groups, strict=True):
            _set(each, settings)
    torch.set_rng_state(random)
    facts: dict[str, Any] = run["facts"]
    return facts


def _files(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"model-{number}.safetensors", folder / f"optimizer-{number}.safetensors"


def _told(group: ProcessGroup, value: Any) -> list[Any]:
    """Plain data of each rank, by rank."""
    return [json.loads(text) for text in group.all_gather(json.dumps(value), "how far a run is")]


def _read(folder: Path) -> dict[str, Any] | None:
    """Content of `run.json`; None where there is none.

    Raises:
        MismatchError: it is not one.
    """
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise MismatchError(f"cannot read {folder / 'run.json'}: {error}.") from None
    except RecursionError:
        raise MismatchError(f"{folder / 'run.json'} nests too deeply to be a run.") from None
    if not isinstance(run, dict) or not _is_run(run):
        raise MismatchError(
            f"{folder / 'run.json'} is no run of this version; expected what save_run() writes, format {_FORMAT}."
        )
    return run


def _read_together(group: ProcessGroup, folder: Path) -> dict[str, Any] | None:
    """As `_read` on rank 0, on every rank."""
    run = together(group, lambda: _read(folder) if group.rank == 0 else None)
    found: dict[str, Any] | None = _told(group, run)[0]
    return found


def _is_run(run: dict[str, Any]) -> bool:
    if run.get("format") != _FORMAT or not set(run) >= _FIELDS:
        return False
    number, groups = run["number"], [] if run["groups"] is None else run["groups"]
    is_number = isinstance(number, int) and not isinstance(number, bool) and number >= 0  # it goes into paths
    are_groups = isinstance(groups, list) and all(isinstance(each, dict) for each in groups)
    return is_number and are_groups and isinstance(run["facts"], dict) and isinstance(run["random"], str)


def _random(text: str, folder: Path) -> torch.Tensor:
    """The state of random numbers.

    Raises:
        MismatchError: it is none.
    """
    try:
        state = torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
        torch.Generator().set_state(state)
    except (ValueError, RuntimeError):
        raise MismatchError(f"{folder / 'run.json'} has no state of random numbers; save the run again.") from None
    return state


def _check_settings(groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Raises: MismatchError: these are no settings of the optimizer's groups."""
    if len(groups) != len(optimizer.param_groups):
        raise MismatchError(
            f"the run in {folder} has {len(groups)} groups of parameters; the optimizer has "
            f"{len(optimizer.param_groups)}, make it with the same groups."
        )
    for settings, group in zip(groups, optimizer.param_groups, strict=True):
        for name, value in settings.items():
            if name == "params" or not _is_alike(value, group.get(name, 0.0)):  # a scheduler adds numbers
                raise MismatchError(
                    f"the run in {folder} has {name} = {value!r:.60} for a group of parameters, the optimizer has "
                    f"{group.get(name)!r:.60}; expected a run of {type(optimizer).__name__}."
                )


def _is_alike(value: Any, known: Any) -> bool:
    """Whether a setting can stand in the place of another one."""
    if isinstance(known, tuple | list):
        return isinstance(value, list) and len(value) == len(known) and all(map(_is_alike, value, known))
    if isinstance(known, bool) or known is None:
        return isinstance(value, bool) or value is None
    if isinstance(known, torch.Tensor | int | float):
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, type(known))


def _is_plain(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _settings(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]] | None:
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


def _set(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        known = group.get(name)
        if isinstance(known, torch.Tensor):
            known.fill_(value)
        else:
            group[name] = tuple(value) if isinstance(value, list) else value
