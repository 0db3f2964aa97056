"""Pieces of models that work along the last dimension, of `WIDTH` entries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.helpers.wide_net.pieces import ANYWHERE, WIDTH, Function, Make, Table, functions


class _Tied(nn.Module):
    """A layer that is used twice, and once transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return functional.linear(self.inner(self.inner(h).tanh()), self.inner.weight.t())


class _Frozen(nn.Module):
    """A frozen layer with a low-rank adapter, and a head that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up, self.unused = nn.Linear(WIDTH, 2, False), nn.Linear(2, WIDTH, False), nn.Linear(WIDTH, 3)

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h) + self.up(self.down(h))


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, h, use_reentrant=False)


class _Experts(nn.Module):
    """Two of four experts for each token, each of which computes all tokens; and the mean of shares."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4, False), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, h: Tensor) -> Tensor:
        shares = self.gate(h).softmax(-1)
        kept = shares * (shares >= shares.topk(2, -1).values[..., -1:])
        return sum(kept[..., i : i + 1] * expert(h).relu() for i, expert in enumerate(self.experts)) + shares.mean()


class _Codes(nn.Module):
    """Nearest entry of a code book, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(5, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        found = self.codes(torch.cdist(h.reshape(-1, WIDTH), self.codes.weight).argmin(-1)).view(h.shape)
        return h + (found - h).detach() + 0.1 * found


class _Bags(nn.Module):
    """Bags of embeddings of numbers that the tensor gives."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(5, WIDTH, mode=mode)

    def forward(self, h: Tensor) -> Tensor:
        numbers = (h.detach()[..., :3].abs() * 3).long().clamp(max=4).reshape(-1, 3)
        return h + self.bags(numbers).view(h.shape)


def _linear(out: int = WIDTH, **settings: Any) -> nn.Linear:
    return nn.Linear(WIDTH, out, **settings)


