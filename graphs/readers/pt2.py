"""Read a ``.pt2`` file (`torch.export.save`) as an `OpGraph`, without running anything the file brings.

`torch.export.load` unpickles, imports, evaluates and compiles what it finds, and it reads archives by a reader of its
own, which may find other parts than `zipfile` does. So it never sees the file: each part that a graph needs is read
once, checked, and written into a new archive in memory, and that is what it loads. Weights are not read: their
sizes are in the archive, and they are made on the device ``meta``, which has no memory.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from graphs.disk import read_bytes, stem
from graphs.errors import CaptureError, GraphError, GraphFileError
from graphs.opgraph import OpGraph

# The program in a ``.pt2`` file, cut down to what a graph is read from, and checked text by text.
#
# PyTorch makes Python source of a program's names and runs it, evaluates the text of symbolic sizes, looks up
# operators
# by dotted name and imports the modules that its tree specifications name. So nothing passes that is not known to be
# harmless: what no graph needs is dropped, and every text that is left has a form of its own.

# An operator: torch.ops.aten.mm.default, _operator.getitem, math.ceil, torch.sym_max, torch._sym_sqrt; but none of
# those that make or make use of other functions.
_NAME = r"(?:(?!__)[A-Za-z_]\w*|__i?(?:and|or|xor|lshift|rshift)__)"
_OPERATOR = re.compile(
    rf"torch\.ops\.{_NAME}\.{_NAME}(\.{_NAME})?|math\.{_NAME}|torch\._?sym_\w+"
    rf"|_operator\.(?!(?:attrgetter|call|itemgetter|methodcaller)$){_NAME}"
)
# Any other text: without brackets, quotes, equals signs and line breaks no Python source calls or assigns anything.
_TEXT = re.compile(r"[\w.+/ -]{0,1000}")
_SYMBOL = re.compile(r"[a-z]+[0-9]{1,5}")  # torch counts up to the number of a symbol without a value
_FREE = frozenset({"as_string", "as_strings", "nn_module_stack", "stack_trace"})  # constants, and where it comes from
_CUSTOM = frozenset({"as_custom_obj", "custom_obj"})


def plain_program(document: Any, where: str) -> dict[str, Any]:
    """The program in a parsed ``models/NAME.json``, without what `graphs.capture.from_exported_program` does not read.

    Raises:
        GraphFileError: it is no program, or loading it could run code from the file.
    """
    module = document.get("graph_module") if isinstance(document, dict) else None
    ranges = document.get("range_constraints", {}) if isinstance(document, dict) else None
    if not isinstance(module, dict) or not isinstance(ranges, dict):
        raise GraphFileError(f"{where} is damaged: its program is no graph with its sizes; save it again.")
    whole = {"fqn": "", "signature": None}  # how arguments nest is told by names of types, which torch would look up
    kept = {**module, "module_call_graph": [whole], "metadata": {}, "treespec_namedtuple_fields": {}}
    symbols = {size: ends for size, ends in ranges.items() if _SYMBOL.fullmatch(size)}  # not of 2*s0, that follows
    program = {**document, "graph_module": kept, "guards_code": [], "range_constraints": symbols}
    for key, item in _items(program):
        if isinstance(item, str):
            _check_text(key, item, where)
        elif isinstance(item, dict):
            if key == "metadata":  # of a node: texts by name, and two of them are read
                for unread in [name for name, value in item.items() if isinstance(value, str) and name not in _FREE]:
                    del item[unread]
            for name in item:
                _check_text("", name, where)
    return program


def refusal(where: str, what: str) -> GraphFileError:
    """The error for a file that would do more than build a graph."""
    return GraphFileError(
        f"{where} is refused: {what}, and loading it could run code from the file; capture the model in Python instead."
    )


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Everything in a JSON value with the key that it stands under, each before what is in it."""
    stack: list[tuple[str, Any]] = [("", value)]
    while stack:
        key, item = stack.pop()
        yield key, item
        if isinstance(item, dict):
            stack.extend(item.items())
        elif isinstance(item, list):
            stack.extend((key, inner) for inner in item)


def _check_text(key: str, value: str, where: str) -> None:
    if value in _CUSTOM:
        raise refusal(where, "it has an object that is no tensor")
    if key in ("target", "as_operator"):
        if not _OPERATOR.fullmatch(value):
            raise refusal(where, f"it calls {value[:80]!r}, which is not an operator")
    elif key == "expr_str":
        if not is_harmless(value):
            raise refusal(where, f"it has a size {value[:80]!r}, which is not arithmetic with small powers")
    elif key not in _FREE and not _TEXT.fullmatch(value):
        raise refusal(where, f"it has a name {value[:80]!r}, which is not made of letters, digits, dots and spaces")


