"""safetensors files that rank 0 writes tensor by tensor, so that no process has to hold all of them."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import safetensors
import torch

from graphs.disk import atomic_file
from graphs.errors import CheckpointError, MismatchError

if TYPE_CHECKING:
    from placement.runtime.ranks.process_group import ProcessGroup

Path = str | os.PathLike[str]

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""As safetensors writes them."""

DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}


class Outline(NamedTuple):
    """A tensor of a file: its key, its dtype as safetensors writes it, its shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_OF[self.dtype].itemsize


def describe(tensor: torch.Tensor, key: str) -> Outline:
    """Raises: MismatchError: safetensors has no such dtype."""
    if tensor.dtype not in DTYPES:
        raise MismatchError(f"{key!r} is {tensor.dtype}, which no safetensors file can hold.")
    return Outline(key, DTYPES[tensor.dtype], tuple(tensor.shape))


def write(
    path: Path, outlines: Sequence[Outline], tensors: Iterable[torch.Tensor], said: Mapping[str, str] | None = None
) -> None:
    """Write a file in one step; what was there stays until then.

    Args:
        outlines: what will be in it, in that order.
        tensors: one for each outline, on the CPU.
        said: what else the header says.

    Raises:
        OSError: it cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(said or {})}}
    end = 0
    for outline in outlines:
        start, end = end, end + outline.size_bytes
        header[outline.key] = {"dtype": outline.dtype, "shape": outline.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def opened(path: Path) -> Any:
    """A safetensors file to read from.

    Raises:
        MismatchError: it is none, or is not there.
    """
    if os.path.isdir(path):
        raise MismatchError(
            f"{os.fspath(path)} is a folder; expected a safetensors file, or load_run() for a folder of save_run()."
        )
    try:
        return safetensors.safe_open(os.fspath(path), framework="pt", device="cpu")
    except FileNotFoundError:
        raise MismatchError(f"there is no checkpoint {os.fspath(path)}; check the path on every host.") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise MismatchError(f"cannot read {os.fspath(path)} as a safetensors file: {error}.") from None


def agree(group: ProcessGroup, act: Callable[[], None]) -> None:
    """Let rank 0 act; where it meets an `OSError`, every rank says what that is.

    Raises:
        CheckpointError: on every rank.
    """
    sentence = ""
    if group.rank == 0:
        try:
            act()
        except OSError as error:
            sentence = _sentence(error)
    met = group.all_gather(sentence, "whether a file is written")[0]
    if met:
        raise CheckpointError(met)


def _sentence(error: OSError) -> str:
    advice = {errno.ENOENT: "make the folder", errno.ENOSPC: "free some space", errno.EDQUOT: "free some space"}
    way_out = ", or ".join(filter(None, (advice.get(error.errno or 0), "save it elsewhere")))
    return f"cannot write {error.filename or 'a checkpoint'}: {error.strerror or error}; {way_out}."
