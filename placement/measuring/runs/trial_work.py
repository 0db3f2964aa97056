"""Main functions of the processes of a trial: `plain` runs the model as it is, `placed` as it was placed.

`rounding` runs the plain model with weights that are off by their rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

from graphs.capture import Program, capture_program
from graphs.capture.failure import reason_of
from graphs.capture.fake import set_mode
from graphs.capture.record import default_loss
from graphs.errors import MismatchError
from graphs.kept import precision_named
from graphs.origin import COMPILED, EAGER
from placement.inputs.examples import Example, read_example
from placement.measuring.models.op_clock import Stretch, recorded
from placement.measuring.runs.differences import MOVED, WEIGHT, TensorFile, compared, distance, largest
from placement.measuring.runs.steps import (
    STEPS,
    ModelStep,
    ProcessOutcome,
    RecordedStep,
    Span,
    TrialTask,
    timed_run,
)
from placement.processes.processes import Usage, forget_peak, keep_freed_memory
from placement.processes.starting import StepProgress
from placement.results.result import Result
from placement.runtime.application import apply, layout_of
from placement.runtime.checking.smaller_model import without_dropout
from placement.runtime.modules.by_module import module_places
from placement.runtime.modules.placed_ranks import PlacedRanks, RankStep
from placement.runtime.ranks.group import joined
from placement.runtime.ranks.launch import tell
from placement.runtime.states import accept_gradients, compute_in, convert

if TYPE_CHECKING:
    from placement.runtime.program.device_layout import DeviceLayout


def plain(task: TrialTask) -> ProcessOutcome:
    """Steps of the model as it is; what the first ones compute goes to a file for the others to compare with."""
    step = _plain_step(task)
    dropout = without_dropout(step.model) if task.is_calm else {}
    weights = dict(step.model.named_parameters(remove_duplicate=False)) if task.train else {}
    before = {name: weight.detach().clone() for name, weight in weights.items() if weight.requires_grad}
    usage: list[Usage] = []  # of the system, in the second step
    keeps = False

    def done(number: int) -> None:
        nonlocal keeps
        usage.append(Usage.now())
        if number == 2:
            keeps = task.places[0].type == "cpu" and keep_freed_memory()

    try:
        computed = _first_steps(step, task, None, done)
    except Exception as error:
        raise MismatchError(
            f"{task.model} fails on its own inputs ({reason_of(error)}); first make it run as it is."
        ) from error
    with_dropout(dropout)
    names = tuple(computed)
    moved = {f"{MOVED}{WEIGHT}{name}": distance(weights[name].detach(), start) for name, start in before.items()}
    save_file(computed | {name: torch.tensor(by) for name, by in moved.items()}, task.reference)
    del computed, before
    forget_peak()
    timed = timed_run(step, task.repeats, None, task.places)
    kept_bytes = {next(iter(task.devices)): own_bytes(step.model)}
    return ProcessOutcome(timed, kept_bytes, computed=names, given_back=usage[1].since(usage[0]) if keeps else None)


def rounding(task: TrialTask) -> dict[str, float]:
    """By how much each tensor moves when every weight of the plain model is off by its rounding.

    Parts of a step are rounded at other places than the whole, and how far that is carried depends on the model.
    """
    step = _plain_step(task)
    if task.is_calm:
        without_dropout(step.model)
    eps = max(torch.finfo(getattr(torch, name)).eps for name in ("float32", *task.halves))
    draws = torch.Generator().manual_seed(task.seed)
    with torch.no_grad():
        for weight in step.model.parameters():
            if weight.is_floating_point():
                signs = 2.0 * torch.randint(0, 2, weight.shape, generator=draws) - 1.0
                weight.copy_(weight * (1.0 + eps * signs.to(weight.device)))
    reference = TensorFile(task.reference)
    moved = _first_steps(step, task, reference)
    # A loss is rounded itself, however little the weights move it.
    return {
        name: max(distance(tensor, reference[name]), eps * largest(reference[name]))
        for name, tensor in moved.items()
        if name in reference
    }


def placed(task: TrialTask) -> ProcessOutcome:
    """Steps of the model as placed, or of this rank's share, and whether they compute what the plain model does."""
    keep_freed_memory()
    result, reference = Result.load(task.placement), TensorFile(task.reference)
    with _same_draws(task):
        example = _example(task, result)
        dropout = without_dropout(example.model) if task.is_calm else {}
        example = _as_placed(example, task, result)
        step = _step(task, example)
        computed = _first_steps(step, task, reference)
        with_dropout(dropout)
        checked = compared(computed, reference)
        del computed, reference  # a step does not need them
        forget_peak()
        timed = timed_run(step, task.repeats, dist.group.WORLD, task.places)
    kept_bytes = _kept_bytes(task, example.model, result)
    recorded: tuple[RecordedStep, ...] = ()
    if isinstance(example.model, RecordingModule):
        recorded = record_steps(example.model, step, dist.group.WORLD, task.recorded)
    return ProcessOutcome(timed, kept_bytes, compared=checked, recorded=recorded)


