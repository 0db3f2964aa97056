"""`apply`: the user's own model, run as a placement says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphs.capture import Program, capture_program, example_inputs
from graphs.capture.record import Loss
from graphs.capture.trace import value_of
from graphs.errors import MismatchError, UnknownNameError
from graphs.kept import check_formats, precision_named
from graphs.opgraph import OpGraph
from graphs.origin import COMPILED, EAGER, FUSED, STACKS
from graphs.records import LANE
from placement.inputs.call_arguments import check_call
from placement.results.result import Result
from placement.runtime.backends import BACKENDS, MODULES, Request, backend_of
from placement.runtime.program.device_layout import DeviceLayout
from placement.runtime.program.functional import functional
from placement.runtime.ranks.group import of_this_host
from placement.runtime.states import accept_gradients, convert

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from placement.runtime.torch_runner.setup import Setup

Devices = Mapping[str, str | torch.device]
_STEPS = {True: "training", False: "inference"}


def apply(
    model: nn.Module,
    result: Result | str | os.PathLike[str],
    args: tuple[Any, ...] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    devices: Devices | None = None,
    mesh: DeviceMesh | None = None,
    stack: str = EAGER,
) -> nn.Module:
    """The model with every op on the device that a placement gives it, as a drop-in for the model.

    In one process every device of the placement is a torch device, and a thread drives each; parameters are moved to
    where they were placed, and stay the objects they are. Under ``torchrun`` every process is one device, and gets its
    own share of the model. A placement on one device gives the model itself.

    Args:
        model: the model that was captured. With its parameters on ``meta``, each process makes only its own.
        result: what `placement.optimize` found, or the file it was saved to. The model's numbers become those of the
            precision that it was captured in, if any.
        args, kwargs: example inputs of the shapes that were captured.
        loss: as in `placement.capture`, if it was given there.
        devices: torch device of each device of the cluster by name; by default the n-th of kind ``"gpu"`` is
            ``cuda:n`` and every other one is the CPU.
        mesh: of a strategy: one that the script has made of its processes; it must be the strategy's.
        stack: ``"eager"``, op by op; ``"compiled"``: under torch.compile, the model itself where one device has all
            of it, else the ops of each device between two transfers or exchanges. The values are the same for every
            stack on which the result was found.

    Raises:
        UnknownNameError: no such stack.
        MismatchError: the result is infeasible, of a strategy or for another model, or names a device that is not
            there; or the mesh is another one; or a placement of modules is to be compiled.
        CaptureError: the model cannot be captured.
    """
    positional, keywords = example_inputs(args, kwargs)
    placed = _read(result)
    placed.device_numbers()  # says so if there is no placement
    check_formats(placed.graph)

    def program() -> Program:
        if isinstance(model, nn.Module):
            check_call(model, positional, keywords)
        origin = placed.graph.origin
        return capture_program(
            *(model, positional, keywords, placed.graph.is_training),
            loss=loss,
            optimizer=origin.optimizer or "adam",
            precision=origin.precision,
            is_compiled=placed.stack == COMPILED,
        )

    request = Request(
        model=model,
        result=placed,
        by_module=placed.graph.origin.granularity == "module",
        loss=loss,
        places=partial(places_of, placed, devices),
        layout=lambda: layout_of(program(), placed, devices),
        setup=lambda: strategy_setup(program(), placed, model),
        mesh=mesh,
    )
    backend = backend_of(request)
    _check_stack(stack, backend)
    precision = None if placed.graph.origin.precision is None else precision_named(placed.graph.origin.precision)
    # Where a strategy keeps parameters in one format and reads them in another, fully_shard casts them.
    casts = request.is_strategy and precision is not None and (precision.casts_parameters or precision.has_masters)
    if precision is not None and not casts:
        convert(model, precision)
    applied = BACKENDS[backend].run(request)
    if precision is not None and not casts:
        accept_gradients(applied, precision)
    if stack == COMPILED:
        applied.compile()
    return applied


def check_runnable(stack: str) -> None:
    """Refuse a stack that no model is run on.

    Raises:
        UnknownNameError, MismatchError: says which are.
    """
    if stack not in STACKS:
        raise UnknownNameError("stack", str(stack), STACKS)
    if stack == FUSED:
        raise MismatchError("stack fused stands for modules of Megatron-LM; apply runs a model eager or compiled.")


def _check_stack(stack: str, backend: str) -> None:
    """Refuse what is not run compiled."""
    check_runnable(stack)
    if stack == COMPILED and backend == MODULES:
        raise MismatchError(
            "stack compiled runs placements of ops, and this one is of modules, which may do what cannot be traced; "
            "leave stack out."
        )


def layout_of(program: Program, result: Result, devices: Devices | None = None) -> DeviceLayout:
    """Where and in which order the ops of a program run, on the devices that the result uses.

    Raises:
        MismatchError: the result is for another program, or names a device that is not there.
    """
    _check_arguments(program, result.graph)
    check_same(program.graph, result.graph)
    numbers = result.device_numbers()
    used = sorted(set(numbers.tolist()))
    index = {device: i for i, device in enumerate(used)}
    places = places_of(result, devices)
    _, schedule = result.schedule()
    sequence = schedule.order.tolist()
    return DeviceLayout(
        functional(program),
        [index[device] for device in numbers.tolist()],
        [[op for op in sequence if numbers[op] == device] for device in used],
        schedule.op_start_s.tolist(),
        [places[result.cluster.devices[device].name] for device in used],
    )


def strategy_setup(program: Program, result: Result, model: nn.Module) -> Setup:
    """What the strategy of a result says to a model, for the torch runner.

    Raises:
        MismatchError: the result is for another program, or torch has no way to run the strategy with this model.
    """
    from placement.runtime.setups.facts_of import setup_of  # loads all transforms

    _check_arguments(program, result.graph)
    return setup_of(result, program.graph, model)


def places_of(
    result: Result, devices: Devices | None = None, ranks: Sequence[str] | None = None
) -> dict[str, torch.device]:
    """The torch device of every device that a result uses, by name.

    Under ``torchrun`` on several hosts the GPUs of each are counted from ``cuda:0``; those of others are not looked at.

    Args:
        ranks: the devices in the order of the processes; None: in that of the cluster.

    Raises:
        MismatchError: it is not there.
    """
    if devices is not None and not isinstance(devices, Mapping):
        raise MismatchError(f"devices is a {type(devices).__name__}; expected a mapping such as {{'gpu0': 'cpu'}}.")
    for name in devices or {}:
        if name not in result.cluster.device_index:
            raise UnknownNameError(f"device of cluster {result.cluster.name!r}", str(name), result.cluster.device_index)
    lanes = {device.name for device in result.cluster.devices if device.kind == LANE}
    used = result.answered().used - lanes if ranks is None else set(ranks)
    here = of_this_host(ranks or [device.name for device in result.cluster.devices if device.name in used])
    gpus = [d.name for d in result.cluster.devices if d.kind == "gpu" and (here is None or d.name in here)]
    found = {}
    for device in result.cluster.devices:
        if device.name not in used:
            continue
        if here is not None and device.name not in here:
            found[device.name] = torch.device("cuda" if device.kind == "gpu" else "cpu")
            continue
        if devices is not None and device.name in devices:
            place = _torch_device(device.name, devices[device.name])
        else:
            place = torch.device("cuda", gpus.index(device.name)) if device.kind == "gpu" else torch.device("cpu")
        if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
            sentence = (
                f"device {device.name!r} of cluster {result.cluster.name!r} stands for {place}, and this machine has "
                f"{torch.cuda.device_count()} GPUs"
            )
            raise MismatchError(
                f"{sentence}; pass devices={{{device.name!r}: 'cpu'}} to run it elsewhere, or place the model on "
                "Cluster.local()."
            ).but_on_command_line(f"{sentence}; place the model with --cluster local.")
        found[device.name] = place
    return found


def _torch_device(name: str, wanted: str | torch.device) -> torch.device:
    try:
        place = torch.device(wanted)
        if place.type not in ("cpu", "cuda"):
            torch.empty(1, device=place).cpu()
    except (RuntimeError, TypeError, AssertionError, NotImplementedError):
        raise MismatchError(
            f"device {name!r} is to be {str(wanted)!r}, which this PyTorch or machine does not have; expected for "
            "example 'cpu' or 'cuda:0'."
        ) from None
    return place


def check_same(captured: OpGraph, placed: OpGraph) -> None:
    """Refuse a placement of another model; measured times may differ.

    Raises:
        MismatchError: names the first op that differs.
    """
    if captured.is_training != placed.is_training:
        mine, theirs = (_STEPS[graph.is_training] for graph in (captured, placed))
        raise MismatchError(
            f"the placement is for {theirs} of graph {placed.name!r}, and this is {mine}; run what was placed, or "
            f"place {mine}."
        )
    what = f"the placement is for graph {placed.name!r}, and this model gives another one"
    for mine, theirs in zip(captured.op_names, placed.op_names, strict=False):
        if mine != theirs:
            raise MismatchError(f"{what}: op {mine!r} where the placement has {theirs!r}; place this model first.")
    if captured.n_ops != placed.n_ops:
        raise MismatchError(
            f"{what}: {captured.n_ops} ops where the placement has {placed.n_ops}; place this model first."
        )
    for op, made, expected in zip(captured.op_names, _outputs(captured), _outputs(placed), strict=True):
        size, placed_size = (sum(bytes_ for bytes_, _ in tensors) for tensors in (made, expected))
        if size != placed_size:
            raise MismatchError(
                f"{what}: op {op!r} makes {size} bytes where the placement has {placed_size}; place this model first."
            )
        if made != expected:
            raise MismatchError(f"{what}: other ops read what op {op!r} makes; place this model first.")
    for op, kept, placed_kept in zip(captured.op_names, captured.kept_bytes, placed.kept_bytes, strict=True):
        if kept != placed_kept:
            raise MismatchError(
                f"{what}: op {op!r} keeps {kept} bytes of parameters where the placement has {placed_kept}; place this "
                "model first."
            )


def _outputs(graph: OpGraph) -> list[list[tuple[int, list[int]]]]:
    """(bytes, ops that read it) of each tensor that each op makes."""
    found: list[list[tuple[int, list[int]]]] = [[] for _ in range(graph.n_ops)]
    consumers, ends = graph.consumers.tolist(), graph.consumer_ptr.tolist()
    for tensor, producer in enumerate(graph.tensor_producer.tolist()):
        found[producer].append((int(graph.tensor_bytes[tensor]), consumers[ends[tensor] : ends[tensor + 1]]))
    return found


def _check_arguments(program: Program, placed: OpGraph) -> None:
    """Refuse example inputs of other shapes than placed; graphs have sizes only, so say which shapes have those.

    Raises:
        MismatchError: names the argument and the dimension.
    """
    if program.graph.op_names != placed.op_names:
        return
    for path, node in program.trace.arguments.items():
        op = program.op_of.get(node)
        if op is None:
            continue
        dtype, placed_dtype = program.graph.dtypes[op], placed.dtypes[op]
        if dtype != placed_dtype:
            raise MismatchError(
                f"argument {path!r} is {dtype} where the placement has {placed_dtype}; convert it, or place the model "
                "for this type."
            )
        mine, theirs = (int(graph.tensor_bytes[graph.tensor_producer == op].sum()) for graph in (program.graph, placed))
        if mine != theirs:
            shape = value_of(node).layout.shape
            fitting = [
                f"{size * theirs // mine} in dimension {dimension}"
                for dimension, size in enumerate(shape)
                if mine and theirs and size * theirs % mine == 0
            ]
            which = f", with {' or '.join(fitting)}" if fitting else ""
            raise MismatchError(
                f"argument {path!r} of shape {shape} makes {mine} bytes where the placement has {theirs}; give inputs "
                f"of the shapes that were placed{which}, or place the model for these."
            )


def _read(result: Any) -> Result:
    if isinstance(result, Result):
        return result
    if isinstance(result, (str, os.PathLike)):
        return Result.load(result)
    raise MismatchError(
        f"got a {type(result).__name__} as the placement; expected what placement.optimize returned, or the file that "
        "its save() wrote."
    )
