"""Read an ONNX model as an `OpGraph`: shapes are inferred, weights are never turned into arrays."""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import networkx as nx
import onnx
from onnx import TensorProto, helper

from graphs.disk import read_bytes, stem
from graphs.errors import GraphError, GraphFileError
from graphs.opgraph import Op, OpGraph, Origin, Tensor
from graphs.readers.onnx_costs import (
    LARGEST_SHAPE_CONSTANT,
    OnnxValue,
    bytes_read,
    flops,
    infer_shapes,
    lacks_formula,
    subgraphs,
)

MOST_NODES = 1_000_000  # of a model after inlining; the largest exports have some ten thousand
MOST_BYTES = 2**30  # of those nodes: less than protobuf's own limit for one message, 2 GiB
_DEEPEST = 90  # calls inside calls; onnx itself refuses 100 in newer releases, and earlier ones go as deep on the stack

_Key = tuple[str, str, str]  # domain, name, overload


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every call of a local function replaced by the function's nodes.

    Raises:
        GraphError: a function calls itself, or is there twice; or inlining would give too many nodes.
    """
    if not model.functions:
        return model
    _check_calls(model)
    from onnx import inliner

    try:
        return inliner.inline_local_functions(model)
    except Exception as error:  # onnx raises several unrelated classes here
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise GraphError(f"its local functions cannot be inlined: {reason}; export the model again.") from None


def _check_calls(model: onnx.ModelProto) -> None:
    bodies = {_key(function.domain, function.name, function.overload): function for function in model.functions}
    if len(bodies) < len(model.functions):
        raise GraphError("a local function is defined twice; export the model again.")
    calls = nx.DiGraph()
    calls.add_nodes_from(bodies)
    for key, function in bodies.items():
        called = {_called(node) for node in _nodes(function.node)}
        calls.add_edges_from((key, other) for other in called if other in bodies)
    if not nx.is_directed_acyclic_graph(calls):
        name = nx.find_cycle(calls)[0][0][1]
        raise GraphError(f"local function {name!r} calls itself, which ONNX does not allow; export the model again.")
    sizes: dict[_Key, tuple[int, int, int]] = {}
    for key in reversed(list(nx.topological_sort(calls))):
        sizes[key] = _size(bodies[key].node, sizes)
    nodes, size, depth = _size(model.graph.node, sizes)
    if nodes > MOST_NODES or size > MOST_BYTES or depth > _DEEPEST:
        raise GraphError(
            f"its local functions stand for more than {MOST_NODES:,} nodes or {MOST_BYTES:,} bytes, or call each other "
            f"more than {_DEEPEST} deep; export the model with fewer calls."
        )


def _size(nodes: Iterable[onnx.NodeProto], sizes: dict[_Key, tuple[int, int, int]]) -> tuple[int, int, int]:
    """Nodes, their bytes and the depth of calls once every call among `nodes` is replaced by what it stands for."""
    count = size = depth = 0
    for node in _nodes(nodes):
        inner = sizes.get(_called(node))
        count += 1 if inner is None else inner[0]
        size += node.ByteSize() if inner is None else inner[1]
        depth = max(depth, 0 if inner is None else inner[2] + 1)
    return min(count, MOST_NODES + 1), min(size, MOST_BYTES + 1), depth  # or they would grow with every doubling


def _called(node: onnx.NodeProto) -> _Key:
    return _key(node.domain, node.op_type, node.overload)


def _key(domain: str, name: str, overload: str) -> _Key:
    return "" if domain == "ai.onnx" else domain, name, overload


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """These nodes, and those of the graphs inside control flow."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from _nodes(graph.node)


Path = str | os.PathLike[str]

