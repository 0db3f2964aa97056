"""The forward pass of a model as torch.fx sees it, with the modules open that borders between stages cut."""

from __future__ import annotations

import dis
import inspect
import math
import operator
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Any

from torch import fx, nn

from graphs.opgraph import OpGraph
from graphs.records import Phase
from placement.runtime.setups.module_tree import is_under

# Operators of aten whose names are not those of the functions that call them.
_CALLED = {"bmm": "matmul", "mm": "matmul", "_softmax": "softmax", "_log_softmax": "log_softmax", "addmm": "linear"}
# Functions and operators that are as many.
_COUNTED = {
    **{name: name for name in ("add", "sub", "mul", "div", "cat", "gelu", "relu", "silu", "tanh", "mean", "sum")},
    **{"truediv": "div", "stack": "cat", "softmax": "_softmax", "_softmax": "_softmax"},
}
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal")
_SIZES = ("shape", "ndim", "dtype", "device")


@dataclass(frozen=True)
class ModuleCall:
    """The call of a module, with nodes by their numbers in `ModelTrace.nodes`.

    Attributes:
        path: of the module; ``""`` for the model.
        first, end: numbers of the nodes that it runs, from the first to before the end.
        arguments: nodes, or tuples of nodes, that it is called with, by name of the parameter.
        is_positional: whether the first argument is given by position.
        result: what it returns, with nodes in it.
    """

    path: str
    first: int
    end: int
    arguments: Mapping[str, Any]
    is_positional: bool
    result: Any


@dataclass(frozen=True, eq=False)
class ModelTrace:
    """A traced model.

    Attributes:
        nodes: of the forward pass, in order; arguments of the model and what it returns are none.
        calls: of each module that was opened, its call; modules that are called more than once are not among them.
        again: nodes that need no parameter, so that every stage can compute them itself.
        sizes: nodes of numbers that tell the shapes of tensors.
    """

    nodes: tuple[fx.Node, ...]
    calls: Mapping[str, ModuleCall]
    again: frozenset[fx.Node]
    sizes: frozenset[fx.Node]

    @cached_property
    def numbers(self) -> dict[fx.Node, int]:
        """The number of each node; arguments of the model have none."""
        return {node: place for place, node in enumerate(self.nodes)}

    def is_everywhere(self, node: fx.Node) -> bool:
        """True if every stage has it by itself. A parameter is read by the stage that computes with it."""
        return node in self.again or node in self.sizes or node.op == "get_attr"

    def users(self, node: fx.Node) -> list[int]:
        """Numbers of the nodes that read one; the number behind the last for what the model returns."""
        return [self.numbers.get(user, len(self.nodes)) for user in node.users]


@dataclass(frozen=True)
class _Noted:
    """A call as the tracer came by it: numbers are those of all nodes of its graph."""

    path: str
    first: int
    end: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: Mapping[str, Any]
    result: Any


class _Tracer(fx.Tracer):
    """A tracer that notes how modules are called.

    Args:
        opened: modules whose own code is followed; None for all but those of torch.
    """

    proxy_buffer_attributes = True  # a buffer that is handed to a module is an argument like others

    def __init__(self, opened: Collection[str] | None) -> None:
        super().__init__()
        self.opened = opened
        self.found: list[_Noted] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if self.opened is None or module_qualified_name in self.opened:
            return super().is_leaf_module(m, module_qualified_name)
        return True

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        count = obj.node.args[1] if obj.node.target == "chunk" else _unpacked(inspect.currentframe())
        if isinstance(count, int):  # a loop over so many
            return iter(_parts(obj, count))
        return super().iter(obj)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        path, first = self.path_of_module(m), len(self.graph.nodes)
        result = super().call_module(m, forward, args, kwargs)
        if not self.is_leaf_module(m, path):
            given = _nodes(inspect.signature(m.forward).bind(*args, **kwargs).arguments)
            end = len(self.graph.nodes)
            self.found.append(_Noted(path, first, end, _nodes(args), _nodes(kwargs), given, _nodes(result)))
        return result


def _parts(whole: Any, count: int) -> list[Any]:
    return [whole[k] for k in range(count)]


def _unpacked(frame: FrameType | None) -> int | None:
    """How many names code is about to give the parts that a generator makes of a tensor; None where it has none."""
    for _ in range(2):  # the tracer's own frame, and that of `Proxy.__iter__`
        frame = None if frame is None else frame.f_back
    if frame is None:
        return None
    later = (one for one in dis.get_instructions(frame.f_code) if one.offset > frame.f_lasti)
    first = next((one for one in later if one.opname not in ("PRECALL", "CALL", "CACHE")), None)
    return int(first.argval) if first is not None and first.opname == "UNPACK_SEQUENCE" else None


def traced(model: nn.Module, opened: Collection[str], graph: OpGraph) -> ModelTrace | None:
    """The forward pass of a model; None where its own code does more than torch.fx follows.

    The code of all modules is followed, since what it does may depend on what they return, such as None; or, where
    that is not possible, of those alone that are to be opened.

    Args:
        opened: paths of modules of which each op is a node, not the call.
        graph: of the model, which has the same ops.
    """
    given = {graph.op_names[op] for op, kind in enumerate(graph.kinds) if kind == "input"}
    trace = _followed(model, opened, given, None)
    if trace is None:
        trace = _followed(model, opened, given, opened)
        trace = None if trace is None or not _has_same_ops(trace, graph, {*opened, ""}) else trace
    return trace


def _followed(
    model: nn.Module, opened: Collection[str], given: Collection[str], follows: Collection[str] | None
) -> ModelTrace | None:
    tracer = _Tracer(follows)
    parameters = inspect.signature(model.forward).parameters
    absent = {name: None for name, p in parameters.items() if p.default is None and name not in given}
    try:
        with _stand_ins(model):
            graph = tracer.trace(model, concrete_args=absent or None)
    except Exception:  # whatever the model's code raises on stand-ins for tensors
        return None
    every = list(graph.nodes)
    position = {node: place for place, node in enumerate(every)}
    folded = _fold([call for call in tracer.found if call.path not in opened], graph, every, position)
    if folded is None:
        return None
    nodes = tuple(node for node in graph.nodes if node.op not in ("placeholder", "output") and not _is_check(node))
    places = [position[node] for node in nodes]
    count = Counter(call.path for call in tracer.found)
    calls = {
        call.path: ModuleCall(
            call.path,
            bisect_left(places, call.first),
            bisect_left(places, call.end),
            {name: _mapped(value, folded) for name, value in call.arguments.items()},
            bool(call.args),
            _mapped(call.result, folded),
        )
        for call in tracer.found
        if call.path in opened and count[call.path] == 1
    }
    arguments = {str(node.target): node for node in every if node.op == "placeholder" and node.target not in absent}
    calls[""] = ModuleCall("", 0, len(nodes), arguments, True, every[-1].args[0])
    return ModelTrace(nodes, calls, frozenset(_again(model, graph.nodes)), frozenset(_sizes(nodes)))


def _fold(
    calls: Sequence[_Noted], graph: fx.Graph, every: Sequence[fx.Node], position: dict[fx.Node, int]
) -> dict[fx.Node, fx.Node] | None:
    """Put one node in the place of all that each of the outermost calls runs.

    Args:
        every: the nodes of the graph.
        position: of each of them; those of new nodes are added.

    Returns:
        the new node for each one that others read; None where they read more of a call than it returns.
    """
    folded: dict[fx.Node, fx.Node] = {}
    rest = len(every)
    for call in sorted(calls, key=lambda call: (-call.end, call.first)):
        own = every[call.first : call.end]
        if call.first >= rest or not own:
            continue  # inside another one, or without an op
        rest = call.first
        with graph.inserting_after(own[-1]):
            whole = graph.call_module(call.path, call.args, call.kwargs)
        returned = {None: call.result} if isinstance(call.result, fx.Node) else call.result
        listed = returned.items() if isinstance(returned, dict) else enumerate(returned)
        inside = set(own)
        position[whole] = call.end - 1
        for key, node in listed:
            if node not in inside or not any(user not in inside for user in node.users):
                continue
            folded[node] = whole
            if key is not None:
                with graph.inserting_after(whole):
                    folded[node] = graph.call_function(operator.getitem, (whole, key))
            position[folded[node]] = call.end - 1
            node.replace_all_uses_with(folded[node], delete_user_cb=lambda user, own=inside: user not in own)
        for node in reversed(own):
            if node.users:
                return None
            graph.erase_node(node)
    return folded


