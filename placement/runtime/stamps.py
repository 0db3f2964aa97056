"""A routine with a stamp after every op, so that each op's time is measured where and as it runs when it counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from placement.runtime.routines import Routine


@dataclass(frozen=True, eq=False)
class StampedRoutine:
    """A routine's code with stamps in it.

    Attributes:
        run: as `Routine.run`; what it returns ends with the stamps: two before the first op, one after each op.
        ops: the number of the op that each stamp but the first two comes after.
    """

    run: Callable[..., tuple[Any, ...]]
    ops: tuple[int, ...]

    def seconds(self, stamps: Sequence[Any], between: Callable[[Any, Any], float]) -> dict[int, float]:
        """Seconds of each op, from the stamps of one run, with what a stamp itself takes left out."""
        cost = between(stamps[0], stamps[1])
        found: dict[int, float] = {}
        for op, before, after in zip(self.ops, stamps[1:], stamps[2:], strict=False):
            found[op] = found.get(op, 0.0) + max(0.0, between(before, after) - cost)
        return found


def stamped(routine: Routine, stamp: Callable[[], Any]) -> StampedRoutine:
    """Put stamps into a copy of a routine.

    What readers make on the spot (views, memory without content) counts to the op that reads it first, and so does what
    is freed after an op count to that op; what comes after the last op counts to the last op.
    """
    module = routine.module
    graph = fx.Graph(owning_module=module)
    copies: dict[fx.Node, fx.Node] = {}
    stamps: list[fx.Node] = []
    ops: list[int] = []
    calls = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    ends = _ends(calls)
    for node in module.graph.nodes:
        if not stamps and node.op != "placeholder":
            stamps += [graph.call_function(stamp, ()) for _ in range(2)]
        if node.op == "output":
            given = fx.map_arg(node.args[0], copies.__getitem__)
            graph.output((*given, *stamps))
            break
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node in ends:
            stamps.append(graph.call_function(stamp, ()))
            ops.append(ends[node])
    return StampedRoutine(fx.GraphModule(module, graph).forward, tuple(ops))


def _ends(calls: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The last node of each run of nodes that belong to one op, and the number of that op."""
    marked = [(node, node.meta["op"]) for node in calls if "op" in node.meta]
    found = {node: op for (node, op), (_, following) in pairwise(marked) if op != following}
    if marked:
        found[calls[-1]] = marked[-1][1]
    return found


def host_clock() -> tuple[Callable[[], float], Callable[[float, float], float]]:
    """A stamp of the host's clock, and the seconds between two of them."""
    return time.perf_counter, lambda before, after: after - before


def cuda_clock() -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """A stamp that a GPU makes when it gets there, and the seconds between two of them once all is done."""

    def stamp() -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    return stamp, lambda before, after: float(before.elapsed_time(after)) / 1e3
