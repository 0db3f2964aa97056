"""Facts that compilers know of an op by its kind: whether it may share a kernel with its neighbours.

The lists name operators of torch without prefix and underscores, so that ``aten.relu_`` and ONNX's ``Relu`` are one. A
kind that stands nowhere is a library's kernel and shares nothing, which is on the safe side.
"""

from __future__ import annotations

import enum
from functools import cache

from graphs.op_kinds import base_name


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
_TRUTHS = frozenset({
    "all", "any", "eq", "ge", "gt", "isfinite", "isinf", "isnan", "le", "logical_and", "logical_not", "logical_or",
    "logical_xor", "lt", "ne",
})
# fmt: on
_ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    "complex128": 16,
}
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


def item_bytes(kind: str, dtype: str) -> int:
    """Bytes of one element of what an op writes."""
    return 1 if base_name(kind) in _TRUTHS else _ITEM_BYTES.get(dtype, 1)
