"""`Rates`: how long kernels take on a device, by what they do and by their sizes (docs/score.md, "Rates").

A few constants with a meaning, fitted to measured kernels, in place of a data sheet's peaks. The formulas are for whole
arrays of ops (n ops); none of them looks at another op: what ops wait for their host is `env.times.op_times`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.codec import LATER
from graphs.errors import ClusterError
from graphs.origin import COMPILED, EAGER, FUSED, STACKS

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


# Kinds of work of an op, as `graphs.records.Work` numbers them.
PRODUCT, WEIGHT_GRADIENT, GROUPED, ATTENTION, ATTENTION_BACKWARD = 1, 2, 3, 4, 5
# Rows and columns of the tiles into which kernels cut a product, one tile on a multiprocessor at a time.
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_HIGH, _WIDE = np.array(TILES, dtype=np.float64).T[:, :, None]
_HAIR = 1e-9  # an extent that was divided may be above a whole number of tiles, by rounding
MOST_SPLITS = 16  # parts into which kernels cut the depth of a product of few tiles
UNTILED = 0.5  # of the float32 peak: kernels without tiles, for products as narrow as depthwise convolutions
ATTENTION_TILE = 128  # queries of one tile of attention
# Products of an attention's backward pass, by those of its forward pass: five matrix products in place of two.
BACKWARD_WORK = 2.5
# Numbers of 16 bytes, which kernels for tensor cores load at a time; other dtypes are computed without tensor cores.
ALIGNED_TO = {"bfloat16": 8.0, "float16": 8.0, "float8_e4m3fn": 16.0, "float8_e5m2": 16.0}


@dataclass(frozen=True)
class Rates:
    """How long kernels take on a device.

    Attributes:
        multiprocessors: tiles that are worked on at the same time.
        bytes_per_s: reached by ops that mostly move bytes.
        floor_s: what each kernel takes beyond its work.
        sustained: how many times as long products take in a long run as in a short one (clocks under load).
        weight_gradient: how many times as long products take whose depth is the batch, adding up in float32.
        grouped: how many times as long many products of unlike sizes take in one kernel.
        misaligned: how many times as long products on tensor cores take for each halving of what rows in memory are
            whole numbers of: 8 bytes in place of 16, 4 in place of 8; at most as long as without tiles.
        products: by dtype; at least one.
        convolutions: beside the products that they are made of, whose channels are padded to 16 bytes for tensor cores;
            None: as these.
        attention: as torch runs it; None: by FLOPs and bytes alone.
        fused_attention: as libraries of kernels for this device run it (FlashAttention 3, cuDNN); None: as torch does.
        steps: by stack, how many times as long a step's kernels take as all of them one by one; 1 of others.
        backward_launch: how many times as long a launch of the backward pass, from autograd's thread, takes its host as
            `Device.launch_overhead_s`, which is one of the forward pass.
        parameter_s: of the host for each parameter that a step trains, beside launches: adding up its gradient, and
            what the optimizer does in Python. Hand-made stacks, whose optimizers work on flat buffers, have none of it.
        source: where the constants come from: what was measured, when, with which versions.

    Raises:
        ClusterError: a figure is no number, or below what it may be.
    """

    multiprocessors: int
    bytes_per_s: float
    floor_s: float
    products: Mapping[str, ProductRate]
    sustained: float = 1.0
    weight_gradient: float = 1.0
    grouped: float = 1.0
    misaligned: float = field(default=1.0, metadata=LATER)
    convolutions: ConvolutionRate | None = field(default=None, metadata=LATER)
    attention: AttentionRate | None = field(default=None, metadata=LATER)
    fused_attention: AttentionRate | None = field(default=None, metadata=LATER)
    steps: Mapping[str, float] | None = field(default=None, metadata=LATER)
    backward_launch: float = field(default=1.0, metadata=LATER)
    parameter_s: float = field(default=0.0, metadata=LATER)
    source: str = field(default="", metadata=LATER)

    def __post_init__(self) -> None:
        check(
            "rates",
            self,
            positive=("multiprocessors", "bytes_per_s", "backward_launch"),
            amounts=("floor_s", "parameter_s"),
            at_least_1=("sustained", "weight_gradient", "grouped", "misaligned"),
        )
        if self.multiprocessors != int(self.multiprocessors):
            raise refusal("rates", "multiprocessors", self.multiprocessors, "a whole number")
        if not isinstance(self.products, Mapping) or not self.products:
            raise refusal("rates", "products", self.products, "a table for each dtype, at least for one")
        for stack, factor in mapping("rates", "steps", self.steps or {}).items():
            if stack not in STACKS:
                raise refusal("rates", "steps", stack, f"one of {', '.join(STACKS)}")
            check_positive("steps", stack, factor)
        if not isinstance(self.source, str):
            raise refusal("rates", "source", self.source, "a text in quotes")

    def with_fused_attention(self) -> Rates:
        """These rates, with attention as libraries of kernels run it, where that is known."""
        return self if self.fused_attention is None else replace(self, attention=self.fused_attention)

    def of_stack(self, stack: str | None) -> Rates:
        """These rates for the kernels of whole steps of a stack, whose factor is in them."""
        rates = self.with_fused_attention() if stack == FUSED else self
        if stack == COMPILED:  # Inductor pads matrices whose rows are not aligned (its `config.shape_padding`)
            rates = replace(rates, misaligned=1.0)
        factor = (self.steps or {}).get(stack or EAGER, 1.0)
        return rates if factor == 1.0 else rates.scaled(1.0 / factor, 1.0 / factor)

    def scaled(self, compute: float = 1.0, memory: float = 1.0) -> Rates:
        """These rates with FLOP/s and bytes/s times a factor each."""
        products = {
            dtype: replace(rate, flops_per_s=rate.flops_per_s * compute, bytes_per_s=rate.bytes_per_s * memory)
            for dtype, rate in self.products.items()
        }
        attention, fused = (
            rate and replace(rate, flops_per_s=rate.flops_per_s * compute)
            for rate in (self.attention, self.fused_attention)
        )
        return replace(
            self,
            bytes_per_s=self.bytes_per_s * memory,
            products=products,
            attention=attention,
            fused_attention=fused,
        )

    # -- Times --------------------------------------------------------------------------------------------------

    def seconds(
        self, work: IntArray, extents: FloatArray, flops: FloatArray, bytes_moved: FloatArray, rates: ProductRates
    ) -> FloatArray:
        """float64 [n]: seconds of the work of each op, without the floor of its kernels.

        Args:
            work: int64 [n], as `graphs.records.Work` counts.
            extents: float64 [n, 5], sizes of products and of attention (`graphs.records.Op.extents`).
            flops, bytes_moved: float64 [n].
            rates: of each op's dtype (`Rates.by_op`).
        """
        moving_s = bytes_moved / self.bytes_per_s
        result = np.maximum(flops * self.sustained / rates["flops_per_s"], moving_s)
        at = _products_at(work, extents)
        if len(at):
            there = rates.of(at)
            compute_s = self._products_s(work[at], extents[at], there) * self._times_as_long(
                work[at], extents[at], flops[at]
            )
            result[at] = _together(compute_s, bytes_moved[at] / there["bytes_per_s"])
        at = self._attention_at(work, extents)
        if len(at) and self.attention is not None:
            compute_s = self._attention_s(self.attention, work[at], extents[at], rates["share"][at])
            result[at] = _together(compute_s, moving_s[at])
        return result

    def least_seconds(
        self, work: IntArray, extents: FloatArray, flops: FloatArray, bytes_moved: FloatArray, rates: ProductRates
    ) -> FloatArray:
        """float64 [n]: at most `seconds`, and a part of an op never takes less than its share of it.

        Neither is so of `seconds`, as a part may fill its last wave of tiles better. Arguments as there.
        """
        is_product = np.zeros(len(work), dtype=np.bool_)
        is_product[_products_at(work, extents)] = True
        moving_s = bytes_moved / np.where(is_product, rates["bytes_per_s"], self.bytes_per_s)
        factor = np.full(len(work), self.sustained)
        for kind, longer in ((WEIGHT_GRADIENT, self.weight_gradient), (GROUPED, self.grouped)):
            factor[(work == kind) & is_product] *= longer
        # A part's depth is no greater, so that the start of a tile costs it as much for each FLOP, or more.
        started = rates["flops_per_s"] / (1.0 + rates["depth"] / np.where(is_product, extents[:, 3], np.inf))
        compute_s = flops * factor / np.where(is_product, np.maximum(started, rates["untiled"]), rates["flops_per_s"])
        at = self._attention_at(work, extents)
        if len(at) and self.attention is not None:
            heads, queries, keys, width, density = extents[at].T
            per_s = _head_rate(self.attention, width) * rates["share"][at]
            compute_s[at] = 4.0 * heads * queries * keys * width * density / per_s * _passes(self.attention, work[at])
        result: FloatArray = np.maximum(compute_s, moving_s)
        return result

    def _products_s(self, work: IntArray, extents: FloatArray, rates: ProductRates) -> FloatArray:
        """float64 [p]: computing products by the best tile, in one piece or cut along their depth."""
        extents = _padded(work, extents, rates["aligned_to"])
        batch, rows, columns, depth = extents.T[:4]
        at_once, high, wide = float(self.multiprocessors), _HIGH, _WIDE  # float64 [tiles, 1]: all tiles at a time
        tiles = batch * np.ceil(rows / high - _HAIR) * np.ceil(columns / wide - _HAIR)
        # A tile's FLOPs, slower by its edges than one of the first tiles.
        slower = (1.0 + rates["edge"] * (1.0 / high + 1.0 / wide)) / (1.0 + rates["edge"] * (1.0 / 256 + 1.0 / 128))
        wave_s = at_once * (2.0 * high * wide) * slower / rates["flops_per_s"]
        whole_s = np.ceil(tiles / at_once) * wave_s * (depth + rates["depth"])
        splits = np.clip(np.floor(at_once / np.maximum(tiles, 1.0)), 1.0, MOST_SPLITS)
        # Parts are added up in float32: each is written and read.
        added_s = 8.0 * splits * batch * rows * columns / rates["bytes_per_s"]
        cut_s = wave_s * (np.ceil(depth / splits) + rates["depth"]) + added_s
        best = np.where(splits > 1.0, np.minimum(whole_s, cut_s), whole_s).min(axis=0)
        if self.misaligned > 1.0:
            for is_halved in _halvings(work, extents, rates["aligned_to"]):
                best = np.where(is_halved, best * self.misaligned, best)
        best = np.minimum(best, 2.0 * batch * rows * columns * depth / rates["untiled"])
        result: FloatArray = best * self.sustained
        return result

    def _times_as_long(self, work: IntArray, extents: FloatArray, flops: FloatArray) -> FloatArray:
        """float64 [p]: by the kind of product, and for an op that does several of one size."""
        batch, rows, columns, depth = extents.T[:4]
        result = np.maximum(flops / (2.0 * batch * rows * columns * depth), 1.0)
        of_both = result > 1.5  # one op for both gradients has twice the FLOPs of its sizes
        rate, is_gradient = self.convolutions or ConvolutionRate(), work == WEIGHT_GRADIENT
        of_pass = np.where(is_gradient, rate.weight_gradient, np.where(of_both, rate.both, rate.forward))
        plain = np.where(is_gradient, self.weight_gradient, 1.0)
        result = result * np.where(_is_convolution(work, extents), of_pass, plain)
        longer: FloatArray = np.where(work == GROUPED, result * self.grouped, result)
        return longer

    def _attention_s(self, rate: AttentionRate, work: IntArray, extents: FloatArray, share: FloatArray) -> FloatArray:
        """float64 [a]: computing attention by tiles of queries, and the wait for the longest one."""
        heads, queries, keys, width, density = extents.T
        tiles = heads * np.ceil(queries / ATTENTION_TILE - _HAIR)
        all_keys = tiles * (density * keys + rate.depth)
        last_keys = rate.longest * self.multiprocessors * (keys + rate.depth)
        per_s = _head_rate(rate, width) * share
        compute_s = 4.0 * ATTENTION_TILE * width * (all_keys + last_keys) / per_s
        result: FloatArray = compute_s * _passes(rate, work)
        return result

    def _attention_at(self, work: IntArray, extents: FloatArray) -> IntArray:
        """Numbers of the ops whose time is that of attention."""
        if self.attention is None:
            return np.zeros(0, dtype=np.int64)
        at = np.flatnonzero(work >= ATTENTION)
        result: IntArray = at[(extents[at] > 0.0).all(axis=1)]
        return result

    # -- Rates of dtypes ----------------------------------------------------------------------------------------

    def rate_of(self, dtype: str, peak_flops: Mapping[str, float]) -> tuple[str, float]:
        """``(dtype, factor)``: whose constants stand for a dtype, and by how much its FLOP/s differ from them.

        A dtype without rates has those of bfloat16, or of the first that has some, in proportion to the peaks.
        """
        if dtype in self.products:
            return dtype, 1.0
        other = "bfloat16" if "bfloat16" in self.products else next(iter(self.products))
        plain = peak_flops["float32"]
        return other, peak_flops.get(dtype, plain) / peak_flops.get(other, plain)

    def by_op(self, dtypes: Sequence[str], dtype_of: IntArray, peak_flops: Mapping[str, float]) -> ProductRates:
        """The rates of ops: ``dtypes`` are d names, ``dtype_of`` int64 [n] says which of them each op has."""
        usual, _ = self.rate_of("bfloat16", peak_flops)
        figures = []
        for dtype in dtypes:
            name, factor = self.rate_of(dtype, peak_flops)
            rate, flops_per_s = self.products[name], self.products[name].flops_per_s * factor
            share = min(flops_per_s / self.products[usual].flops_per_s, 1.0)
            untiled = min(flops_per_s, UNTILED * peak_flops["float32"])
            aligned_to = ALIGNED_TO.get(dtype, 0.0)
            figures.append((flops_per_s, rate.depth, rate.edge, rate.bytes_per_s, share, untiled, aligned_to))
        return ProductRates(np.array(figures, dtype=np.float64).reshape(-1, len(_CONSTANTS)).T, dtype_of)


# Fields of `ProductRate`; the share of attention's FLOP/s, the FLOP/s of products too narrow for tiles, `ALIGNED_TO`.
_CONSTANTS = ("flops_per_s", "depth", "edge", "bytes_per_s", "share", "untiled", "aligned_to")


@dataclass(frozen=True, eq=False)
class ProductRates:
    """Constants of the dtypes of n ops: ``rates["depth"]`` is float64 [n].

    Attributes:
        table: float64 [7, d], constants of d dtypes.
        dtype_of: int64 [n].
    """

    table: FloatArray
    dtype_of: IntArray

    def of(self, ops: IntArray) -> ProductRates:
        """Rates of some ops."""
        return ProductRates(self.table, self.dtype_of[ops])

    def __getitem__(self, constant: str) -> FloatArray:
        """float64 [n]."""
        result: FloatArray = self.table[_CONSTANTS.index(constant)][self.dtype_of]
        return result


def _together(compute_s: FloatArray, moving_s: FloatArray) -> FloatArray:
    """Computing and moving overlap, but where both take alike: the norm of order 4, by roots that round exactly."""
    most, least = np.maximum(compute_s, moving_s), np.minimum(compute_s, moving_s)
    square = (least / most) * (least / most)
    result: FloatArray = most * np.sqrt(np.sqrt(1.0 + square * square))
    return result


def _products_at(work: IntArray, extents: FloatArray) -> IntArray:
    """Numbers of the products whose sizes are known."""
    at = np.flatnonzero((work >= PRODUCT) & (work <= GROUPED))
    result: IntArray = at[(extents[at, :4] > 0.0).all(axis=1)]
    return result


def _is_convolution(work: IntArray, extents: FloatArray) -> BoolArray:
    """bool [p]: products whose last number is the places of a filter."""
    result: BoolArray = ((work == PRODUCT) | (work == WEIGHT_GRADIENT)) & (extents[:, 4] > 0.0)
    return result


def _padded(work: IntArray, extents: FloatArray, aligned_to: FloatArray) -> FloatArray:
    """float64 [p, 5]: the sizes with the channels of convolutions padded to what tensor cores load at a time.

    Channels that come in are in the depth, beside the places of a filter, and those that go out the columns; in the
    gradient of a weight they are in the columns, and the rows.
    """
    at = np.flatnonzero(_is_convolution(work, extents) & (aligned_to > 0.0))
    if not len(at):
        return extents
    result, numbers, filters = extents.copy(), aligned_to[at], extents[at, 4]
    is_gradient = work[at] == WEIGHT_GRADIENT
    for column, places in ((np.where(is_gradient, 2, 3), filters), (np.where(is_gradient, 1, 2), 1.0)):
        result[at, column] = np.ceil(result[at, column] / places / numbers - _HAIR) * numbers * places
    return result


def _halvings(work: IntArray, extents: FloatArray, aligned_to: FloatArray) -> Iterator[BoolArray]:
    """bool [p], up to four times: products of whose sizes along memory one is no multiple of so many numbers.

    First of `aligned_to` (0: all are aligned), then of half as many, down to two. Along memory lie the columns, and the
    depth, or where the left matrix is transposed, the rows. It is transposed in the gradient of a weight, and it may be
    where there are several products at a time, as in attention. Of a grouped product a mean over the groups is no
    row in memory: columns lie there in all groups together, and rows if the depth differs by group.
    """
    batch, rows, columns, depth, shared = extents.T
    is_grouped = work == GROUPED
    is_gradient = (work == WEIGHT_GRADIENT) | (is_grouped & (shared == 3.0))
    by_rows = is_gradient | ((batch > 1.0) & ~is_grouped)
    columns = np.where(is_grouped & (shared == 2.0), np.rint(batch * columns), columns)
    for halving in range(int(np.log2(max(ALIGNED_TO.values())))):
        numbers = aligned_to / 2.0**halving
        of_rows, of_columns, of_depth = (
            np.mod(size + _HAIR, np.maximum(numbers, 1.0)) > 3.0 * _HAIR for size in (rows, columns, depth)
        )
        result: BoolArray = of_columns | (of_depth & ~is_gradient) | (of_rows & by_rows)
        yield result & (numbers > 1.0)


def _head_rate(rate: AttentionRate, width: FloatArray) -> FloatArray:
    """float64 [a]: FLOP/s of heads so wide."""
    result: FloatArray = rate.flops_per_s * (width / (width + rate.width)) * ((128.0 + rate.width) / 128.0)
    return result


def _passes(rate: AttentionRate, work: IntArray) -> FloatArray:
    return np.where(work == ATTENTION_BACKWARD, BACKWARD_WORK * rate.backward, 1.0)
