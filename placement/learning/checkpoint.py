"""Checkpoints: a training run as it stood between two updates, to be gone on with (docs/training.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphs.errors import PolicyFileError
from placement.learning.learners.learner import LearnerState
from placement.learning.policies.archive import Kind, read_archive, write_archive

_KIND = Kind(
    "a checkpoint of a training run", "checkpoint.json", "placement.checkpoint", 1, "start anew with --restart"
)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A training run between two updates.

    Attributes:
        run: what makes it this run and no other, JSON-ready: policy, preset, seed, graphs, clusters, ...
        seconds: how long it has been training.
        curve: rows of `placement.Training.curve`, JSON-ready.
        state: of the learner.
    """

    run: Mapping[str, Any]
    seconds: float
    curve: list[list[Any]]
    state: LearnerState


def save_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write a checkpoint, atomically.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    record = {
        "run": dict(checkpoint.run),
        "seconds": checkpoint.seconds,
        "curve": checkpoint.curve,
        "values": dict(checkpoint.state.values),
    }
    write_archive(path, _KIND, record, checkpoint.state.tensors)


def load_checkpoint(path: str | os.PathLike[str], run: Mapping[str, Any]) -> Checkpoint:
    """Read a checkpoint of this very run.

    Raises:
        PolicyFileError: no checkpoint, cut short, of another version, or of another run; says what differs.
    """
    where = os.fspath(path)
    record, tensors = read_archive(path, _KIND)
    found, seconds, curve = record.get("run"), record.get("seconds"), record.get("curve")
    values = record.get("values")
    if not (isinstance(found, dict) and isinstance(values, dict) and isinstance(curve, list)) or not isinstance(
        seconds, int | float
    ):
        raise PolicyFileError(f"{where} lacks part of the run; {_KIND.anew}.")
    for key in run:
        if found.get(key) != run[key]:
            there, here = _shown(found.get(key)), _shown(run[key])
            raise PolicyFileError(
                f"{where} is of another run ({key} {there} there, {here} here); {_KIND.anew}, or choose another "
                "--output."
            )
    return Checkpoint(found, float(seconds), curve, LearnerState(tensors, values))


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return value if isinstance(value, str) else repr(value)
