"""A routine that reads a clock after every op, so that each op is timed where and as it runs when it counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from placement.measuring.machine.speeds import synchronise
from placement.runtime.program.fast_calls import with_fast_calls
from placement.runtime.program.transfers import expect, receive, send

if TYPE_CHECKING:
    from placement.runtime.program.routines import Routine


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
class ClockedRoutine:
    """A routine's code with readings in it.

    Attributes:
        run: as `Routine.run`; what it returns ends with the readings: two before the first op, one after each span.
        labels: what each reading but the first two comes after: `Stretch.what` and its number.
    """

    run: Callable[..., tuple[Any, ...]]
    labels: tuple[tuple[str, int], ...]

    def seconds(self, readings: Sequence[Any], between: Callable[[Any, Any], float]) -> dict[int, float]:
        """Seconds of each op, from the readings of one run, with what a reading itself takes left out."""
        cost = between(readings[0], readings[1])
        found: dict[int, float] = {}
        for (what, op), before, after in zip(self.labels, readings[1:], readings[2:], strict=False):
            if what == "op":
                found[op] = found.get(op, 0.0) + max(0.0, between(before, after) - cost)
        return found

    def spans(self, readings: Sequence[float]) -> list[Stretch]:
        """The stretches of a run, from its readings of the host's clock."""
        return [
            Stretch(*label, before, after)
            for label, before, after in zip(self.labels, readings[1:], readings[2:], strict=False)
        ]


def clocked(routine: Routine, read: Callable[[], Any]) -> ClockedRoutine:
    """Put readings into a copy of a routine.

    Tensors that readers make on the spot (views, memory without content) count to the op that reads them first, and
    freeing after an op counts to that op; work after the last op counts to the last op.
    """
    module, labels = _with_readings(routine, read)
    return ClockedRoutine(with_fast_calls(module), labels)


class OpReader:
    """Runs a routine with readings of every clock: of the host, and of the GPU on one.

    Args:
        taken: gives the arguments of one run.
        others: what the code talks to.
    """

    def __init__(
        self, routine: Routine, place: torch.device, taken: Callable[[Routine], list[Any]], *others: Any
    ) -> None:
        clocks = [host_clock()] + ([cuda_clock()] if place.type == "cuda" else [])
        self._codes = [(clocked(routine, read), between) for read, between in clocks]
        self._routine, self._place, self._taken, self._others = routine, place, taken, others

    def read(self) -> dict[int, float]:
        """The seconds of each op in one run by each clock."""
        row: dict[int, float] = {}
        for code, between in self._codes:
            taken = self._taken(self._routine)
            synchronise(self._place)
            readings = code.run(*self._others, *taken)[len(self._routine.gives) :]
            synchronise(self._place)
            # A GPU's op takes as long as the kernel, or as the host needs to launch it.
            for op, seconds in code.seconds(readings, between).items():
                row[op] = max(seconds, row.get(op, 0.0))
        return row


def recorded(routine: Routine, write: Callable[[list[Stretch]], object]) -> Routine:
    """A copy of a routine that, whenever it has run, hands over what it did when."""
    read, _ = host_clock()
    module, labels = _with_readings(routine, read)
    code = ClockedRoutine(with_fast_calls(module), labels)

    def run(*taken: Any) -> tuple[Any, ...]:
        found = code.run(*taken)
        write(code.spans(found[len(routine.gives) :]))
        return found[: len(routine.gives)]

    return replace(routine, run=run, module=module)


def _with_readings(routine: Routine, read: Callable[[], Any]) -> tuple[fx.GraphModule, tuple[tuple[str, int], ...]]:
    """The code with readings in it, and `ClockedRoutine.labels`."""
    module = routine.module
    graph = fx.Graph(owning_module=module)
    copies: dict[fx.Node, fx.Node] = {}
    readings: list[fx.Node] = []
    labels: list[tuple[str, int]] = []
    ends = _ends([node for node in module.graph.nodes if node.op not in ("placeholder", "output")])
    for node in module.graph.nodes:
        if not readings and node.op != "placeholder":
            readings += [graph.call_function(read, ()) for _ in range(2)]
        if node.op == "output":
            given = fx.map_arg(node.args[0], copies.__getitem__)
            graph.output((*given, *readings))
            break
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node in ends:
            readings.append(graph.call_function(read, ()))
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
    """Reading the host's clock, and the seconds between two readings."""
    return time.perf_counter, lambda before, after: after - before


def cuda_clock() -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Having a GPU read its clock when it gets there, and the seconds between two readings once all is done."""

    def read() -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    return read, lambda before, after: float(before.elapsed_time(after)) / 1e3