def _mapped(value: Any, folded: Mapping[fx.Node, fx.Node]) -> Any:
    """A value with the nodes that stand for those in it."""
    if isinstance(value, fx.Node):
        return folded.get(value, value)
    if isinstance(value, dict):
        return {key: _mapped(inner, folded) for key, inner in value.items()}
    return tuple(_mapped(inner, folded) for inner in value) if isinstance(value, tuple) else value


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Lets the code of the model's modules take ``len`` of a stand-in for a tensor, its first size, and ``zip`` it.

    A ``zip`` that is strict says how many parts there are, as many as beside it.
    """

    def length(value: Any) -> Any:
        return value.size(0) if isinstance(value, fx.Proxy) else len(value)

    def zipped(*values: Any, strict: bool = False) -> Any:
        known = [value for value in values if not isinstance(value, fx.Proxy) and hasattr(value, "__len__")]
        if strict and known:
            values = tuple(_parts(v, len(known[0])) if isinstance(v, fx.Proxy) else v for v in values)
        return zip(*values, strict=strict)

    functions = {"len": length, "zip": zipped}
    spaces = {id(space): space for space in map(_globals, model.modules())}
    given = [(space, name) for space in spaces.values() for name in functions if name not in space]
    for space, name in given:
        space[name] = functions[name]
    try:
        yield
    finally:
        for space, name in given:
            del space[name]


def _globals(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = getattr(type(module).forward, "__globals__", {})
    return found


def _has_same_ops(trace: ModelTrace, graph: OpGraph, opened: Collection[str]) -> bool:
    """True if modules that were opened have as many ops of some kinds as in the graph, so that no branch is amiss."""
    of_trace = Counter(
        (_path(node), _COUNTED[_name(node)])
        for node in trace.nodes
        if _name(node) in _COUNTED and node not in trace.sizes
    )
    of_graph = Counter(
        (graph.modules[op], _COUNTED[kind])
        for op in range(graph.n_ops)
        if graph.phase[op] == Phase.FORWARD and graph.modules[op] in opened and (kind := _kind(graph, op)) in _COUNTED
    )
    return of_trace == of_graph


def borders(
    trace: ModelTrace, graph: OpGraph, forward: Sequence[int], places: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """Numbers of the nodes before which stages begin, and the stage of each op then; None where two begin at one.

    A stage begins at the first node from its first op on that is the call of a module, or that is known by its name;
    ops between, which shape tensors or work entry by entry, go with the stage before.

    Args:
        forward: the ops of the forward pass, in order.
        places: in these, of the first op of each stage but the first one.
    """
    of_leaf: dict[str, list[int]] = {}
    of_function: dict[tuple[str, str], list[int]] = {}
    for number, node in enumerate(trace.nodes):
        if node.op == "call_module":
            of_leaf.setdefault(str(node.target), []).append(number)
        else:
            of_function.setdefault((_path(node), _name(node)), []).append(number)
    of_kind: dict[tuple[str, str], list[int]] = {}
    for op in forward:
        of_kind.setdefault((graph.modules[op], _kind(graph, op)), []).append(op)

    def number_of(op: int) -> int | None:
        path, kind = graph.modules[op], _kind(graph, op)
        leaf = next((numbers for leaf, numbers in of_leaf.items() if is_under(path, leaf)), None)
        if leaf is not None:
            return leaf[0] if len(leaf) == 1 else None
        alike = of_kind[path, kind]
        for name in (kind, _CALLED.get(kind, kind)):
            named = of_function.get((path, name), [])
            if len(named) == len(alike):
                return named[alike.index(op)]
        return None

    numbers = [number_of(op) for op in forward]
    found = [next((n for n in numbers[place:] if n is not None), len(trace.nodes)) for place in places]
    if any(one >= other for one, other in zip(found, [*found[1:], len(trace.nodes)], strict=True)):
        return None
    stages = [0]
    for at in numbers:
        stages.append(stages[-1] if at is None else bisect_right(found, at))
    return found, stages[1:]


def _kind(graph: OpGraph, op: int) -> str:
    return graph.kinds[op].removeprefix("aten.").partition(".")[0]


def _path(node: fx.Node) -> str:
    """The innermost open module that a node is from."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def _is_check(node: fx.Node) -> bool:
    return node.op == "call_function" and _name(node).startswith(("_assert", "_assert_is_none"))


def _nodes(value: Any) -> Any:
    """A value with the nodes of its proxies."""
    if isinstance(value, fx.Proxy):
        return value.node
    if isinstance(value, dict):
        return {key: _nodes(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(_nodes, value))
    return value


def _again(model: nn.Module, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that no parameter has a part in, and no random number."""
    found: set[fx.Node] = set()
    for node in nodes:
        if not found.issuperset(node.all_input_nodes) or node.op == "output":
            continue
        if node.op == "get_attr":
            holder, _, name = str(node.target).rpartition(".")
            is_again = not isinstance(getattr(model.get_submodule(holder), name), nn.Parameter)
        elif node.op == "call_module":
            module = model.get_submodule(str(node.target))
            is_random = isinstance(module, nn.modules.dropout._DropoutNd)
            is_again = not is_random and next(module.parameters(), None) is None
        else:
            is_again = not any(word in _name(node) for word in _RANDOM)
        if is_again:
            found.add(node)
    return found


def _is_of_numbers(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return any(getattr(module, name, None) is function for module in (operator, math))


def _sizes(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that tell the shape of a tensor, or are computed from such numbers alone."""
    found: set[fx.Node] = set()
    for node in nodes:
        if node.target is getattr:
            is_size = node.args[1] in _SIZES
        elif node.op == "call_method":
            is_size = node.target in ("size", "dim", "numel")
        else:
            read = node.all_input_nodes
            is_size = bool(read) and found.issuperset(read) and _is_of_numbers(node.target)
        if is_size:
            found.add(node)
    return found
