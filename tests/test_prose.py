"""Docstrings, comments and help texts name what they are about: no sentence begins with what, who, which or of.

A sentence that begins so has neither a subject nor a verb to tell its reader what is described. Questions are written
with whether, and counts with how many.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from source_tree import LAYERS, ROOT, modules

WORDS = "Whatever|Whoever|Whom|Whose|What(?!-if)|Who|Which|Of"  # a comparison is called "What-if"
BEGINS = re.compile(rf"(?:^|(?<=[.!?:]\s)|(?<=[.!?][\"'`)]\s))(?:{WORDS})\b")
COMMENT = re.compile(rf"(?:^|\s)#\s(?:{WORDS})\b.*")
EMPTY = re.compile(r"\b(?:(?<!not )at all|by now|best of all)\b")
# Folders and files whose texts are still to be put so. The list may shrink, and not grow.
NOT_YET: tuple[str, ...] = ()


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


def comments(path: Path) -> Iterator[re.Match[str]]:
    """Comments of a file that begin with one of the words."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return (found for line in lines if (found := COMMENT.search(line)))


def files(top: str) -> Iterator[tuple[str, Path]]:
    for path in modules().values():
        name = str(path.relative_to(ROOT))
        if name.startswith(f"{top}/") and not name.startswith(NOT_YET):
            yield name, path


def texts(top: str) -> Iterator[tuple[str, str]]:
    return ((name, text) for name, path in files(top) for text in sentences(path))


@pytest.mark.parametrize("top", LAYERS)
def test_no_sentence_of_a_docstring_or_a_help_text_begins_with_what_who_which_or_of(top: str) -> None:
    wrong = [f"{name}: {text[found.start() :][:60]}" for name, text in texts(top) for found in BEGINS.finditer(text)]
    assert wrong == []


@pytest.mark.parametrize("top", LAYERS)
def test_no_comment_begins_so(top: str) -> None:
    assert [f"{name}: {found[0]}" for name, path in files(top) for found in comments(path)] == []


@pytest.mark.parametrize("top", LAYERS)
def test_no_docstring_or_help_text_has_words_that_say_nothing(top: str) -> None:
    wrong = [f"{name}: {found[0]}: {text[:60]}" for name, text in texts(top) for found in EMPTY.finditer(text)]
    assert wrong == []


def test_rooms_that_are_still_to_be_written_again_need_it() -> None:
    names = {str(path.relative_to(ROOT)): path for path in modules().values()}
    for part in NOT_YET:
        said = (text for name, path in names.items() if name.startswith(part) for text in sentences(path))
        assert any(BEGINS.search(text) or EMPTY.search(text) for text in said), part


@pytest.mark.parametrize("text", ["What it does.", "Ops. Of each the name.", "Ops (n). Which of them run.", "Who?"])
def test_sentences_that_begin_so_are_found(text: str) -> None:
    assert BEGINS.search(text)


@pytest.mark.parametrize("text", ["The tensor of each op.", "Whether it fits.", "What-if comparison.", "Say of what."])
def test_other_sentences_are_left_alone(text: str) -> None:
    assert not BEGINS.search(text)
