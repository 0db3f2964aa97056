"""Read a ``.pt2`` file (`torch.export.save`) as an `OpGraph`, without running anything the file brings.

`torch.export.load` unpickles, imports, evaluates and compiles what it finds, and it reads archives by a reader of its
own, which may find other parts than `zipfile` does. So it never sees the file: each part that a graph needs is read
once, checked, and written into a new archive in memory, and that is what it loads. Weights are not read: their
sizes are in the archive, and they are made on the device ``meta``, which has no memory.
"""

from __future__ import annotations

import io
import json
import os
import re
import struct
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from graphs.disk import read_bytes, stem
from graphs.errors import CaptureError, GraphError, GraphFileError
from graphs.opgraph import OpGraph
from graphs.readers.pt2_program import plain_program, refusal

Path = str | os.PathLike[str]

# The parts of an archive, below its root folder; a part of no listed kind is refused, compiled code for one.
_PROGRAM = re.compile(r"models/[^/]+\.json")
_PAYLOADS = re.compile(r"data/(weights|constants)/[^/]+_config\.json")
_TENSOR = re.compile(r"data/(weights/weight|constants/tensor)_\d+")
_SAMPLES = re.compile(r"data/sample_inputs/[^/]+\.pt")
_COPIED = re.compile(r"archive_format|archive_version|byteorder|\.data/(version|serialization_id)|version")
_LEFT_OUT = re.compile(r"extra/.*|\.format_version|\.storage_alignment")
_OLDER = re.compile(r"data/(weights|constants)/[^/]+\.pt|serialized_\w+\.(pt|json)")
_LARGEST_TEXT = 2**28  # bytes of a program's JSON; what it becomes in memory is many times as large


def read_pt2(path: Path) -> OpGraph:
    """Read an exported program; its weights are not read, only their sizes.

    Raises:
        GraphFileError: not an exported program, damaged, compressed, from a version of PyTorch this one cannot read, or
            holding anything that would run code: pickled objects, or texts that PyTorch would evaluate.
        CaptureError: as `graphs.capture.from_exported_program`.
    """
    where = os.fspath(path)
    if not read_bytes(path, 4).startswith(b"PK"):
        raise GraphFileError(
            f"{where} is not an exported program: it is no zip archive; save one by torch.export.save."
        )
    try:
        with zipfile.ZipFile(path) as archive:
            harmless = _rebuilt(archive, where)
    except GraphFileError:
        raise
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError, LookupError, struct.error) as error:
        raise GraphFileError(f"{where} is truncated or not a .pt2 archive: {_reason(error)}; save it again.") from None
    from graphs.capture import from_exported_program
    from graphs.capture.failure import TO_MODULES
    from graphs.capture.untraced import quiet_loggers

    try:
        with quiet_loggers():  # what torch would log is in the errors
            return from_exported_program(_load(harmless, where), name=stem(where))
    except GraphFileError:
        raise
    except CaptureError as error:
        way_out = "capture the model itself, by leaf module" if error.way_out == TO_MODULES else error.way_out
        raise CaptureError(f"{where}: {error.reason}", way_out) from None
    except GraphError as error:
        raise GraphFileError(f"{where}: {error}") from None
    except Exception as error:  # a program that fits PyTorch's schema and makes no sense
        raise GraphFileError(f"{where} holds no program that can be read: {_reason(error)}; export it again.") from None


def _load(archive: io.BytesIO, where: str) -> Any:
    import torch

    try:
        return torch.export.load(archive)
    except Exception as error:  # torch raises whatever its schema checks happen to hit
        version = torch.__version__
        raise GraphFileError(
            f"{where} cannot be read by PyTorch {version}: {_reason(error)}; export it again with this version."
        ) from None


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]


# -- the archive --------------------------------------------------------------------------------------------------


def _rebuilt(archive: zipfile.ZipFile, where: str) -> io.BytesIO:
    """A new archive of the parts that a graph needs, each checked; refuses one that holds more than tensors."""
    members = _parts(archive, where)
    content: dict[str, bytes] = {}
    data: set[str] = set()  # tensors whose bytes are needed
    for part, member in members.items():
        if _PROGRAM.fullmatch(part):
            content[part] = _text(plain_program(_json(archive, member, where), where), where)
        elif _PAYLOADS.fullmatch(part):
            config = _json(archive, member, where)
            data |= _without_data(config, part, members, where)
            content[part] = _text(config, where)
        elif _TENSOR.fullmatch(part) or _SAMPLES.fullmatch(part):
            content[part] = b""
        elif _COPIED.fullmatch(part):
            content[part] = _read(archive, member, where)
        elif _OLDER.fullmatch(part):
            raise refusal(where, f"{part} is a pickle, as older versions of PyTorch saved tensors")
        elif part == "policy.json":
            raise GraphFileError(f"{where} is a trained policy and no graph; give it as --method policy:{where}.")
        elif not _LEFT_OUT.fullmatch(part):
            raise refusal(where, f"it has a part {part!r:.80}, which is neither a graph nor plain tensors")
    programs = sum(_PROGRAM.fullmatch(part) is not None for part in content)
    if programs != 1:
        raise GraphFileError(f"{where} holds {programs} exported programs; expected 1, saved by torch.export.save.")
    result = io.BytesIO()
    with zipfile.ZipFile(result, "w", zipfile.ZIP_STORED) as new:
        for part, text in content.items():
            new.writestr(f"program/{part}", archive.read(members[part]) if part in data else text)
    result.seek(0)
    return result


