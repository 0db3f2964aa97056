"""Packed columns: numbers and texts as short strings for JSON, and the columns of a graph as an object of them.

Numbers are written in 64 bits, little-endian, whole ones as differences to the number before, since neighbours in a
rewritten graph are alike; then deflated and written in base64. Texts are a JSON list, deflated likewise. A graph of
42,000 ops takes 0.2 MB so, where it takes 19 MB as one object for each op.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import prod
from types import GenericAlias
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphs.arrays import FloatArray, IntArray
from graphs.codec import plain, values_of
from graphs.errors import GraphFileError
from graphs.opgraph import OpGraph
from graphs.origin import Origin
from graphs.records import EXTENTS, SplitRow, State

MOST_NUMBERS = 2**26  # of one column
_MOST_TEXT_BYTES = 2**28  # of all texts of one column
# Columns by what holds one entry for each op, or for each tensor.
_WHOLE = (
    *("parameter_bytes", "gradient_bytes", "optimizer_bytes", "workspace_bytes", "kernels", "colocation", "phase"),
    *("forward_of", "work", "stream"),
)
_REPEATED = {"kinds": str, "dtypes": str, "modules": str, "pins": tuple[str, ...], "split_rows": tuple[SplitRow, ...]}
_OF_TENSORS = ("tensor_producer", "tensor_bytes", "tensor_in_place")
_REAL = ("flops", "bytes_moved", "time_s", "fixed_s", "extents", "tensor_transfer_s")
_REST = ("op_names", "readers", "consumers")
COLUMNS = (*_REST, *_WHOLE, *_REPEATED, *_OF_TENSORS, *_REAL)


# -- columns ----------------------------------------------------------------------------------------------------


def pack_whole(values: NDArray[Any]) -> str:
    """Whole numbers of any shape as a text; `unpack_whole` gives them back, flat."""
    flat = np.asarray(values).reshape(-1).astype(np.int64)
    return _deflated(np.diff(flat, prepend=np.int64(0)).astype("<i8").tobytes())


def pack_real(values: FloatArray) -> str:
    """Numbers of any shape as a text, to the last bit; `unpack_real` gives them back, flat."""
    return _deflated(np.asarray(values, dtype="<f8").tobytes())


def pack_texts(values: Sequence[str]) -> str:
    """Texts as one text; `unpack_texts` gives them back."""
    return _deflated(json.dumps(values).encode())


def pack_repeated(values: Iterable[Hashable]) -> dict[str, Any]:
    """Values of which many are equal: each once, as JSON has it, and its number for every entry."""
    number: dict[Hashable, int] = {}
    codes = [number.setdefault(value, len(number)) for value in values]
    return {"table": [plain(value) for value in number], "codes": pack_whole(np.array(codes, dtype=np.int64))}


def unpack_whole(text: Any, count: int, what: str) -> IntArray:
    """int64 [count], the inverse of `pack_whole`.

    Args:
        what: names the column in errors.

    Raises:
        GraphFileError: no such text, or another number of entries.
    """
    return np.cumsum(_numbers(text, count, what, "<i8"), dtype=np.int64)


def unpack_real(text: Any, count: int, what: str) -> FloatArray:
    """float64 [count], the inverse of `pack_real`; arguments and errors as of `unpack_whole`."""
    return _numbers(text, count, what, "<f8").astype(np.float64)


def unpack_texts(text: Any, what: str) -> tuple[str, ...]:
    """The inverse of `pack_texts`; errors as of `unpack_whole`."""
    content = _inflated(text, _MOST_TEXT_BYTES, what)
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise GraphFileError(f"{what} is no packed list of texts; save it again.")
    return tuple(values)


def unpack_repeated(packed: Any, count: int, what: str, hint: Any) -> tuple[Any, ...]:
    """`count` values, the inverse of `pack_repeated`; equal ones are one object. Errors as of `unpack_whole`.

    Args:
        hint: annotation of a value, by which `graphs.codec` reads it.
    """
    hints = {"table": GenericAlias(tuple, (hint, ...)), "codes": str}
    found = values_of(hints, packed, what, GraphFileError, ("table", "codes"))
    table, codes = found["table"], unpack_whole(found["codes"], count, what)
    if ((codes < 0) | (codes >= len(table))).any():
        raise GraphFileError(f"{what} has a code beyond its table of {len(table)}; save it again.")
    return tuple(table[code] for code in codes.tolist())


def _deflated(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 6)).decode("ascii")


def _inflated(text: Any, most_bytes: int, what: str) -> bytes:
    """The content of a packed text, which may say no more than so many bytes."""
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(base64.b64decode(text.encode("ascii"), validate=True), most_bytes + 1)
    except (AttributeError, ValueError, binascii.Error, zlib.error):
        raise GraphFileError(f"{what} is no packed column; save it again.") from None
    if not unpacker.eof or len(content) > most_bytes:
        raise GraphFileError(f"{what} is broken off, or longer than {most_bytes:,} bytes; save it again.")
    return content


def _numbers(text: Any, count: int, what: str, kind: str) -> NDArray[Any]:
    content = _inflated(text, 8 * count, what)
    if len(content) != 8 * count:
        raise GraphFileError(f"{what} has {len(content) / 8:g} numbers; expected {count}.")
    return np.frombuffer(content, dtype=kind)


# -- graphs -----------------------------------------------------------------------------------------------------


def packed_columns(graph: OpGraph) -> dict[str, Any]:
    """All of a graph but its name, origin and states, JSON-ready: its numbers of things and its columns."""
    whole = {key: pack_whole(getattr(graph, key)) for key in (*_WHOLE, *_OF_TENSORS, "consumers")}
    return {
        "ops": graph.n_ops,
        "tensors": graph.n_tensors,
        "edges": graph.n_edges,
        "time_keys": list(graph.time_keys),
        "columns": {
            "op_names": pack_texts(graph.op_names),
            "readers": pack_whole(np.diff(graph.consumer_ptr)),
            **whole,
            **{key: pack_repeated(getattr(graph, key)) for key in _REPEATED},
            **{key: pack_real(getattr(graph, key)) for key in _REAL},
        },
    }


def graph_from_columns(packed: Mapping[str, Any], name: str, origin: Origin, states: Sequence[State]) -> OpGraph:
    """The inverse of `packed_columns`.

    Raises:
        GraphFileError: a column is missing, or none of its kind or length.
        GraphError: as `OpGraph`.
    """
    n, m, e = (_count(packed, key) for key in ("ops", "tensors", "edges"))
    keys, columns = packed["time_keys"], packed["columns"]
    if len(keys) * n > MOST_NUMBERS:
        raise GraphFileError(f"time_keys has {len(keys)} texts, which is more than can be; save the graph again.")
    if columns.keys() != set(COLUMNS):
        raise GraphFileError(f"the graph has other packed columns than {', '.join(COLUMNS)}; save it again.")
    names = unpack_texts(columns["op_names"], "op_names")
    if len(names) != n:
        raise GraphFileError(f"op_names has {len(names)} texts; expected {n}.")
    readers = unpack_whole(columns["readers"], m, "readers")
    if (readers < 0).any() or int(readers.sum()) != e:
        raise GraphFileError(f"readers add up to {readers.sum()}; expected {e}, none below 0.")
    k = len(keys)
    real = {"time_s": (n, k), "fixed_s": (n, k), "extents": (n, EXTENTS), "tensor_transfer_s": (m,)}
    found: dict[str, Any] = {key: unpack_whole(columns[key], n, key) for key in _WHOLE}
    found |= {key: unpack_whole(columns[key], m, key) for key in _OF_TENSORS}
    found |= {key: unpack_repeated(columns[key], n, key, hint) for key, hint in _REPEATED.items()}
    for key in _REAL:
        shape = real.get(key, (n,))
        found[key] = unpack_real(columns[key], prod(shape), key).reshape(shape)
    found["tensor_in_place"] = found["tensor_in_place"].astype(np.bool_)
    return OpGraph(
        name=name,
        op_names=names,
        time_keys=tuple(keys),
        consumer_ptr=np.concatenate([[0], np.cumsum(readers)]).astype(np.int64),
        consumers=unpack_whole(columns["consumers"], e, "consumers"),
        states=tuple(states),
        origin=origin,
        **found,
    )


def _count(packed: Mapping[str, Any], key: str) -> int:
    value = packed.get(key)
    if type(value) is not int or not 0 <= value <= MOST_NUMBERS:
        raise GraphFileError(f"the graph has {key} = {value!r:.60}; expected a whole number up to {MOST_NUMBERS:,}.")
    return value
