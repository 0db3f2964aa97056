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
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any

from graphs.disk import read_bytes, read_json, read_text, write_atomically
from graphs.errors import GraphError, GraphFileError
from graphs.formatting import is_text
from graphs.opgraph import Op, OpGraph, Phase, Tensor, Work
from graphs.origin import origin_of
from graphs.packed import graph_from_columns, packed_columns
from graphs.records import EXTENTS
from graphs.rows import SplitRow, State

SCHEMA = "placement.opgraph"
VERSION = 2
PACKED_VERSION = 3  # of graphs as columns, inside of other files
_VERSIONS = (1, 2, PACKED_VERSION)  # that are read
Path = str | os.PathLike[str]


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
    op_lines = ",\n  ".join(_encode(_differing(op)) for op in ops)
    tensor_lines = ",\n  ".join(_encode(_differing(tensor)) for tensor in tensors)
    state_lines = ",\n  ".join(_encode(_differing(state)) for state in graph.states)
    states = f',\n "states": [\n  {state_lines}]' if graph.states else ""
    return f'{head},\n "ops": [\n  {op_lines}],\n "tensors": [\n  {tensor_lines}]{states}}}\n'


def packed_graph(graph: OpGraph) -> dict[str, Any]:
    """A graph as packed columns (`graphs.packed`), JSON-ready, for files that nobody reads by eye."""
    head = {"schema": SCHEMA, "version": PACKED_VERSION, "name": graph.name, "origin": graph.origin.known()}
    return {**head, **packed_columns(graph), "states": [_differing(state) for state in graph.states]}


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
        return _read_onnx(path)
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


def _read_onnx(path: Path) -> OpGraph:
    from graphs.readers.onnx_graph import read_onnx  # onnx takes a while to import

    return read_onnx(path)


def _read_pt2(path: Path) -> OpGraph:
    from graphs.readers.pt2 import read_pt2  # so does torch

    return read_pt2(path)


_READERS: dict[str, Callable[[Path], OpGraph]] = {".json": _read_any_json, ".onnx": _read_onnx, ".pt2": _read_pt2}


_encode = json.JSONEncoder(allow_nan=False).encode  # made once: json.dumps would make one per line


# -- records to JSON and back -------------------------------------------------------------------------------


def _defaults(record: type[Op | Tensor | State]) -> tuple[tuple[str, Any], ...]:
    """Field names, each with the value that a file leaves out; None, which no other field holds, for a required one."""
    return tuple(
        (f.name, {} if f.default_factory is not MISSING else None if f.default is MISSING else f.default)
        for f in fields(record)
    )


_DEFAULTS = {record: _defaults(record) for record in (Op, Tensor, State)}


def _differing(record: Op | Tensor | State) -> dict[str, Any]:
    """The fields of a record that differ from their defaults, as JSON values."""
    result = {name: value for name, default in _DEFAULTS[type(record)] if (value := getattr(record, name)) != default}
    for key in ("phase", "work"):
        if key in result:
            result[key] = result[key].name.lower()
    if "split_rows" in result:
        result["split_rows"] = [str(row) for row in result["split_rows"]]
    return result


