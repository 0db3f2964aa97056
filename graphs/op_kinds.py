"""`OpKind`: facts about an op that its kind tells, in one table for rewrites, searches and the runtime.

A kind is the text ``op.kind`` of a graph, such as ``"aten.conv2d"``. Facts follow from it alone, so that a graph file
of any version has them. Elsewhere are row rules and local calls, one function for each operator
(`graphs.capture.rows`, `placement.runtime.calls`), and the kernels that ops become
(`graphs.transforms.stacks.kinds`).
"""

from __future__ import annotations

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
