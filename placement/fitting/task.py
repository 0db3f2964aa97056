"""The task of a fit: a model whose loss is to fall, samples to train on, and samples to judge it by."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from graphs.capture.failure import reason_of
from graphs.capture.record import default_loss, output_tensors
from graphs.errors import CaptureError, FitError, GraphFileError
from graphs.kept import precision_named
from graphs.recipes import PRECISIONS
from placement.fitting.participants import Portion
from placement.inputs.functions import call_function, described, is_function
from placement.inputs.sources import refuse_script
from placement.runtime.states import compute_in

_MOST_EPOCHS = 8  # whose orders are kept, for workers that are not all in one epoch
CPU = torch.device("cpu")
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class WeightLayout:
    """Places of parameters in the flat vector of weights.

    Attributes:
        names, shapes: of the parameters, in order.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Entries of each parameter in the flat vector."""
        ends = torch.tensor([0, *(shape.numel() for shape in self.shapes)]).cumsum(0).tolist()
        return tuple(slice(a, b) for a, b in pairwise(ends))

    @property
    def size(self) -> int:
        """Entries of the flat vector."""
        return self.slices[-1].stop if self.slices else 0

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """Each parameter's part of a flat vector, in its shape, on the same memory."""
        return (flat[part].view(shape) for part, shape in zip(self.slices, self.shapes, strict=True))


