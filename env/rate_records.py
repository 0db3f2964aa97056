"""Records of which `env.rates.Rates` are made: what kernels of one kind reach."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from graphs.errors import ClusterError

_POSITIVE = sys.float_info.min, "a number above 0"


@dataclass(frozen=True)
class ProductRate:
    """Matrix products of one dtype, in short runs.

    Attributes:
        flops_per_s: reached by tiles of 256 x 128 that keep all multiprocessors busy, for a long time.
        depth: columns of depth that a tile takes longer: its start, and writing what it made.
        edge: how much slower smaller tiles are: one of r x c takes 1 + edge (1 / r + 1 / c) times its FLOPs.
        bytes_per_s: of reading operands and writing what comes out.
    """

    flops_per_s: float
    depth: float
    edge: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        check("products", self, positive=("flops_per_s", "bytes_per_s"), amounts=("depth", "edge"))


@dataclass(frozen=True)
class AttentionRate:
    """Attention in one kernel, as torch's ``scaled_dot_product_attention`` runs it.

    Attributes:
        flops_per_s: reached by long sequences with heads 128 wide.
        depth: keys that a tile of queries takes longer.
        width: how much slower narrow heads are: w wide ones reach w / (w + width) of the widest.
        longest: share of the time of the longest tile for which other multiprocessors wait at the end.
        backward: how many times as long a FLOP takes in the backward pass, whose FLOPs are 2.5 times the forward's.
    """

    flops_per_s: float
    depth: float
    width: float
    longest: float
    backward: float

    def __post_init__(self) -> None:
        check(
            "attention",
            self,
            positive=("flops_per_s",),
            amounts=("depth", "width", "longest"),
            at_least_1=("backward",),
        )


@dataclass(frozen=True)
class ConvolutionRate:
    """Convolutions, by how many times as long they take as the matrix products of their unfolded windows.

    Attributes:
        forward, data_gradient, weight_gradient: by pass.
    """

    forward: float = 1.0
    data_gradient: float = 1.0
    weight_gradient: float = 1.0

    def __post_init__(self) -> None:
        check("convolutions", self, at_least_1=("forward", "data_gradient", "weight_gradient"))

    @property
    def both(self) -> float:
        """Of both gradients together, in the mean."""
        return (self.data_gradient + self.weight_gradient) / 2.0


def check_positive(what: str, key: str, value: Any) -> None:
    """Raises: ClusterError: no number above 0."""
    _check_number(what, key, value, *_POSITIVE)


def check(
    what: str, record: Any, positive: Iterable[str] = (), amounts: Iterable[str] = (), at_least_1: Iterable[str] = ()
) -> None:
    for keys, least, expected in (
        (positive, *_POSITIVE),
        (amounts, 0.0, "a number, 0 or more"),
        (at_least_1, 1.0, "a number, 1 or more"),
    ):
        for key in keys:
            _check_number(what, key, getattr(record, key), least, expected)


def _check_number(what: str, key: str, value: Any, least: float, expected: str) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and least <= value <= sys.float_info.max):
        raise refusal(what, key, value, expected)


def refusal(what: str, key: str, value: Any, expected: str) -> ClusterError:
    return ClusterError(f"{what}: {key} is {value!r}; expected {expected}.")


def mapping(what: str, key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise refusal(what, key, value, "a table")
    return value
