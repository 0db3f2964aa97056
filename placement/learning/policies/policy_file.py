"""Policy files: a zip of ``policy.json`` and ``weights.safetensors``, and nothing else (docs/training.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphs.errors import PlacementError, PolicyFileError
from placement.learning.policies.archive import Kind, read_archive, write_archive
from placement.learning.policies.policy import PlacementPolicy
from placement.learning.policies.registry import GROUP, POLICIES, policy_kind

_OF_STRATEGIES = "searches"  # a key in files of versions whose policies could make moves between strategies
_KIND = Kind("a policy file", "policy.json", "placement.policy", 1)


@dataclass(frozen=True)
class PolicyOrigin:
    """Origin of a policy.

    Attributes:
        preset, warm_start, seed: as given to `placement.train`.
        samples: placements it was trained on.
        graphs, clusters: name and hash of each problem's graph and cluster, in the same order.
        versions: of Python and the packages that trained it.
        command: the command line that trained it, or "".
        note: what else is worth knowing, for example what it reached in validation, or "".
    """

    preset: str
    warm_start: bool
    seed: int
    samples: int
    graphs: tuple[tuple[str, str], ...]
    clusters: tuple[tuple[str, str], ...]
    versions: Mapping[str, str]
    command: str = ""
    note: str = ""


@dataclass(frozen=True, eq=False)
class LoadedPolicy:
    """Contents of a policy file."""

    policy: PlacementPolicy
    origin: PolicyOrigin


def save_policy(path: str | os.PathLike[str], policy: PlacementPolicy, origin: PolicyOrigin) -> None:
    """Write a policy file, atomically; the same policy and origin make the same bytes.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    record: dict[str, Any] = {
        "policy": policy.name,
        "config": policy.config(),
        "preset": origin.preset,
        "warm_start": origin.warm_start,
        "seed": origin.seed,
        "samples": origin.samples,
        "graphs": [{"name": name, "hash": digest} for name, digest in origin.graphs],
        "clusters": [{"name": name, "hash": digest} for name, digest in origin.clusters],
        "versions": dict(origin.versions),
        "command": origin.command,
    }
    if origin.note:
        record["note"] = origin.note
    write_archive(path, _KIND, record, policy.state_dict())


def load_policy(path: str | os.PathLike[str]) -> LoadedPolicy:
    """Read a policy file. Whether it can place a given problem is for `PlacementPolicy.check` to say.

    Raises:
        PolicyFileError: no such file, no policy file, cut short, of another version, of a policy that this version
            does not have, or whose weights do not fit its configuration.
    """
    where = os.fspath(path)
    record, weights = read_archive(path, _KIND)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()):
        raise PolicyFileError(f"{where} has weights that are no numbers (NaN or infinite); train it again.")
    if _OF_STRATEGIES in record:
        raise PolicyFileError(
            f"{where} holds a policy that searches strategies, which this version does not have; leave it out, and "
            "strategies are searched without one."
        )
    try:
        origin = _origin(record)
        name, config = str(record["policy"]), dict(record["config"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise PolicyFileError(f"{where} lacks part of its description of the policy; train it again.") from None
    kind = policy_kind(name)
    if kind is None:
        raise PolicyFileError(
            f"{where} holds a policy {name!r}, which this version does not have; it has {', '.join(POLICIES)}. Import "
            f"its class first, or name it among the entry points {GROUP} of its package."
        )
    return LoadedPolicy(_policy(kind, config, weights, where), origin)


def _origin(record: Mapping[str, Any]) -> PolicyOrigin:
    graphs, clusters = (
        tuple((str(entry["name"]), str(entry["hash"])) for entry in record[key]) for key in ("graphs", "clusters")
    )
    return PolicyOrigin(
        str(record["preset"]),
        bool(record["warm_start"]),
        int(record["seed"]),
        int(record["samples"]),
        graphs,
        clusters,
        {str(key): str(value) for key, value in dict(record["versions"]).items()},
        str(record["command"]),
        str(record.get("note", "")),
    )


def _policy(
    kind: type[PlacementPolicy], config: dict[str, Any], weights: Mapping[str, Tensor], where: str
) -> PlacementPolicy:
    """The policy with these weights."""
    # A layer has at least as many weights as it is wide: larger numbers could only be there to fill the memory.
    most = sum(tensor.numel() for tensor in weights.values())
    if any(isinstance(value, int | float) and not -most <= value <= most for value in config.values()):
        raise _misfit(where)
    try:
        with torch.random.fork_rng(devices=[]):  # what it draws for its first weights is nobody else's business
            policy = kind(**config)
        policy.load_state_dict(weights)
    except PlacementError:
        raise
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError, ArithmeticError, AssertionError):
        raise _misfit(where) from None
    return policy.eval()


def _misfit(where: str) -> PolicyFileError:
    """The weights of a file are not those of its policy."""
    return PolicyFileError(f"{where} has weights that do not fit its configuration; it is damaged, train it again.")
