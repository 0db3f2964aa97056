"""Limits that keep the house readable: rooms, functions, names, and comments where code is densest."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import LAYERS, ROOT, modules

# Decorators of `env.jit`.
COMPILERS = {"entry", "parallel_entry", "allocating", "inner", "entry_without_arrays", "inlined"}
MOST_FILES, MOST_PARAMETERS, LEAST_COMMENTS = 20, 8, 0.08
# The public verbs: what a user may set stands in their signature, and typer reads the options of a command from it.
VERBS = ("placement/cli/", "placement/comparing/", "placement/optimization.py")
PUBLIC_VERBS = {
    "capture",
    "capture_program",
    "compare",
    "fit",
    "optimize",
    "profile",
    "suite",
    "what_if",
    "train",
    "__init__",
}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in modules().values():
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def kernels() -> list[Path]:
    """Files of compiled code."""
    return [path for path in modules().values() if _is_compiled(path)]


def _is_compiled(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = (
        decorator.func if isinstance(decorator, ast.Call) else decorator
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
    )
    return any(isinstance(name, ast.Name) and name.id in COMPILERS for name in names)


def test_no_room_holds_more_than_a_reader_can_take_in() -> None:
    rooms = Counter(path.parent for top in (*LAYERS, "tests") for path in (ROOT / top).rglob("*.py"))
    assert {str(room.relative_to(ROOT)): n for room, n in rooms.items() if n > MOST_FILES} == {}


def test_every_room_says_what_it_is_for() -> None:
    rooms = [path for path in modules().values() if path.name == "__init__.py"]
    assert [str(path) for path in rooms if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))] == []


def test_functions_take_few_parameters() -> None:
    kernel_files = {str(path.relative_to(ROOT)) for path in kernels()}
    wrong = []
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and name not in kernel_files:
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len(arguments) - (bool(arguments) and arguments[0].arg in ("self", "cls"))
                is_torch_s = name.endswith("torch_runner/module_parallel.py") and node.name == "_forward"
                if count > MOST_PARAMETERS and not (node.name in PUBLIC_VERBS or name.startswith(VERBS) or is_torch_s):
                    wrong.append(f"{name}: {node.name} takes {count}")
    assert wrong == []


def test_no_two_public_classes_share_a_name() -> None:
    homes = defaultdict(list)
    for name, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


@pytest.mark.parametrize("path", kernels(), ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_explain_themselves(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    comments = sum(t.type == tokenize.COMMENT for t in tokenize.generate_tokens(io.StringIO(source).readline))
    assert comments >= LEAST_COMMENTS * sum(bool(line.strip()) for line in source.splitlines())