LAYERS: Table = {
    "linear": _linear,
    "linear_without_bias": lambda: _linear(bias=False),
    "residual": lambda: Function(lambda h, inner: h + inner(h), _linear()),
    "perceptron": lambda: nn.Sequential(_linear(16), nn.GELU(), nn.Linear(16, WIDTH)),
    "narrow": lambda: nn.Sequential(_linear(5), nn.SiLU(), nn.Linear(5, WIDTH)),
    "matrix": lambda: Function(lambda h, w: h @ w, torch.randn(WIDTH, WIDTH) / 3),
    "einsum": lambda: Function(lambda h, w: torch.einsum("...i,ji->...j", h, w), torch.randn(WIDTH, WIDTH) / 3),
    "by_heads": lambda: Function(
        lambda h, w: torch.einsum("...hi,hij->...hj", h.unflatten(-1, (2, 4)), w).flatten(-2), torch.randn(2, 4, 4) / 2
    ),
    "bilinear": lambda: Function(lambda h, inner: inner(h, h.tanh()), nn.Bilinear(WIDTH, WIDTH, WIDTH)),
    "scale_and_bias": lambda: Function(lambda h, a, b: h * a + b, torch.rand(WIDTH) + 0.5, torch.rand(WIDTH)),
    "squared_scale": lambda: Function(lambda h, a: h * (a * a), torch.rand(WIDTH) + 0.5),
}
SHARED: Table = {
    "tied": _Tied,
    "frozen": _Frozen,
    "checkpointed": _Checkpointed,
    "experts": _Experts,
    "code_book": _Codes,
    "bags_sum": lambda: _Bags("sum"),
    "bags_mean": lambda: _Bags("mean"),
    "bags_max": lambda: _Bags("max"),
    "weight_norm": lambda: parametrizations.weight_norm(_linear()),
    "weight_norm_of_old": torch.no_grad()(lambda: nn.utils.weight_norm(_linear())),
    "spectral_norm": lambda: parametrizations.spectral_norm(_linear()),
    "spectral_norm_of_old": lambda: nn.utils.spectral_norm(_linear()),
    "orthogonal": lambda: parametrizations.orthogonal(_linear()),
    "low_rank": lambda: Function(
        lambda h, a, b: functional.linear(h, a @ b), torch.randn(WIDTH, 2) / 2, torch.randn(2, WIDTH) / 2
    ),
    "symmetric": lambda: Function(lambda h, w: h @ (w + w.t()), torch.randn(WIDTH, WIDTH) / 4),
    "inverse": lambda: Function(lambda h, w: h @ torch.linalg.inv(w + 4 * torch.eye(WIDTH)), torch.randn(WIDTH, WIDTH)),
    "solve": lambda: Function(
        lambda h, w: torch.linalg.solve(w + 4 * torch.eye(WIDTH), h.reshape(-1, WIDTH).t()).t().reshape(h.shape),
        torch.randn(WIDTH, WIDTH),
    ),
    "matrix_exponential": lambda: Function(lambda h, w: h @ torch.matrix_exp(w - w.t()), torch.randn(WIDTH, WIDTH) / 4),
    "log_determinant": lambda: Function(
        lambda h, w: h @ w + torch.linalg.slogdet(w)[1], torch.randn(WIDTH, WIDTH) + 3 * torch.eye(WIDTH)
    ),
    "log_determinant_by_columns": lambda: Function(
        lambda h, w: h @ w + torch.linalg.slogdet(w)[1], (torch.randn(WIDTH, WIDTH) + 3 * torch.eye(WIDTH)).t()
    ),
    "cholesky": lambda: Function(
        lambda h, w: h @ torch.linalg.cholesky(w @ w.t() + torch.eye(WIDTH)), torch.randn(WIDTH, WIDTH) / 3
    ),
    "normalised_weight": lambda: Function(
        lambda h, w: functional.linear(functional.normalize(h, dim=-1), functional.normalize(w, dim=-1)),
        torch.randn(WIDTH, WIDTH),
    ),
    "masked_weight": lambda: Function(lambda h, w: h @ w.tril(), torch.randn(WIDTH, WIDTH) / 2),
    "quantised_weight": lambda: Function(
        lambda h, w: h @ (w + ((w * 8).round() / 8 - w).detach()), torch.randn(WIDTH, WIDTH) / 2
    ),
    "standardised_weight": lambda: Function(
        lambda h, w: h @ ((w - w.mean(0)) / (w.std(0) + 0.1)), torch.randn(WIDTH, WIDTH)
    ),
}


def _root_mean_square(h: Tensor, weight: Tensor) -> Tensor:
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3) * weight


NORMS: Table = {
    "LayerNorm": lambda: nn.LayerNorm(WIDTH, eps=1e-3),
    "LayerNorm_plain": lambda: nn.LayerNorm(WIDTH, eps=1e-3, elementwise_affine=False),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH, eps=1e-3),
    "rms_by_hand": lambda: Function(_root_mean_square, torch.rand(WIDTH) + 0.5),
    "layer_norm_by_hand": lambda: Function(
        lambda h, a, b: a * (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 0.1) + b,
        torch.rand(WIDTH) + 0.5,
        torch.rand(WIDTH),
    ),
    "l2_normalised": lambda: Function(lambda h: functional.normalize(h, dim=-1, eps=1e-3)),
    "softmax": lambda: nn.Softmax(-1),
    "log_softmax": lambda: nn.LogSoftmax(-1),
    "softmin": lambda: nn.Softmin(-1),
    "minus_logsumexp": lambda: Function(lambda h: h - h.logsumexp(-1, keepdim=True)),
    "over_maximum": lambda: Function(lambda h: h / (h.abs().amax(-1, keepdim=True) + 0.5)),
    "group_norm_of_features": lambda: Function(
        lambda h, norm: norm(h.reshape(-1, WIDTH)).view(h.shape), nn.GroupNorm(2, WIDTH, eps=1e-3)
    ),
    "batch_norm_with_weights": lambda: Function(
        lambda h, a, b: a * (h - h.mean(0)) * torch.rsqrt(h.var(0, correction=0) + 0.1) + b,
        torch.rand(WIDTH) + 0.5,
        torch.rand(WIDTH),
    ),
}