# Change only the shape they are read with: their output is their input, so it must not count as a second tensor.
_VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"})
_SHAPES = frozenset({"Shape", "Size"})  # known before the step starts
_LARGEST_RANK = 100  # dimensions of a constant
_TERM = r"[A-Za-z ]*(\.\.\.[A-Za-z ]*)?"
_EQUATION = re.compile(rf"{_TERM}(,{_TERM})*(->{_TERM})?")  # of Einsum
_LONGEST_SCOPES = 10_000  # characters
_RANDOM = frozenset({"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial"})


def read_onnx(path: Path, dims: Mapping[str, int] | None = None) -> OpGraph:
    """Read an ONNX model; external data files are not opened.

    One op per input (kind ``"input"``, no kernels) and one per node, but: views (reshape, squeeze, dropout, ...) are
    folded into their input, and whatever depends on constants or shapes alone is a constant. Each op keeps the
    constants it reads; but a weight (two dimensions or more, over 1,024 elements, not integer indices) that several
    ops read is kept once, and those ops share a colocation
    group. An ``If``, ``Loop`` or ``Scan`` is one op. FLOPs are counted as in `graphs.readers.onnx_costs`.

    Args:
        path: the ``.onnx`` file.
        dims: sizes of the symbolic dimensions, e.g. ``{"batch": 8}``. A symbolic dimension not given, or one that
            depends on data, counts as 1.

    Warns:
        UserWarning: a symbolic dimension counts as 1; or operators that may do products count 0 FLOPs, because there
            is no formula for them.

    Raises:
        GraphFileError: not an ONNX model, an op that reads what nothing produces, or an output of unknown rank; the
            message names the op. Also for a name in `dims` that the model does not have.
    """
    where = os.fspath(path)
    try:
        model = _parse(read_bytes(path), where)
        _check_ranks(model.graph)
        _check_equations(model.graph)
        _settle_dimensions(model.graph, dims or {}, where)
        for graph in _graphs(model.graph):
            for constant in graph.initializer:
                _drop_data(constant)
        model = _inferred(model, where)
        result = _Reading(model.graph, where).finish()
        _warn_of_uncounted(model.graph, where)
    except GraphFileError:
        raise
    except GraphError as error:
        raise GraphFileError(f"{where}: {error}") from None
    except _NONSENSE as error:
        raise GraphFileError(f"{where} cannot be read: {_first_line(error)}; export the model again.") from None
    return result


# Errors of a model that parses and makes no sense: names of nothing, numbers too large, depth.
_NONSENSE = (ArithmeticError, LookupError, ValueError, TypeError, AttributeError, RecursionError, MemoryError)


def _check_ranks(graph: onnx.GraphProto) -> None:
    for inner in _graphs(graph):
        attributes = [attribute.t for node in inner.node for attribute in node.attribute]
        for tensor in (*inner.initializer, *attributes):
            if len(tensor.dims) > _LARGEST_RANK:
                raise GraphError(f"constant {tensor.name!r:.80} has {len(tensor.dims)} dimensions; correct it.")


def _check_equations(graph: onnx.GraphProto) -> None:
    """onnx's own inference of shapes reads others for ever, in C++, where no signal reaches it."""
    for node in (node for inner in _graphs(graph) for node in inner.node if node.op_type == "Einsum"):
        equation = next((attribute.s.decode() for attribute in node.attribute if attribute.name == "equation"), "")
        if not _EQUATION.fullmatch(equation):
            raise GraphError(
                f"op {(node.name or node.output[0])!r:.80} has the equation {equation!r:.80}; expected terms of "
                "letters and at most one '...', such as 'bij,bjk->bik'."
            )


