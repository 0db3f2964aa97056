"""Pieces of models that take a tensor of any shape and keep it.

A table holds pieces of one category by name; each is made when a model is built, so that its weights are the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, LENGTH, WIDTH = 8, 6, 8
Make = Callable[[], nn.Module]
Table = dict[str, Make]


class Function(nn.Module):
    """A function as a module, with the modules and parameters that it reads besides."""

    def __init__(self, function: Callable[..., Tensor], *weights: nn.Module | Tensor) -> None:
        super().__init__()
        self.function, self.names = function, [f"part{i}" for i in range(len(weights))]
        for name, weight in zip(self.names, weights, strict=True):
            setattr(self, name, weight if isinstance(weight, nn.Module) else nn.Parameter(weight))

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h, *(getattr(self, name) for name in self.names))


def functions(table: dict[str, Callable[[Tensor], Tensor]]) -> Table:
    """A table of functions without weights."""
    return {name: lambda function=function: Function(function) for name, function in table.items()}


# -- of any shape ------------------------------------------------------------------------------------------------------

_OTHERS = ("GLU", "MultiheadAttention", "Softmax", "LogSoftmax", "Softmin", "Softmax2d", "Threshold")
ACTIVATIONS: Table = {
    name: getattr(nn, name) for name in torch.nn.modules.activation.__all__ if name not in _OTHERS and hasattr(nn, name)
} | {"Threshold": lambda: nn.Threshold(0.1, 0.0)}

ENTRIES = functions(
    {
        "clamp": lambda h: h.clamp(-0.5, 0.7),
        "where": lambda h: torch.where(h > 0, h, h * 0.3),
        "square": lambda h: h.square(),
        "times_itself": lambda h: h * h,
        "divided_by_itself": lambda h: h / (h * h + 1),
        "sine": lambda h: h.sin() + h.cos(),
        "erf": lambda h: torch.erf(h),
        "power": lambda h: h.abs() ** 1.5,
        "root": lambda h: (h.square() + 0.1).sqrt(),
        "log_exp": lambda h: (h.exp() + 1).log() + torch.log1p(h.abs()) + torch.expm1(-h.abs()),
        "atan2": lambda h: torch.atan2(h, h.abs() + 1),
        "lerp": lambda h: torch.lerp(h, h.tanh(), 0.3),
        "lerp_by_itself": lambda h: torch.lerp(h, h.tanh(), h),
        "addcmul": lambda h: torch.addcmul(h, h, h.sigmoid(), value=0.5),
        "addcmul_itself": lambda h: torch.addcmul(h, h, h, value=0.5),
        "addcdiv": lambda h: torch.addcdiv(h, h, h.square() + 1, value=0.5),
        "logaddexp": lambda h: torch.logaddexp(h, -h),
        "maximum": lambda h: torch.maximum(h, -0.2 * h) + torch.minimum(h, h.square()),
        "sign": lambda h: h * torch.sign(h) + h.abs(),
        "remainder": lambda h: torch.remainder(h, 1.7),
        "hypot": lambda h: torch.hypot(h, h + 1),
        "xlogy": lambda h: torch.xlogy(h.square(), h.square() + 0.5),
        "sinc": lambda h: torch.sinc(h),
        "nan_to_num": lambda h: torch.nan_to_num(h),
        "rounded_straight_through": lambda h: h + (torch.round(h * 4) / 4 - h).detach(),
        "detached_scale": lambda h: h / (h.detach().abs() + 1),
    }
)


class _Doubled(torch.autograd.Function):
    """With a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        return gradients[0] * 2 + 0.1 * h


