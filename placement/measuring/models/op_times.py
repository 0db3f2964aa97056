"""The time of every op of a captured step on one device, in the code that a placement runs there.

The updates of a training step, which an optimizer makes all at once, are timed parameter by parameter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import nn

from graphs.capture import Program
from graphs.capture.trace import TensorInfo, value_of
from graphs.kept import precision_named
from graphs.opgraph import Phase
from placement.inputs.call_arguments import as_captured
from placement.measuring.machine.speeds import synchronise
from placement.measuring.machine.workers import Worker
from placement.measuring.models.op_clock import OpReader, PartOfStep
from placement.measuring.models.repeats import Repeats, run_steps, seconds_of
from placement.processes.starting import Report, StepProgress, tell_nobody
from placement.runtime.program.device_layout import DeviceLayout, Key
from placement.runtime.program.functional import draw, functional
from placement.runtime.program.routines import Routine, compile_routines
from placement.runtime.program.variants import NamedTensors
from placement.runtime.states import OPTIMIZERS, add_gradients, is_narrow, with_masters

_T = TypeVar("_T", bound=torch.Tensor)
Times = dict[int, list[float]]  # op -> seconds in each step
_LR = 1e-6
_MOST_ALONE = 10  # steps while the others rest

# Single ops differ more than their sum does: where there is time, its median alone does not end the measurement.
REPEATS = Repeats(least=2, settled=60, most=60)


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """The measurements of one device.

    Attributes:
        ops: op -> seconds in each step; what takes no time of its own (inputs, constants) is left out.
        step_s: each whole step of these ops, run without readings.
        drawing: op -> seconds in each step of drawing the random numbers that it uses, before all ops.
        updates: op -> seconds in each step of the update of a parameter, with handing its gradient over, after them.
        fixed: op -> of ``ops`` what each part of it takes in full, in each step; where that was measured.
        updates_fixed: the same of ``updates``.
        alone: op -> seconds in each of some more steps in which the other workers rest; empty where nobody else is, or
            this worker is one that rests.
    """

    ops: Times
    step_s: list[float]
    drawing: Times
    updates: Times
    fixed: Times
    updates_fixed: Times
    alone: Times


@dataclass(frozen=True, eq=False)
class StepToMeasure:
    """A captured step with its data: what `op_times` needs of it.

    Attributes:
        model: whose parameters and buffers are read, never written.
        program: of the model.
        inputs: tensors among its arguments by their path.
        optimizer: by name; read only for a training step.
        part: the step on a part of the batch; None where there is none.
    """

    model: nn.Module
    program: Program
    inputs: Mapping[str, torch.Tensor]
    optimizer: str
    part: PartOfStep | None = None

    def optimizer_of(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """An optimizer of parameters, with master copies of the narrow ones where the precision has them."""
        parameters = list(parameters)
        kind, settings = OPTIMIZERS[self.optimizer]
        made = kind(parameters, lr=_LR, **settings)  # torch's own choice between its implementations
        precision = self.program.graph.origin.precision
        if precision is None or not precision_named(precision).has_masters or not any(map(is_narrow, parameters)):
            return made
        return with_masters(made)


@torch.no_grad()
def op_times(
    step: StepToMeasure,
    place: torch.device,
    repeats: Repeats,
    worker: Worker | None = None,
    report: Report = tell_nobody,
) -> MeasuredStep:
    """Run a step over and over on one device, with readings and without by turns; with other workers, all in step."""
    layout, routine = _on_one_device(step.program, place)
    (place,) = layout.places
    turns = _Turns(step, layout, routine, _values(step, layout, routine), place)

    def barrier() -> None:
        if worker is not None:
            worker.barrier()

    exchange = (lambda seconds: [seconds]) if worker is None else worker.all_gather

    def tell(now: StepProgress) -> None:
        runs = 2 if step.part is None else 3  # a turn runs the step as it is, and with readings, and a part of it
        report(replace(now, done=runs * now.done, expected=runs * now.expected))

    step_s, warm_up = run_steps(turns.take, repeats, exchange, tell)
    steps = len(step_s) - warm_up
    drawing = {op: [seconds] * steps for op, seconds in _drawing_s(layout, steps).items()}
    updates, updates_fixed = {}, {}
    if turns.updates is not None:
        sum_s, updated = statistics.median(turns.update_s[warm_up:]), turns.updates.given(turns.given)
        turns.updates = None  # its optimizer's memory
        make = step.optimizer_of
        updates = update_times_s(updated, make, place, steps, barrier, sum_s)
        smallest = [(op, parameter.reshape(-1)[:1].clone(), g.reshape(-1)[:1].clone()) for op, parameter, g in updated]
        updates_fixed = update_times_s(smallest, make, place, steps, barrier)
    ops, fixed = turns.op_times_s(warm_up)
    alone: Times = {}
    if worker is not None and worker.size > 1:
        barrier()
        if worker.rank == 0:
            alone = turns.more_times_s(min(steps, _MOST_ALONE))
        barrier()
    return MeasuredStep(ops, step_s[warm_up:], drawing, updates, fixed, updates_fixed, alone)


def _on_one_device(program: Program, place: torch.device) -> tuple[DeviceLayout, Routine]:
    """A step with all of its ops on one device, and its code."""
    order = program.graph.topological_order.tolist()
    starts = [float(i) for i in range(len(order))]
    layout = DeviceLayout(functional(program), [0] * len(order), [order], starts, [place])
    return layout, compile_routines(layout, [layout.whole() if program.train else layout.forward()]).sections[0][0]


@dataclass(eq=False)
class _Turns:
    """Runs of a step: each turn plain with its update, and with readings: of the whole, and of a part.

    ``values``: states and inputs.
    """

    step: StepToMeasure
    layout: DeviceLayout
    routine: Routine
    values: Mapping[Key, Any]
    place: torch.device

    def __post_init__(self) -> None:
        self._whole = OpReader(self.routine, self.place, self._taken, None)
        part = self.step.part
        self._part: OpReader | None = None
        if part is not None:
            less = replace(self.step, program=part.program, inputs=part.inputs)
            layout, routine = _on_one_device(part.program, self.place)
            values = _values(less, layout, routine, self.values)
            self._part = OpReader(routine, self.place, lambda routine: _taken(routine, values, layout), None)
        self._rows: list[dict[int, float]] = []
        self._fixed: list[dict[int, float]] = []
        self.given: dict[Key, Any] = {}
        self.updates: _Updates | None = None
        self.update_s: list[float] = []

    def _taken(self, routine: Routine) -> list[Any]:
        return _taken(routine, self.values, self.layout)

    def plain(self) -> float:
        """Run without readings; returns how many seconds it took."""
        taken = self._taken(self.routine)
        synchronise(self.place)
        start = time.perf_counter()
        given = self.routine.run(None, *taken)
        synchronise(self.place)
        seconds = time.perf_counter() - start
        self.given = dict(zip(self.routine.gives, given, strict=True))
        return seconds

    def take(self) -> float:
        """One turn; returns how many seconds the run without readings took."""
        step_s = self.plain()
        if self.step.program.train:
            # Right after the step, as in training: the memory that an update reads is in no cache by then.
            self.updates = self.updates or _Updates.of(self.step, self.given)
            if self.updates is not None:
                self.update_s.append(self.updates.take(self.given))
        self._rows.append(self._whole.read())
        self._take_part()
        return step_s

    def _take_part(self) -> None:
        """Read the step on a part; none any more where an op cannot run there, as one whose data says which rows."""
        if self.step.part is None or self._part is None:
            return
        try:
            self._fixed.append(self.step.part.fixed_s(self._rows[-1], self._part.read()))
        except (RuntimeError, IndexError):
            self._part = None
            self._fixed.clear()

    def more_times_s(self, steps: int) -> Times:
        """By op, of so many more runs of the whole."""
        rows = [self._whole.read() for _ in range(steps)]
        return {op: [row[op] for row in rows] for op in rows[0]}

    def op_times_s(self, warm_up: int) -> tuple[Times, Times]:
        """By op, of every turn but the first ones: its time, and the fixed part of that."""
        times, fixed = (
            {op: [row[op] for row in rows[warm_up:]] for op in (rows[0] if rows else ())}
            for rows in (self._rows, self._fixed)
        )
        return times, fixed


def _taken(routine: Routine, values: Mapping[Key, Any], layout: DeviceLayout) -> list[Any]:
    """The arguments of one run; what is drawn for it, the run may overwrite."""
    drawn = {("drawn", number): tensor for number, tensor in draw(layout.step, layout.places[0]).items()}
    return [drawn[key] if key in drawn else values[key] for key in routine.takes]


def _values(
    step: StepToMeasure, layout: DeviceLayout, routine: Routine, known: Mapping[Key, Any] | None = None
) -> dict[Key, Any]:
    """States and inputs; states that the step writes are copies, so that the user's stay as they are.

    ``known``: of another step of the model, whose states these are.
    """
    program, (place,) = step.program, layout.places
    written = set(layout.step.state_writes.values())
    index_of = {name: index for index, state in enumerate(program.states) for name in state.names}
    copies: dict[int, torch.Tensor] = {}  # tied states stay one
    tensors = NamedTensors(step.model)
    found: dict[Key, Any] = {}
    for kind, name in routine.takes:
        if kind == "input":
            found[kind, name] = as_captured(step.inputs[name], program.trace.arguments[name], place)
        elif kind == "state":
            own = tensors.get(name)
            if own is not None and known is not None and (kind, name) in known:
                found[kind, name] = known[kind, name]
                continue
            tensor = (program.constants[name] if own is None else own).detach()
            if index_of.get(name) in written:
                tensor = copies.setdefault(index_of[name], tensor.to(place, copy=True))
            found[kind, name] = tensor.to(place)
    return found


def _drawing_s(layout: DeviceLayout, repeats: int) -> dict[int, float]:
    """Seconds of drawing random numbers, which is done before the step, by the op that they are for."""
    nodes = [node for node in layout.step.graph.nodes if node in layout.step.random and node in layout.step.made_by]
    if not nodes:
        return {}
    times_s, warm_up = run_steps(
        lambda: seconds_of(lambda: draw(layout.step, layout.places[0])), Repeats.exactly(repeats + 1, 1)
    )
    total_s = statistics.median(times_s[warm_up:])
    infos = [value_of(node) for node in nodes]
    counts = [info.layout.n_elements if isinstance(info, TensorInfo) else 1 for info in infos]
    found: dict[int, float] = {}
    for node, count in zip(nodes, counts, strict=True):
        op = layout.step.made_by[node]
        found[op] = found.get(op, 0.0) + total_s * count / max(1, sum(counts))
    return found


# -- updates ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Updates:
    """All updates of a step: copies of its parameters with an optimizer.

    Attributes:
        ops: the update op of each parameter.
        keys: under which a step gives its gradient.
        parameters: copies.
        optimizer: of all of them.
    """

    ops: tuple[int, ...]
    keys: tuple[Key, ...]
    parameters: nn.ParameterList
    optimizer: torch.optim.Optimizer

    @staticmethod
    def of(step: StepToMeasure, given: Mapping[Key, Any]) -> _Updates | None:
        """None where nothing is updated; ``given``: what a step gave."""
        graph, tensors = step.program.graph, NamedTensors(step.model)
        ops, keys, parameters = [], [], []
        for state in step.program.states:
            users = [op for op in state.users if graph.phase[op] == Phase.UPDATE]
            gradients: list[Key] = [key for name in state.names if (key := ("gradient", name)) in given]
            own = [tensor for name in state.names if (tensor := tensors.get(name)) is not None]
            if users and gradients and own:
                ops.append(users[0])
                keys.append(gradients[0])
                gradient = given[gradients[0]]
                parameter = nn.Parameter(own[0].detach().to(gradient.device, copy=True))
                parameters.append(_accepting(parameter, gradient))
        if not ops:
            return None
        copies = nn.ParameterList(parameters)
        return _Updates(tuple(ops), tuple(keys), copies, step.optimizer_of(copies.parameters()))

    def take(self, given: Mapping[Key, Any]) -> float:
        """Hand the gradients over and update all; returns how many seconds that took."""
        place = self.parameters[0].device
        start = time.perf_counter()
        self.optimizer.zero_grad()
        add_gradients(self.parameters, {str(number): given[key] for number, key in enumerate(self.keys)})
        self.optimizer.step()
        synchronise(place)
        return time.perf_counter() - start

    def given(self, given: Mapping[Key, Any]) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """(update op, its parameter, the gradient that the step gave)."""
        parameters = [parameter.detach() for parameter in self.parameters]
        gradients = [given[key].detach() for key in self.keys]
        return list(zip(self.ops, parameters, gradients, strict=True))


def update_times_s(
    updates: Sequence[tuple[int, torch.Tensor, torch.Tensor]],
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    place: torch.device,
    steps: int,
    barrier: Callable[[], None],
    sum_s: float | None = None,
) -> Times:
    """Seconds that the updates of parameters take out of one optimizer's step over all of them.

    An optimizer for each parameter, one after the other, tells how they compare; a single optimizer for all, what they
    take in sum. The fixed cost of many small optimizers is subtracted equally from each.

    Args:
        updates: (op, parameter, its gradient); the parameters are changed.
        make: an optimizer of some of the parameters.
        steps: how often it steps; as many warm-up steps as parameters need to have their state come before.
        barrier: called before each step, to wait for other workers.
        sum_s: seconds of a step over all; None: measured here.
    """
    if not updates:
        return {}
    parameters = []
    for _, parameter, gradient in updates:
        _accepting(parameter.requires_grad_(True), gradient).grad = gradient
        parameters.append(parameter)
    singles = [make([parameter]) for parameter in parameters]
    rows = [_stepped(singles, place, barrier) for _ in range(steps + 2)][2:]
    del singles
    if sum_s is None:
        whole = [make(parameters)]
        sum_s = statistics.median([_stepped(whole, place, barrier)[0] for _ in range(steps + 2)][2:])
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    fixed_s = _fixed_s(medians, sum_s)
    scale = sum_s / sum(s - fixed_s for s in medians)
    return {op: [max(0.0, row[i] - fixed_s) * scale for row in rows] for i, (op, _, _) in enumerate(updates)}


def _accepting(parameter: _T, gradient: torch.Tensor) -> _T:
    """A parameter that takes a gradient of that format, which may be wider than it is."""
    if gradient.dtype != parameter.dtype:
        parameter.grad_dtype = gradient.dtype
    return parameter


def _fixed_s(singles_s: Sequence[float], sum_s: float) -> float:
    """The fixed cost that each of several steps has too much; leaves a tenth of the shortest at least."""
    n = len(singles_s)
    too_much_s = (sum(singles_s) - sum_s) / (n - 1) if n > 1 else 0.0
    return min(max(0.0, too_much_s), 0.9 * min(singles_s))


def _stepped(
    optimizers: Sequence[torch.optim.Optimizer], place: torch.device, barrier: Callable[[], None]
) -> list[float]:
    """Seconds of one step of each."""
    barrier()
    synchronise(place)
    readings = [time.perf_counter()]
    for optimizer in optimizers:
        cast(Any, optimizer).step()
        synchronise(place)
        readings.append(time.perf_counter())
    return [after - before for before, after in pairwise(readings)]