def _first_steps(
    step: ModelStep,
    task: TrialTask,
    reference: Mapping[str, Tensor] | None,
    done: Callable[[int], None] = lambda number: None,
) -> dict[str, Tensor]:
    """As `ModelStep.first_steps`, with the task's random numbers; who waits is told, and called with each number."""
    began_s = perf_counter()

    def told(number: int) -> None:
        done(number)
        step_s = (perf_counter() - began_s) / number
        tell(StepProgress(number, STEPS + task.repeats.expected([step_s]), step_s))

    torch.manual_seed(task.seed)
    return step.first_steps(reference, told)


def with_dropout(found: Mapping[tuple[nn.Module, str], float]) -> None:
    """Give back what `without_dropout` took, for the steps that are timed; traced stages go on without it."""
    for (module, name), value in found.items():
        setattr(module, name, value)


def _as_placed(example: Example, task: TrialTask, result: Result) -> Example:
    if task.recorded and task.way == "ranked" and result.strategy.is_none:
        ranks = joined(len(task.devices))
        layout = layout_of(_program(example, task.train, result), result, task.devices)
        return replace(example, model=RecordingModule(example.model, layout, ranks, layout.places[ranks.rank]))
    stack = COMPILED if task.is_compiled else EAGER
    model = apply(example.model, result, example.args, example.kwargs, devices=task.devices, stack=stack)
    example = replace(example, model=model)
    return _moved(example, task.places[0]) if task.way == "compiled" else example


def _same_draws(task: TrialTask) -> AbstractContextManager[object]:
    """Compiled code draws other numbers than the kernels of PyTorch, so that dropout would not compare."""
    if task.way != "compiled":
        return nullcontext()
    from torch._inductor import config  # loads the compiler

    patched: AbstractContextManager[object] = config.patch(fallback_random=True)
    return patched


def _kept_bytes(task: TrialTask, model: nn.Module, result: Result) -> dict[str, int]:
    """Bytes of parameters and buffers by device; those that are one torch device are told apart."""
    devices = list(task.devices)
    if task.way != "by_module":
        return {devices[dist.get_rank()]: own_bytes(model)}
    names = {torch.device("meta", number): name for number, name in enumerate(devices)}
    places = module_places(model, result, {name: place for place, name in names.items()})
    found = dict.fromkeys(devices, 0)
    seen: set[int] = set()
    for path, module in model.named_modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[names[places[path]]] += tensor.nbytes
    return found


def _example(task: TrialTask, result: Result) -> Example:
    """The model with its inputs, in the formats of the precision that the result was captured in."""
    example = read_example(task.model, train=task.train, dims=task.dims, seed=task.seed)
    set_mode(example.model, task.train)
    if result.graph.origin.precision is not None:
        precision = precision_named(result.graph.origin.precision)
        convert(example.model, precision)
        accept_gradients(example.model, precision)
    return example


