"""Stages that begin inside a module: what each of them computes of it, as a function in its forward pass's place."""

from __future__ import annotations

import builtins
import json
import keyword
import math
import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from graphs.formatting import show
from graphs.module_paths import prefixes
from graphs.opgraph import OpGraph
from placement.runtime.setups.module_tree import is_under
from placement.runtime.setups.stage_modules import Pieces
from placement.runtime.setups.stage_trace import ModelTrace, ModuleCall, borders, traced

_WIDTH = 116  # characters of the head of a function


def pieces_of(
    model: nn.Module,
    graph: OpGraph,
    forward: Sequence[int],
    places: Sequence[int],
    inside: Sequence[int],
    opened: Collection[str],
    of_model: bool,
) -> tuple[Pieces, list[int]] | None:
    """The pieces of modules that some stages begin in, and the stage of each op by them.

    None where torch.fx does not follow the model's own code.

    Args:
        forward: ops of the forward pass that compute, in order.
        places: in these, of the first op of each stage but the first one.
        inside: numbers of the stages that begin inside a module.
        opened: modules with ops in several stages.
        of_model: whether the model's own forward pass is to be in pieces, not that of modules inside alone.
    """
    trace = traced(model, opened, graph)
    found = None if trace is None else borders(trace, graph, forward, places)
    if trace is None or found is None:
        return None
    positions, stage_of = found
    begins: dict[int, str] = {}
    functions: dict[int, dict[str, str]] = {}
    texts: dict[str, str] = {}
    try:
        for call in [trace.calls[""]] if of_model else _cut_calls(trace, positions, inside):
            stages = [number for number, position in enumerate(positions, 1) if call.first <= position < call.end]
            begins.update(dict.fromkeys(stages, call.path))
            for stage, name, text in _pieces(model, trace, call, positions, stages):
                if name in texts:
                    raise NoText(f"two modules that both give {name}")
                functions.setdefault(stage, {})[call.path] = name
                texts[name] = text
    except NoText:
        return None
    return Pieces(begins, functions, texts), stage_of


def several_returned(model: nn.Module, paths: Collection[str], graph: OpGraph) -> dict[str, str]:
    """Functions, as code, from the tensor that goes on to all that a module returns, of modules that return more.

    Modules whose code torch.fx does not follow are taken to return one tensor.

    Args:
        paths: of the modules; others are not looked at.
        graph: of the model.
    """
    modules = {path: model.get_submodule(path) for path in paths}
    pairs = [path for path, module in modules.items() if isinstance(module, nn.RNNBase | nn.MultiheadAttention)]
    found: dict[str, Any] = dict.fromkeys(pairs, ("output", None))
    own = [path for path, module in modules.items() if not type(module).__module__.startswith("torch.nn.")]
    trace = traced(model, {"", *(outer for path in own for outer in prefixes(path))}, graph) if own else None
    if trace is not None:
        results = {path: trace.calls[path].result for path in own if path in trace.calls}
        found.update({path: result for path, result in results.items() if not isinstance(result, fx.Node)})
    return {path: f"lambda received: {_stood_for(result)}" for path, result in found.items()}


def _stood_for(result: Any) -> str:
    """Code that gives one tensor for each one in what a module returns."""
    if isinstance(result, tuple):
        return f"({', '.join(map(_stood_for, result))}{',' * (len(result) == 1)})"
    if isinstance(result, dict):
        return "{" + ", ".join(f"{quoted(str(key))}: {_stood_for(value)}" for key, value in result.items()) + "}"
    return repr(result) if result is None or isinstance(result, bool | int | float) else "received"


def _cut_calls(trace: ModelTrace, positions: Sequence[int], inside: Sequence[int]) -> list[ModuleCall]:
    """The smallest calls, none of them inside another, in which all that crosses a border is read."""
    calls = sorted(trace.calls.values(), key=lambda call: call.end - call.first)
    chosen: dict[str, ModuleCall] = {}
    todo = [positions[number - 1] for number in inside]
    while todo:
        position = todo.pop()
        call = next(
            call
            for call in calls
            if call.first <= position < call.end
            and all(_is_closed(trace, call, other) for other in positions if call.first <= other < call.end)
        )
        chosen[call.path] = call
    return [
        call
        for call in chosen.values()
        if not any(other is not call and is_under(call.path, other.path) for other in chosen.values())
    ]


def _crossing(trace: ModelTrace, call: ModuleCall, position: int) -> list[fx.Node]:
    """Nodes before one that are read from it on, in the order in which they are computed."""
    arguments = nodes_in(trace.calls[""].arguments)
    return [
        node
        for node in (*arguments, *trace.nodes[:position])
        if not trace.is_everywhere(node) and max(trace.users(node), default=-1) >= position
    ]