@dataclass(frozen=True, eq=False)
class FitTask:
    """A model with its data. All weights are handled as one flat vector, float32 [n], on the CPU.

    Attributes:
        model: in training mode. Its own parameters are the start; they are not changed.
        data: tensors of S samples each, the model's arguments; the loss is a mean over samples.
        held_out: likewise, samples to judge by.
        batch: samples of a worker's mini-batch.
        loss: from the model's output to a scalar, as of `placement.capture`.
        seed: of the order of samples, and of what the model draws.
        place: where model and data are, and gradients are computed.
        precision: name of the precision in which they are computed; None: float32, or as the model does.
    """

    model: nn.Module
    data: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    batch: int
    loss: Callable[[object], Tensor]
    seed: int = 0
    place: torch.device = CPU
    precision: str | None = None

    def on(self, place: torch.device) -> FitTask:
        """The same task, its gradients computed elsewhere."""
        if place == self.place:
            return self
        data, held_out = (tuple(each.to(place) for each in columns) for columns in (self.data, self.held_out))
        return replace(self, model=copy.deepcopy(self.model).to(place), data=data, held_out=held_out, place=place)

    @contextmanager
    def drawing(self, worker: int, step: int) -> Iterator[None]:
        """The model's random numbers, for dropout say, depend on these and the seed alone; torch's own go on after."""
        gpus = [self.place] if self.place.type == "cuda" else []
        number = (self.seed * 1_000_003 + worker) * 1_000_003 + step
        with torch.random.fork_rng(devices=gpus):
            torch.default_generator.manual_seed(number)
            for gpu in gpus:
                with torch.cuda.device(gpu):
                    torch.cuda.manual_seed(number)
            yield

    @cached_property
    def layout(self) -> WeightLayout:
        """Layout of the model's trainable parameters."""
        named = [(name, value) for name, value in self.model.named_parameters() if value.requires_grad]
        return WeightLayout(tuple(name for name, _ in named), tuple(value.shape for _, value in named))

    def fingerprint(self) -> str:
        """Hash of the weights at the start and all samples: equal where they are."""
        found = hashlib.sha256(f"{self.batch} {self.seed}".encode())
        for each in (self.weights(), *self.data, *self.held_out):
            found.update(each.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def weights(self) -> Tensor:
        """A copy of the model's own parameters."""
        named = dict(self.model.named_parameters())
        return torch.cat([named[name].detach().reshape(-1).float() for name in self.layout.names]).to(CPU)

    def loss_at(self, weights: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean loss, a scalar, of samples [b, ...] at weights, float32 [n]; differentiable."""
        values = dict(zip(self.layout.names, self.layout.views(weights), strict=True))
        if self.batch_norms:  # what forward passes write to them is left
            values |= {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        end = None if self.precision is None else compute_in(self.model, precision_named(self.precision))
        try:
            return self.loss(torch.func.functional_call(self.model, values, batch))
        finally:
            if end is not None:
                end()

    def gradient(
        self, weights: Tensor, samples: Tensor, backward_weights: Tensor | None = None
    ) -> tuple[float, Tensor]:
        """The mean loss over samples by number, and its gradient, float32 [n]; both 0 where there are none.

        Where the backward pass reads other weights than the forward pass, the result is the gradient of no function.
        """
        if not len(samples):
            return 0.0, torch.zeros_like(weights)
        leaf = weights.detach().to(self.place, copy=True).requires_grad_()
        try:
            with nullcontext() if backward_weights is None else _read_later(leaf, backward_weights):
                value = self.loss_at(leaf, tuple(each[samples] for each in self.data))
            (gradient,) = torch.autograd.grad(value, leaf)
        except Exception as error:
            raise _failed(f"{len(samples)} training samples, {samples[0]} the first of them,", error) from error
        return float(value.detach()), gradient.to(CPU)

    def held_out_loss(self, weights: Tensor) -> float:
        """The loss over the held-out samples, in evaluation mode; batch norm normalizes by these samples themselves."""
        was = self.model.training
        self.model.eval()
        for each in self.batch_norms:
            each.train()
        try:
            with torch.no_grad():
                return float(self.loss_at(weights, self.held_out))
        except Exception as error:
            raise _failed(f"the {len(self.held_out[0])} held-out samples", error) from error
        finally:
            self.model.train(was)

    def samples_of(self, asked: Tensor | Portion | None, worker: int, workers: int, step: int) -> Tensor:
        """int64: the samples of a `Compute`."""
        match asked:
            case None:
                return self.samples(worker, workers, step)
            case Portion(number, count):
                return self.portion(number, count)
        return asked

    def portion(self, number: int, count: int) -> Tensor:
        """int64: the samples of one of `count` almost equal portions of all, in their order."""
        total = len(self.data[0])
        return torch.arange(number * total // count, (number + 1) * total // count)

    def samples(self, worker: int, workers: int, step: int) -> Tensor:
        """int64 [batch]: the samples of a worker's mini-batch number `step`.

        Workers share each epoch's shuffled order: the batches number `step` of all are the global batch of that step.
        """
        total = len(self.data[0])
        first = (step * workers + worker) * self.batch
        end = first + self.batch
        epochs = range(first // total, (end - 1) // total + 1)
        return torch.cat([self._order(each)[max(0, first - each * total) : end - each * total] for each in epochs])

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            if len(self._orders) == _MOST_EPOCHS:
                del self._orders[next(iter(self._orders))]
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._orders[epoch] = torch.randperm(len(self.data[0]), generator=generator)
        return self._orders[epoch]

    @cached_property
    def batch_norms(self) -> tuple[nn.Module, ...]:
        """Modules that normalize by the batch; their running statistics are neither kept nor used."""
        return tuple(each for each in self.model.modules() if isinstance(each, BATCH_NORMS))

    @cached_property
    def _orders(self) -> dict[int, Tensor]:
        return {}


def _failed(samples: str, error: Exception) -> FitError:
    return FitError(
        f"the model fails on {samples} ({reason_of(error)}); expected forward to take any of the data's samples, "
        "in any number."
    )


def _read_later(leaf: Tensor, replacement: Tensor) -> AbstractContextManager[None]:
    """Let autograd read what it keeps of `leaf` and its views from `replacement`, of the same shape, when needed."""
    memory = leaf.untyped_storage().data_ptr()

    source = replacement.detach().to(leaf.device, copy=True)

    def packed(kept: Tensor) -> Callable[[], Tensor]:
        if kept.untyped_storage().data_ptr() != memory:
            return lambda: kept
        where = (kept.shape, kept.stride(), kept.storage_offset())
        return lambda: source.as_strided(*where)

    def unpacked(read: Callable[[], Tensor]) -> Tensor:
        return read()

    return torch.autograd.graph.saved_tensors_hooks(packed, unpacked)


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
