"""A user's model and data, from the MODEL argument of a command or from Python, checked and made into a `FitTask`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from graphs.capture.failure import reason_of
from graphs.capture.record import default_loss, output_tensors
from graphs.errors import CaptureError, FitError, GraphFileError
from graphs.kept import precision_named
from graphs.recipes import PRECISIONS
from placement.fitting.task import CPU, FitTask
from placement.inputs.functions import call_function, described, is_function
from placement.inputs.sources import refuse_script

_DEFAULT_BATCH = 32
_HELD_OUT = 10  # one sample in so many, the last ones


def model_and_data(argument: str, dims: Mapping[str, int], seed: int) -> tuple[nn.Module, Any]:
    """A model and the samples to fit it to, as ``file.py:function`` returns them.

    Args:
        dims: keyword arguments of the function.
        seed: of torch's random numbers while it runs.

    Raises:
        UnknownNameError, GraphFileError: no such function; or no function, as built-in models have no data.
        CaptureError: the user's function failed, or returned something else.
    """
    refuse_script(argument)
    if not is_function(argument):
        raise GraphFileError(
            f"{argument} has no data to be fitted to; give file.py:function that returns (model, data), data being "
            "tensors with a row for each sample."
        )
    torch.manual_seed(seed)
    returned = call_function(argument, dims)
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module)):
        raise CaptureError(f"{argument} returned {described(returned)}; expected (model, data).")
    return returned


def fit_task_of(
    model: nn.Module,
    data: Any,
    *,
    batch: int | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    seed: int = 0,
    precision: str | None = None,
) -> FitTask:
    """The task of fitting a model to data; the last tenth of the samples, at least one, is held out. The model is
    copied.

    Args:
        data: a tensor, or a sequence of tensors with a row for each sample, the model's arguments; or a torch Dataset
            of such samples, which is read whole.
        batch: samples of a worker's mini-batch; 32, or all if there are fewer, by default.
        loss: as of `placement.capture`.
        precision: in which gradients are computed; weights and gradients themselves are float32.

    Raises:
        UnknownNameError: no such precision.
        FitError: a precision of other weights or gradients; no model, nothing to train, no such data, a batch larger
            than the data, or a model that does not take the data.
    """
    _check_precision(precision)
    if not isinstance(model, nn.Module):
        raise FitError(f"the model is a {type(model).__name__}; expected a torch.nn.Module.")
    columns = _columns(data)
    total = len(columns[0])
    kept = total - max(1, total // _HELD_OUT)
    batch = min(_DEFAULT_BATCH, kept) if batch is None else batch
    if not isinstance(batch, int) or not 1 <= batch <= kept:
        raise FitError(
            f"a batch of {batch} samples was asked for, and {kept} of the {total} are to train on, the rest held out; "
            f"give 1 to {kept}."
        )
    task = FitTask(
        model=copy.deepcopy(model).train(),
        data=tuple(each[:kept] for each in columns),
        held_out=tuple(each[kept:] for each in columns),
        batch=batch,
        loss=loss or default_loss,
        seed=seed,
        precision=precision,
    )
    _check(task)
    return task


def _check_precision(name: str | None) -> None:
    """Refuse a precision in which other numbers than float32 are exchanged."""
    if name is None:
        return
    own = precision_named(name)
    if {own.parameter, own.gradient} != {"float32"}:
        fitting = [one.name for one in PRECISIONS.values() if {one.parameter, one.gradient} == {"float32"}]
        raise FitError(
            f"fit exchanges weights and gradients in float32, and precision {name!r} has weights in {own.parameter} "
            f"and gradients in {own.gradient}; take {' or '.join(fitting)}."
        )


def has_no_loss(task: FitTask) -> bool:
    """Whether the model gives several numbers for a sample and nobody says what its loss is: their mean is taken."""
    if task.loss is not default_loss:
        return False
    outputs: list[Any] = []

    def kept(output: Any) -> torch.Tensor:
        outputs.append(output)
        return default_loss(output)

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        replace(task, loss=kept).loss_at(task.weights(), tuple(each[: task.batch] for each in task.data))
    (output,) = outputs
    given = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return given is None and any(each.is_floating_point() and each.ndim > 1 for each in output_tensors(output))


def _columns(data: Any) -> tuple[torch.Tensor, ...]:
    if isinstance(data, Dataset):
        total = len(data) if hasattr(data, "__len__") else 0
        try:
            data = default_collate([data[number] for number in range(total)]) if total else ()
        except Exception as error:
            raise FitError(
                f"the Dataset cannot be read whole ({reason_of(error)}); expected samples of one shape."
            ) from error
    columns = (data,) if isinstance(data, torch.Tensor) else tuple(data) if isinstance(data, Sequence) else ()
    if not columns or not all(isinstance(each, torch.Tensor) and each.ndim for each in columns):
        raise FitError(
            f"the data are a {type(data).__name__}; expected tensors with a row for each sample, the model's "
            "arguments, or a torch Dataset with a length that gives tuples of tensors."
        )
    rows = [len(each) for each in columns]
    if len(set(rows)) > 1 or rows[0] < 2:
        few = "no rows" if max(rows) == 0 else f"{' and '.join(map(str, dict.fromkeys(rows)))} rows"
        raise FitError(
            f"the tensors of the data have {few}; expected a row for each sample, as many in each, 2 or more."
        )
    for number, column in enumerate(columns):
        is_bad = ~column.isfinite().reshape(len(column), -1).all(1)
        if is_bad.any():
            first = int(is_bad.int().argmax())
            raise FitError(
                f"tensor {number} of the data has numbers that are not finite, the first in sample {first}; leave such "
                "samples out, or replace the numbers."
            )
    return columns


def _check(task: FitTask) -> None:
    """Refuse what no gradient can be taken of, before a cluster is simulated."""
    if not task.layout.names:
        raise FitError("the model has no trainable parameter; expected at least one with requires_grad.")
    moved = next(
        (each for each in (*task.model.parameters(), *task.model.buffers(), *task.data) if each.device != CPU), None
    )
    if moved is not None:
        raise FitError(
            f"model or data are on {moved.device}; leave both on the CPU, fit takes them where they are needed."
        )
    wide = next((p.dtype for p in task.model.parameters() if p.requires_grad and p.dtype != torch.float32), None)
    if wide is not None:
        raise FitError(f"the model has parameters of {wide}; expected torch.float32, convert it with model.float().")
    try:
        task.gradient(task.weights(), torch.arange(task.batch))
    except FitError as error:
        raise FitError(
            f"the model cannot be trained on these data ({reason_of(error.__cause__ or error)}); expected forward to "
            f"take the {len(task.data)} tensors of the data, targets among them, and the loss to be a scalar."
        ) from error