def _is_closed(trace: ModelTrace, call: ModuleCall, position: int) -> bool:
    """True if what crosses a border inside a call is read there, or is what the call returns."""
    if call.path and not call.is_positional:
        return False
    returned = set(nodes_in(call.result))
    return all(
        max(trace.users(node)) < call.end or (node in returned and trace.numbers.get(node, -1) >= call.first)
        for node in _crossing(trace, call, position)
    )


def _pieces(
    model: nn.Module, trace: ModelTrace, call: ModuleCall, positions: Sequence[int], stages: Sequence[int]
) -> Iterator[tuple[int, str, str]]:
    """``(stage, name, code)`` of each piece of a call.

    Raises:
        NoText: something that a script has no words for, or that a stage would have to be sent without a gradient.
    """
    starts = [(number, positions[number - 1]) for number in stages]
    if starts[0][1] > call.first:
        starts.insert(0, (starts[0][0] - 1, call.first))
    for (stage, first), (_, end) in zip(starts, [*starts[1:], (-1, call.end)], strict=True):
        received = _crossing(trace, call, first) if stage in stages else None
        sent = _crossing(trace, call, end) if end < call.end else None
        result = call.result if sent is None else sent[0] if len(sent) == 1 else tuple(sent)
        parameters = _parameters(model.get_submodule(call.path))
        names = _argument_names(trace, call, received is not None)
        lines = []
        if received is not None:
            parameters = ["received: Any", *(parameters[1:] if call.path else parameters)]
            names.update({node: "received" if len(received) == 1 else node.name for node in received})
            if len(received) > 1:
                lines.append(f"{', '.join(names[node] for node in received)} = received")
        nodes = _needed(trace, call, first, end, names, nodes_in(result))
        lines += lines_of(call.path, nodes, names, result)
        name = f"{_identifier(call.path)}_in_stage_{stage}"
        head = f"def {name}({', '.join(['self: nn.Module', *parameters])}) -> Any:"
        if len(head) > _WIDTH:
            head = "\n".join([f"def {name}(", f"    {', '.join(['self: nn.Module', *parameters])}", ") -> Any:"])
        what = f"What stage {stage} computes of {plain(call.path) or 'the model'}."
        yield stage, name, "\n".join([head, f'    """{what}"""', *(f"    {line}" for line in lines)])


def _identifier(path: str) -> str:
    """A word for a module in names of functions."""
    word = re.sub(r"[^0-9A-Za-z]", "_", path) or "model"
    return f"module_{word}" if word[0].isdecimal() else word


def _parameters(module: nn.Module) -> list[str]:
    """The parameters of a module's forward pass, as code."""
    found = []
    for name, parameter in signature(module.forward).parameters.items():
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            raise NoText(f"parameter *{name}")
        if parameter.kind == Parameter.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        default = parameter.default
        is_plain = isinstance(default, bool | int | float) and default == default
        text = quoted(default) if isinstance(default, str) else repr(default) if is_plain else "None"
        found.append(f"{name}: Any" if default is Parameter.empty else f"{name}: Any = {text}")
    return found


def _argument_names(trace: ModelTrace, call: ModuleCall, has_received: bool) -> dict[fx.Node, str]:
    """The code for each argument of a call; of a later piece, for those that every stage computes itself."""
    codes: list[tuple[Any, str]] = []
    for name, value in call.arguments.items():
        inner = enumerate(value) if isinstance(value, tuple) else value.items() if isinstance(value, dict) else ()
        codes += [(value, name), *((one, f"{name}[{key!r}]") for key, one in inner)]
    return {
        node: code for node, code in codes if isinstance(node, fx.Node) and (not has_received or node in trace.again)
    }


def _needed(
    trace: ModelTrace, call: ModuleCall, first: int, end: int, names: Mapping[fx.Node, str], result: Sequence[fx.Node]
) -> list[fx.Node]:
    """The nodes of a piece: its own, and earlier ones that every stage computes itself.

    Raises:
        NoText: it needs another earlier one.
    """
    wanted = {node for node in result if node not in names}
    found = []
    for number in range(end - 1, call.first - 1, -1):
        node = trace.nodes[number]
        if node in wanted or (number >= first and is_statement(node)):
            if number < first and not trace.is_everywhere(node):
                break
            wanted.discard(node)
            found.append(node)
            wanted.update(read for read in node.all_input_nodes if read not in names)
    if wanted:
        raise NoText(f"{min(node.name for node in wanted)} of another stage")
    return found[::-1]


# -- nodes as text -----------------------------------------------------------------------------------------------------


_WIDEST = 100  # characters of a line that takes in what another one computes
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
            is_short = len(text) < _WIDEST // 2
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
    """True if a node changes a tensor."""
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


def plain(text: str) -> str:
    """A name in a docstring: on one line, without quotes or escapes."""
    return show(text).replace("\\", "/").replace('"', "'")


def quoted(text: str) -> str:
    """A string of Python, in ASCII."""
    return json.dumps(text, ensure_ascii=False).encode("ascii", "backslashreplace").decode()