def _inferred(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    try:
        return infer_shapes(model)
    except Exception as error:  # onnx raises several unrelated classes here
        raise GraphFileError(f"{where}: shape inference failed: {_first_line(error)}.") from None


def _warn_of_uncounted(graph: onnx.GraphProto, where: str) -> None:
    kinds = [node.op_type for inner in _graphs(graph) for node in inner.node if lacks_formula(node)]
    if kinds:
        counted = f"{len(kinds)} op{'s' if len(kinds) > 1 else ''} of {where}"
        listed = ", ".join(sorted(set(kinds)))
        warnings.warn(f"{counted} of kinds {listed} count 0 FLOPs: there is no formula for them.", stacklevel=3)


def _parse(data: bytes, where: str) -> onnx.ModelProto:
    try:
        model = onnx.load_model_from_string(data)
    except Exception:  # protobuf's DecodeError has moved between its releases
        raise GraphFileError(f"{where} is not an ONNX model, or is truncated: it does not parse.") from None
    if not model.graph.node:
        raise GraphFileError(f"{where} is not an ONNX model with operators: its graph is empty.")
    return inlined(model)


# -- dimensions and sizes -------------------------------------------------------------------------------------


def _settle_dimensions(graph: onnx.GraphProto, dims: Mapping[str, int], where: str) -> None:
    """Give every symbolic input dimension its size, and forget stored shapes that still hold a symbol."""
    shapes = [value.type.tensor_type.shape for value in graph.input]
    symbols = {dim.dim_param for shape in shapes for dim in shape.dim if dim.dim_param}
    for name, size in dims.items():
        if name not in symbols:
            known = ", ".join(sorted(symbols)) or "none"
            raise GraphFileError(f"{where} has no symbolic dimension {name!r}; it has: {known}.")
        if size < 1:
            raise GraphFileError(f"{where}: dimension {name!r} = {size}; expected 1 or more.")
    sizes = {name: dims.get(name, 1) for name in symbols}
    if missing := sorted(symbols - set(dims)):
        names = ", ".join(map(repr, missing))
        subject = (
            f"dimension {names} of {where} counts" if len(missing) == 1 else f"dimensions {names} of {where} count"
        )
        options = " ".join(f"--dim {name}=N" for name in missing)
        keys = ", ".join(f"{name!r}: N" for name in missing)
        what = "its size" if len(missing) == 1 else "their sizes"
        warnings.warn(f"{subject} as 1; give {what} with {options} (read_onnx(dims={{{keys}}})).", stacklevel=3)
    for shape in shapes:
        for dim in shape.dim:
            if dim.dim_value <= 0:
                dim.dim_value = sizes.get(dim.dim_param, 1)
    for inner in _graphs(graph):
        for value in (*inner.value_info, *inner.output):
            if not all(_settled(dim, sizes) for dim in value.type.tensor_type.shape.dim):
                value.type.tensor_type.ClearField("shape")


def _settled(dim: Any, sizes: Mapping[str, int]) -> bool:
    if dim.dim_param in sizes:
        dim.dim_value = sizes[dim.dim_param]
    return bool(dim.HasField("dim_value"))


def _drop_data(constant: onnx.TensorProto) -> None:
    """Forget the data of a weight: shape inference needs none of it, and copies the model."""
    if prod(constant.dims) > LARGEST_SHAPE_CONSTANT:
        for name in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
            constant.ClearField(name)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all graphs inside its control-flow nodes."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _graphs(inner)


def _value(elem_type: int, shape: Iterable[int]) -> OnnxValue:
    if elem_type == TensorProto.STRING:
        return OnnxValue(tuple(shape), "string", 8)
    try:
        dtype = helper.tensor_dtype_to_np_dtype(elem_type)
    except KeyError:
        raise GraphError(f"a value has the element type {elem_type}, which ONNX does not know; correct it.") from None
    return OnnxValue(tuple(shape), dtype.name, dtype.itemsize)


def _known_values(graph: onnx.GraphProto) -> dict[str, OnnxValue]:
    """Every value whose rank is known, by name, also those inside control flow."""
    result: dict[str, OnnxValue] = {}
    for inner in _graphs(graph):
        for info in (*inner.input, *inner.value_info, *inner.output):
            tensor = info.type.tensor_type
            if info.type.HasField("tensor_type") and tensor.HasField("shape") and tensor.elem_type:
                result[info.name] = _value(tensor.elem_type, (max(dim.dim_value, 1) for dim in tensor.shape.dim))
        for constant in inner.initializer:
            result[constant.name] = _value(constant.data_type, constant.dims)
        for sparse in inner.sparse_initializer:
            result[sparse.values.name] = _value(sparse.values.data_type, sparse.dims)
        for node in inner.node:
            for attribute in node.attribute:
                if node.op_type == "Constant" and attribute.HasField("t"):
                    result[node.output[0]] = _value(attribute.t.data_type, attribute.t.dims)
    return result


# -- the graph --------------------------------------------------------------------------------------------------


@dataclass
class _Reading:
    """State of one pass over the nodes, in the file's order, which ONNX requires to be topological."""

    graph: onnx.GraphProto
    where: str
    ops: list[Op] = field(default_factory=list)
    outputs: list[tuple[str, str]] = field(default_factory=list)  # (op, value)
    readers: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # value -> ops
    alias: dict[str, str] = field(default_factory=dict)  # output of a view -> its input
    constants: dict[str, str | None] = field(default_factory=dict)  # value -> the weight it is made of, if one
    keeper: dict[str, str] = field(default_factory=dict)  # weight -> the op that keeps it
    tied: Any = field(default_factory=nx.utils.UnionFind)  # op names

    def finish(self) -> OpGraph:
        graph = self.graph
        self.values = _known_values(graph)
        for constant in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)):
            self.constants[constant.name] = constant.name if self._is_weight(constant.name) else None
        available = {info.name for info in graph.input} | set(self.constants) | {""}
        self.wanted = {name for node in graph.node for name in _reads(node)} | {info.name for info in graph.output}
        inputs = [info.name for info in graph.input if info.name in self.wanted and info.name not in self.constants]
        for name in inputs:
            self._check_known(name, "input", [name])
            self.ops.append(Op(name=name, kind="input", kernels=0, dtype=self.values[name].dtype))
            self.outputs.append((name, name))
        names = _op_names(graph.node, taken=set(inputs))
        for node, name in zip(graph.node, names, strict=True):
            missing = [value for value in _reads(node) if value not in available]
            if missing:
                raise GraphFileError(
                    f"{self.where}: op {name!r} ({node.op_type}) reads {missing[0]!r}, which no op before it produces."
                )
            available.update(node.output)
            self._add(node, name)
        origin = Origin("onnx", train=False, granularity="op")
        return OpGraph.build(self._grouped(), self._tensors(), graph.name or stem(self.where), origin)

    def _is_weight(self, name: str) -> bool:
        # Small constants, masks and indices are cheaper to copy than to share: they must not tie layers together.
        value = self.values[name]
        large = len(value.shape) >= 2 and prod(value.shape) > LARGEST_SHAPE_CONSTANT
        return large and value.dtype not in ("int32", "int64", "bool", "string")

    def _add(self, node: onnx.NodeProto, name: str) -> None:
        reads = _reads(node)
        if node.op_type in _SHAPES or (
            all(value in self.constants for value in reads) and node.op_type not in _RANDOM and not subgraphs(node)
        ):
            weights = {root for value in reads if (root := self.constants.get(value))}
            weight = min(weights) if len(weights) == 1 and node.op_type not in _SHAPES else None
            self.constants.update(dict.fromkeys(node.output, weight))
            return
        used = [output for output in node.output if output and output in self.wanted]
        if node.op_type in _VIEWS and node.input[0] not in self.constants and used in ([], [node.output[0]]):
            self.alias[node.output[0]] = self._source(node.input[0])
            return
        self.ops.append(self._op(node, name, used))
        for value in dict.fromkeys(self._source(value) for value in reads if value not in self.constants):
            self.readers[value].append(name)
        self.outputs += [(name, output) for output in used]

    def _op(self, node: onnx.NodeProto, name: str, used: list[str]) -> Op:
        self._check_known(name, node.op_type, used)
        reads = _reads(node)
        known = [self.values[value] for value in (*reads, *used) if value in self.values]
        work = flops(node, self.values)
        integer_product = node.op_type in ("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul")
        return Op(
            name=name,
            kind=f"{node.domain or 'onnx'}.{node.op_type}",
            flops=work,
            bytes_moved=float(
                sum(bytes_read(node, value, i, self.values) for i, value in enumerate(reads))
                + sum(self.values[output].bytes for output in used)
            ),
            kept_bytes=self._kept(node, name),
            dtype="int8" if integer_product else next((value.dtype for value in known if value.is_float), "float32"),
            module=_module(node),
        )

    def _check_known(self, name: str, kind: str, values: list[str]) -> None:
        for value in values:
            if value not in self.values:
                raise GraphFileError(
                    f"{self.where}: op {name!r} ({kind}) has an output {value!r} of unknown shape, because its inputs "
                    "do not fit or onnx does not know the operator; correct it, or store the shape (value_info)."
                )

    def _kept(self, node: onnx.NodeProto, name: str) -> int:
        """Bytes of the constants an op keeps; also ties it to the other readers of its weights."""
        inside = [
            constant.name for graph in subgraphs(node) for inner in _graphs(graph) for constant in inner.initializer
        ]
        kept = sum(self.values[constant].bytes for constant in inside)
        for value in dict.fromkeys(_reads(node)):
            weight = self.constants.get(value)
            if weight is not None:
                if weight not in self.keeper:
                    self.keeper[weight] = name
                    kept += self.values[weight].bytes
                self.tied.union(self.keeper[weight], name)
            elif value in self.constants and value in self.values:
                kept += self.values[value].bytes
        return kept

    def _grouped(self) -> list[Op]:
        label = {name: min(group) for group in map(set, self.tied.to_sets()) if len(group) > 1 for name in group}
        return [replace(op, colocation=label.get(op.name)) for op in self.ops]

    def _tensors(self) -> list[Tensor]:
        return [Tensor(op, self.values[value].bytes, tuple(self.readers.get(value, ()))) for op, value in self.outputs]

    def _source(self, value: str) -> str:
        return self.alias.get(value, value)