def graph_from_document(document: Any, where: str) -> OpGraph:
    """The graph in a parsed JSON value; `where` names its file in errors, which are those of `load_json_graph`."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        got = f"schema {document['schema']!r}" if isinstance(document, dict) and "schema" in document else "no schema"
        raise GraphFileError(
            f'{where} is not a saved graph: expected "schema": "{SCHEMA}", it has {got}; a configuration of '
            'transformers has "architectures" or "model_type", and results are for apply, verify and export.'
        )
    if document.get("version") not in _VERSIONS:
        raise GraphFileError(
            f"{where} is of version {document.get('version')!r}; this release reads versions 1 to {PACKED_VERSION}, "
            "save the graph again or use a newer release."
        )
    is_packed = document["version"] == PACKED_VERSION
    needed = ("columns", "time_keys") if is_packed else ("ops", "tensors")
    _check_fields(document, _PACKED if is_packed else _DOCUMENT, needed, where, "the graph")
    try:
        states = [_state(entry, i, where) for i, entry in enumerate(document.get("states", ()))]
        origin = origin_of(document.get("origin", {}))
        if is_packed:
            return graph_from_columns(document, document.get("name", "graph"), origin, states)
        ops = [_op(entry, i, where) for i, entry in enumerate(document["ops"])]
        tensors = [_tensor(entry, i, where) for i, entry in enumerate(document["tensors"])]
        graph = OpGraph.build(ops, tensors, document.get("name", "graph"), origin, states)
        if document["version"] == VERSION:
            return graph
        from graphs.readers.version_1 import upgraded

        return upgraded(graph)
    except GraphError as error:
        text = str(error)
        raise GraphFileError(text if text.startswith(f"{where}: ") else f"{where}: {text}") from None


def _op(entry: Any, number: int, where: str) -> Op:
    label = entry.get("name") if isinstance(entry, dict) else None
    _check_fields(entry, _OP, ("name",), where, f"op {label!r}" if isinstance(label, str) else f"ops[{number}]")
    given = dict(entry)
    if "phase" in given:
        given["phase"] = _PHASES[given["phase"]]
    if "work" in given:
        given["work"] = _WORKS[given["work"]]
    if "extents" in given:
        given["extents"] = tuple(map(float, given["extents"]))
    if "pins" in given:
        given["pins"] = tuple(given["pins"])
    if "kept_bytes" in given and "parameter_bytes" in given:
        raise GraphFileError(
            f"{where}: op {label!r} has kept_bytes and parameter_bytes; the first hold the second, leave one out."
        )
    if "split_rows" in given:
        given["split_rows"] = _rows(tuple(given["split_rows"]))
    return Op(**given)


@lru_cache(maxsize=4096)
def _rows(texts: tuple[str, ...]) -> tuple[SplitRow, ...]:
    """The rows of an op. Layers repeat: ops with equal rows share them, which saves time wherever rows are compared."""
    return tuple(map(SplitRow.parse, texts))


def _tensor(entry: Any, number: int, where: str) -> Tensor:
    _check_fields(entry, _TENSOR, ("producer", "bytes"), where, f"tensors[{number}]")
    return Tensor(**{**entry, "consumers": tuple(entry.get("consumers", ()))})


def _state(entry: Any, number: int, where: str) -> State:
    _check_fields(entry, _STATE, ("name", "users"), where, f"states[{number}]")
    return State(**{**entry, "users": tuple(entry["users"])})


# -- types ------------------------------------------------------------------------------------------------------

_PHASES = {phase.name.lower(): phase for phase in Phase}
_WORKS = {work.name.lower(): work for work in Work}
Check = tuple[str, Callable[[Any], bool]]  # what is expected, in words, and the test for it


def _is_number(value: Any) -> bool:
    return type(value) is float or type(value) is int


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and is_text(value)


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


_STRING: Check = ("a string of valid Unicode text", _is_text)
_NUMBER: Check = ("a number", _is_number)
_COUNT: Check = ("a whole number", lambda value: type(value) is int)
_STRINGS: Check = ("a list of strings", _is_strings)
_FLAG: Check = ("true or false", lambda value: isinstance(value, bool))
_LIST: Check = ("a list", lambda value: isinstance(value, list))
_TIMES: Check = (
    "an object of seconds by device",
    lambda value: isinstance(value, dict) and all(map(_is_number, value.values())) and all(map(_is_text, value)),
)

_DOCUMENT: Mapping[str, Check] = {
    "schema": _STRING,
    "version": _COUNT,
    "name": _STRING,
    "origin": ("an object", lambda value: isinstance(value, dict)),
    "ops": _LIST,
    "tensors": _LIST,
    "states": _LIST,
}
_PACKED: Mapping[str, Check] = {
    **_DOCUMENT,
    **dict.fromkeys(("ops", "tensors", "edges"), _COUNT),
    "time_keys": _STRINGS,
    "columns": ("an object", lambda value: isinstance(value, dict)),
}
_OP: Mapping[str, Check] = {
    "name": _STRING,
    "kind": _STRING,
    "flops": _NUMBER,
    "bytes_moved": _NUMBER,
    "kept_bytes": _COUNT,
    "workspace_bytes": _COUNT,
    "kernels": _COUNT,
    "colocation": ("a string or a whole number", lambda value: type(value) is int or _is_text(value)),
    "phase": (f"one of {', '.join(_PHASES)}", lambda value: isinstance(value, str) and value in _PHASES),
    "forward_of": _STRING,
    "dtype": _STRING,
    "module": _STRING,
    "pins": _STRINGS,
    "time_s": _TIMES,
    "fixed_s": _TIMES,
    "parameter_bytes": _COUNT,
    "gradient_bytes": _COUNT,
    "optimizer_bytes": _COUNT,
    "split_rows": _STRINGS,
    "work": (f"one of {', '.join(_WORKS)}", lambda value: isinstance(value, str) and value in _WORKS),
    "extents": (
        f"a list of {EXTENTS} numbers",
        lambda value: isinstance(value, list) and len(value) == EXTENTS and all(map(_is_number, value)),
    ),
    "stream": _COUNT,
}
_TENSOR: Mapping[str, Check] = {
    "producer": _STRING,
    "bytes": _COUNT,
    "consumers": _STRINGS,
    "transfer_s": _NUMBER,
    "in_place": _FLAG,
}
_STATE: Mapping[str, Check] = {
    "name": _STRING,
    "users": _STRINGS,
    "parameter_bytes": _COUNT,
    "gradient_bytes": _COUNT,
    "optimizer_bytes": _COUNT,
    "frozen": _FLAG,
    "dtype": _STRING,
}


def _check_fields(entry: Any, known: Mapping[str, Check], needed: tuple[str, ...], where: str, what: str) -> None:
    if not isinstance(entry, dict):
        raise GraphFileError(f"{where}: {what} is {_short(entry)}; expected an object with {', '.join(needed)}.")
    for key, value in entry.items():
        if key not in known:
            raise GraphFileError(f"{where}: {what} has unknown field {key!r}; known: {', '.join(known)}.")
        expected, test = known[key]
        if not test(value):
            raise GraphFileError(f"{where}: {what} has {key} = {_short(value)}; expected {expected}.")
    for key in needed:
        if key not in entry:
            raise GraphFileError(f"{where}: {what} has no {key!r}; add it.")


def _short(value: Any) -> str:
    return re.sub(r"(?s)(.{60}).+", r"\1...", repr(value))
