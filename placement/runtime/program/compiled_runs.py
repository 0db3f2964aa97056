"""Routines whose ops run under torch.compile, from one exchange with others to the next."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from graphs.capture.costs import signature
from placement.runtime.program.routines import Routine, Routines, with_fast_calls

Compile = Callable[[fx.GraphModule], Callable[..., Any]]
_LEAST = 2  # ops in a run: one alone is a kernel already


@dataclass(frozen=True, eq=False)
class CompiledRun:
    """Calls the code of a run; torch.compile makes that when it is first called."""

    run: Callable[..., Any]
    __name__ = "compiled_run"

    def __call__(self, *values: Any) -> Any:
        return self.run(*values)


def compiler(**options: Any) -> Compile:
    """`torch.compile` for code whose sizes are those that were captured, with further options of it."""
    return partial(torch.compile, **{"dynamic": False, "fullgraph": True, **options})


def compiled_routines(routines: Routines, compile_run: Compile | None) -> Routines:
    """A step whose routines are all `compiled_routine`; as it is where nothing compiles."""
    if compile_run is None:
        return routines
    sections = (tuple(compiled_routine(one, compile_run) for one in section) for section in routines.sections)
    return replace(routines, sections=tuple(sections))


def compiled_routine(routine: Routine, compile_run: Compile) -> Routine:
    """The same work, with all ops between two exchanges compiled together.

    An op that writes in place, draws random numbers, or is no operator of PyTorch runs as before, and parts runs as an
    exchange does: the memory that is written and the order that others see stay as planned.

    Args:
        compile_run: makes the code of one run.
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for nodes in _runs(routine.module.graph):
        if sum(not _is_free(node) for node in nodes) < _LEAST:
            for node in nodes:
                new[node] = graph.node_copy(node, new.__getitem__)
            continue
        inside = set(nodes)
        taken = list(dict.fromkeys(value for node in nodes for value in node.all_input_nodes if value not in inside))
        given = [node for node in nodes if not inside.issuperset(node.users)]
        part = compile_run(fx.GraphModule({}, _part(nodes, taken, given)))
        call = graph.call_function(CompiledRun(part), tuple(new[value] for value in taken))
        call.meta.update(next((node.meta for node in nodes if "op" in node.meta), {}))
        for number, node in enumerate(given):
            new[node] = graph.call_function(operator.getitem, (call, number))
    module = fx.GraphModule(routine.module, graph)
    return replace(routine, run=with_fast_calls(module), module=module)


def _part(nodes: Sequence[fx.Node], taken: Sequence[fx.Node], given: Sequence[fx.Node]) -> fx.Graph:
    """A run by itself: a function of what it reads, which returns what others read of it."""
    graph = fx.Graph()
    own = {value: graph.placeholder(value.name) for value in taken}
    for node in nodes:
        own[node] = graph.node_copy(node, own.__getitem__)
    graph.output(tuple(own[node] for node in given))
    return graph


def _runs(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """All nodes in order: those that are compiled together, and each of the others by itself."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        if _is_compiled(node):
            run.append(node)
            continue
        if run:
            yield run
        yield [node]
        run = []
    if run:
        yield run


def _is_compiled(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or target is operator.getitem:
        return node.op == "call_function"
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    facts = signature(target)
    return target.namespace == "aten" and not (facts.writes or facts.statistics)


def _is_free(node: fx.Node) -> bool:
    """True if a node launches nothing: it opens a tuple, or looks at memory in another way."""
    return not _is_compiled(node) or node.target is operator.getitem or signature(node.target).may_alias
