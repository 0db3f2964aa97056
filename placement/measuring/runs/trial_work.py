"""Main functions of the processes of a trial: `plain` runs the model as it is, `placed` as it was placed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from graphs.capture import Program, capture_program
from graphs.capture.failure import reason_of
from graphs.capture.record import default_loss
from graphs.errors import MismatchError
from graphs.kept import precision_named
from graphs.origin import COMPILED, EAGER
from placement.inputs.examples import Example, read_example
from placement.measuring.runs.differences import GRADIENT, ROUNDING, compared, distance, largest
from placement.measuring.runs.recording import RecordingModule, record_steps
from placement.measuring.runs.steps import ModelStep
from placement.measuring.runs.timed_run import timed_run
from placement.measuring.runs.timeline import RecordedStep
from placement.measuring.runs.trial_task import ProcessOutcome, TrialTask
from placement.processes.kept_memory import Usage, keep_freed_memory
from placement.results.result import Result
from placement.runtime.application import apply, layout_of, plan_of
from placement.runtime.modules.by_module import module_places
from placement.runtime.modules.strategy_module import StrategyModule
from placement.runtime.ranks.process_group import ProcessGroup
from placement.runtime.states.formats import accept_gradients, compute_in, convert


def plain(task: TrialTask, group: ProcessGroup) -> ProcessOutcome:
    """Steps of the model as it is; what it computes first goes to a file for the others to compare with."""
    result, place = Result.load(task.placement), task.places[0]
    example = _example(task, result)
    if task.way == "plain":
        layout_of(_program(example, task.train, result), result, task.devices)  # refuses another model's placement
    if result.graph.origin.precision is not None:
        compute_in(example.model, precision_named(result.graph.origin.precision))
    step = _step(task, _moved(example, place))
    torch.manual_seed(task.seed)
    try:
        computed = step.computed()
    except Exception as error:
        raise MismatchError(
            f"{task.model} fails on its own inputs ({reason_of(error)}); first make it run as it is."
        ) from error
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in computed.items()
    }
    names = tuple(copies)
    save_file(copies | _rounding(step, task, copies), task.reference)
    del copies, computed
    given_back = _without_kept_memory(step) if place.type == "cpu" else None
    timed = timed_run(step, task.repeats, group, task.places)
    kept_bytes = {next(iter(task.devices)): _own_bytes(step.model)}
    return ProcessOutcome(timed, kept_bytes, computed=names, given_back=given_back)


def _rounding(step: ModelStep, task: TrialTask, computed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By how much each tensor moves when every weight is off by its rounding; nothing of a step in float32 alone.

    Parts of a step in bfloat16 or float16 are rounded at other places than the whole, and how far that is carried
    depends on the model.
    """
    eps = max((torch.finfo(getattr(torch, name)).eps for name in task.halves), default=0.0)
    if not eps:
        return {}
    weights = [weight for weight in step.model.parameters() if weight.is_floating_point()]
    originals = [weight.detach().clone() for weight in weights]
    draws = torch.Generator().manual_seed(task.seed)
    with torch.no_grad():
        for weight in weights:
            signs = 2.0 * torch.randint(0, 2, weight.shape, generator=draws) - 1.0
            weight.copy_(weight * (1.0 + eps * signs.to(weight.device)))
    torch.manual_seed(task.seed)
    moved = step.computed()
    with torch.no_grad():
        for weight, original in zip(weights, originals, strict=True):
            weight.copy_(original)
    # A loss is rounded itself, however little the weights move it.
    found = {name: distance(tensor.detach().cpu(), computed[name]) for name, tensor in moved.items()}
    least = {name: eps * largest(computed[name]) for name in found}
    return {f"{ROUNDING}{name}": torch.tensor(max(found[name], least[name])) for name in found}


