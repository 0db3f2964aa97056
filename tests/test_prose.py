"""Docstrings and help texts have no words that say nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from source_tree import LAYERS, ROOT, modules

EMPTY = re.compile(r"\b(?:(?<!not )at all|by now|best of all)\b")


def documented(tree: ast.Module) -> Iterator[str]:
    """Docstrings of a file, and the texts that its options show as ``help``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


@cache
def sentences(path: Path) -> list[str]:
    """Texts of a file, each on one line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [" ".join(text.split()) for text in documented(tree)]


def files(top: str) -> Iterator[tuple[str, Path]]:
    for path in modules().values():
        name = str(path.relative_to(ROOT))
        if name.startswith(f"{top}/"):
            yield name, path


def texts(top: str) -> Iterator[tuple[str, str]]:
    return ((name, text) for name, path in files(top) for text in sentences(path))


@pytest.mark.parametrize("top", LAYERS)
def test_no_docstring_or_help_text_has_words_that_say_nothing(top: str) -> None:
    wrong = [f"{name}: {found[0]}: {text[:60]}" for name, text in texts(top) for found in EMPTY.finditer(text)]
    assert wrong == []