def _plain_step(task: TrialTask) -> ModelStep:
    result = Result.load(task.placement)
    example = _example(task, result)
    if task.way == "plain":
        layout_of(_program(example, task.train, result), result, task.devices)  # refuses another model's placement
    if result.graph.origin.precision is not None:
        compute_in(example.model, precision_named(result.graph.origin.precision))
    return _step(task, _moved(example, task.places[0]))


def _step(task: TrialTask, example: Example) -> ModelStep:
    loss = None if hasattr(example.model, "gathered_gradients") else default_loss
    return ModelStep(example.model, example.args, example.kwargs, task.train, loss, task.optimizer)


def own_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers of a model, or of what this rank has of them."""
    own: tuple[Any, ...] = (*model.parameters(), *model.buffers())
    return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in own)


def _program(example: Example, train: bool, result: Result) -> Program:
    origin = result.graph.origin
    how: dict[str, Any] = {"optimizer": origin.optimizer or "adam", "precision": origin.precision}
    how["is_compiled"] = result.stack == COMPILED
    return capture_program(example.model, example.args, example.kwargs, train, **how)


def _moved(example: Example, place: torch.device) -> Example:
    """The example on a device, its tensors one by one."""

    def moved(value: Any) -> Any:
        return value.to(place) if isinstance(value, Tensor) else value

    args, kwargs = tree_map(moved, (example.args, dict(example.kwargs)))
    return replace(example, model=example.model.to(place), args=args, kwargs=kwargs)


# -- recording ---------------------------------------------------------------------------------------------------------


class RecordingModule(PlacedRanks):
    """As `PlacedRanks`; `spans_of` runs with a look at the clock after every op and transfer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._with_clock: dict[DeviceLayout, RankStep] = {}
        self._spans: list[Span] | None = None

    def spans_of(self, run: Callable[[], object]) -> list[Span]:
        """The spans of the steps that ``run`` runs on this rank."""
        spans: list[Span] = []
        plain, self._steps, self._spans = self._steps, self._with_clock, spans
        try:
            run()
        finally:
            self._steps, self._spans = plain, None
        return spans

    def _made(self, layout: DeviceLayout) -> RankStep:
        step = super()._made(layout)
        if self._spans is not None:
            step.change(lambda routine: recorded(routine, partial(self._write, step, routine.ops)))
        return step

    def _write(self, step: RankStep, ops: Sequence[int], stretches: Sequence[Stretch]) -> None:
        assert self._spans is not None
        for each in whole(stretches, ops):
            op, peer = each.number, None
            if each.what != "op":
                transfer = step.transfers[each.number]
                op, peer = transfer.op, transfer.target if each.what == "send" else transfer.source
            self._spans.append(Span(each.what, op, each.start_s, each.end_s, peer))


def whole(spans: Sequence[Stretch], ops: Sequence[int]) -> list[Stretch]:
    """One span for each op, in the order that the ops began.

    An op of several calls, between which something may be sent, lasts from the first to the last; one without code (an
    input, a copy that nobody would notice) has no length and comes when the op before it has ended.
    """
    first: dict[int, Stretch] = {}
    last: dict[int, Stretch] = {}
    for span in spans:
        if span.what == "op":
            first.setdefault(span.number, span)
            last[span.number] = span
    now = spans[0].start_s if spans else perf_counter()
    found = [span for span in spans if span.what != "op"]
    for op in ops:
        begun = first[op].start_s if op in first else now
        now = last[op].end_s if op in last else now
        found.append(Stretch("op", op, begun, now))
    return sorted(found, key=lambda span: span.start_s)


def record_steps(
    module: RecordingModule, step: ModelStep, group: ProcessGroup | None, count: int
) -> tuple[RecordedStep, ...]:
    """Record some steps of this rank after one that warms up, by the host's clock, which all its processes share."""
    found = []
    for _ in range(1 + count):
        if group is not None:
            dist.barrier(group=group)
        start_s = perf_counter()
        spans = module.spans_of(step.passes)
        if step.train:
            began_s = perf_counter()
            step.update()
            spans.append(Span("update", -1, began_s, perf_counter()))
        found.append(RecordedStep(start_s, perf_counter(), tuple(spans)))
    return tuple(found[1:])
