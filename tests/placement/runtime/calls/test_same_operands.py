"""Rows hold for an op with these operands: one tensor in two places, sums that meet sums, and ops that stay whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from parallel.sharded_models import check, check_inference
from torch import Tensor, nn
from torch.nn import functional

# -- one tensor in two places ------------------------------------------------------------------------------------------

Two = Callable[[Tensor, Tensor], Tensor]

# Of two tensors [4, 4]: every kind of op with two tensor arguments that is linear in one of them, or in both.
TWO: dict[str, Two] = {
    "mul": torch.mul,
    "mul in place": lambda a, b: a.clone().mul_(b),
    "square": lambda a, b: (a * a) + (b * b),
    "div": lambda a, b: a / (b.abs() + 1),
    "div itself": lambda a, b: a / (b + 9),
    "true_divide": lambda a, b: torch.true_divide(a, b.square() + 1),
    "of counts": lambda a, b: (a > 0) / (b.abs() + 1),
    "counts": lambda a, b: (4 * a).long() * b,
    "add": torch.add,
    "sub": lambda a, b: torch.sub(a, b, alpha=2),
    "rsub": torch.rsub,
    "mm": torch.mm,
    "gram": lambda a, b: a @ b.t(),
    "bmm": lambda a, b: torch.bmm(a[None], b[None])[0],
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "baddbmm": lambda a, b: torch.baddbmm(a[None], b[None], a[None])[0],
    "linear": functional.linear,
    "mv": lambda a, b: torch.mv(a, b[0]),
    "dot": lambda a, b: torch.dot(a[0], b[1]),
    "outer": lambda a, b: torch.outer(a[0], b[0]).pow(2),
    "einsum": lambda a, b: torch.einsum("ij,ij->i", a, b),
    "lerp": lambda a, b: torch.lerp(a, b, a),
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, a.abs() + 1),
    "where": lambda a, b: torch.where(a > b, a, b),
    "maximum": torch.maximum,
    "hypot": lambda a, b: torch.hypot(a, b + 3),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]) * torch.stack([b, a]),
    "mse": lambda a, b: functional.mse_loss(a, b + 1),
    "cosine": lambda a, b: functional.cosine_similarity(a, b + 1),
    "softmax": lambda a, b: a.softmax(-1) * b,
    "broadcast": lambda a, b: a[:, :1] * b,
    "rows and columns": lambda a, b: a[:, :1] * b[:1],
    "complex": lambda a, b: torch.view_as_real(torch.complex(a, b) * torch.complex(b, a)).sum(-1),
}
# Two places of one tensor [8, 8] in which it may stand on both sides.
VIEWS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "itself": lambda t: (t[:4, :4], t[:4, :4]),
    "halves of rows": lambda t: (t[:4, :4], t[4:, :4]),
    "halves of columns": lambda t: (t[:4, :4], t[:4, 4:]),
    "transposed": lambda t: (t[:4, :4], t.t()[:4, :4]),
}
# From [8, 8, 8] a tensor [8, 8] that is a sum over samples, over words, or where a product cuts its inner dimension.
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "samples": lambda h: h.mean(0),
    "words": lambda h: h.sum(1) * 0.3,
    "features": lambda h: h[:, 0],
}


class InTwoPlaces(nn.Module):
    """A sum, and all of `TWO` of it and itself."""

    def __init__(self, added: str, view: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.added, self.view = SUMS[added], VIEWS[view]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        left, right = self.view(self.added(self.b(self.a(x))))
        return tuple(two(left, right) for two in TWO.values())


def _squares(outputs: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([output.float().square().mean() for output in outputs]).sum()


# Each sum in two of the views, and each view in two of the sums; the other pairs when there is time.
_SUMMED = {
    ("samples", "dp2"): ("itself", "halves of rows"),
    ("samples", "mb2"): ("halves of columns", "transposed"),
    ("words", "cp2"): ("itself", "transposed"),
    ("features", "tp2"): ("halves of rows", "halves of columns"),
}


@pytest.mark.parametrize(
    ("added", "strategy", "view"),
    [
        pytest.param(*summed, view, marks=() if view in by_day else pytest.mark.slow)
        for summed, by_day in _SUMMED.items()
        for view in VIEWS
    ],
)
def test_sums_that_meet_themselves(added: str, strategy: str, view: str) -> None:
    check(InTwoPlaces(added, view), (torch.randn(8, 8, 8),), strategy, loss=_squares)


class Gate(nn.Module):
    """Halves of what a layer makes, multiplied: the simple gate of image restoration."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a, self.b, self.dim = nn.Linear(6, 8), nn.Linear(4 if dim == 2 else 8, 3), dim

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.a(x).chunk(2, self.dim)
        result: Tensor = self.b(left * right).pow(2)
        return result


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_halves_multiplied_under_tensor_parallelism(dim: int) -> None:
    check(Gate(dim), (torch.randn(4, 4, 6),), "tp2")
    check_inference(Gate(dim), (torch.randn(4, 4, 6),), "tp2")