def _widened(function: Callable[[Tensor], Tensor], times: int = 2) -> Make:
    """A layer that is so many times as wide, and what is made of its output."""
    return lambda: Function(lambda h, inner: function(inner(h)), _linear(times * WIDTH))


GATES: Table = {
    "simple_gate": _widened(lambda h: h.chunk(2, -1)[0] * h.chunk(2, -1)[1]),
    "gate_by_split": _widened(lambda h: torch.mul(*h.split(WIDTH, -1))),
    "gate_by_slices": _widened(lambda h: h[..., :WIDTH] * h[..., WIDTH:]),
    "gate_by_view": _widened(lambda h: torch.mul(*h.unflatten(-1, (2, WIDTH)).unbind(-2))),
    "gate_by_stride": _widened(lambda h: h[..., ::2] * h[..., 1::2]),
    "gate_divided": _widened(lambda h: h[..., :WIDTH] / (h[..., WIDTH:].square() + 1)),
    "gate_addcmul": _widened(lambda h: torch.addcmul(h[..., :WIDTH], h[..., :WIDTH], h[..., WIDTH:])),
    "GLU": _widened(lambda h: functional.glu(h, -1)),
    "swiglu": _widened(lambda h: functional.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]),
    "three_parts": _widened(lambda h: h.split(WIDTH, -1)[0] * h.split(WIDTH, -1)[1] + h.split(WIDTH, -1)[2], 3),
    "three_of_stack": _widened(lambda h: torch.einsum("...in,...jn->...n", *[h.unflatten(-1, (3, WIDTH))] * 2), 3),
    "maxout": _widened(lambda h: h.unflatten(-1, (WIDTH, 2)).amax(-1)),
    "halves_multiplied": lambda: Function(lambda h: torch.cat([h[..., :4] * h[..., 4:], h[..., :4]], -1)),
    "two_layers_multiplied": lambda: Function(lambda h, a, b: a(h) * b(h), _linear(), _linear()),
    "one_layer_squared": lambda: Function(lambda h, a: a(h) * a(h), _linear()),
    "highway": lambda: Function(lambda h, a, b: b(h).sigmoid() * a(h) + (1 - b(h).sigmoid()) * h, _linear(), _linear()),
    "squeeze_and_excite": lambda: Function(lambda h, a: h * a(h).mean(-1, keepdim=True).sigmoid(), _linear()),
}