# -- sizes --------------------------------------------------------------------------------------------------------

# Parts of which a symbolic size may consist, e.g. Mul(Integer(2), Symbol('s69', positive=True, integer=True)).
# fmt: off
_FUNCTIONS = frozenset({
    "Abs", "Add", "And", "CeilDiv", "CeilToInt", "CleanDiv", "Eq", "Equality", "Float", "FloatPow", "FloatTrueDiv",
    "FloorDiv", "FloorToInt", "Ge", "GreaterThan", "Gt", "Identity", "IntTrueDiv", "Integer",
    "IsNonOverlappingAndDenseIndicator", "LShift", "Le", "LessThan", "Lt", "Max", "Min", "Mod", "ModularIndexing",
    "Mul", "Ne", "Not", "Or", "Pow", "PowByNatural", "PythonMod", "RShift", "Rational", "RoundDecimal", "RoundToInt",
    "StrictGreaterThan", "StrictLessThan", "Symbol", "ToFloat", "TruncToFloat", "TruncToInt", "Unequality", "Where",
    "ceiling", "floor",
})
# fmt: on
# Their second argument is an exponent, or a number of bits or digits.
_POWERS = ("FloatPow", "LShift", "Pow", "PowByNatural", "RShift", "RoundDecimal", ast.LShift, ast.Pow, ast.RShift)
_LONGEST = 4000  # characters of one size
_LARGEST_EXPONENT = 64
_MOST_TERMS = 1000  # of a size that is multiplied out
_MOST_COMPARED = 30  # terms of a Max or Min: sympy compares each with each, slowly
_LARGE_EXPONENT = re.compile(r"\d[eE][+-]?[\d_]{3}")  # which Python takes for infinite, and sympy does not
_NUMBER = re.compile(r"[A-Za-z_]\w{0,99}|[+-]?\d{0,30}\.?\d{0,30}(e[+-]?\d{1,2})?")  # or the name of a symbol


def is_harmless(expression: str) -> bool:
    """Whether a symbolic size is arithmetic on names and numbers, and little work: its text may be evaluated."""
    if len(expression) > _LONGEST or _LARGE_EXPONENT.search(expression):
        return False
    try:
        return _terms(ast.parse(expression.strip(), mode="eval").body) <= _MOST_TERMS
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return False


def _terms(node: ast.expr) -> int:
    """How many terms a size has once multiplied out, at most, of a power of a number its exponent; or too many.

    Raises:
        ValueError: something that is not arithmetic, or a number of many digits.
    """
    match node:
        case ast.Name() | ast.Constant(value=bool() | None):
            return 1
        case ast.Constant(value=int() | float() | str() as value) if _NUMBER.fullmatch(str(value)):
            return 1
        case ast.UnaryOp(operand=operand):
            return _terms(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _combined(type(op), [left, right])
        case ast.BoolOp(values=values):
            return sum(map(_terms, values))
        case ast.Compare(left=left, comparators=others):
            return sum(map(_terms, [left, *others]))
        case ast.Call(func=ast.Name(id=function), args=args, keywords=keywords) if function in _FUNCTIONS:
            for keyword in keywords:
                _small(keyword.value)
            if function == "Float":  # after the number: how many digits
                _small(*args[1:])
            return _combined(function, args)
    raise ValueError(ast.dump(node))


def _combined(function: str | type[ast.operator], args: list[ast.expr]) -> int:
    if function in _POWERS:
        base, exponent = args
        power = _small(exponent)
        return min(max(int(_terms(base) ** power), power), _MOST_TERMS + 1)
    if function in ("Mul", ast.Mult):
        return min(prod(map(_terms, args)), _MOST_TERMS + 1)
    terms = sum(map(_terms, args))
    return min(terms, _MOST_TERMS + 1) if function not in ("Max", "Min") or terms <= _MOST_COMPARED else _MOST_TERMS + 1


def _small(*nodes: ast.expr) -> int:
    """The largest number in what must be small numbers.

    Raises:
        ValueError: anything else.
    """
    largest = 0
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value <= _LARGEST_EXPONENT:
            largest = max(largest, ceil(node.value))
        elif not isinstance(node, ast.UnaryOp | ast.unaryop | ast.Load | ast.Call) and not (
            isinstance(node, ast.Name) and node.id in ("Float", "Integer", "Rational")
        ):
            raise ValueError(ast.dump(node))
    return largest


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
    from graphs.capture.on_cuda import quiet_loggers

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
