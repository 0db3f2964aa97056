"""`printed`: functions of the torch runner, with all that they use, as the text of a module of its own."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from placement.exporters.scripts.specialised import Text, named, specialised
from placement.runtime.setups.facts import Facts

_ROOM = "placement.runtime.torch_runner"


@dataclass
class Printed:
    """Text of functions and classes, what they import, and the constants that they read.

    Attributes:
        definitions: in order, each after those that it uses.
        imports: module -> names; "" for those that are imported whole.
        constants: names of fields of a `Setup`.
    """

    definitions: dict[str, str] = field(default_factory=dict)
    imports: dict[str, set[str]] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)

    def needs(self, name: str, module: str = "") -> None:
        """Note an import."""
        self.imports.setdefault(module, set()).add(name)


def printed(entries: Iterable[tuple[str, str]], setup: Any) -> Printed:
    """Text of some functions of the torch runner for one setup.

    Args:
        entries: ``(file, function)``, such as ``("parallel", "parallelize")``.
    """
    found = Printed()
    for file, name in entries:
        _print(found, f"{_ROOM}.{file}", name, setup)
    return found


def print_used(found: Printed, text: str, file: str, setup: Any) -> None:
    """Print what a text uses that a file of the torch runner defines or imports."""
    source = _source(f"{_ROOM}.{file}")
    for name in sorted(_free_names(text)):
        _use(found, f"{_ROOM}.{file}", source, name, setup)


@dataclass(frozen=True)
class _Source:
    """A file of the room.

    Attributes:
        definitions: name -> text of a function, class or assignment.
        imports: name -> (module, name in it); module "" for a whole one.
    """

    definitions: dict[str, str]
    imports: dict[str, tuple[str, str]]


@cache
def _source(module: str) -> _Source:
    path = importlib.import_module(module).__file__
    assert path is not None
    text = Text(Path(path).read_text(encoding="utf-8"))
    definitions: dict[str, str] = {}
    imports: dict[str, tuple[str, str]] = {}
    for node in text.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            definitions[node.name] = text.lines(first, node.end_lineno or 0)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                definitions[target.id] = text.lines(node.lineno, node.end_lineno or 0)
        elif isinstance(node, ast.Import):
            imports.update({(one.asname or one.name).partition(".")[0]: ("", _whole(one)) for one in node.names})
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports.update({one.asname or one.name: (node.module, one.name) for one in node.names})
    return _Source(definitions, imports)


def _whole(one: ast.alias) -> str:
    return f"{one.name} as {one.asname}" if one.asname else one.name


def _print(found: Printed, module: str, name: str, setup: Any) -> None:
    if name in found.definitions:
        return
    source = _source(module)
    result = named(specialised(source.definitions[name], setup))
    found.constants |= result.constants
    found.definitions[name] = ""  # it may use itself
    for used in sorted(_free_names(result.source)):
        _use(found, module, source, used, setup)
    del found.definitions[name]  # so that it stands behind what it uses
    found.definitions[name] = result.source


def _use(found: Printed, module: str, source: _Source, name: str, setup: Any) -> None:
    if name in source.definitions:
        _print(found, module, name, setup)
    elif name in source.imports:
        origin, original = source.imports[name]
        if origin.startswith(_ROOM):
            _print(found, origin, original, setup)
        else:
            found.needs(original, origin)


def _free_names(source: str) -> Collection[str]:
    """Names that a text reads, annotations among them."""
    tree = ast.parse(source)
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(dir(builtins))


_WIDTH = 120
_OWN = {  # of what stands in every script
    **{"inspect": "", "os": "", "time": "", "Any": "typing", "torch": "", "nn": "torch"},
    **{"DeviceMesh": "torch.distributed.device_mesh", "init_device_mesh": "torch.distributed.device_mesh"},
}
_OF_PIECES = {"math": "", "functools": "", "json": "", "Path": "pathlib", "transformers": ""}


def import_lines(facts: Facts, found: Printed, body: str) -> str:
    """All lines, sorted as isort does.

    Args:
        body: of the script, which says what is needed beside what functions of the torch runner import.
    """
    for name, module in _OWN.items():
        found.needs(name, module)
    found.needs("torch.distributed as dist")
    for name, module in _OF_PIECES.items():
        if re.search(rf"\b{name}\b[.(]", body):
            found.needs(name, module)
    plain = sorted(found.imports.pop("", set()))
    lines = ["from __future__ import annotations"]
    for is_own in (True, False):
        whole = [f"import {name}" for name in plain if _is_standard(name) is is_own]
        some = [
            _from(module, names) for module, names in sorted(found.imports.items()) if _is_standard(module) is is_own
        ]
        lines += ["", *whole, *some]
    if facts.source is not None and not facts.of_configuration:
        file, _, function = facts.source.partition("(")[0].rpartition(":")
        lines += ["", f"from {Path(file).stem} import {function}" + ("" if function == "make" else " as make")]
    return "\n".join(lines)


def _is_standard(module: str) -> bool:
    return module.split()[0].partition(".")[0] in sys.stdlib_module_names


def _from(module: str, names: set[str]) -> str:
    def kind(name: str) -> tuple[int, str]:
        return (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2, name)

    listed = sorted(names, key=kind)
    line = f"from {module} import {', '.join(listed)}"
    return line if len(line) <= _WIDTH else "\n".join([f"from {module} import (", *(f"    {n}," for n in listed), ")"])