def _parts(archive: zipfile.ZipFile, where: str) -> dict[str, zipfile.ZipInfo]:
    """The archive's members by their names below its one root folder."""
    members = archive.infolist()
    root = members[0].filename.partition("/")[0] + "/" if members else ""
    parts = {member.filename.removeprefix(root): member for member in members}
    # PyTorch's reader takes names that differ in case only for one.
    if len({part.casefold() for part in parts}) < len(members):
        raise refusal(where, "two of its parts have one name")
    for part, member in parts.items():
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise GraphFileError(
                f"{where} has a compressed part {part!r:.80}, and torch.export.save compresses nothing; save the "
                "program again, and do not pack the file anew."
            )
    return parts


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo, where: str) -> bytes:
    if member.file_size > _LARGEST_TEXT:
        raise GraphFileError(
            f"{where} has a part {member.filename!r:.80} of {member.file_size} bytes; expected at most {_LARGEST_TEXT}."
        )
    return archive.read(member)


def _json(archive: zipfile.ZipFile, member: zipfile.ZipInfo, where: str) -> Any:
    try:
        return json.loads(_read(archive, member, where).decode())
    except (ValueError, RecursionError):
        raise GraphFileError(f"{where} is damaged: its part {member.filename} is not JSON; save it again.") from None


def _text(value: Any, where: str) -> bytes:
    """The JSON text of what was checked, so that nothing else can be read from it."""
    try:
        return json.dumps(value).encode()
    except RecursionError:
        raise GraphFileError(f"{where} nests too deeply to be a program.") from None


# -- weights and constants ----------------------------------------------------------------------------------------


def _without_data(config: Any, part: str, members: Mapping[str, zipfile.ZipInfo], where: str) -> set[str]:
    """Move the tensors of a record to the device ``meta``, in place; returns the files of those that cannot be."""
    entries = config.get("config") if isinstance(config, dict) else None
    if not isinstance(entries, dict):
        raise GraphFileError(f"{where} is damaged: {part} lists no tensors; save it again.")
    tensors: dict[str, list[_Stored]] = defaultdict(list)
    for name, entry in entries.items():
        file = f"{part.rpartition('/')[0]}/{entry.get('path_name')}" if isinstance(entry, dict) else ""
        if not _TENSOR.fullmatch(file) or entry.get("use_pickle"):
            raise refusal(where, f"{name!r:.80} in {part} is a pickled object")
        there = members[file].file_size if file in members else -1
        tensor = _stored(name, entry)
        if tensor is None or there < 0 or (there > 0 and tensor.end > there):
            raise GraphFileError(
                f"{where} is damaged: {name!r:.80} in {part} is not of a size that its {max(there, 0)} bytes can have; "
                "save it again."
            )
        tensors[file].append(tensor)
    data = set()
    for file, views in tensors.items():
        # PyTorch makes memory for the first tensor of a file, and the others are views of it.
        views.sort(key=lambda tensor: -tensor.elements)
        on_cpu = members[file].file_size > 0 and max(tensor.end for tensor in views) > views[0].elements
        data |= {file} if on_cpu else set()
        for tensor in views:
            entries[tensor.name] = entries.pop(tensor.name)
            entries[tensor.name]["tensor_meta"]["device"] = {"type": "cpu" if on_cpu else "meta", "index": None}
    return data


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file: its name, its elements, and where in the file it ends, counted in elements."""

    name: str
    elements: int
    end: int


def _stored(name: str, entry: Mapping[str, Any]) -> _Stored | None:
    """The tensor that a record describes; None where it makes no sense."""
    meta: Any = entry.get("tensor_meta")
    try:
        sizes, strides = ([size["as_int"] for size in meta[key]] for key in ("sizes", "strides"))
        offset = meta["storage_offset"]["as_int"]
    except (LookupError, TypeError):
        return None
    numbers = [*sizes, *strides, offset]
    if len(sizes) != len(strides) or not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        return None
    elements = prod(sizes)
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return _Stored(name, elements, offset + reach + 1 if elements else 0)