# -- ops that stay whole -----------------------------------------------------------------------------------------------

# From [8, 6] to [8, 6], over all samples.
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda h: h.sort(0)[0],
    "cumsum": lambda h: h.cumsum(0),
    "softmax": lambda h: h.softmax(0) * h,
    "permutation": lambda h: h[torch.tensor([2, 0, 3, 1, 7, 6, 5, 4])],
    "product": lambda h: (h @ h.t()) @ h,
}
REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda h: h.sum(0),
    "mean": lambda h: h.mean(0),
    "of all": lambda h: h.sum(),
    "mean of all": lambda h: h.mean(),
    "norm": lambda h: h.norm(dim=0),
    "largest": lambda h: h.amax(0),
    "variance": lambda h: h.var(0),
    "product": lambda h: h.t() @ h,
    "vector": lambda h: h.t() @ torch.ones(8),
    "einsum": lambda h: torch.einsum("bi,bj->ij", h, h),
    "mse": lambda h: functional.mse_loss(h, torch.ones_like(h)),
    "labels": lambda h: functional.cross_entropy(h, torch.arange(8) % 6),
    "logsumexp": lambda h: h.logsumexp(0),
}


class Reduced(nn.Module):
    """An op over all samples, and every reduction of what it makes."""

    def __init__(self, whole: str) -> None:
        super().__init__()
        self.a, self.whole, self.b = nn.Linear(6, 6), WHOLE[whole], nn.Linear(6, 6)
        self.mask: Tensor
        self.register_buffer("mask", torch.rand(8, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.whole(self.a(x))
        return *(reduced(h) for reduced in REDUCED.values()), self.b(h), (h * self.mask).sum() / self.mask.sum()


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("strategy", ["mb2", "dp2 | mb2", "tp2"])
def test_reductions_of_what_is_left_whole(whole: str, strategy: str) -> None:
    check(Reduced(whole), (torch.randn(8, 6),), strategy, loss=_squares)


class OfSamples(nn.Module):
    """A parameter and a buffer with an entry for each sample, which micro-batches take their parts of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.offset, self.square = nn.Linear(6, 6), nn.Parameter(torch.randn(8, 6)), nn.Linear(6, 6)
        self.weight: Tensor
        self.register_buffer("weight", torch.rand(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.square(self.a(x) * self.weight + self.offset)
        by_sums: Tensor = h / (
            1 + self.weight.sum() + self.offset.abs().sum() + (self.offset.square() * self.weight).sum()
        )
        return by_sums


@pytest.mark.parametrize("strategy", ["mb2", "dp2 | mb2", "dp2", "dp2 zero2"])
def test_states_with_an_entry_for_each_sample(strategy: str) -> None:
    check(OfSamples(), (torch.randn(8, 6),), strategy)


class Turned(nn.Module):
    """Words and features of one tensor stand side by side: what is cut by words is cut by features elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        result: Tensor = self.b(h.transpose(1, 2)[:, :4] * h[:, :4, :4])
        return result


def test_an_update_of_a_whole_table_reads_its_whole_gradient() -> None:
    check(Turned(), (torch.randn(4, 4, 6),), "cp2")
