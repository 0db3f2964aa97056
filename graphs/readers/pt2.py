"""Read a ``.pt2`` file (`torch.export.save`) as an `OpGraph`, without running anything the file brings.

`torch.export.load` unpickles custom objects, evaluates the text of symbolic sizes, and looks up operators by dotted
name. So the archive is inspected first, and one that would need any of that beyond plain tensors is refused.
"""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import re
import zipfile
from collections.abc import Iterator
from typing import Any

from graphs.disk import read_bytes
from graphs.errors import GraphFileError
from graphs.opgraph import OpGraph

Path = str | os.PathLike[str]

# An operator: torch.ops.aten.mm.default, _operator.getitem, math.ceil, torch.sym_max, torch._sym_sqrt; but none of
# those that make or make use of other functions.
_NAME = r"(?:(?!__)[A-Za-z_]\w*|__i?(?:and|or|xor|lshift|rshift)__)"
_OPERATOR = re.compile(
    rf"torch\.ops\.{_NAME}\.{_NAME}(\.{_NAME})?|math\.{_NAME}|torch\._?sym_\w+"
    rf"|_operator\.(?!(?:attrgetter|call|itemgetter|methodcaller)$){_NAME}"
)
# What a symbolic size may call and consist of, e.g. Mul(Integer(2), Symbol('s69', positive=True, integer=True)).
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
_ARITHMETIC = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.Name,
    ast.Load,
    ast.keyword,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
)  # fmt: skip
# The parts of an archive, below its root folder; a part of no listed kind is refused, compiled code for one.
_PROGRAM = re.compile(r"models/[^/]+\.json|serialized_exported_program\.json")
_PAYLOADS = re.compile(r"data/(weights|constants)/[^/]+_config\.json")
_TENSORS = re.compile(
    r"data/(weights|constants|sample_inputs)/[^/]+\.pt|serialized_(state_dict|constants|example_inputs)\.pt"
)
_PASSIVE = re.compile(
    r"data/(weights/weight|constants/tensor)_\d+|extra(_files)?/.*|archive_format|archive_version|byteorder|version"
    r"|\.data/(version|serialization_id)|\.format_version|\.storage_alignment"
)


def read_pt2(path: Path) -> OpGraph:
    """Read an exported program; its weights pass through memory, because `torch.export.load` offers no way round.

    Raises:
        GraphFileError: not an exported program, damaged, from a version of PyTorch this one cannot read, or holding
            pickled objects other than plain tensors.
        CaptureError: as `graphs.capture.from_exported_program`.
    """
    where = os.fspath(path)
    if not read_bytes(path, 4).startswith(b"PK"):
        raise GraphFileError(
            f"{where} is not an exported program: it is no zip archive; save one by torch.export.save."
        )
    try:
        with zipfile.ZipFile(path) as archive:
            _inspect(archive, where)
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError) as error:
        raise GraphFileError(f"{where} is truncated or not a .pt2 archive: {error}; save it again.") from None
    program = _load(where)
    from graphs.capture import from_exported_program

    return from_exported_program(program, name=os.path.splitext(os.path.basename(where))[0])


def _load(where: str) -> Any:
    import torch

    log = logging.getLogger("torch.export")
    level = log.level
    log.setLevel(logging.ERROR)  # what torch would warn about is in the error below
    try:
        return torch.export.load(where)
    except Exception as error:  # torch raises whatever its schema checks happen to hit
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise GraphFileError(
            f"{where} cannot be read by PyTorch {torch.__version__}: {reason}; export it again with this version."
        ) from None
    finally:
        log.setLevel(level)


# -- what is in the archive -----------------------------------------------------------------------------------


def _inspect(archive: zipfile.ZipFile, where: str) -> None:
    """Refuse an archive whose loading would do more than build tensors and a graph."""
    members = archive.namelist()
    parts = dict(zip(members, _below_root(members), strict=True))
    if len(parts) < len(members):
        raise _refusal(where, "two of its parts have one name")
    for member, part in parts.items():
        if _PROGRAM.fullmatch(part):
            _inspect_program(_json(archive, member, where), where)
        elif _PAYLOADS.fullmatch(part):
            _inspect_payloads(_json(archive, member, where), part, where)
        elif _TENSORS.fullmatch(part):
            _inspect_tensors(archive.read(member), part, where)
        elif not _PASSIVE.fullmatch(part):
            raise _refusal(where, f"it has a part {part!r}, which is neither a graph nor plain tensors")
    programs = sum(_PROGRAM.fullmatch(part) is not None for part in parts.values())
    if programs != 1:
        raise GraphFileError(f"{where} holds {programs} exported programs; expected 1, saved by torch.export.save.")


def _below_root(members: list[str]) -> list[str]:
    """Names without the archive's one root folder, which files of older versions lack."""
    root = members[0].partition("/")[0] + "/" if members else ""
    return [member.removeprefix(root) for member in members] if all(m.startswith(root) for m in members) else members


def _json(archive: zipfile.ZipFile, member: str, where: str) -> Any:
    try:
        return json.loads(archive.read(member))
    except (ValueError, RecursionError):
        raise GraphFileError(f"{where} is damaged: its part {member} is not JSON; save it again.") from None


def _inspect_payloads(config: Any, member: str, where: str) -> None:
    entries = config.get("config") if isinstance(config, dict) else None
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        plain = isinstance(entry, dict) and not entry.get("use_pickle")
        if not plain or not str(entry.get("path_name")).startswith(("weight_", "tensor_")):
            raise _refusal(where, f"{name!r} in {member} is a pickled object")


def _inspect_tensors(data: bytes, member: str, where: str) -> None:
    """Sample inputs, and weights of older files: torch tries its restricted unpickler first, which must succeed."""
    import torch

    if not data:
        return
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="meta")
    except Exception:  # the restricted unpickler raises many classes
        raise _refusal(where, f"{member} holds pickled objects that are not plain tensors") from None


def _inspect_program(program: Any, where: str) -> None:
    for key, value in _strings(program):
        if key == "target" and not _OPERATOR.fullmatch(value):
            raise _refusal(where, f"it calls {value[:80]!r}, which is not an operator")
        if key == "expr_str" and not _is_harmless(value):
            raise _refusal(where, f"it has a size {value[:80]!r}, which is not arithmetic")


def _is_harmless(expression: str) -> bool:
    """Whether a symbolic size is arithmetic on names and numbers, so that evaluating its text is safe."""
    try:
        nodes = list(ast.walk(ast.parse(expression.strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(
        isinstance(node, _ARITHMETIC)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS)
        or (isinstance(node, ast.Constant) and re.fullmatch(r"[\w.+-]+", str(node.value)) is not None)
        for node in nodes
    )


def _strings(value: Any) -> Iterator[tuple[str, str]]:
    """Every string in a JSON value with the key it stands under."""
    stack: list[tuple[str, Any]] = [("", value)]
    while stack:
        key, item = stack.pop()
        if isinstance(item, str):
            yield key, item
        elif isinstance(item, dict):
            stack.extend(item.items())
        elif isinstance(item, list):
            stack.extend((key, inner) for inner in item)


def _refusal(where: str, what: str) -> GraphFileError:
    return GraphFileError(
        f"{where} is refused: {what}, and loading it would run code from the file; capture the model in Python instead."
    )
