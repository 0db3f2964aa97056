"""The work of the processes of a trial.

`plain` runs the model as it is, `compiled` the same under torch.compile, `ranked` a rank's share of it, `by_module` all
of one that is placed by module.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from graphs.capture import Program, capture_program
from graphs.capture.failure import reason_of
from graphs.capture.record import default_loss, output_tensors
from graphs.errors import MismatchError
from graphs.origin import COMPILED
from placement.inputs.examples import Example, read_example
from placement.measuring.recording import RecordingModule, record_steps
from placement.measuring.repeats import Repeats, run_steps
from placement.measuring.speeds import synchronise
from placement.measuring.trial import GRADIENT
from placement.processes.kept_memory import Usage, keep_freed_memory
from placement.runtime.application import apply, layout_of, plan_of
from placement.runtime.modules.by_module import module_places
from placement.runtime.ranks.process_group import ProcessGroup
from placement.solving.result import Result

if TYPE_CHECKING:
    from placement.runtime.modules.strategy_module import StrategyModule

# Sums in another order differ by rounding; float32 keeps 7 digits, and a step adds many numbers.
RELATIVE, ABSOLUTE = 1e-3, 1e-5
NOISE = (
    1e-6  # of the largest gradient: what rounding leaves of a sum that is zero, such as a bias's before a batch norm
)
NEGLIGIBLE = 1e-3  # of the largest gradient: differences are told relative to at least that
ROUNDINGS = 4.0  # times what weights that are off by their rounding change
ROUNDING = "rounding/"  # that change, of the tensor with the rest of the name


def plain(description: Mapping[str, Any], group: ProcessGroup) -> dict[str, Any]:
    """Steps of the model as it is; what it computes first goes to a file for the others to compare with."""
    train = description["train"]
    example = _example(description)
    if description["is_plain"]:
        result = Result.load(description["placement"])
        layout_of(_program(example, train, result), result, description["devices"])  # refuses another model's placement
    example = _moved(example, torch.device(description["place"]))
    torch.manual_seed(description["seed"])
    try:
        computed = _first_step(example.model, example, train)
    except Exception as error:
        raise MismatchError(
            f"{description['model']} fails on its own inputs ({reason_of(error)}); first make it run as it is."
        ) from error
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in computed.items()
    }
    names = list(copies)
    copies |= _rounding(example, description, copies)
    save_file(copies, description["reference"])
    del copies, computed
    optimizer = _optimizer(example.model) if train else None
    step = _step_of(example, optimizer)
    given_back = _without_kept_memory(step, optimizer) if description["place"] == "cpu" else None
    found = _timed(step, description, group)
    if given_back is not None:
        found["given_back"] = asdict(given_back)
    return found | {"computed": names, "kept_bytes": _own_bytes(example.model)}


def _rounding(example: Example, description: Mapping[str, Any], computed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By how much each tensor moves when every weight is off by its rounding; nothing of a step in float32 alone.

    Parts of a step in bfloat16 or float16 are rounded at other places than the whole, and how far that is carried
    depends on the model.
    """
    eps = max((torch.finfo(getattr(torch, name)).eps for name in description["halves"]), default=0.0)
    if not eps:
        return {}
    weights = [weight for weight in example.model.parameters() if weight.is_floating_point()]
    originals = [weight.detach().clone() for weight in weights]
    draws = torch.Generator().manual_seed(description["seed"])
    with torch.no_grad():
        for weight in weights:
            signs = 2.0 * torch.randint(0, 2, weight.shape, generator=draws) - 1.0
            weight.copy_(weight * (1.0 + eps * signs.to(weight.device)))
    example.model.zero_grad()
    torch.manual_seed(description["seed"])
    moved = _first_step(example.model, example, description["train"])
    with torch.no_grad():
        for weight, original in zip(weights, originals, strict=True):
            weight.copy_(original)
    # A loss is rounded itself, however little the weights move it.
    found = {name: _distance(tensor.detach().cpu(), computed[name]) for name, tensor in moved.items()}
    least = {name: eps * _largest(computed[name]) for name in found}
    return {f"{ROUNDING}{name}": torch.tensor(max(found[name], least[name])) for name in found}


def _without_kept_memory(step: Callable[[], None], optimizer: torch.optim.Optimizer | None) -> Usage | None:
    """A step where freed memory goes back to the system; None where it always does, or never.

    From then on this process keeps it, as those that run the placement do.
    """
    if optimizer is not None:
        optimizer.step()  # its state is made once, and not with every step
    before = Usage.now()
    step()
    found = Usage.now().since(before)
    return found if keep_freed_memory() else None


