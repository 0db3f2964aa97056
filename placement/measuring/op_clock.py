"""A routine with a stamp after every op, so that each op's time is measured where and as it runs when it counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from placement.runtime.program.fast_calls import quickened
from placement.runtime.program.routines import Routine
from placement.runtime.program.transfers import expect, receive, send


@dataclass(frozen=True)
class Stretch:
    """A stretch of a run.

    Attributes:
        what: ``"op"``, ``"receive"``, ``"send"`` or ``"expect"``.
        number: of the op; of a transfer its tag.
        start_s, end_s: by the host's clock.
    """

    what: str
    number: int
    start_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class StampedRoutine:
    """A routine's code with stamps in it.

    Attributes:
        run: as `Routine.run`; what it returns ends with the stamps: two before the first op, one after each span.
        labels: what each stamp but the first two comes after: ``("op", number)``, or ``("receive" | "send" | "expect",
            tag)``.
    """

    run: Callable[..., tuple[Any, ...]]
    labels: tuple[tuple[str, int], ...]

    def seconds(self, stamps: Sequence[Any], between: Callable[[Any, Any], float]) -> dict[int, float]:
        """Seconds of each op, from the stamps of one run, with what a stamp itself takes left out."""
        cost = between(stamps[0], stamps[1])
        found: dict[int, float] = {}
        for (what, op), before, after in zip(self.labels, stamps[1:], stamps[2:], strict=False):
            if what == "op":
                found[op] = found.get(op, 0.0) + max(0.0, between(before, after) - cost)
        return found

    def spans(self, stamps: Sequence[float]) -> list[Stretch]:
        """What a run did when, from its stamps of the host's clock."""
        return [
            Stretch(*label, before, after)
            for label, before, after in zip(self.labels, stamps[1:], stamps[2:], strict=False)
        ]


def stamped(routine: Routine, stamp: Callable[[], Any]) -> StampedRoutine:
    """Put stamps into a copy of a routine.

    What readers make on the spot (views, memory without content) counts to the op that reads it first, and so does what
    is freed after an op count to that op; what comes after the last op counts to the last op.
    """
    module, labels = _with_stamps(routine, stamp)
    return StampedRoutine(quickened(module), labels)


def recorded(routine: Routine, write: Callable[[list[Stretch]], object]) -> Routine:
    """A copy of a routine that, whenever it has run, hands over what it did when."""
    stamp, _ = host_clock()
    module, labels = _with_stamps(routine, stamp)
    code = StampedRoutine(quickened(module), labels)

    def run(*taken: Any) -> tuple[Any, ...]:
        found = code.run(*taken)
        write(code.spans(found[len(routine.gives) :]))
        return found[: len(routine.gives)]

    return replace(routine, run=run, module=module)


def _with_stamps(routine: Routine, stamp: Callable[[], Any]) -> tuple[fx.GraphModule, tuple[tuple[str, int], ...]]:
    """The code with stamps in it, and `StampedRoutine.labels`."""
    module = routine.module
    graph = fx.Graph(owning_module=module)
    copies: dict[fx.Node, fx.Node] = {}
    stamps: list[fx.Node] = []
    labels: list[tuple[str, int]] = []
    ends = _ends([node for node in module.graph.nodes if node.op not in ("placeholder", "output")])
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
            labels.append(ends[node])
    return fx.GraphModule(module, graph), tuple(labels)


def _label(node: fx.Node) -> tuple[str, int] | None:
    if node.target in (receive, send, expect):
        return node.target.__name__, int(node.args[1])  # type: ignore[arg-type]
    return ("op", node.meta["op"]) if "op" in node.meta else None


def _ends(calls: Sequence[fx.Node]) -> dict[fx.Node, tuple[str, int]]:
    """The last node of each run of nodes with one label, and that label."""
    marked = [(node, label) for node in calls if (label := _label(node)) is not None]
    found = {node: label for (node, label), (_, following) in pairwise(marked) if label != following}
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
