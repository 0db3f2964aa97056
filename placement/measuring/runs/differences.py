"""Outcomes of a placement beside those of the plain model: equal but for rounding, and how far off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GRADIENT = "gradient/"  # prefix of the names of gradients; those of outputs and of the loss have none
# Sums in another order differ by rounding; float32 keeps 7 digits, and a step adds many numbers.
RELATIVE, ABSOLUTE = 1e-3, 1e-5
NOISE = (
    1e-6  # of the largest gradient: what rounding leaves of a sum that is zero, such as a bias's before a batch norm
)
NEGLIGIBLE = 1e-3  # of the largest gradient: differences are told relative to at least that
ROUNDINGS = 4.0  # times the change by weights that are off by their rounding
ROUNDING = "rounding/"  # that change, of the tensor with the rest of the name


@dataclass(frozen=True)
class Difference:
    """A tensor that differs from the plain model's.

    Attributes:
        name: ``"loss"``, ``"output/0"``, or ``"gradient/"`` and a parameter's name.
        share: the largest difference of an entry, relative to the largest entry; infinite for another shape.
    """

    name: str
    share: float


# By the name of each tensor: whether it is the model's, and its largest difference.
Compared = Mapping[str, tuple[bool, float]]


def compared(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, tuple[bool, float]]:
    """Whether each tensor that was computed here is the model's, and its largest difference.

    That is relative to the largest number in the model's, of a small gradient to `NEGLIGIBLE` of the largest one;
    infinite where the model has no such tensor, and NaN where the model's has no finite number, so that nothing can be
    compared.
    """
    largest_gradient = max((largest(reference[name]) for name in reference if name.startswith(GRADIENT)), default=0.0)
    result: dict[str, tuple[bool, float]] = {}
    for name, tensor in found.items():
        if name not in reference:
            result[name] = False, math.inf
            continue
        of_gradient = largest_gradient * name.startswith(GRADIENT)
        noise = max(NOISE * of_gradient, ROUNDINGS * float(reference.get(f"{ROUNDING}{name}", 0.0)))
        own, expected = tensor.detach().cpu(), reference[name]
        is_empty = expected.numel() > 0 and not expected.isfinite().any()
        # A gradient that is zero but for rounding has no figures to be off by.
        scale = max(largest(expected), NEGLIGIBLE * of_gradient, 1e-30)
        off = math.nan if is_empty else distance(own, expected) / scale
        result[name] = equal(own, expected, noise), off
    return result


def equal(found: Tensor, expected: Tensor, noise: float = 0.0) -> bool:
    """Equal within rounding, relative to the largest number in it, or within ``noise``."""
    if found.shape != expected.shape:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(found, expected)
    atol = max(ABSOLUTE * max(largest(expected), 1e-30) * 10, noise)
    return bool(torch.allclose(found, expected, rtol=RELATIVE, atol=atol, equal_nan=True))


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors; infinite where their shapes differ, or one alone is not finite."""
    if found.shape != expected.shape:
        return math.inf
    if not found.numel():
        return 0.0
    wide = torch.complex128 if found.is_complex() else torch.float64
    same = (found == expected) | (found.isnan() & expected.isnan())
    off = torch.where(same, 0.0, (found.to(wide) - expected.to(wide)).abs())
    return float(off.nan_to_num(nan=math.inf).max())


def largest(tensor: Tensor) -> float:
    """The largest finite number of a tensor; 0 where it has none."""
    sizes = tensor.abs()
    finite = sizes[sizes.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def all_equal(computed: Sequence[str], ranks: Sequence[Compared], of_gradients: bool) -> bool | None:
    """Whether all that the plain model computed, gradients or the rest, is the same on the ranks that have it.

    None where it has computed nothing of the kind, or no finite number.
    """
    numberless = {name for rank in ranks for name, (_, share) in rank.items() if math.isnan(share)}
    expected = {name for name in computed if name.startswith(GRADIENT) == of_gradients} - numberless
    found = [
        (name, is_equal)
        for rank in ranks
        for name, (is_equal, _) in rank.items()
        if name not in numberless and name.startswith(GRADIENT) == of_gradients
    ]
    if not expected and not found:
        return None
    return all(is_equal for _, is_equal in found) and expected <= {name for name, _ in found}


def largest_difference(ranks: Sequence[Compared]) -> Difference | None:
    """The largest difference of all tensors that were compared; None where there are none."""
    off = [(share, name) for rank in ranks for name, (_, share) in rank.items() if not math.isnan(share)]
    return None if not off else Difference(*max(off)[::-1])
