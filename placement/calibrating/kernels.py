"""Measured kernels: matrix products, attention and copies of many shapes, as a step of training launches them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest

import torch
from torch.nn import functional as nn_functional

from graphs.records import Work
from placement.calibrating.clock import Call, TimeLeft, kernel_s

Extents = tuple[float, float, float, float, float]
_IN_TURN, _IN_TURN_BYTES = 8, 128 << 20  # operands that are taken by turns: more than the caches of a GPU hold
_MOST_KERNEL_S = 0.1  # a longer one says nothing that shorter ones do not


@dataclass(frozen=True)
class MeasuredKernel:
    """The time of one kernel.

    Attributes:
        work: what it computes.
        dtype: of its operands.
        extents: as `graphs.records.Op.extents`.
        flops, bytes_moved: what it computes, and what it reads and writes at least.
        seconds: how long it takes, without a launch.
    """

    work: Work
    dtype: str
    extents: Extents
    flops: float
    bytes_moved: float
    seconds: float


@dataclass(frozen=True)
class Shapes:
    """Shapes to measure on one kind of device.

    Attributes:
        dtypes: of products; attention is measured in the first one.
        tokens: rows of products of the forward pass, depth of those of gradients of weights.
        widths: of layers, which are multiplied by the matrices of a transformer: 3, 1 and 4 widths wide.
        narrow: (m, n, k) of products that fill a device badly.
        attention: (batch * heads, length, head width).
        copied: numbers of a pointwise op.
        convolutions: (samples, channels in, side of a picture, channels out, side of a filter, stride).
        figure_s: how long to repeat one kernel.
        most_flops: shapes that compute more are left out.
    """

    dtypes: tuple[str, ...]
    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    narrow: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int], ...]
    copied: tuple[int, ...]
    convolutions: tuple[tuple[int, int, int, int, int, int], ...]
    figure_s: float
    most_flops: float = math.inf


GPU = Shapes(
    dtypes=("bfloat16", "float16", "float32"),
    tokens=(4096, 8192, 1024, 16384, 2048),
    widths=(4096, 2048, 8192, 1024, 768),
    narrow=(
        *((4096, n, 4096) for n in (64, 128, 256, 512)),
        *((4096, 4096, k) for k in (64, 128, 256, 512)),
        *((m, 4096, 4096) for m in (1, 8, 64, 128, 256, 512)),
        *((4096, 32_000, 2048), (8192, 50_304, 768), (2048, 128_256, 4096)),
    ),
    attention=(
        *((32, length, 128) for length in (1024, 2048, 4096, 8192)),
        *((64, length, 64) for length in (256, 512, 1024, 2048, 4096)),
        *((8, length, 128) for length in (4096, 8192, 16384)),
        *((256, 512, 64), (128, 1024, 128), (16, 2048, 256)),
    ),
    copied=tuple(1 << k for k in (28, 26, 24, 22, 20, 18, 16, 14, 27, 25, 23, 21)),
    convolutions=(
        *((64, 64, 56, 64, 3, 1), (64, 256, 14, 256, 3, 1), (64, 3, 224, 64, 7, 2), (64, 1024, 14, 256, 1, 1)),
        *((64, 128, 28, 128, 3, 1), (64, 512, 7, 512, 3, 1), (32, 64, 224, 64, 3, 1), (64, 64, 56, 256, 1, 1)),
        *((32, 256, 56, 256, 3, 1), (128, 3, 224, 64, 11, 4)),
    ),
    figure_s=0.03,
)
CPU = Shapes(
    dtypes=("float32", "bfloat16"),
    tokens=(128, 512, 64, 256),
    widths=(256, 512, 128, 1024),
    narrow=(
        *((256, n, 256) for n in (8, 16, 32, 64)),
        *((256, 256, k) for k in (8, 16, 32, 64)),
        *((m, 512, 512) for m in (1, 4, 16, 32)),
    ),
    attention=tuple((heads, length, width) for heads, width in ((8, 64), (4, 32)) for length in (64, 128, 256, 512)),
    copied=tuple(1 << k for k in (25, 23, 21, 19, 17, 15, 13, 24, 22)),
    convolutions=((4, 8, 16, 8, 3, 1), (4, 16, 8, 32, 3, 1), (4, 3, 32, 16, 7, 2), (4, 32, 8, 32, 1, 1)),
    figure_s=0.03,
    most_flops=2e9,
)
BRIEF = Shapes(
    ("float32",),
    (16, 32),
    (16, 32),
    ((4, 16, 16), (16, 4, 16)),
    ((2, 16, 8), (2, 32, 8)),
    (64, 256),
    ((1, 4, 4, 4, 3, 1),),
    0.0,
)


def shapes_for(place: torch.device) -> Shapes:
    """Shapes measured on that kind of device; GPUs before A100 compute bfloat16 by way of float32."""
    if place.type != "cuda":
        return CPU
    is_old = torch.version.cuda is not None and torch.cuda.get_device_capability(place) < (8, 0)
    return replace(GPU, dtypes=("float16", "float32")) if is_old else GPU


def measured_kernels(
    place: torch.device, shapes: Shapes, deadline: TimeLeft, tell: Callable[[str], None] = lambda _: None
) -> list[MeasuredKernel]:
    """Measure products, convolutions, attention and copies until the deadline, the most telling shapes first.

    A kernel that the device has not, or that has no room in its memory, is left out.
    """
    plans = (
        ("matrix products", products(shapes), 0.6),
        ("convolutions", convolutions(shapes), 0.3),
        ("attention", attentions(shapes), 0.6),
        ("memory-bound ops", copies(shapes), 1.0),
    )
    found: list[MeasuredKernel] = []
    fastest: dict[str, float] = {}  # FLOP/s by dtype, by which long kernels are known beforehand
    for name, plan, share in plans:
        tell(f"measuring {name}")
        until, before = deadline.share(share), len(found)
        for planned in plan:
            if until.left_s <= 0 and len(found) > before:
                break
            if planned.flops > shapes.most_flops or planned.flops > _MOST_KERNEL_S * fastest.get(
                planned.dtype, math.inf
            ):
                continue
            for one in planned.measured(place, shapes.figure_s):
                found.append(one)
                fastest[one.dtype] = max(fastest.get(one.dtype, 0.0), one.flops / one.seconds)
    return found


@dataclass(frozen=True)
class Planned:
    """A kernel to be measured: one way of calling it for each set of operands.

    Attributes:
        flops, bytes_moved, work, dtype, extents: as `MeasuredKernel`.
        operands: makes a call on operands of its own.
    """

    work: Work
    dtype: str
    extents: Extents
    flops: float
    bytes_moved: float
    operands: Callable[[torch.device], Call]

    def measured(self, place: torch.device, figure_s: float) -> list[MeasuredKernel]:
        """Its time; nothing where the device refuses."""
        turns = max(1, min(_IN_TURN, int(_IN_TURN_BYTES // max(1.0, self.bytes_moved))))
        try:
            seconds = kernel_s(lambda: self.operands(place), turns, place, figure_s)
        except (RuntimeError, NotImplementedError):  # no such kernel, or no memory for it (torch.OutOfMemoryError)
            return []
        return [MeasuredKernel(self.work, self.dtype, self.extents, self.flops, self.bytes_moved, seconds)]


def sustained_factor(place: torch.device, shapes: Shapes, seconds: float) -> float:
    """How many times as long a large product takes after some seconds of nothing else as after a rest; 1 at least.

    A device at its limit of power or heat lowers its clocks, in a step of training too, but not in a short measurement.
    """
    width = max(shapes.widths)
    planned = product(Work.PRODUCT, shapes.dtypes[0], width, width, width)

    def measured(figure_s: float) -> float:
        return kernel_s(lambda: planned.operands(place), 1, place, figure_s)

    try:
        time.sleep(min(1.0, seconds / 4))
        rested_s = measured(shapes.figure_s)
        measured(seconds)
        return max(1.0, measured(shapes.figure_s) / rested_s)
    except RuntimeError:
        return 1.0


# -- matrix products ---------------------------------------------------------------------------------------------


def products(shapes: Shapes) -> Iterator[Planned]:
    """Products of the forward pass, of gradients of weights, and in batches; all dtypes by turns after the first."""
    first, *others = ([*_products(shapes, dtype)] for dtype in shapes.dtypes)
    yield from first
    for together in zip_longest(*others):
        yield from (one for one in together if one is not None)


def _products(shapes: Shapes, dtype: str) -> Iterator[Planned]:
    for tokens in shapes.tokens:
        for width in shapes.widths:
            for wide, deep in ((4 * width, width), (width, width), (width, 4 * width), (3 * width, width)):
                yield product(Work.PRODUCT, dtype, tokens, wide, deep)
                yield product(Work.WEIGHT_GRADIENT, dtype, wide, deep, tokens)
    for m, n, k in shapes.narrow:
        yield product(Work.PRODUCT, dtype, m, n, k)
    for heads, length, width in shapes.attention[:4]:
        yield product(Work.PRODUCT, dtype, length, length, width, heads)
        yield product(Work.PRODUCT, dtype, length, width, length, heads)


def product(work: Work, dtype: str, m: int, n: int, k: int, batch: int = 1) -> Planned:
    """A product in the layout of its pass: x times a weight turned over, or an output's gradient, turned over, times x.

    Args:
        m, n, k: rows and columns of the result, and the depth.
    """

    def operands(place: torch.device) -> Call:
        number_format = getattr(torch, dtype)
        out = torch.empty(batch, m, n, dtype=number_format, device=place)
        if work == Work.WEIGHT_GRADIENT:
            a, b = _numbers((batch, k, m), dtype, place).transpose(1, 2), _numbers((batch, k, n), dtype, place)
        else:
            a, b = _numbers((batch, m, k), dtype, place), _numbers((batch, n, k), dtype, place).transpose(1, 2)
        if batch == 1:
            return lambda a=a[0], b=b[0], out=out[0]: torch.mm(a, b, out=out)  # type: ignore[misc]
        return lambda: torch.bmm(a, b, out=out)

    moved = float(batch * (m * k + k * n + m * n) * width_of(dtype))
    return Planned(work, dtype, (batch, m, n, k, 0.0), 2.0 * batch * m * n * k, moved, operands)


def _numbers(shape: Sequence[int], dtype: str, place: torch.device) -> torch.Tensor:
    # Not zeros: a GPU that multiplies zeros draws less power, and is clocked higher, than one that trains.
    return torch.empty(*shape, dtype=getattr(torch, dtype), device=place).uniform_(-1.0, 1.0)


def width_of(dtype: str) -> int:
    """Bytes of one number."""
    return int(getattr(torch, dtype).itemsize)


# -- convolutions ----------------------------------------------------------------------------------------------------


def convolutions(shapes: Shapes) -> Iterator[Planned]:
    """Forward pass, both gradients, and those of weights alone; channels last, so that nothing is turned round."""
    dtype = shapes.dtypes[0]
    yield from chain.from_iterable(convolution(*shape, dtype) for shape in shapes.convolutions)


def convolution(
    samples: int, channels: int, side: int, filters: int, width: int, stride: int, dtype: str
) -> tuple[Planned, Planned, Planned]:
    """One convolution, as of `Shapes.convolutions`, in the three ways in which a step computes it."""
    padding, backward = width // 2, torch.ops.aten.convolution_backward
    places = samples * ((side + 2 * padding - width) // stride + 1) ** 2
    how = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)

    def tensors(place: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = (samples, channels, side, side), (filters, channels, width, width)
        x, weight = (_numbers(shape, dtype, place).to(memory_format=torch.channels_last) for shape in shapes)
        return x, weight

    def forward(place: torch.device) -> Call:
        x, weight = tensors(place)
        return lambda: nn_functional.conv2d(x, weight, None, stride, padding)

    def gradients(mask: list[bool], place: torch.device) -> Call:
        x, weight = tensors(place)
        grad = torch.ones_like(nn_functional.conv2d(x, weight, None, stride, padding))
        return lambda: backward(grad, x, weight, None, *how, mask)

    taps = float(width * width)
    sizes = (1.0, float(places), float(filters), channels * taps, taps)
    turned = (1.0, float(filters), channels * taps, float(places), taps)
    flops = 2.0 * places * filters * channels * taps
    x_bytes, weight_bytes, out_bytes = (
        float(size * width_of(dtype))
        for size in (samples * channels * side**2, filters * channels * width**2, places * filters)
    )
    moved = x_bytes + weight_bytes + out_bytes
    return (
        Planned(Work.PRODUCT, dtype, sizes, flops, moved, forward),
        Planned(
            Work.PRODUCT,
            dtype,
            sizes,
            2 * flops,
            moved + x_bytes + weight_bytes,
            partial(gradients, [True, True, False]),
        ),
        Planned(Work.WEIGHT_GRADIENT, dtype, turned, flops, moved, partial(gradients, [False, True, False])),
    )


# -- attention -------------------------------------------------------------------------------------------------------


def attentions(shapes: Shapes) -> Iterator[Planned]:
    """Causal attention, forward and backward by turns, and some that is not causal."""
    dtype = shapes.dtypes[0]
    pairs = ((attention(*shape, dtype, True), attention(*shape, dtype, False)) for shape in shapes.attention)
    for causal, full in pairs:
        yield from causal
        yield from full


def attention(heads: int, length: int, width: int, dtype: str, is_causal: bool) -> tuple[Planned, Planned]:
    """Forward and backward pass, by whatever kernel torch chooses here; ``heads`` counts those of all samples."""

    def tensors(place: torch.device) -> list[torch.Tensor]:
        shape = (1, heads, length, width)
        return [_numbers(shape, dtype, place).requires_grad_() for _ in range(3)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn_functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    def forward(place: torch.device) -> Call:
        qkv = [one.detach() for one in tensors(place)]
        return lambda: attend(*qkv)

    def backward(place: torch.device) -> Call:
        qkv = tensors(place)
        with torch.enable_grad():
            out = attend(*qkv)
        grad = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, qkv, grad, retain_graph=True)

    extents = (heads, length, length, width, 0.5 if is_causal else 1.0)
    size = float(heads * length * width * width_of(dtype))
    flops = 4.0 * heads * length * length * width  # two products forward, five backward, as torch counts them
    return (
        Planned(Work.ATTENTION, dtype, extents, flops, 4 * size, forward),
        Planned(Work.ATTENTION_BACKWARD, dtype, extents, 2.5 * flops, 8 * size, backward),
    )


# -- memory-bound ops ------------------------------------------------------------------------------------------------


def copies(shapes: Shapes) -> Iterator[Planned]:
    """Sums of two tensors: two numbers read, one written."""
    yield from chain.from_iterable((addition(size, dtype) for size in shapes.copied) for dtype in shapes.dtypes[:1])


def addition(size: int, dtype: str) -> Planned:
    """The sum of two tensors of that many numbers."""

    def operands(place: torch.device) -> Call:
        a, b = (_numbers((size,), dtype, place) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.add(a, b, out=out)

    return Planned(Work.OTHER, dtype, (0.0,) * 5, float(size), 3.0 * size * width_of(dtype), operands)
