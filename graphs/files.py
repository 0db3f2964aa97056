"""Graph files: our JSON, written atomically, and `load_graph`, which reads every format this project knows.

A saved graph is one JSON object, one op or tensor a line, with only the fields that differ from their defaults::

    {"schema": "placement.opgraph", "version": 2, "name": "net", "origin": {"source": "capture", "train": false},
     "ops": [
      {"name": "a", "kind": "aten.mm", "flops": 2000000.0, "parameter_bytes": 4000},
      {"name": "b", "pins": ["cpu"]}],
     "tensors": [
      {"producer": "a", "bytes": 4000, "consumers": ["b"]}]}
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from graphs.codec import plain, record_of, values_of
from graphs.disk import read_bytes, read_json, read_text, write_atomically
from graphs.errors import GraphError, GraphFileError, MissingPackageError
from graphs.opgraph import Op, OpGraph, Tensor
from graphs.origin import Origin
from graphs.packed import graph_from_columns, packed_columns
from graphs.records import State

SCHEMA = "placement.opgraph"
VERSION = 2
PACKED_VERSION = 3  # of graphs as columns, inside of other files
Path = str | os.PathLike[str]
_RecordT = TypeVar("_RecordT")


def save_graph(graph: OpGraph, path: Path) -> None:
    """Write a graph as JSON, atomically; `load_json_graph` gives an equal graph, every float to the last bit.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    write_atomically(path, graph_to_json(graph))


def graph_to_json(graph: OpGraph) -> str:
    """The text of `save_graph`, for files that hold a graph beside other things."""
    ops, tensors = graph.records()
    whole = {"schema": SCHEMA, "version": VERSION, "name": graph.name, "origin": graph.origin.known()}
    head = json.dumps(whole)[:-1]
    op_lines = ",\n  ".join(_encode(plain(op, sparse=True)) for op in ops)
    tensor_lines = ",\n  ".join(_encode(plain(tensor, sparse=True)) for tensor in tensors)
    state_lines = ",\n  ".join(_encode(plain(state, sparse=True)) for state in graph.states)
    states = f',\n "states": [\n  {state_lines}]' if graph.states else ""
    return f'{head},\n "ops": [\n  {op_lines}],\n "tensors": [\n  {tensor_lines}]{states}}}\n'


def packed_graph(graph: OpGraph) -> dict[str, Any]:
    """A graph as packed columns (`graphs.packed`), JSON-ready, for files that nobody reads by eye."""
    head = {"schema": SCHEMA, "version": PACKED_VERSION, "name": graph.name, "origin": graph.origin.known()}
    return {**head, **packed_columns(graph), "states": [plain(state, sparse=True) for state in graph.states]}


def load_json_graph(path: Path) -> OpGraph:
    """Read a graph that `save_graph` wrote.

    Raises:
        GraphFileError: a truncated file, another schema, an unknown version, a missing, unknown or mistyped field,
            a cycle, a dangling edge, a negative size, a duplicate name; the message names the file and the op or line.
    """
    document, doubled = _read_json(path)
    return _own_graph(document, doubled, os.fspath(path))


def load_graph(path: Path) -> OpGraph:
    """Read a graph of any known format: our JSON, NeurIPS 2020 JSON, a PipeDream profile, ONNX, or ``.pt2``.

    ``.onnx``, ``.pt2`` and ``.json`` are taken at their word; any other file is recognised by its first bytes.
    A NeurIPS 2020 file also describes devices: `graphs.readers.published.read_neurips` gives both.

    Raises:
        GraphFileError: the file cannot be read, or is of no known format.
    """
    from graphs.readers.published import is_profile_line, read_pipedream  # readers are imported when a file needs one

    start = read_bytes(path, 4096)
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix in _READERS:
        return _READERS[suffix](path)
    if start.startswith(b"PK\x03\x04"):
        return _read_pt2(path)
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return _read_any_json(path)
    if is_profile_line(start.decode("utf-8", errors="replace").lstrip().split("\n", 1)[0]):
        return read_pipedream(path)
    if start.startswith(b"\x08"):  # the tag of ir_version, the first field of an ONNX model
        return read_onnx_file(path)
    raise GraphFileError(
        f"{os.fspath(path)} is of no known format; expected a saved graph (.json), a NeurIPS 2020 problem (.json), "
        "a PipeDream profile (.txt), an ONNX model (.onnx) or an exported program (.pt2)."
    )


def _read_any_json(path: Path) -> OpGraph:
    from graphs.readers.published import is_neurips_document, neurips_graph

    document, doubled = _read_json(path)
    if is_neurips_document(document):
        return neurips_graph(document, os.fspath(path))
    return _own_graph(document, doubled, os.fspath(path))


def _own_graph(document: Any, doubled: tuple[str, str] | None, where: str) -> OpGraph:
    if doubled is not None and isinstance(document, dict) and document.get("schema") == SCHEMA:
        what, key = doubled
        raise GraphFileError(f"{where}: {what} has {key!r} twice; remove one of the two.")
    return graph_from_document(document, where)