def _written(h: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    """A copy of a tensor after something is written to it."""
    h = h.clone()
    write(h)
    return h


MEMORY = functions(
    {
        "transpose_in_place": lambda h: (h * 1).transpose_(0, -1).tanh().transpose(0, -1),
        "transpose_in_place_twice": lambda h: (h * 1).transpose_(0, 1).transpose_(0, 1) + h,
        "swapaxes_in_place": lambda h: (h * 1).swapaxes_(0, 1).sigmoid().swapaxes(0, 1),
        "unsqueeze_in_place": lambda h: (h * 1).unsqueeze_(0).tanh().squeeze(0),
        "unsqueeze_view_in_place": lambda h: torch.cat([h[:, :1].unsqueeze_(0)[0], h[:, 1:]], 1),
        "squeeze_in_place": lambda h: (h[:, None] * 2).squeeze_(1).tanh(),
        "multiplied_in_place": lambda h: (h + 0).mul_(2).add_(1),
        "relu_in_place": lambda h: functional.relu_(h + 0.1),
        "column_set": lambda h: _written(h, lambda c: c[..., 0].fill_(0.5)),
        "column_scaled": lambda h: _written(h, lambda c: c[:, 1].mul_(2)),
        "samples_added": lambda h: _written(h, lambda c: c[:4].add_(h[4:])),
        "slice_assigned": lambda h: _written(h, lambda c: c[..., 1:].copy_(h[..., :-1])),
        "masked_fill_in_place": lambda h: _written(h, lambda c: c.masked_fill_(c > 0.5, 0.5)),
        "index_put_in_place": lambda h: _written(h, lambda c: c.__setitem__(c < -0.5, -0.5)),
        "index_add": lambda h: h.index_add(1, torch.tensor([0, 2, 2]), h[:, :3]),
        "index_copy": lambda h: h.index_copy(1, torch.tensor([0, 2]), h[:, 2:4]),
        "index_fill": lambda h: h.index_fill(1, torch.tensor([0, 2]), 0.25),
        "new_zeros_filled": lambda h: _written(h.new_zeros(h.shape), lambda c: c[:, 1:].copy_(h[:, :-1])),
        "made_contiguous": lambda h: h.transpose(0, 1).contiguous().transpose(0, 1),
        "cloned_by_columns": lambda h: h.transpose(1, -1).contiguous().transpose(1, -1) * 2,
        "empty_filled": lambda h: torch.empty_like(h).copy_(h),
        "as_strided": lambda h: h.contiguous().as_strided(h.shape, h.contiguous().stride()),
    }
)

SAMPLES = functions(
    {
        "minus_batch_mean": lambda h: h - h.mean(0),
        "over_batch_deviation": lambda h: h / (h.std(0) + 0.5),
        "batch_norm_by_var": lambda h: (h - h.mean(0)) / (h.var(0, unbiased=False) + 0.1).sqrt(),
        "batch_norm_by_sums": lambda h: (h - (m := h.mean(0))) / ((h * h).mean(0) - m * m + 0.1).sqrt(),
        "times_batch_mean": lambda h: h * h.mean(0, keepdim=True),
        "squared_batch_mean": lambda h: h + (m := h.mean(0)) * m,
        "batch_means_multiplied": lambda h: h + h.mean(0) * h.tanh().mean(0),
        "batch_means_divided": lambda h: h + (m := h.mean(0)) / (m.square() + 1),
        "over_total": lambda h: h / h.abs().sum(),
        "over_norm_of_all": lambda h: h / h.norm(),
        "softmax_of_batch": lambda h: h.softmax(0),
        "log_softmax_of_batch": lambda h: h.log_softmax(0),
        "batch_maximum": lambda h: h - h.amax(0),
        "batch_argmax": lambda h: h - h.max(0).values,
        "batch_flipped": lambda h: h.flip(0) + h,
        "batch_rolled": lambda h: h + h.roll(1, 0),
        "batch_permuted": lambda h: h + h[torch.tensor([3, 1, 0, 2, 7, 5, 4, 6])],
        "batch_cumsum": lambda h: h.cumsum(0),
        "batch_sorted": lambda h: h.sort(0).values,
        "batch_halves_added": lambda h: torch.cat([h[:4] + h[4:], h[:4] - h[4:]]),
        "batch_halves_mixed": lambda h: torch.cat([h[4:], h[:4]]) * 0.3 + h * 0.7,
        "every_other_sample": lambda h: h[::2].repeat_interleave(2, 0),
        "samples_stacked": lambda h: torch.stack(list(h.unbind(0))),
        "samples_in_pairs": lambda h: h.unflatten(0, (4, 2)).flip(1).flatten(0, 1),
        "samples_repeated": lambda h: h.repeat(2, *[1] * (h.ndim - 1)).unflatten(0, (2, BATCH)).sum(0),
        "samples_by_number": lambda h: h * torch.arange(len(h))[(..., *[None] * (h.ndim - 1))],
        "only_first_samples": lambda h: torch.cat([h[:3].tanh(), h[3:]]),
        "distances_of_samples": lambda h: (
            h + torch.cdist(h.flatten(1), h.flatten(1)).mean(1)[(..., *[None] * (h.ndim - 1))]
        ),
        "similar_samples": lambda h: ((h.flatten(1) @ h.flatten(1).t()).softmax(1) @ h.flatten(1)).view(h.shape),
    }
)


class _Average(nn.Module):
    """A running mean of the batch, as a buffer; added to the output, or only kept."""

    def __init__(self, is_read: bool, decay: float = 0.9) -> None:
        super().__init__()
        self.is_read, self.decay = is_read, decay
        self.register_buffer("average", torch.ones(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average.mul_(self.decay).add_(h.mean(), alpha=1 - self.decay)
                self.count += 1
        return h * self.average if self.is_read else h


class _Shared(nn.Module):
    """One parameter that is multiplied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, h: Tensor) -> Tensor:
        return (h * self.scale).tanh() * self.scale


NOISE: Table = {
    "Dropout": lambda: nn.Dropout(0.3),
    "AlphaDropout": lambda: nn.AlphaDropout(0.3),
    "functional_dropout": lambda: Function(lambda h: functional.dropout(h, 0.2, True)),
    "noise_like": lambda: Function(lambda h: h + torch.randn_like(h) * 0.1),
    "noise_of_shape": lambda: Function(lambda h: h + torch.rand(h.shape, dtype=h.dtype)),
    "stochastic_depth": lambda: Function(
        lambda h: h + h.tanh() * (torch.rand(len(h), *[1] * (h.ndim - 1), dtype=h.dtype) > 0.3)
    ),
}
BUFFERS: Table = {
    "average_kept": lambda: _Average(False),
    "average_read": lambda: _Average(True),
    "scalar_twice": _Shared,
    "scalar_bias": lambda: Function(lambda h, bias: h + bias, torch.tensor(0.5)),
    "scalar_exp": lambda: Function(lambda h, scale: h * scale.exp(), torch.tensor(0.1)),
}
CASTS: Table = functions(
    {
        "through_float": lambda h: h.float().tanh().to(h.dtype),
        "type_as": lambda h: torch.arange(h.shape[-1]).type_as(h) * h,
        "to_like": lambda h: h.to(torch.float32).to(h),
        "mask_as_number": lambda h: h * (h > 0).to(h.dtype) + (h > 0).sum() * 0.01,
        "mask_type_as": lambda h: h * (h > 0.1).type_as(h),
        "own_backward": lambda h: _Doubled.apply(h),  # type: ignore[no-untyped-call]
        "like_itself": lambda h: torch.zeros_like(h) + torch.ones_like(h) * h + torch.full_like(h, 0.5),
        "new_tensor": lambda h: h + h.new_ones(h.shape[-1]) * h.new_tensor([0.5]),
    }
)

ANYWHERE: dict[str, Table] = {
    "activations": ACTIVATIONS,
    "entries": ENTRIES,
    "memory": MEMORY,
    "samples": SAMPLES,
    "noise": NOISE,
    "buffers": BUFFERS,
    "casts": CASTS,
}
