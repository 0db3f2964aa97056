"""The task of a fit: a model whose loss is to fall, samples to train on, and samples to judge it by."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from graphs.capture.failure import reason_of
from graphs.errors import FitError
from graphs.kept import precision_named
from placement.fitting.requests import Portion
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
