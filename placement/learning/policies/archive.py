"""One JSON record and some tensors in one zip file, read without unpickling or unpacking anything."""

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
from torch import Tensor

from graphs.disk import read_bytes, write_atomically
from graphs.errors import GraphFileError, PolicyFileError

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