INDEXING = functions(
    {
        "features_permuted": lambda h: h[..., torch.tensor([3, 1, 0, 2, 7, 5, 4, 6])],
        "features_flipped": lambda h: h.flip(-1),
        "features_rolled": lambda h: h.roll(3, -1),
        "features_sorted": lambda h: h.sort(-1).values,
        "features_cumsum": lambda h: h.cumsum(-1),
        "features_cummax": lambda h: h.cummax(-1).values,
        "features_logcumsumexp": lambda h: h.logcumsumexp(-1),
        "features_cumprod": lambda h: (h.tanh() + 1.5).cumprod(-1),
        "features_selected": lambda h: h.index_select(-1, torch.tensor([0, 0, 1, 2, 3, 4, 5, 7])),
        "features_gathered": lambda h: h.gather(-1, h.detach().argsort(-1)),
        "features_scattered": lambda h: torch.zeros_like(h).scatter(-1, h.detach().argsort(-1), h),
        "features_scatter_added": lambda h: torch.zeros_like(h).scatter_add(-1, (h.detach() > 0).long(), h),
        "largest_features": lambda h: torch.cat([h.topk(4, -1).values, h[..., :4]], -1),
        "one_hot_of_largest": lambda h: h + functional.one_hot(h.argmax(-1), WIDTH).to(h.dtype),
        "kth_value": lambda h: h - h.kthvalue(3, -1, keepdim=True).values,
        "median": lambda h: h - h.median(-1, keepdim=True).values,
        "differences": lambda h: functional.pad(h.diff(dim=-1), (1, 0)),
        "padded_and_cut": lambda h: functional.pad(h, (2, 2))[..., 1:-3],
        "transposed_halves": lambda h: h.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2),
        "movedim": lambda h: h.movedim(-1, 0).softmax(0).movedim(0, -1),
        "features_meshed": lambda h: (h[..., :, None] * h[..., None, :]).mean(-1),
        "outer_product": lambda h: torch.einsum("...i,...j->...ij", h, h).tril().sum(-1),
        "diagonal": lambda h: torch.diag_embed(h).sum(-2) + torch.diag_embed(h).diagonal(dim1=-2, dim2=-1),
        "variance_of_features": lambda h: h * h.var(-1, keepdim=True),
        "stacked_twice": lambda h: torch.stack([h, h.tanh()], -1).mean(-1),
        "concatenated_and_halved": lambda h: torch.cat([h, h.tanh()], -1)[..., ::2],
        "broadcast": lambda h: sum(torch.broadcast_tensors(h, h.mean(-1, keepdim=True))),  # type: ignore[arg-type,return-value]
        "expanded": lambda h: h.mean(-1, keepdim=True).expand(h.shape) + h,
        "bucketed": lambda h: h + torch.bucketize(h.detach(), torch.linspace(-1, 1, 5).to(h.dtype)),
        "unfolded": lambda h: functional.pad(h, (1, 1)).unfold(-1, 3, 1).mean(-1),
        "repeated": lambda h: h[..., :4].repeat_interleave(2, -1) + h[..., :2].repeat(*[1] * (h.ndim - 1), 4),
        "vmap": lambda h: torch.vmap(lambda one: one.tanh() * 2)(h),
        "chunks_swapped": lambda h: torch.cat(h.chunk(2, -1)[::-1], -1),
        "rotated_halves": lambda h: h * 0.8 + torch.cat([-h[..., 4:], h[..., :4]], -1) * 0.6,
    }
)


def _rotated(h: Tensor, table: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(h.unflatten(-1, (4, 2)).contiguous()) * table).flatten(-2)


COMPLEX: Table = {
    "fft_real_part": lambda: Function(lambda h: torch.fft.fft(h).real),
    "rfft_filtered": lambda: Function(
        lambda h, w: torch.fft.irfft(torch.fft.rfft(h) * w, n=WIDTH), torch.randn(5, dtype=torch.complex128)
    ),
    "power_spectrum": lambda: Function(lambda h: (torch.fft.fft(h) * torch.fft.fft(h).conj()).real.sqrt() / math.pi),
    "conjugate_twice": lambda: Function(lambda h: (c := torch.fft.fft(h).conj()).real * c.imag + (c * c.conj()).real),
    "turned_by_table": lambda: Function(_rotated, torch.randn(4, dtype=torch.complex128)),
    "turned_twice": lambda: Function(
        lambda h, t: _rotated(h, t) * _rotated(h.tanh(), t), torch.randn(4, dtype=torch.complex128)
    ),
    "polar": lambda: Function(lambda h: torch.polar(h.abs() + 1, h).real + torch.polar(h.abs() + 1, h).imag),
    "angle": lambda: Function(lambda h: torch.complex(h + 3, h).angle() + torch.complex(h, h + 1).abs()),
    "complex_matrix": lambda: Function(
        lambda h, w: (h.to(w.dtype) @ w).real, torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 3
    ),
    "fft_of_batch": lambda: Function(lambda h: torch.fft.fft(h, dim=0).real / 3),
    "convolved_by_fft": lambda: Function(
        lambda h, w: torch.fft.irfft(torch.fft.rfft(h, n=16) * torch.fft.rfft(w, n=16), n=16)[..., :WIDTH],
        torch.randn(WIDTH) / 3,
    ),
}


FEATURES: dict[str, Table] = ANYWHERE | {
    "layers": LAYERS,
    "shared": SHARED,
    "norms": NORMS,
    "gates": GATES,
    "indexing": INDEXING,
    "complex": COMPLEX,
}
