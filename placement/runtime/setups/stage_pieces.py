"""Stages that begin inside a module: what each of them computes of it, as a function in its forward pass's place."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

from torch import fx, nn

from graphs.module_paths import prefixes
from graphs.opgraph import OpGraph
from placement.runtime.setups.code_text import plain, quoted
from placement.runtime.setups.module_tree import is_under
from placement.runtime.setups.node_text import NoText, is_statement, lines_of, nodes_in
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
    """Whether what crosses a border inside a call is read there, or is what the call returns."""
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
