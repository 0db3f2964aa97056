"""`OpKind`: facts about an op that its kind tells, in one table for rewrites, searches and the runtime.

A kind is the text ``op.kind`` of a graph, such as ``"aten.conv2d"``. Facts follow from it alone, so that a graph file
of any version has them. What capture knows of an operator beside, such as the ways to split it, is in `graphs.ops`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from graphs.arrays import BoolArray

# Words in kinds of any origin, in lower case: operators of torch, modules, ONNX.
_PRODUCTS = ("mm", "linear", "conv", "embedding", "lstm", "gru", "rnn", "attention_in")
_LABEL_LOSSES = ("nll_loss", "cross_entropy")
# Cores of attention: one op, or two products with a softmax between them.
FUSED, SPELT_OUT = "scaled_dot_product", "bmm"
# Names as of `base_name`.
_SHAPE_ONLY = {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"}
_STATISTICS = {"batch_norm", "native_batch_norm", "batch_norm_with_update", "native_batch_norm_legit"}
_STATISTICS |= {"native_batch_norm_backward", "batch_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward"}


@dataclass(frozen=True)
class OpKind:
    """Facts about one kind of op.

    Attributes:
        is_product: multiplies by weights, or looks them up: a tensor axis cuts these by columns and by rows.
        is_grouped: a product of tokens in groups, whose sizes the data says: a tensor axis cuts each expert, and not
            the experts.
        is_convolution: an operator, no module: the columns of its product are dimension 1, the channels.
        reads_shape_only: needs no value of its arguments, and so waits for none.
        has_statistics: split along anything but channels it computes other statistics, unless parts put theirs
            together.
        is_label_loss: divided by the labels that count, of which parts may have unlike numbers; forward or backward.
        is_softmax: of scores or logits.
        attention_core: word in its kind by which a pattern selects it to be recomputed, if there is a softmax: the
            attention as one op, or a product before or after it; else "".
        is_sparse: makes a gradient of single rows of a table.
        is_drawn: the mask of a dropout: truth values of no argument, and yet of each sample.
    """

    is_product: bool
    is_grouped: bool
    is_convolution: bool
    reads_shape_only: bool
    has_statistics: bool
    is_label_loss: bool
    is_softmax: bool
    attention_core: str
    is_sparse: bool
    is_drawn: bool


@cache
def op_kind(kind: str) -> OpKind:
    """The facts about a kind; none is true of one that nobody knows."""
    words, name = kind.lower(), base_name(kind)
    return OpKind(
        is_product=any(word in words for word in _PRODUCTS),
        is_grouped="grouped_mm" in words,
        is_convolution="conv" in kind,
        reads_shape_only=name in _SHAPE_ONLY,
        has_statistics=name in _STATISTICS,
        is_label_loss="binary" not in words and any(word in words for word in _LABEL_LOSSES),
        is_softmax="softmax" in kind,
        attention_core=next((word for word in (FUSED, SPELT_OUT) if word in words), ""),
        is_sparse="_sparse_coo_tensor" in words,
        is_drawn=name == "bernoulli",
    )


@cache
def base_name(kind: str) -> str:
    """``aten._to_copy``, ``aten.relu_.default`` and ``ReLU(inplace)`` as ``to_copy`` and ``relu``."""
    parts = kind.lower().split("(")[0].split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).strip("_")


def shape_readers(kinds: Iterable[str]) -> BoolArray:
    """bool [n]: ops that read nothing of their arguments but their shapes."""
    return np.array([op_kind(kind).reads_shape_only for kind in kinds], dtype=np.bool_)


# -- kernels of compilers ---------------------------------------------------------------------------------------------
# Names as of `base_name`, so that ``aten.relu_`` and ONNX's ``Relu`` are one. A kind that stands nowhere is a library's
# kernel and shares nothing, which is on the safe side.


class KernelRole(enum.IntEnum):
    """How an op may share a kernel."""

    NOTHING = 0  # launches nothing: an input, a table, a barrier
    LIBRARY = 1  # a product, a convolution, attention, a sort, an exchange: a kernel of its own
    POINTWISE = 2  # each element by itself, read from wherever it lies
    WINDOW = 3  # pointwise, but what it reads must lie in memory: pooling, resampling
    RANDOM = 4  # pointwise; its numbers are drawn once, so they are written
    ROWS = 5  # reduces along rows and writes as much as it reads: softmax, layer norm
    CHANNELS = 6  # the same along columns, so that a kernel of its own must come before: batch norm
    REDUCTION = 7  # writes less than it reads
    UPDATE = 8  # of an optimizer


# fmt: off
POINTWISE = frozenset({
    "abs", "acos", "acosh", "add", "addcdiv", "addcmul", "alias_copy", "and", "angle", "arange", "as_strided_copy",
    "asin", "asinh", "atan", "atan2", "atanh", "binary_cross_entropy_backward", "bitwise_and", "bitwise_left_shift",
    "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "broadcast_to", "bucketize", "cast", "cat",
    "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clip", "clone", "complex", "conj_physical",
    "constant_pad_nd", "contiguous", "convert_element_type", "copy", "copysign", "cos", "cosh", "deg2rad",
    "diagonal_scatter", "digamma", "div", "dropout", "elu", "elu_backward", "embedding", "eq", "erf", "erfc",
    "erfinv", "exp", "exp2", "expand_copy", "expm1", "eye", "fill", "flatten", "flip", "float_power", "floor",
    "floor_divide", "fmax", "fmin", "fmod", "frac", "frexp", "full", "full_like", "gather", "gcd", "ge", "gelu",
    "gelu_backward", "glu", "glu_backward", "gt", "hardshrink", "hardsigmoid", "hardsigmoid_backward", "hardswish",
    "hardswish_backward", "hardtanh", "hardtanh_backward", "heaviside", "hypot", "i0", "iand", "igamma", "igammac",
    "ilshift", "index", "index_select", "ior", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "ixor", "lcm",
    "ldexp", "le", "leaky_relu", "leaky_relu_backward", "leakyrelu", "lerp", "lgamma", "log", "log10", "log1p",
    "log2", "log_sigmoid_backward", "log_sigmoid_forward", "logaddexp", "logaddexp2", "logical_and", "logical_not",
    "logical_or", "logical_xor", "logit", "logit_backward", "lshift", "lt", "masked_fill", "maximum", "minimum",
    "mish", "mish_backward", "mse_loss_backward", "mul", "mvlgamma", "nan_to_num", "native_dropout_backward", "ne",
    "neg", "new_full", "new_ones", "new_zeros", "nextafter", "nll_loss2d_backward", "nll_loss_backward", "not",
    "ones", "ones_like", "or", "permute_copy", "polar", "polygamma", "positive", "pow", "prelu", "rad2deg",
    "reciprocal", "reflection_pad1d", "reflection_pad2d", "relu", "relu6", "remainder", "repeat",
    "repeat_interleave", "replication_pad2d", "reshape", "roll", "round", "rshift", "rsqrt", "rsub",
    "scalar_tensor", "select_backward", "select_scatter", "selu", "sgn", "sigmoid", "sigmoid_backward", "sign",
    "signbit", "silu", "silu_backward", "sin", "sinc", "sinh", "slice_backward", "slice_scatter",
    "smooth_l1_loss_backward", "softplus", "softplus_backward", "softshrink", "sqrt", "square", "stack", "sub",
    "swish", "tan", "tanh", "tanh_backward", "threshold", "threshold_backward", "to", "to_copy", "tril", "triu",
    "true_divide", "trunc", "unsafe_index", "view_copy", "where", "xlogy", "xor", "zero", "zeros", "zeros_like",
})
WINDOW = frozenset({
    "avg_pool1d", "avg_pool2d", "avg_pool2d_backward", "max_pool2d", "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward", "upsample_bilinear2d", "upsample_nearest2d", "upsample_nearest2d_backward",
    "upsample_bicubic2d", "adaptive_avg_pool2d_backward",
})
RANDOM = frozenset({
    "bernoulli", "exponential", "native_dropout", "normal", "rand", "rand_like", "randint", "randn", "randn_like",
    "uniform",
})
ROWS = frozenset({
    "fused_rms_norm", "fused_rms_norm_backward", "group_norm", "layer_norm", "log_softmax",
    "log_softmax_backward_data", "native_group_norm", "native_group_norm_backward", "native_layer_norm",
    "native_layer_norm_backward", "rms_norm", "safe_softmax", "softmax", "softmax_backward_data", "layernormalization",
    "logsoftmax",
})
CHANNELS = frozenset({
    "batch_norm", "cudnn_batch_norm", "cudnn_batch_norm_backward", "instance_norm", "native_batch_norm",
    "native_batch_norm_backward", "native_batch_norm_legit", "native_batch_norm_legit_functional",
    "native_batch_norm_legit_no_training", "native_batch_norm_legit_no_training_backward", "batch_norm_with_update",
    "batchnormalization",
})
REDUCTION = frozenset({
    "adaptive_avg_pool2d", "all", "amax", "amin", "any", "argmax", "argmin", "linalg_vector_norm", "logsumexp", "max",
    "mean", "min", "nll_loss2d_forward", "nll_loss_forward", "norm", "prod", "std", "std_mean", "sum", "var",
    "var_mean", "mse_loss", "binary_cross_entropy", "smooth_l1_loss", "reducemean", "reducesum", "globalaveragepool",
    "binary_cross_entropy_with_logits",
})
# Pointwise ops with exponentials, which are computed once and written where several read them (ir.py,
# `StorageBox.should_realize_on_reuse`).
HEAVY = frozenset({
    "elu", "elu_backward", "exp", "expm1", "gelu_backward", "log_sigmoid_backward", "log_sigmoid_forward",
    "logaddexp", "sigmoid", "silu", "silu_backward", "softplus", "swish",
})
PRODUCTS = frozenset({"linear", "mm"})  # that can add a matrix to their product
MATRIX_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm"})  # of which attention is made where it is spelt out
ATTENTION = frozenset({"scaled_dot_product_attention"})  # made of several operators, of which one computes
# Copies that mostly change the order in memory: the next one to read does not meet the elements in order.
COPIES = frozenset({"clone", "contiguous", "copy", "flatten", "permute_copy", "reshape"})
# Truth values, of one byte each, whatever the op computes with.
TRUTHS = frozenset({
    "all", "any", "eq", "ge", "gt", "isfinite", "isinf", "isnan", "le", "logical_and", "logical_not", "logical_or",
    "logical_xor", "lt", "ne",
})
# Entry by entry and of one argument mostly: what coarsening by rule merges into its input.
ELEMENTWISE = frozenset({
    "abs", "add", "addcdiv", "addcmul", "cast", "ceil", "celu", "clamp", "clip", "clone", "convert_element_type",
    "copy", "cos", "div", "dropout", "elu", "eq", "erf", "exp", "floor", "ge", "gelu", "gelu_backward", "gt",
    "hardsigmoid", "hardswish", "hardtanh", "le", "leaky_relu", "leakyrelu", "log", "logical_and", "logical_not",
    "logical_or", "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "native_dropout", "ne", "neg", "not", "pow",
    "reciprocal", "relu", "relu6", "remainder", "rsqrt", "rsub", "selu", "sigmoid", "sigmoid_backward", "sign", "silu",
    "silu_backward", "sin", "softplus", "sqrt", "square", "sub", "swish", "tanh", "tanh_backward",
    "threshold_backward", "to", "to_copy", "where",
})
# fmt: on
_ROLES = (
    (POINTWISE, KernelRole.POINTWISE),
    (WINDOW, KernelRole.WINDOW),
    (RANDOM, KernelRole.RANDOM),
    (ROWS, KernelRole.ROWS),
    (CHANNELS, KernelRole.CHANNELS),
    (REDUCTION, KernelRole.REDUCTION),
)


@cache
def role_of(kind: str) -> KernelRole:
    """The role that a kind has where it launches anything."""
    if kind.startswith("optimizer."):
        return KernelRole.UPDATE
    name = base_name(kind)
    return next((role for names, role in _ROLES if name in names), KernelRole.LIBRARY)
