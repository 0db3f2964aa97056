"""Policy files and checkpoints: a JSON record and tensors in one zip, read without unpickling (docs/training.md)."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from graphs.disk import read_bytes, write_atomically
from graphs.errors import GraphFileError, PlacementError, PolicyFileError
from placement.learning.policies.policy import PlacementPolicy
from placement.learning.policies.registry import GROUP, POLICIES, policy_kind

_TENSORS = "weights.safetensors"
_THE_SAME_DAY = (1980, 1, 1, 0, 0, 0)  # so that equal contents are equal files


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        what: it is called in sentences.
        member: name of its JSON member.
        schema, version: of that.
        anew: what to do where it cannot be had again.
    """

    what: str
    member: str
    schema: str
    version: int
    anew: str = "train again"


def write_archive(
    path: str | os.PathLike[str], kind: Kind, record: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a file, atomically; equal arguments make equal bytes.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    text = json.dumps({"schema": kind.schema, "version": kind.version, **record}, indent=1)
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in ((kind.member, text.encode()), (_TENSORS, safetensors.torch.save(own))):
            archive.writestr(zipfile.ZipInfo(name, _THE_SAME_DAY), content)
    write_atomically(path, buffer.getvalue())


def read_archive(path: str | os.PathLike[str], kind: Kind) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record and the tensors of a file that `write_archive` wrote.

    Nothing is compressed in such a file, so what it holds is never larger than the file itself.

    Raises:
        PolicyFileError: no such file, cut short or damaged, another kind of file or another version of this one.
    """
    where = os.fspath(path)
    try:
        data = read_bytes(path)
    except GraphFileError as error:
        raise PolicyFileError(str(error)) from None
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _check_members(archive, where, kind)
            text, weights = archive.read(kind.member), archive.read(_TENSORS)
    except PolicyFileError:
        raise
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OverflowError, ValueError, OSError):
        raise _damaged(where, kind) if data[:2] == b"PK" else _not_one(where, kind) from None
    record = _record(text, where, kind)
    try:
        return record, safetensors.torch.load(weights)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError):
        raise _damaged(where, kind) from None


def _check_members(archive: zipfile.ZipFile, where: str, kind: Kind) -> None:
    members = archive.infolist()
    if sorted(member.filename for member in members) != sorted((kind.member, _TENSORS)):
        raise _not_one(where, kind)
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise PolicyFileError(
                f"{where} has a compressed member {member.filename!r}, and {kind.what} has none; use the file as "
                "placement wrote it."
            )


def _record(text: bytes, where: str, kind: Kind) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        raise _damaged(where, kind) from None
    if not isinstance(record, dict) or record.get("schema") != kind.schema:
        raise _not_one(where, kind)
    if record.get("version") != kind.version:
        raise PolicyFileError(
            f"{where} is version {record.get('version')!r} of {kind.what}, and this placement reads version "
            f"{kind.version}; use the placement that wrote it, or {kind.anew}."
        )
    return record


def _damaged(where: str, kind: Kind) -> PolicyFileError:
    return PolicyFileError(f"{where} is cut short or damaged, expected {kind.what}; copy it again or {kind.anew}.")


def _not_one(where: str, kind: Kind) -> PolicyFileError:
    return PolicyFileError(
        f"{where} is not {kind.what}, which `placement train` writes; check the path, or {kind.anew}."
    )


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
        **vars(origin),
        "versions": dict(origin.versions),
    }
    for key in ("graphs", "clusters"):
        record[key] = [{"name": name, "hash": digest} for name, digest in record[key]]
    if not origin.note:
        del record["note"]
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