def _without_kept_memory(step: ModelStep) -> Usage | None:
    """A step where freed memory goes back to the system; None where it always does, or never.

    From then on this process keeps it, as those that run the placement do.
    """
    step.update()  # the optimizer's state is made once, and not with every step
    before = Usage.now()
    step()
    found = Usage.now().since(before)
    return found if keep_freed_memory() else None


def placed(task: TrialTask, group: ProcessGroup) -> ProcessOutcome:
    """Steps of the model as placed, or of this rank's share, and whether they compute what the plain model does."""
    keep_freed_memory()
    result = Result.load(task.placement)
    with _same_draws(task):
        example = _as_placed(task, result, group)
        step = _step(task, example)
        torch.manual_seed(task.seed)
        checked = compared(step.computed(), _expected(task, example.model))
        timed = timed_run(step, task.repeats, group, task.places)
    recorded: tuple[RecordedStep, ...] = ()
    if task.recorded and isinstance(example.model, RecordingModule) and example.model.is_placement:
        recorded = record_steps(example.model, step, group, task.recorded)
    return ProcessOutcome(
        timed, _kept_bytes(task, example.model, result, group.rank), compared=checked, recorded=recorded
    )


def _as_placed(task: TrialTask, result: Result, group: ProcessGroup) -> Example:
    example = _example(task, result)
    if task.way == "ranked":
        plan = plan_of(_program(example, task.train, result), result)
        module = RecordingModule(example.model, plan, group, task.places[group.rank])
        if task.is_compiled:
            module.compile()
        return replace(example, model=module)
    is_compiled = task.way == "compiled"
    stack = COMPILED if is_compiled else EAGER
    model = apply(example.model, result, example.args, example.kwargs, devices=task.devices, stack=stack)
    example = replace(example, model=model)
    return _moved(example, task.places[0]) if is_compiled else example


def _same_draws(task: TrialTask) -> AbstractContextManager[object]:
    """Compiled code draws other numbers than the kernels of PyTorch, so that dropout would not compare."""
    if task.way != "compiled":
        return nullcontext()
    from torch._inductor import config  # loads the compiler

    patched: AbstractContextManager[object] = config.patch(fallback_random=True)
    return patched


def _expected(task: TrialTask, model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the plain model, of gradients a rank's part; none for a parameter that others store."""
    reference = load_file(task.reference)
    if not isinstance(model, StrategyModule):
        return reference
    found: dict[str, Tensor] = {}
    for name, tensor in reference.items():
        parameter = name.removeprefix(GRADIENT)
        own = model.own_part(parameter, tensor) if parameter != name else tensor  # roundings among the latter
        if own is not None:
            found[name] = own
    return found


def _kept_bytes(task: TrialTask, model: nn.Module, result: Result, rank: int) -> dict[str, int]:
    """Bytes of parameters and buffers by device; those that are one torch device are told apart."""
    devices = list(task.devices)
    if task.way != "by_module":
        return {devices[rank]: _own_bytes(model)}
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
    example.model.train(task.train)
    if result.graph.origin.precision is not None:
        precision = precision_named(result.graph.origin.precision)
        convert(example.model, precision)
        accept_gradients(example.model, precision)
    return example


def _step(task: TrialTask, example: Example) -> ModelStep:
    loss = None if isinstance(example.model, StrategyModule) else default_loss
    return ModelStep.of(example.model, example.args, example.kwargs, task.train, loss)


def _own_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _program(example: Example, train: bool, result: Result) -> Program:
    origin = result.graph.origin
    how: dict[str, Any] = {"optimizer": origin.optimizer or "adam", "precision": origin.precision}
    return capture_program(example.model, example.args, example.kwargs, train, **how)


def _moved(example: Example, place: torch.device) -> Example:
    """The example on a device, its tensors one by one."""

    def moved(value: Any) -> Any:
        return value.to(place) if isinstance(value, Tensor) else value

    args, kwargs = tree_map(moved, (example.args, dict(example.kwargs)))
    return replace(example, model=example.model.to(place), args=args, kwargs=kwargs)
