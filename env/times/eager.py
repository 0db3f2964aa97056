"""`moved_again`: what torch's own CUDA kernels take beyond moving each byte once (docs/score.md, "Rates").

A graph says which bytes an op has to move. Some kernels of eager torch read theirs several times, or keep only a part
of the device busy: one block of threads for each channel, say. Facts about such kernels are in one table, by kind of
op: one with *c* columns takes ``fixed + narrow (1 + half / c)`` times as long as its bytes.

Measured with `benchmarks/gpu.py` and torch.profiler on an NVIDIA H100 80GB HBM3, torch 2.11.0 with CUDA 13.0, 27
November 2026: eager training steps of GPT-2, BERT, Llama and T5 (transformers) and of ResNet-50, in bfloat16. How often
kernels read their input is as in `aten/src/ATen/native/cuda` of torch 2.11.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from graphs.arrays import FloatArray, IntArray
from graphs.op_kinds import base_name, op_kind
from graphs.origin import EAGER, FUSED
from graphs.recipes import UPDATE_KIND

COLUMNS = 2  # of `OpGraph.extents`
UPDATED_TOGETHER = 36  # tensors that one launch of a fused Adam takes (aten/src/ATen/native/cuda/MultiTensorApply.cuh)
_HALF = ("bfloat16", "float16")


class _Fact(NamedTuple):
    """A kernel, by how many times as long as its bytes it takes: fixed + narrow (1 + half / columns).

    Attributes:
        above: it is so of rows of more columns than that.
        dtypes: it is so of these; empty: of all.
        is_replaced: the stack of hand-made kernels has another one.
    """

    fixed: float = 0.0
    narrow: float = 0.0
    half: float = 0.0
    above: float = 0.0
    dtypes: tuple[str, ...] = ()
    is_replaced: bool = True


# Rows of up to 1,024 are read once, longer ones up to three times forward, partly from caches (1.55 to 1.87 times as
# long), and in the backward pass one of two inputs twice (1.29 to 1.39).
_SOFTMAX, _SOFTMAX_BACKWARD = _Fact(fixed=1.7, above=1024.0), _Fact(fixed=4 / 3, above=1024.0)
_FACTS = {
    "softmax": _SOFTMAX,
    "log_softmax": _SOFTMAX,
    "softmax_backward_data": _SOFTMAX_BACKWARD,
    "log_softmax_backward_data": _SOFTMAX_BACKWARD,
    # Four kernels: the softmax, a mask of what is minus infinity, whether all of a row is, and zeros where it is.
    # In float32 22 bytes a number in place of 8.
    "safe_softmax": _Fact(fixed=2.75),
    # One number of each row is read; and zeros are written all over, of what was counted as read and written.
    "nll_loss_forward": _Fact(fixed=0.0),
    "nll_loss_backward": _Fact(fixed=0.5),
    # A block for each row: 1.5 TB/s where rows have 768 numbers.
    "native_layer_norm": _Fact(narrow=1.0, half=700.0),
    "layer_norm": _Fact(narrow=1.0, half=700.0),
    # The same kernels without a mean (aten/src/ATen/native/cuda/layer_norm_kernel.cu); not measured apart.
    "fused_rms_norm": _Fact(narrow=1.0, half=700.0),
    "rms_norm": _Fact(narrow=1.0, half=700.0),
    "fused_rms_norm_backward": _Fact(fixed=1.0, narrow=2 / 3, half=2750.0),
    # The gradient of the input, and then those of scale and shift, by a block for every 32 columns, which reads two
    # tensors of three once more: 0.64 to 0.75 TB/s with 768 columns.
    "native_layer_norm_backward": _Fact(fixed=1.0, narrow=2 / 3, half=2750.0),
    # Over all rows, as the gradient of a bias: 0.8 TB/s with 768 columns, 1.4 to 2.0 with 2,304 and 3,072.
    "sum": _Fact(narrow=1.0, half=2000.0),
    # A block for each channel, of NCHW. Forward one more reading for the statistics; backward both inputs twice. Such
    # kernels serve bfloat16, cuDNN's the other formats: 0.3 to 0.4 TB/s with 64 channels, 1 to 1.6 from 256 on.
    "native_batch_norm": _Fact(narrow=1.5, half=550.0, dtypes=("bfloat16",), is_replaced=False),
    "native_batch_norm_backward": _Fact(narrow=5 / 3, half=500.0, dtypes=("bfloat16",), is_replaced=False),
    # The places of a window one by one, in NCHW.
    "max_pool2d_with_indices": _Fact(fixed=2.6, is_replaced=False),
    "max_pool2d_with_indices_backward": _Fact(fixed=5.0, is_replaced=False),
}
# Convolutions in 16 bit are made by cuDNN's kernels for NHWC; what they read and write is turned round before and
# after, each of it read and written once more.
_CONVOLUTION = _Fact(fixed=3.0, dtypes=_HALF, is_replaced=False)


def moved_again(kinds: Sequence[str], dtypes: Sequence[str], extents: FloatArray, stack: str | None) -> FloatArray:
    """float64 [n]: times that the bytes of each op are moved beyond once, as far as the time of it goes.

    Below 0, down to -1, where a kernel does not touch all that the op is said to read. Nothing on a compiled stack,
    whose kernels are the compiler's own.

    Args:
        kinds, dtypes: of n ops.
        extents: float64 [n, 5]; of an op whose rows and columns are not known, nothing is.
        stack: as of `graphs.origin`; None: eager.
    """
    result = np.zeros(len(kinds))
    if (stack or EAGER) not in (EAGER, FUSED):
        return result
    for i in np.flatnonzero(extents[:, COLUMNS] > 0.0).tolist():
        fact = _fact(kinds[i])
        if fact is None or (fact.is_replaced and stack == FUSED) or (fact.dtypes and dtypes[i] not in fact.dtypes):
            continue
        columns = float(extents[i, COLUMNS])
        if columns > fact.above and not (fact is _CONVOLUTION and extents[i, 0] != 1.0):  # groups have kernels apart
            result[i] = fact.fixed + fact.narrow * (1.0 + fact.half / columns) - 1.0
    return result


def launches(kinds: Sequence[str], kernels: IntArray, stack: str | None) -> FloatArray:
    """float64 [n]: launches of each op; on the eager stack an update's part of one that it shares with others."""
    result = kernels.astype(np.float64)
    if (stack or EAGER) == EAGER:
        result[[kind.startswith(UPDATE_KIND) for kind in kinds]] /= UPDATED_TOGETHER
    return result


@cache
def _fact(kind: str) -> _Fact | None:
    return _CONVOLUTION if op_kind(kind).is_convolution else _FACTS.get(base_name(kind))