def by_module(description: Mapping[str, Any], group: ProcessGroup) -> dict[str, Any]:
    """Steps of a model placed by module, all in this process, and whether it computes what the model does."""
    keep_freed_memory()
    example = _example(description)
    train, result = description["train"], Result.load(description["placement"])
    model = apply(example.model, result, example.args, example.kwargs, devices=description["devices"])
    example = replace(example, model=model)
    torch.manual_seed(description["seed"])
    compared = _compared(_first_step(model, example, train), load_file(description["reference"]))
    kept_bytes = _kept_bytes(model, result, list(description["devices"]))
    found = _timed(_step_of(example, _optimizer(model) if train else None), description, group)
    return found | {"compared": compared, "kept_bytes": kept_bytes}


def compiled(description: Mapping[str, Any], group: ProcessGroup) -> dict[str, Any]:
    """Steps of the model under torch.compile on its one device, and whether it computes what the model does."""
    from torch._inductor import config  # loads the compiler

    keep_freed_memory()
    example = _example(description)
    train, result = description["train"], Result.load(description["placement"])
    own = (example.args, example.kwargs)
    model = apply(example.model, result, *own, devices=description["devices"], stack=COMPILED)
    example = _moved(replace(example, model=model), torch.device(description["place"]))
    torch.manual_seed(description["seed"])
    # Compiled code draws other numbers than the kernels of PyTorch, so that dropout would not compare.
    with config.patch(fallback_random=True):
        compared = _compared(_first_step(model, example, train), load_file(description["reference"]))
        found = _timed(_step_of(example, _optimizer(model) if train else None), description, group)
    return found | {"compared": compared, "kept_bytes": _own_bytes(model)}


def ranked(description: Mapping[str, Any], group: ProcessGroup) -> dict[str, Any]:
    """Steps of a rank's share, and whether it computes its parts of what the model does."""
    keep_freed_memory()
    example = _example(description)
    train, result = description["train"], Result.load(description["placement"])
    plan = plan_of(_program(example, train, result), result)
    place = torch.device(list(description["devices"].values())[group.rank])
    module = RecordingModule(example.model, plan, group, place)
    if description["is_compiled"]:
        module.compile()
    torch.manual_seed(description["seed"])
    if train:
        computed = {"loss": module.step(*example.args, **example.kwargs)} | _gradients(module)
    else:
        computed = _outputs(module, example)
    reference = load_file(description["reference"])
    expected = {name: _own_part(module, name, tensor) for name, tensor in reference.items()}
    compared = _compared(computed, {name: tensor for name, tensor in expected.items() if tensor is not None})
    del computed, reference, expected
    optimizer = _optimizer(module) if train else None
    run = _run_of(module, example, optimizer, lambda: module.step(*example.args, **example.kwargs))
    found = _timed(_with_update(run, optimizer), description, group)
    found |= {"compared": compared, "kept_bytes": _own_bytes(module)}
    if description["recorded"] and plan.is_placement:
        update = None if optimizer is None else optimizer.step
        found["recorded"] = record_steps(module, run, update, group, description["recorded"])
    return found


def _own_part(module: StrategyModule, name: str, tensor: Tensor) -> Tensor | None:
    """A rank's part of a tensor that the plain model computed; None for a gradient of a parameter that others store."""
    parameter = name.removeprefix(GRADIENT)
    return module.own_part(parameter, tensor) if parameter != name else tensor  # roundings among the latter


