"""Nodes of torch.fx as lines of Python, as a person would write them."""

from __future__ import annotations

import builtins
import keyword
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from placement.runtime.setups.code_text import quoted
from placement.runtime.setups.module_tree import is_under

_WIDTH = 100  # characters of a line that takes in what another one computes
_INFIX = {
    **{operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//"},
    **{operator.mod: "%", operator.pow: "**", operator.matmul: "@", operator.eq: "==", operator.ne: "!="},
    **{operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.and_: "&"},
    operator.or_: "|",
}


class NoText(Exception):
    """A node that has no words in a script of torch alone; says which."""


def lines_of(path: str, nodes: Sequence[fx.Node], names: Mapping[fx.Node, str], result: Any) -> list[str]:
    """The lines of a function of a module, ``self``, that computes nodes and returns a result.

    Args:
        path: of the module; ``""`` for the model.
        nodes: in order, each after those that it reads, or which `names` has.
        names: of the function's arguments, as code.
        result: nodes, in tuples, lists and dicts.

    Raises:
        NoText: a function that is not one of torch's, or an argument that is no plain value.
    """
    return _Writer(path, nodes, names, result).lines


class _Writer:
    """The text of some nodes; what is read once goes where it is read, if the line is short."""

    def __init__(self, path: str, nodes: Sequence[fx.Node], names: Mapping[fx.Node, str], result: Any) -> None:
        self.path = path
        self.code = {node: (name, False) for node, name in names.items()}  # and whether it is an infix expression
        self.taken = {name.partition("[")[0] for name in names.values()} | {"self", "torch", "nn", "received"}
        self.lines: list[str] = []
        uses: dict[fx.Node, int] = {}
        for node in nodes:
            for read in nodes_in((node.args, node.kwargs)):
                uses[read] = uses.get(read, 0) + 1
        for read in nodes_in(result):
            uses[read] = uses.get(read, 0) + 1
        changes = any(is_statement(node) for node in nodes)
        for node in nodes:
            if node not in uses and not is_statement(node):
                continue
            text, is_infix = self._expression(node)
            if is_statement(node):
                self.lines.append(text)
                self.code[node] = self.code.get(node, (text, is_infix))
                continue
            is_short = len(text) < _WIDTH // 2
            if uses[node] == 1 and is_short and not changes:
                self.code[node] = (text, is_infix)
            else:
                name = self._new_name(node)
                self.lines.append(f"{name} = {text}")
                self.code[node] = (name, False)
        self.lines.append(f"return {self._text(result)}")

    def _new_name(self, node: fx.Node) -> str:
        last = str(node.target).rpartition(".")[2] if node.op == "call_module" else node.name
        if node.target is builtins.getattr:
            last = str(node.args[1])
        elif node.target is operator.getitem and isinstance(node.args[1], int):
            last = f"{self._text(node.args[0])}_{node.args[1]}"
        name = last if _is_word(last) else node.name
        while name in self.taken:
            name = node.name if name != node.name and node.name not in self.taken else f"{name}_"
        self.taken.add(name)
        return name

    def _expression(self, node: fx.Node) -> tuple[str, bool]:
        args = list(node.args)
        if node.op == "get_attr":
            return path_text(str(node.target), self.path), False
        if node.op == "call_module":
            return f"{path_text(str(node.target), self.path)}({self._arguments(args, node.kwargs)})", False
        if node.op == "call_method":
            return f"{self._atom(args[0])}.{node.target}({self._arguments(args[1:], node.kwargs)})", False
        target: Any = node.target
        if target in _INFIX:
            return f"{self._atom(args[0])} {_INFIX[target]} {self._atom(args[1])}", True
        if target is operator.neg:
            return f"-{self._atom(args[0])}", True
        if target is operator.getitem:
            return f"{self._atom(args[0])}[{self._index(args[1])}]", False
        if target is operator.setitem:
            return f"{self._atom(args[0])}[{self._index(args[1])}] = {self._text(args[2])}", False
        if target is builtins.getattr:
            return f"{self._atom(args[0])}.{args[1]}", False
        return f"{_function_text(target)}({self._arguments(args, node.kwargs)})", False

    def _atom(self, value: Any) -> str:
        """A value as an operand."""
        if isinstance(value, fx.Node):
            text, is_infix = self.code[value]
            return f"({text})" if is_infix else text
        text = self._text(value)
        return f"({text})" if text.startswith("-") else text

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        given = [*map(self._text, args), *(f"{name}={self._text(value)}" for name, value in kwargs.items())]
        return ", ".join(given)

    def _index(self, value: Any) -> str:
        if isinstance(value, tuple):
            return ", ".join(map(self._index, value)) + ("," if len(value) == 1 else "")
        if isinstance(value, slice):
            start, stop = ("" if end is None else self._text(end) for end in (value.start, value.stop))
            return f"{start}:{stop}" + ("" if value.step is None else f":{self._text(value.step)}")
        return self._text(value)

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.code[value][0]
        if isinstance(value, list | tuple):
            inner = ", ".join(map(self._text, value))
            if isinstance(value, list):
                return f"[{inner}]"
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self._text(key)}: {self._text(inner)}" for key, inner in value.items()) + "}"
        if isinstance(value, str):
            return quoted(value)
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is Ellipsis:
            return "..."
        if value is None or isinstance(value, bool | int | float):
            return repr(value)
        if isinstance(value, torch.dtype | torch.memory_format):
            return str(value)
        raise NoText(f"{type(value).__name__} {value!r:.40}")


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes in a value, as often as they are there."""
    if isinstance(value, fx.Node):
        return [value]
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [node for one in inner for node in nodes_in(one)]


def is_statement(node: fx.Node) -> bool:
    """Whether a node changes a tensor."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and (node.target is operator.setitem or (name.endswith("_") and name[0] != "_"))


def _is_word(text: str) -> bool:
    return text.isidentifier() and text.isascii() and not keyword.iskeyword(text)


def path_text(path: str, around: str) -> str:
    """The code for a module, parameter or buffer of ``self``, the module around it, by its path."""
    if not is_under(path, around):
        raise NoText(f"attribute {path!r:.40} of another module")
    parts = path.split(".")[around.count(".") + 1 if around else 0 :]
    if not all(_is_word(part) or part.isdecimal() for part in parts) or "_tensor_constant" in path:
        raise NoText(f"attribute {path!r:.40}")
    return "self" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)


def _function_text(target: Any) -> str:
    for module, words in ((functional, "nn.functional"), (torch, "torch"), (math, "math")):
        name = getattr(target, "__name__", "")
        if getattr(module, name, None) is target:
            return f"{words}.{name}"
        found = next((key for key, value in vars(module).items() if value is target and key[0] != "_"), None)
        if found is not None:
            return f"{words}.{found}"
    raise NoText(f"function {target!r:.60}")
