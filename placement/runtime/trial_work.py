"""What the processes of a trial do.

`plain` runs the model as it is, `placed` a rank's share of it, `by_module` all of one that is placed by module.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from graphs.capture import capture_program
from graphs.capture.failure import reason_of
from graphs.capture.record import default_loss, output_tensors
from graphs.errors import MismatchError
from placement.application import apply, layout_of, optimizer_of
from placement.models import Example, read_example
from placement.result import Result
from placement.runtime.by_module import module_places
from placement.runtime.crew import Crew
from placement.runtime.measure import measure_step
from placement.runtime.recording import RecordingModule, record_steps

# Sums in another order differ by rounding; float32 keeps 7 digits, and a step adds many numbers.
RELATIVE, ABSOLUTE = 1e-3, 1e-5


def plain(description: Mapping[str, Any], crew: Crew) -> dict[str, Any]:
    """Steps of the model as it is; what it computes first goes to a file for the others to compare with."""
    example = _moved(_example(description), torch.device(description["place"]))
    torch.manual_seed(description["seed"])
    try:
        computed = _first_step(example.model, example, description["train"])
    except Exception as error:
        raise MismatchError(
            f"{description['model']} fails on its own inputs ({reason_of(error)}); first make it run as it is."
        ) from error
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in computed.items()
    }
    save_file(copies, description["reference"])
    del copies, computed
    found = _timed(_step_of(example.model, example, description["train"]), description, crew)
    return found | {"kept_bytes": _own_bytes(example.model)}


def by_module(description: Mapping[str, Any], crew: Crew) -> dict[str, Any]:
    """Steps of a model placed by module, all in this process, and whether it computes what the model does."""
    example = _example(description)
    train, result = description["train"], Result.load(description["placement"])
    model = apply(example.model, result, example.args, example.kwargs, devices=description["devices"])
    torch.manual_seed(description["seed"])
    found, reference = _first_step(model, example, train), load_file(description["reference"])
    gradients = {name for name in (*found, *reference) if name.startswith("gradient/")}
    outputs = reference.keys() - gradients
    own = {
        "outputs_equal": all(equal(found[name], reference[name]) for name in outputs),
        "gradients_equal": all(equal_gradients(found.get(name), reference.get(name)) for name in gradients),
        "kept_bytes": _kept_bytes(model, result, list(description["devices"])),
    }
    del found, reference
    return _timed(_step_of(model, example, train), description, crew) | own


def placed(description: Mapping[str, Any], crew: Crew) -> dict[str, Any]:
    """Steps of a rank's share, and whether it computes what the model does."""
    example = _example(description)
    train = description["train"]
    result = Result.load(description["placement"])
    program = capture_program(example.model, example.args, example.kwargs, train, optimizer=optimizer_of(result.graph))
    layout = layout_of(program, result, description["devices"])
    module = RecordingModule(example.model, layout, crew)
    reference = load_file(description["reference"])
    torch.manual_seed(description["seed"])
    optimizer = None
    if train:
        loss = module.step(*example.args, **example.kwargs)
        outputs_equal = equal(loss, reference["loss"])
        gradients_equal = all(
            equal_gradients(p.grad, reference.get(f"gradient/{name}")) for name, p in module.named_parameters()
        )
        optimizer = _optimizer(module)
    else:
        tensors = _tensors(module, example)
        outputs_equal = all(equal(tensor, reference[f"output/{i}"]) for i, tensor in enumerate(tensors))
        gradients_equal = True
    del reference

    run = _run_of(module, example, optimizer, lambda: module.step(*example.args, **example.kwargs))
    found = _timed(_with_update(run, optimizer), description, crew)
    found |= {"outputs_equal": outputs_equal, "gradients_equal": gradients_equal, "kept_bytes": _own_bytes(module)}
    if description["recorded"]:
        update = None if optimizer is None else optimizer.step
        found["recorded"] = record_steps(module, run, update, crew, description["recorded"])
    return found


def _step_of(model: nn.Module, example: Example, train: bool) -> Callable[[], None]:
    """A step of a model that one process runs."""
    optimizer = _optimizer(model) if train else None

    def backward() -> None:
        default_loss(model(*example.args, **example.kwargs)).backward()  # type: ignore[no-untyped-call]

    return _with_update(_run_of(model, example, optimizer, backward), optimizer)


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
        return {f"output/{i}": tensor for i, tensor in enumerate(_tensors(model, example))}
    loss = default_loss(model(*example.args, **example.kwargs))
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {f"gradient/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss} | gradients


def _tensors(model: nn.Module, example: Example) -> list[Tensor]:
    with torch.no_grad():
        return output_tensors(model(*example.args, **example.kwargs))


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


def equal_gradients(found: Tensor | None, expected: Tensor | None) -> bool:
    """As `equal`; no gradient equals no gradient."""
    if found is None or expected is None:
        return found is expected
    return equal(found, expected)


def equal(found: Tensor, expected: Tensor) -> bool:
    """Equal within rounding, relative to the largest number in it."""
    found = found.detach().cpu()
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(found, expected)
    sizes = expected.abs()
    finite = sizes[sizes.isfinite()]
    scale = float(finite.max()) if finite.numel() else 0.0
    return bool(torch.allclose(found, expected, rtol=RELATIVE, atol=ABSOLUTE * max(scale, 1e-30) * 10, equal_nan=True))


def _timed(step: Callable[[], None], description: Mapping[str, Any], crew: Crew) -> dict[str, Any]:
    # Waiting for the others between two steps is no part of either.
    waited_before: list[float] = []
    waited_after: list[float] = []

    def together() -> None:
        waited_after.append(crew.waited_s)
        crew.exchange("")
        waited_before.append(crew.waited_s)

    times = measure_step(
        step,
        steps=description["steps"],
        dropped=description["dropped"],
        places=[torch.device(place) for place in description["devices"].values()],
        together=together,
    )
    waited_after.append(crew.waited_s)
    waits = [after - before for before, after in zip(waited_before, waited_after[1:], strict=True)]
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "step_s": list(times.samples_s),
        "waited_s": waits[description["dropped"] :],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }
