"""A routine that reads a clock after every op, so that each op is timed where and as it runs when it counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from graphs.capture import Program
from graphs.capture.record import argument_leaves
from graphs.errors import PlacementError
from graphs.opgraph import OpGraph
from graphs.records import ANY_DEVICE, Shard
from graphs.transforms.splitting.splitter import BATCH, chunk
from placement.inputs.call_arguments import tensors_of
from placement.measuring.machine.speeds import synchronise
from placement.runtime.program.routines import Routine, expect, receive, send, with_fast_calls


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


# -- parts of a batch --------------------------------------------------------------------------------------------------


_PARTS = (4, 2)  # as many as leave two samples to each: statistics of a single one do not exist
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class PartOfStep:
    """A step on the first samples of the batch.

    Attributes:
        program: of the same ops.
        inputs: tensors among its arguments by their path.
        share: op -> work of its part, in work of the op; what is not cut is left out.
    """

    program: Program
    inputs: Mapping[str, torch.Tensor]
    share: Mapping[int, float]

    @staticmethod
    def of(
        model: nn.Module, whole: Program, arguments: Arguments, capture: Callable[..., Program]
    ) -> PartOfStep | None:
        """A part of a whole step; None where its batch is unknown, or too small, or cannot be cut.

        Args:
            arguments: positional ones, and those by keyword.
            capture: makes the program of others.
        """
        leaves = argument_leaves(model, *arguments)
        dims = {path: dim for path, dim in _batch_dims(whole).items() if path in leaves}
        samples = min((leaves[path].shape[dim] for path, dim in dims.items()), default=0)
        for number in _PARTS:
            size = samples // number
            if size < 2:
                continue
            parts = {id(leaves[path]): _first(leaves[path], dim, samples, size) for path, dim in dims.items()}
            positional, keywords = pytree.tree_map(lambda leaf, parts=parts: parts.get(id(leaf), leaf), arguments)
            try:  # some models cannot be cut, or are made for one batch
                share = _shares(whole.graph, number)
                program = capture(positional, keywords)
            except PlacementError:
                continue
            if program.graph.op_names == whole.graph.op_names and program.graph.kinds == whole.graph.kinds:
                return PartOfStep(program, tensors_of(argument_leaves(model, positional, keywords)), share)
        return None

    def fixed_s(self, whole_s: Mapping[int, float], part_s: Mapping[int, float]) -> dict[int, float]:
        """The fixed part of each op that is cut, from one run of the whole and one of a part; noise may make it < 0."""
        return {
            op: (part_s[op] - share * whole_s[op]) / (1 - share)
            for op, share in self.share.items()
            if op in whole_s and op in part_s
        }


def _batch_dims(program: Program) -> dict[str, int]:
    """The dimension of samples of each tensor among the arguments that has them."""
    found = {}
    for path, node in program.trace.arguments.items():
        op = program.op_of.get(node)
        rows = () if op is None else program.graph.split_rows[op]
        parts = [part for row in rows if row.axis == BATCH for part in row.outputs if isinstance(part, Shard)]
        if parts:
            found[path] = parts[0].dim
    return found


def _first(tensor: torch.Tensor, dim: int, samples: int, size: int) -> torch.Tensor:
    """What the first samples have of a tensor, several entries of each perhaps."""
    return tensor.narrow(dim, 0, tensor.shape[dim] * size // samples).clone()


def _shares(graph: OpGraph, number: int) -> dict[int, float]:
    """`PartOfStep.share`, by the smallest of so many parts."""
    # As if each op took a second, so that times of parts are shares of the work.
    ones = np.ones((graph.n_ops, 1))
    cut = chunk(replace(graph, time_keys=(ANY_DEVICE,), time_s=ones, fixed_s=0 * ones), number)
    is_copy = ~np.isnan(cut.graph.time_s[:, 0])
    origin = cut.origins[cut.origin_ptr[:-1]][is_copy]
    share = np.ones(graph.n_ops)
    np.minimum.at(share, origin, cut.graph.time_s[is_copy, 0])
    return {op: float(share[op]) for op in np.flatnonzero(share < 1).tolist()}
