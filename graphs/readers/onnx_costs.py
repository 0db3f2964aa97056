"""FLOPs and bytes of ONNX operators, counted as torch's own counters do: products only, element-wise work is 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from graphs.errors import GraphError

# Bits of the element types that numpy stores in whole bytes but ONNX packs.
_PACKED_BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}


@dataclass(frozen=True)
class OnnxValue:
    """Shape and element type of one ONNX value, e.g. ``OnnxValue((1, 3, 224, 224), "float32", 4)``."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def bytes(self) -> int:
        bits = _PACKED_BITS.get(self.dtype, 8 * self.itemsize)
        return (prod(self.shape) * bits + 7) // 8

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))


OnnxValues = Mapping[str, OnnxValue]


def flops(node: Any, values: OnnxValues) -> float:
    """Floating-point operations of a node (a ``NodeProto``); 0 where a needed shape is unknown.

    Convolutions, matrix products, recurrent layers, einsum and attention count 2 per multiply-add. The dearest branch
    of an ``If`` counts; the body of a ``Loop`` or ``Scan`` counts once, since its trip count is data.
    """
    bodies = [sum(flops(inner, values) for inner in graph.node) for graph in subgraphs(node)]
    if bodies:
        return max(bodies)
    count = _COUNTERS.get(node.op_type)
    if count is None:
        return 0.0
    try:
        return float(count(node, values))
    except (KeyError, IndexError):  # an operand without a known shape, or fewer operands than the operator needs
        return 0.0


def lacks_formula(node: Any) -> bool:
    """Whether a node may do products that `flops` cannot count: one of another domain, or one of `_UNCOUNTED`."""
    known = node.op_type in _COUNTERS or subgraphs(node)
    return not known and (node.domain not in ("", "ai.onnx") or node.op_type in _UNCOUNTED)


def bytes_read(node: Any, name: str, position: int, values: OnnxValues) -> int:
    """Bytes a node reads of one input; a lookup reads what it returns, not its whole table."""
    value = values.get(name)
    if value is None:
        return 0
    if node.op_type in _LOOKUPS and position == 0 and node.output and node.output[0] in values:
        return min(value.bytes, values[node.output[0]].bytes)
    return value.bytes


def subgraphs(node: Any) -> list[Any]:
    """The graphs inside a control-flow node, in order."""
    return [attribute.g for attribute in node.attribute if attribute.HasField("g")]


_LOOKUPS = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})


def _attribute(node: Any, name: str) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), 0)


def _conv(weight: int) -> Callable[[Any, OnnxValues], int]:
    def count(node: Any, values: OnnxValues) -> int:
        return 2 * prod(values[node.output[0]].shape) * prod(values[node.input[weight]].shape[1:])

    return count


def _conv_transpose(node: Any, values: OnnxValues) -> int:
    return 2 * prod(values[node.input[0]].shape) * prod(values[node.input[1]].shape[1:])


def _gemm(node: Any, values: OnnxValues) -> int:
    inner = values[node.input[0]].shape[0 if _attribute(node, "transA") else 1]
    return 2 * prod(values[node.output[0]].shape) * inner


def _matmul(node: Any, values: OnnxValues) -> int:
    return 2 * prod(values[node.output[0]].shape) * values[node.input[0]].shape[-1]


def _recurrent(node: Any, values: OnnxValues) -> int:
    steps, batch = values[node.input[0]].shape[:2]  # either order gives the same product
    return 2 * steps * batch * (prod(values[node.input[1]].shape) + prod(values[node.input[2]].shape))


def _attention(node: Any, values: OnnxValues) -> int:
    query, key, out = values[node.input[0]].shape, values[node.input[1]].shape, values[node.output[0]].shape
    return 2 * key[-2] * (prod(query) + prod(out))


def _einsum(node: Any, values: OnnxValues) -> int:
    equation = next((attribute.s.decode() for attribute in node.attribute if attribute.name == "equation"), "")
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    shapes = [values[name].shape for name in node.input]
    if "." in equation:
        return 0
    if [len(term) for term in terms] != [len(shape) for shape in shapes]:
        name = node.name or node.output[0]
        raise GraphError(f"op {name!r} has the equation {equation!r:.80}, which does not fit its inputs; correct it.")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        sizes.update(zip(term, shape, strict=True))
    return 2 * prod(sizes.values()) if len(terms) > 1 else 0


# Operators of ONNX itself that do products, without a formula here; all others only move data or go element by element.
_UNCOUNTED = frozenset(
    {"CausalConvWithState", "DFT", "DeformConv", "Det", "FlexAttention", "LinearAttention", "STFT", "SwiGLU"}
)
_COUNTERS: Mapping[str, Callable[[Any, OnnxValues], int]] = {
    "Attention": _attention,
    "Conv": _conv(weight=1),
    "ConvInteger": _conv(weight=1),
    "QLinearConv": _conv(weight=3),
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "GRU": _recurrent,
    "Gemm": _gemm,
    "LSTM": _recurrent,
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "QLinearMatMul": _matmul,
    "RNN": _recurrent,
}