def _step_of(example: Example, optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
    """A step of a model that one process runs."""

    def backward() -> None:
        default_loss(example.model(*example.args, **example.kwargs)).backward()  # type: ignore[no-untyped-call]

    return _with_update(_run_of(example.model, example, optimizer, backward), optimizer)


def _run_of(
    model: nn.Module, example: Example, optimizer: torch.optim.Optimizer | None, backward: Callable[[], object]
) -> Callable[[], None]:
    """Inference where there is no optimizer, else `backward`, which runs both passes, on gradients set to zero."""

    def run() -> None:
        if optimizer is None:
            with torch.no_grad():
                model(*example.args, **example.kwargs)
            return
        optimizer.zero_grad()
        backward()

    return run


def _with_update(run: Callable[[], None], optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
    def step() -> None:
        run()
        if optimizer is not None:
            optimizer.step()

    return step


def _own_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers that a process has."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _kept_bytes(model: nn.Module, result: Result, devices: list[str]) -> dict[str, int]:
    """Bytes of parameters and buffers by device; those that are one torch device are told apart."""
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


def _program(example: Example, train: bool, result: Result) -> Program:
    optimizer = result.graph.origin.optimizer or "adam"
    return capture_program(example.model, example.args, example.kwargs, train, optimizer=optimizer)


def _example(description: Mapping[str, Any]) -> Example:
    model, train, dims, seed = (description[key] for key in ("model", "train", "dims", "seed"))
    example = read_example(model, train=train, dims=dims, seed=seed)
    example.model.train(train)
    return example


def _moved(example: Example, place: torch.device) -> Example:
    """The example on a device, its tensors one by one."""

    def moved(value: Any) -> Any:
        return value.to(place) if isinstance(value, Tensor) else value

    args, kwargs = tree_map(moved, (example.args, dict(example.kwargs)))
    return replace(example, model=example.model.to(place), args=args, kwargs=kwargs)


def _first_step(model: nn.Module, example: Example, train: bool) -> dict[str, Tensor]:
    if not train:
        return _outputs(model, example)
    loss = default_loss(model(*example.args, **example.kwargs))
    loss.backward()  # type: ignore[no-untyped-call]
    return {"loss": loss} | _gradients(model)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {f"{GRADIENT}{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def _outputs(model: nn.Module, example: Example) -> dict[str, Tensor]:
    with torch.no_grad():
        tensors = output_tensors(model(*example.args, **example.kwargs))
    return {f"output/{number}": tensor for number, tensor in enumerate(tensors)}


def _compared(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, tuple[bool, float]]:
    """Whether each tensor that was computed here is the model's, and its largest difference.

    That is relative to the largest number in the model's, of a small gradient to `NEGLIGIBLE` of the largest one;
    infinite where the model has no such tensor, and NaN where the model's has no finite number, so that nothing can be
    compared.
    """
    largest = max((_largest(reference[name]) for name in reference if name.startswith(GRADIENT)), default=0.0)
    result: dict[str, tuple[bool, float]] = {}
    for name, tensor in found.items():
        if name not in reference:
            result[name] = False, math.inf
            continue
        rounding = float(reference.get(f"{ROUNDING}{name}", 0.0))
        noise = max(NOISE * largest * name.startswith(GRADIENT), ROUNDINGS * rounding)
        own, expected = tensor.detach().cpu(), reference[name]
        is_empty = expected.numel() > 0 and not expected.isfinite().any()
        # A gradient that is zero but for rounding has no figures to be off by.
        scale = max(_largest(expected), NEGLIGIBLE * largest * name.startswith(GRADIENT), 1e-30)
        off = math.nan if is_empty else _distance(own, expected) / scale
        result[name] = equal(own, expected, noise), off
    return result


def _distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors; infinite where their shapes differ, or one alone is not finite."""
    if found.shape != expected.shape:
        return math.inf
    if not found.numel():
        return 0.0
    wide = torch.complex128 if found.is_complex() else torch.float64
    same = (found == expected) | (found.isnan() & expected.isnan())
    off = torch.where(same, 0.0, (found.to(wide) - expected.to(wide)).abs())
    return float(off.nan_to_num(nan=math.inf).max())


def _optimizer(model: nn.Module) -> torch.optim.Optimizer | None:
    """Adam on what there is to train, which may be nothing on a rank."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.Adam(parameters, lr=1e-5, foreach=False) if parameters else _Nothing()


class _Nothing(torch.optim.Optimizer):
    """For a rank that trains nothing."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return


def equal(found: Tensor, expected: Tensor, noise: float = 0.0) -> bool:
    """Equal within rounding, relative to the largest number in it, or within ``noise``."""
    found = found.detach().cpu()
    if found.shape != expected.shape:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(found, expected)
    atol = max(ABSOLUTE * max(_largest(expected), 1e-30) * 10, noise)
    return bool(torch.allclose(found, expected, rtol=RELATIVE, atol=atol, equal_nan=True))


def _largest(tensor: Tensor) -> float:
    sizes = tensor.abs()
    finite = sizes[sizes.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _timed(step: Callable[[], None], description: Mapping[str, Any], group: ProcessGroup) -> dict[str, Any]:
    places = [torch.device(place) for place in description["devices"].values()]
    waited_s: list[float] = []  # within the steps: waiting for the others between two of them is no part of either
    usage: list[Usage] = []  # after each step

    def timed() -> float:
        waited_before, start = group.waited_s, perf_counter()
        step()
        for place in places:
            synchronise(place)
        seconds = perf_counter() - start
        waited_s.append(group.waited_s - waited_before)
        usage.append(Usage.now())
        return seconds

    def all_gather(seconds: float) -> list[float]:
        return [float(text) for text in group.all_gather(repr(seconds))]

    usage.append(Usage.now())
    times_s, warm_up = run_steps(timed, Repeats(**description["repeats"]), all_gather, group.report)
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "step_s": times_s[warm_up:],
        "waited_s": waited_s[warm_up:],
        "dropped": warm_up,
        "usage": asdict(usage[-1].since(usage[warm_up], len(times_s) - warm_up)),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }
