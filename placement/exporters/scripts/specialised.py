"""Source of the torch runner for one `Setup`: what its constants decide is decided, and constants have names.

    def run(model, setup):                                  def run(model):
        if setup.zero == 1:         of a setup with zero 3      return model.step(BATCH)
            return one(model)       ----------------------->
        return model.step(setup.batch)

Text is cut by the places of nodes in it, so that comments and line breaks stay as they were written.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

_NAME = "setup"
_KNOWN = {name: getattr(builtins, name) for name in ("len", "any", "all", "bool", "max", "min", "set")}
_Block = list[ast.stmt]


class Text:
    """Source that is cut by places of its nodes."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tree = ast.parse(source)
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: Any) -> tuple[int, int]:
        """Where a node begins and ends, in characters."""
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        within = self._lines[line - 1].encode()[:column].decode()  # columns are of bytes
        return self._starts[line - 1] + len(within)

    def line_start(self, line: int) -> int:
        return self._starts[line - 1]

    def of(self, node: Any) -> str:
        low, high = self.span(node)
        return self.source[low:high]

    def lines(self, first: int, last: int) -> str:
        return "".join(self._lines[first - 1 : last])

    def with_lines(self, first: int, last: int, new: str) -> str:
        return self.source[: self._starts[first - 1]] + new + self.source[self._starts[last] :]

    def with_node(self, node: Any, new: str) -> str:
        low, high = self.span(node)
        return self.source[:low] + new + self.source[high:]


def specialised(source: str, setup: Any) -> str:
    """A function or class without what the constants of a setup decide; the constants are still ``setup.name``."""
    while True:
        text = Text(source)
        changed = next(_reductions(text, setup), None)
        if changed is None:
            return source
        source = changed


@dataclass(frozen=True)
class Named:
    """Source in which constants have names of their own.

    Attributes:
        source: without ``setup``.
        constants: names of the fields that it reads.
    """

    source: str
    constants: frozenset[str]


def named(source: str) -> Named:
    """Source with ``NAME`` for ``setup.name``, and without the parameter."""
    constants = set()
    while True:
        text = Text(source)
        field = next((node for node in ast.walk(text.tree) if _is_field(node)), None)
        if isinstance(field, ast.Attribute):
            constants.add(field.attr)
            source = text.with_node(field, field.attr.upper())
            continue
        changed = next(_without_parameter(text), None)
        if changed is None:
            return Named(source, frozenset(constants))
        source = changed


# -- what constants decide -----------------------------------------------------------------------------------------


def _reductions(text: Text, setup: Any) -> Iterator[str]:
    """The text after the first change that the constants allow."""
    value = partial(_value, setup=setup)
    for node in ast.walk(text.tree):
        for block in _blocks(node):
            ends = [n for n, one in enumerate(block[:-1]) if isinstance(one, (ast.Return, ast.Raise))]
            if ends:  # what stands behind is never run
                yield text.with_lines(block[ends[0] + 1].lineno, block[-1].end_lineno or 0, "")
        if isinstance(node, ast.If) and (found := value(node.test)) is not None:
            yield _decided(text, node, bool(found[0]))
        elif isinstance(node, ast.IfExp) and (found := value(node.test)) is not None:
            yield text.with_node(node, text.of(node.body if found[0] else node.orelse))
        elif isinstance(node, ast.BoolOp) and value(node) is None:
            yield from _shorter(text, node, value)
        elif isinstance(node, ast.With) and _does_nothing(text, node):
            yield text.with_lines(node.lineno, node.end_lineno or 0, _moved(text, node.body, node.lineno, node))


def _blocks(node: ast.AST) -> list[_Block]:
    found = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
    return [block for block in found if isinstance(block, list) and block and isinstance(block[0], ast.stmt)]


def _value(node: ast.expr, setup: Any) -> tuple[Any] | None:
    """The value of an expression of constants alone, in a tuple; None for any other."""
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    fields = [one for one in ast.walk(node) if _is_field(one)]
    if isinstance(node, ast.Constant):
        return (node.value,)
    if not fields or not names <= {_NAME, "self", *_KNOWN}:
        return None
    owners = sum(isinstance(one, ast.Name) and one.id in (_NAME, "self") for one in ast.walk(node))
    if owners != len(fields):
        return None  # self is read for something else
    space = {**_KNOWN, _NAME: setup, "self": SimpleNamespace(setup=setup), "__builtins__": {}}
    return (eval(compile(ast.Expression(node), "setup", "eval"), space),)


def _is_field(node: ast.AST) -> bool:
    """True if it is ``setup.name`` or ``self.setup.name``."""
    return isinstance(node, ast.Attribute) and _is_setup(node.value)


def _is_setup(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == _NAME and isinstance(node.value, ast.Name) and node.value.id == "self"
    return isinstance(node, ast.Name) and node.id == _NAME


def _decided(text: Text, node: ast.If, taken: bool) -> str:
    """The text with one branch of an ``if`` in its place."""
    last = node.end_lineno or 0
    if taken:
        return text.with_lines(node.lineno, last, _moved(text, node.body, node.test.end_lineno or 0, node))
    if not node.orelse:
        return text.with_lines(node.lineno, last, "")
    first = node.orelse[0]
    if isinstance(first, ast.If) and text.of(first).startswith("elif"):
        low, high = text.line_start(first.lineno), text.span(first)[1]
        return text.with_lines(node.lineno, last, text.source[low:high].replace("elif", "if", 1) + "\n")
    return text.with_lines(node.lineno, last, _moved(text, node.orelse, node.body[-1].end_lineno or 0, node, 1))


def _moved(text: Text, block: _Block, after: int, outer: ast.stmt, skipped: int = 0) -> str:
    """A block, with the comments before it, where the statement around it stood."""
    first = after + 1 + skipped
    body = text.lines(first, block[-1].end_lineno or 0)
    shift = block[0].col_offset - outer.col_offset
    return "".join(line[shift:] if line[:shift].isspace() else line for line in body.splitlines(keepends=True))


def _shorter(text: Text, node: ast.BoolOp, value: Callable[[ast.expr], tuple[Any] | None]) -> Iterator[str]:
    """A chain of ``and`` or ``or`` without the values that are known."""
    stops = isinstance(node.op, ast.Or)
    kept = []
    for one in node.values:
        found = value(one)
        if found is None:
            kept.append(text.of(one))
        elif bool(found[0]) is stops:
            yield text.with_node(node, repr(stops))
            return
    if len(kept) < len(node.values):
        yield text.with_node(node, (" or " if stops else " and ").join(kept))


def _does_nothing(text: Text, node: ast.With) -> bool:
    """True if it enters ``nullcontext()`` alone, or a stack that its body does not use."""
    if len(node.items) != 1:
        return False
    entered, name = text.of(node.items[0].context_expr), node.items[0].optional_vars
    if entered == "contextlib.nullcontext()":
        return True
    used = {one.id for part in node.body for one in ast.walk(part) if isinstance(one, ast.Name)}
    return entered == "contextlib.ExitStack()" and isinstance(name, ast.Name) and name.id not in used


# -- names of constants --------------------------------------------------------------------------------------------


def _without_parameter(text: Text) -> Iterator[str]:
    """The text after ``setup`` is taken out of a list of parameters, a call, or an assignment to ``self``."""
    for node in ast.walk(text.tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and _is_setup(node.targets[0]):
            yield text.with_lines(node.lineno, node.end_lineno or 0, "")
        elif isinstance(node, ast.FunctionDef):
            own = [*node.args.posonlyargs, *node.args.args]
            yield from _left_out(text, own, [arg.arg == _NAME for arg in own])
        elif isinstance(node, ast.Call):
            given = [*node.args, *node.keywords]
            yield from _left_out(
                text, given, [_is_setup(getattr(one, "value", one)) or _is_setup(one) for one in given]
            )


def _left_out(text: Text, items: list[Any], is_out: list[bool]) -> Iterator[str]:
    """The text without one of several items between commas."""
    if True not in is_out:
        return
    number = is_out.index(True)
    low, high = text.span(items[number])
    if number:
        low = text.span(items[number - 1])[1]
    elif len(items) > 1:
        high = text.span(items[1])[0]
    yield text.source[:low] + text.source[high:]