def _reads(node: onnx.NodeProto) -> list[str]:
    """The values a node reads, in order; a control-flow node also reads what its graphs take from outside."""
    return [value for value in node.input if value] + [value for graph in subgraphs(node) for value in _captured(graph)]


def _captured(graph: onnx.GraphProto) -> list[str]:
    inside = {info.name for info in graph.input} | {constant.name for constant in graph.initializer}
    result = []
    for node in graph.node:
        result += [value for value in _reads(node) if value not in inside]
        inside.update(node.output)
    return result + [info.name for info in graph.output if info.name not in inside]


def _op_names(nodes: Iterable[onnx.NodeProto], taken: set[str]) -> list[str]:
    """Node names where given and unique, else the first output's name, which ONNX makes unique."""
    result = []
    for number, node in enumerate(nodes):
        output = next((name for name in node.output if name), f"node{number}")
        name = next(name for name in (node.name, output, f"{output}#{number}") if name and name not in taken)
        taken.add(name)
        result.append(name)
    return result


def _module(node: onnx.NodeProto) -> str:
    """Module path as torch's exporters store it: a property, or a node name such as ``/layers/0/attn/MatMul``."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            scopes = _texts(entry.value)
            return scopes[-2] if len(scopes) > 1 else ""
    parts = node.name.split("/")
    return ".".join(parts[1:-1]) if len(parts) > 2 and not parts[0] else ""


def _texts(value: str) -> list[str]:
    """The strings of a list as torch's exporters write it; none where it is no such list."""
    try:
        scopes = ast.literal_eval(value) if len(value) <= _LONGEST_SCOPES else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return []
    return [str(scope) for scope in scopes] if isinstance(scopes, list) else []


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]
