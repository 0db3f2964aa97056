"""FLOPs and bytes of ONNX operators, counted as torch's own counters do: products only, element-wise work is 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper, shape_inference

from graphs.errors import GraphError

# Shape arithmetic works on a handful of integers; anything larger is data, and its content decides no shape.
LARGEST_SHAPE_CONSTANT = 1024
# fmt: off
_ARITHMETIC = frozenset({
    "Abs", "Add", "And", "Cast", "Ceil", "Concat", "Div", "Equal", "Flatten", "Floor", "Gather", "Greater", "Identity",
    "Less", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum",
    "Reshape", "Slice", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where",
})
_ELEMENTWISE = frozenset({
    "Add", "And", "Div", "Equal", "Greater", "Less", "Max", "Min", "Mod", "Mul", "Or", "Sub", "Where",
})
# fmt: on


def infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the shape of every value that can be inferred; shape arithmetic is replaced by its result.

    onnx's own data propagation is left off: it bounds nothing, so that a small file can take all memory, and it knows
    only some operators. So, while values without a shape remain, whatever is computed from shapes alone is evaluated,
    and inference runs again.
    """
    while True:
        model = shape_inference.infer_shapes(model)
        if not _lacks_shapes(model.graph) or not _evaluate(model):
            return model


def _lacks_shapes(graph: onnx.GraphProto) -> bool:
    known = {info.name for info in graph.value_info if _shape(info) is not None}
    known.update(info.name for info in graph.output if _shape(info) is not None)
    return any(output and output not in known for node in graph.node for output in node.output)


def _shape(info: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    """The shape of a value, None if not every dimension is known."""
    tensor = info.type.tensor_type
    if not info.type.HasField("tensor_type") or not tensor.HasField("shape"):
        return None
    dims = tuple(dim.dim_value for dim in tensor.shape.dim)
    return dims if all(dim.HasField("dim_value") for dim in tensor.shape.dim) else None


def _evaluate(model: onnx.ModelProto) -> bool:
    """Replace every node computed from shapes alone by a ``Constant``; whether there was one."""
    graph = model.graph
    shapes = {info.name: _shape(info) for info in (*graph.input, *graph.value_info, *graph.output)}
    shapes.update({constant.name: tuple(constant.dims) for constant in graph.initializer})
    known: dict[str, NDArray[Any]] = {}
    for constant in graph.initializer:
        if prod(constant.dims) <= LARGEST_SHAPE_CONSTANT and _is_here(constant):
            known[constant.name] = numpy_helper.to_array(constant)
    changed = False
    for node in graph.node:
        if node.op_type == "Constant":
            value = _constant(node)
        else:
            value = _result(node, shapes, known, model)
            if value is not None:
                name = node.output[0]
                node.CopyFrom(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value, name)))
                changed = True
        if value is not None and value.size <= LARGEST_SHAPE_CONSTANT:
            known[node.output[0]] = value
            shapes[node.output[0]] = value.shape
    return changed


def _is_here(tensor: onnx.TensorProto) -> bool:
    """Whether its data is in the model's own file; no other one is opened."""
    return bool(tensor.data_location != onnx.TensorProto.EXTERNAL)


def _constant(node: onnx.NodeProto) -> NDArray[Any] | None:
    for attribute in node.attribute:
        if attribute.name == "value" and prod(attribute.t.dims) <= LARGEST_SHAPE_CONSTANT and _is_here(attribute.t):
            return numpy_helper.to_array(attribute.t)
        if attribute.name in ("value_int", "value_ints"):
            return np.array(attribute.i if attribute.name == "value_int" else list(attribute.ints), dtype=np.int64)
    return None


def _result(
    node: onnx.NodeProto,
    shapes: dict[str, tuple[int, ...] | None],
    known: dict[str, NDArray[Any]],
    model: onnx.ModelProto,
) -> NDArray[Any] | None:
    """The value of a node of shape arithmetic; None for any other node."""
    if node.op_type == "Shape" and (shape := shapes.get(node.input[0])) is not None:
        bounds = {attribute.name: attribute.i for attribute in node.attribute}
        return np.array(shape[bounds.get("start", 0) : bounds.get("end", len(shape))], dtype=np.int64)
    if node.op_type == "Size" and (shape := shapes.get(node.input[0])) is not None and prod(shape) < 2**63:
        return np.array(prod(shape), dtype=np.int64)
    if node.op_type not in _ARITHMETIC or node.domain or any(name and name not in known for name in node.input):
        return None
    inputs = {name: known[name] for name in node.input if name}
    if not inputs or len(node.output) != 1:
        return None
    if _most_elements(node, [known[name].shape for name in node.input if name]) > LARGEST_SHAPE_CONSTANT:
        return None  # data: checked before it is computed, as small inputs can give a result of many gigabytes
    from onnx.reference import ReferenceEvaluator  # slow to import, and seldom needed

    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in inputs.items()
    ]
    output = onnx.ValueInfoProto(name=node.output[0])
    graph = helper.make_graph([node], "shape_arithmetic", values, [output])
    one_node = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    try:
        results: Any = ReferenceEvaluator(one_node).run(None, inputs)
    except Exception:  # a broken or unsupported node: it stays, and its shape stays unknown
        return None
    return np.asarray(results[0])


def _most_elements(node: onnx.NodeProto, shapes: list[tuple[int, ...]]) -> int:
    """At least as many elements as a node of shape arithmetic gives, and computes on the way, from inputs of `shapes`.

    A dimension of 0 counts as 1, because reducing it gives 1.
    """
    sizes = [[max(dim, 1) for dim in shape] for shape in shapes]
    if node.op_type == "Concat":
        return sum(map(prod, sizes))
    if node.op_type == "Gather":
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        data = sizes[0]
        return prod(map(prod, sizes)) // (data[axis] if -len(data) <= axis < len(data) else 1)
    if node.op_type in _ELEMENTWISE:
        aligned = zip_longest(*(reversed(size) for size in sizes), fillvalue=1)
        return prod(map(max, aligned))
    return prod(sizes[0])


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
