"""Steps of a placement beside those of the plain model: equal but for rounding, and how far off."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

# First parts of the names of what is compared.
LOSS, OUTPUT, GRADIENT, WEIGHT, BUFFER = "loss/", "output/", "gradient/", "weight/", "buffer/"
# Numbers about the plain model beside these: its largest gradient, Adam's epsilon or what SGD's rate is divided by, the
# sum of the rates, and by how much the weight with the rest of the name has moved.
LARGEST, EPS, RATES, MOVED = "fact/largest gradient", "fact/eps", "fact/rates", "fact/moved/"

TOLERANCE = 5e-4  # of the largest entry: sums in another order differ by rounding, and a step adds many numbers
OF_CHANGE = 0.02  # of the largest change of a weight
# Of the largest gradient: what rounding leaves of a sum that is zero, such as that of a bias before a norm.
NOISE = 1e-6
NEGLIGIBLE = 1e-3  # of the largest gradient: differences are told relative to at least that
ROUNDINGS, ROUNDINGS_OF_HALVES = 32.0, 4.0  # times the change by weights that are off by their rounding
_LAST_BITS = 4.0  # of a number format, in which a weight may differ


@dataclass(frozen=True)
class Difference:
    """A tensor that differs from the plain model's.

    Attributes:
        name: such as ``"loss/2"``, of the second step, or ``"gradient/"`` and a parameter's name.
        share: the largest difference of an entry, relative to the largest entry; infinite for another shape.
    """

    name: str
    share: float


class Off(NamedTuple):
    """How far a tensor is off.

    Attributes:
        by: the largest difference of an entry; NaN where the plain model's has no finite number, infinite where the
            plain model has no such tensor.
        allowed: how much that may be.
        scale: the largest entry.
    """

    by: float
    allowed: float
    scale: float

    @property
    def is_equal(self) -> bool:
        """True if it may be off by so much."""
        return math.isnan(self.by) or self.by <= self.allowed

    @property
    def share(self) -> float:
        """The difference, relative to the largest entry."""
        return self.by / self.scale


Compared = Mapping[str, Off]


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, path: str) -> None:
        opened: Any = safe_open
        self._file = opened(path, "pt")
        self._names = frozenset(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def compared(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, Off]:
    """How far each tensor that was computed here is off the model's."""

    def fact(name: str) -> float:
        return float(reference[name]) if name in reference else 0.0

    largest_gradient, eps = fact(LARGEST), fact(EPS)
    result: dict[str, Off] = {}
    for name, tensor in found.items():
        if name not in reference:
            if not (name.startswith(GRADIENT) and not tensor.any()):  # what has no gradient is gathered as zeros
                result[name] = Off(math.inf, 0.0, 1.0)
            continue
        own, expected = tensor.detach().cpu(), reference[name]
        size = largest(expected)
        allowed, scale = TOLERANCE * size, max(size, 1e-30)
        if not (expected.is_floating_point() or expected.is_complex()):
            allowed = 0.0
        elif name.startswith(GRADIENT):
            allowed = max(allowed, NOISE * largest_gradient)
            scale = max(scale, NEGLIGIBLE * largest_gradient)
        elif name.startswith(WEIGHT):
            # No weight moves by more than the rates times its gradient over this.
            noise = fact(RATES) * NOISE * largest_gradient / eps if eps else 0.0
            allowed = OF_CHANGE * fact(f"{MOVED}{name}") + noise + _LAST_BITS * torch.finfo(expected.dtype).eps * size
        is_empty = expected.numel() > 0 and expected.is_floating_point() and not expected.isfinite().any()
        result[name] = Off(math.nan if is_empty else distance(own, expected), allowed, scale)
    return result


def rounded(ranks: Sequence[Compared], moved: Mapping[str, float], times: float) -> list[Compared]:
    """The same where tensors may be off by so many times what rounding moves them by."""
    return [
        {name: off._replace(allowed=max(off.allowed, times * moved.get(name, 0.0))) for name, off in rank.items()}
        for rank in ranks
    ]


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors; infinite where their shapes differ, or one alone is not finite."""
    if found.shape != expected.shape:
        return math.inf
    if not found.numel():
        return 0.0
    if found.dtype == expected.dtype == torch.float32:
        off = float((found - expected).abs_().max())
        if math.isfinite(off):
            return off
    wide = torch.complex128 if found.is_complex() else torch.float64
    same = (found == expected) | (found.isnan() & expected.isnan())
    apart = torch.where(same, 0.0, (found.to(wide) - expected.to(wide)).abs())
    return float(apart.nan_to_num(nan=math.inf).max())


def largest(tensor: Tensor) -> float:
    """The largest finite number of a tensor; 0 where it has none."""
    if not tensor.numel():
        return 0.0
    sizes = tensor.abs()
    most = float(sizes.max())
    if math.isfinite(most):
        return most
    finite = sizes[sizes.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def all_equal(computed: Iterable[str], ranks: Sequence[Compared], kinds: tuple[str, ...]) -> bool | None:
    """True if all that the plain model computed, of some kinds, is the same on the ranks that have it.

    None where it has computed nothing of the kind, or no finite number.
    """
    numberless = {name for rank in ranks for name, off in rank.items() if math.isnan(off.by)}
    expected = {name for name in computed if name.startswith(kinds)} - numberless
    found = [
        (name, off.is_equal)
        for rank in ranks
        for name, off in rank.items()
        if name not in numberless and name.startswith(kinds)
    ]
    if not expected and not found:
        return None
    return all(is_equal for _, is_equal in found) and expected <= {name for name, _ in found}


def largest_difference(ranks: Sequence[Compared]) -> Difference | None:
    """The largest difference of all tensors that were compared, of those that are not equal if there are any."""
    every = [(off, name) for rank in ranks for name, off in rank.items() if not math.isnan(off.by)]
    shown = [each for each in every if not each[0].is_equal] or every
    return max((Difference(name, off.share) for off, name in shown), key=lambda each: each.share, default=None)