def _read_json(path: Path) -> tuple[Any, tuple[str, str] | None]:
    """The value in a JSON file, and ``(object, key)`` for the first key that an object in it has twice."""
    doubled: list[tuple[str, str]] = []

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            what = "the graph" if "schema" in result else f"op {result['name']!r}" if "name" in result else "an object"
            doubled.append((what, twice))
        return result

    try:
        value = json.loads(read_text(path), object_pairs_hook=distinct, parse_constant=int)  # int refuses NaN
    except GraphFileError:
        raise
    except (ValueError, RecursionError):
        return read_json(path), None  # it says what is wrong, and where
    return value, doubled[0] if doubled else None


def read_onnx_file(path: Path, dims: Mapping[str, int] | None = None) -> OpGraph:
    """The graph of an ONNX model; arguments and errors as of `graphs.readers.onnx_graph.read_onnx`.

    Raises:
        MissingPackageError: onnx is not installed.
    """
    try:
        from graphs.readers.onnx_graph import read_onnx  # onnx takes a while to import
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise MissingPackageError("an ONNX model", "onnx") from error
    return read_onnx(path, dims)


def _read_pt2(path: Path) -> OpGraph:
    from graphs.readers.pt2 import read_pt2  # so does torch

    return read_pt2(path)


_READERS: dict[str, Callable[[Path], OpGraph]] = {".json": _read_any_json, ".onnx": read_onnx_file, ".pt2": _read_pt2}


_encode = json.JSONEncoder(allow_nan=False).encode  # made once: json.dumps would make one per line


def graph_from_document(document: Any, where: str) -> OpGraph:
    """The graph in a parsed JSON value; `where` names its file in errors, which are those of `load_json_graph`."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        got = f"schema {document['schema']!r}" if isinstance(document, dict) and "schema" in document else "no schema"
        raise GraphFileError(
            f'{where} is not a saved graph: expected "schema": "{SCHEMA}", it has {got}; a configuration of '
            'transformers has "architectures" or "model_type", and results are for apply, verify and export.'
        )
    if document.get("version") not in (VERSION, PACKED_VERSION):
        raise GraphFileError(
            f"{where} is of version {document.get('version')!r}; this release reads versions {VERSION} and "
            f"{PACKED_VERSION}, make the graph anew with `placement capture`."
        )
    is_packed = document["version"] == PACKED_VERSION
    needed = ("columns", "time_keys") if is_packed else ("ops", "tensors")
    try:
        found = values_of(_PACKED if is_packed else _PLAIN, document, f"{where}: the graph", GraphFileError, needed)
        name, origin = (
            found.get("name", "graph"),
            record_of(Origin, found.get("origin", {}), "the origin", GraphError, False),
        )
        states = [_record(State, entry, f"states[{i}]", where) for i, entry in enumerate(found.get("states", ()))]
        if is_packed:
            return graph_from_columns(found, name, origin, states)
        ops = [_op(entry, i, where) for i, entry in enumerate(found["ops"])]
        tensors = [_record(Tensor, entry, f"tensors[{i}]", where) for i, entry in enumerate(found["tensors"])]
        return OpGraph.build(ops, tensors, name, origin, states)
    except GraphError as error:
        text = str(error)
        raise GraphFileError(text if text.startswith(f"{where}: ") else f"{where}: {text}") from None


def _op(entry: Any, number: int, where: str) -> Op:
    """An op, of which a file may give `Op.kept_bytes` in place of their parts."""
    label = entry.get("name") if isinstance(entry, dict) else None
    what = f"op {label!r}" if isinstance(label, str) else f"ops[{number}]"
    if not isinstance(entry, dict) or "kept_bytes" not in entry:
        return _record(Op, entry, what, where)
    if "parameter_bytes" in entry:
        raise GraphFileError(
            f"{where}: {what} has kept_bytes and parameter_bytes; the first hold the second, leave one out."
        )
    kept = values_of({"kept_bytes": int}, {"kept_bytes": entry["kept_bytes"]}, f"{where}: {what}", GraphFileError, ())
    op = _record(Op, {key: value for key, value in entry.items() if key != "kept_bytes"}, what, where)
    return replace(op, parameter_bytes=kept["kept_bytes"] - op.gradient_bytes - op.optimizer_bytes)


def _record(kind: type[_RecordT], entry: Any, what: str, where: str) -> _RecordT:
    return record_of(kind, entry, f"{where}: {what}", GraphFileError)


_HEAD = {"schema": str, "version": int, "name": str, "origin": Mapping[str, Any], "states": Sequence[Any]}
_PLAIN = {**_HEAD, "ops": Sequence[Any], "tensors": Sequence[Any]}
_PACKED = {
    **_HEAD,
    **dict.fromkeys(("ops", "tensors", "edges"), int),
    "time_keys": Sequence[str],
    "columns": Mapping[str, Any],
}
