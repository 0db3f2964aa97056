"""A traced step as torch.fx nodes, whoever traced it, and what is known of its values: never their data."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from graphs.capture.failure import data_dependent_size

PARAMETER, BUFFER, CONSTANT = "parameter", "buffer", "constant"


@dataclass(frozen=True)
class TracedState:
    """A tensor that is there before the step: a parameter, a buffer or a constant.

    Attributes:
        name: dotted path, e.g. ``"encoder.0.weight"``.
        kind: ``"parameter"``, ``"buffer"`` or ``"constant"``.
        info: its layout and memory; states whose memory overlaps are tied.
        tensor: of a constant, which no module has under that name.
    """

    name: str
    kind: str
    info: TensorInfo
    tensor: torch.Tensor | None = None

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Outputs:
    """The outputs of the model.

    Attributes:
        value: the traced output itself, its tensors without data.
        tensors: those tensors.
        nodes: the node of each of them.
        tangents: number of an output -> node of the gradient that the loss sends into it.
    """

    value: Any
    tensors: tuple[torch.Tensor, ...]
    nodes: tuple[fx.Node, ...]
    tangents: Mapping[int, fx.Node] = field(default_factory=dict)

    @classmethod
    def of(
        cls, value: Any, tensors: Sequence[torch.Tensor], nodes: tuple[fx.Node, ...], tangents: Mapping[int, fx.Node]
    ) -> Outputs:
        """Outputs with a copy of the value: the model may hold the original, and gets it back as it was."""
        return cls(with_tensors(value, zip(tensors, tensors, strict=True)), tuple(tensors), nodes, tangents)

    def is_differentiable(self, number: int) -> bool:
        """Whether an output of the model has a gradient, one that the loss sends or not."""
        return self.tensors[number].requires_grad

    def filled(self, tensors: Iterable[torch.Tensor]) -> Any:
        """An output like the traced one with these tensors in it."""
        return with_tensors(self.value, zip(self.tensors, tensors, strict=True))


@dataclass(frozen=True)
class Trace:
    """A step in program order.

    Node metadata read by `graphs.capture.lower`: ``info`` (or ``val``, described on demand), ``module`` (or
    ``nn_module_stack``), ``phase``, ``mirror`` (a backward node's forward node), ``call`` (number of a module call).

    Attributes:
        graph: placeholders, calls and one output.
        states: what each state placeholder stands for.
        inputs: name of each tensor given by the caller.
        results: nodes whose values leave the step.
        writes: (state placeholder, node): the node's value replaces the state.
        gradients: (parameter placeholder, node of its gradient).
        leaves: class name of each called leaf module, by the number of its call (module granularity).
        outputs: what the model returns; None for a program that was exported elsewhere.
        arguments: placeholder of each tensor among the arguments, by its path from ``forward``'s parameter on.
        unlike: what the model does by which its next step is another one, a sentence without its end; "" for nothing.
        evaluated: paths of the modules that are in evaluation mode.
    """

    graph: fx.Graph
    states: Mapping[fx.Node, TracedState]
    inputs: Mapping[fx.Node, str]
    results: tuple[fx.Node, ...]
    writes: tuple[tuple[fx.Node, fx.Node], ...] = ()
    gradients: tuple[tuple[fx.Node, fx.Node], ...] = ()
    leaves: Mapping[int, str] = field(default_factory=dict)
    outputs: Outputs | None = None
    arguments: Mapping[str, fx.Node] = field(default_factory=dict)
    unlike: str = ""
    evaluated: frozenset[str] = frozenset()


# -- values ----------------------------------------------------------------------------------------------------------


class UnknownSizeError(Exception):
    """A symbolic size whose value depends on data; carries its symbol."""


class Layout(NamedTuple):
    """Enough to make an equal tensor without data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.n_elements * self.dtype.itemsize

    @property
    def distinct_bytes(self) -> int:
        """Bytes of memory behind the elements: a dimension made by ``expand`` (stride 0) is read once."""
        count = 1
        for extent, step in zip(self.shape, self.stride, strict=True):
            count *= extent if step or extent == 0 else 1
        return count * self.dtype.itemsize


class TensorInfo(NamedTuple):
    """A tensor of the trace: its layout and the storage it lives in (equal ``storage``: the tensors share memory).

    ``is_conjugate`` and ``is_negative`` tell ``x.conj()`` and the imaginary part of it from views of the same elements.
    """

    layout: Layout
    storage: int
    offset: int  # elements
    is_conjugate: bool = False
    is_negative: bool = False

    @property
    def memory(self) -> range:
        """The bytes of its storage from its first element to its last."""
        layout = self.layout
        last = sum((extent - 1) * step for extent, step in zip(layout.shape, layout.stride, strict=True))
        n_elements = last + 1 if layout.n_elements else 0
        return range(self.offset * layout.dtype.itemsize, (self.offset + n_elements) * layout.dtype.itemsize)


def with_tensors(value: Any, replacements: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """A copy of a nested value, caches and other objects in it too, with some tensors replaced."""
    # deepcopy takes an object that is in its memo for copied already.
    return copy.deepcopy(value, {id(old): new for old, new in replacements})


def describe(value: Any) -> Any:
    """`TensorInfo` for a tensor, the same nesting of tuples for a sequence, a number for a symbolic one, else None."""
    if isinstance(value, torch.Tensor):
        return tensor_info(value)
    if isinstance(value, (list, tuple)):
        return tuple(describe(item) for item in value)
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    return None


def tensor_info(tensor: torch.Tensor) -> TensorInfo:
    """Raises: UnknownSizeError."""
    shape = tuple(tensor.shape)
    if tensor.layout is not torch.strided:
        return TensorInfo(Layout(_numbers(shape), row_major(_numbers(shape)), tensor.dtype), -id(tensor), 0)
    storage = tensor.untyped_storage()
    layout = Layout(_numbers(shape), _numbers(tensor.stride()), tensor.dtype)
    offset = _number(tensor.storage_offset())
    return TensorInfo(layout, storage._cdata, offset, tensor.is_conj(), tensor.is_neg())


def same_stride(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether strides mean the same; that of a dimension of one element means nothing."""
    return all(a == b or extent == 1 for extent, a, b in zip(shape, one, other, strict=True))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(extent, 1))
    return tuple(reversed(strides[: len(shape)]))


def _numbers(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    # Almost every size is a plain int: check the types once instead of converting one by one.
    if all(type(size) is int for size in sizes):
        return sizes
    return tuple(_number(size) for size in sizes)


def _number(size: Any) -> int:
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise UnknownSizeError(str(size))
    return int(hint)


def dtype_name(dtype: torch.dtype) -> str:
    """E.g. ``"float32"``."""
    return str(dtype).removeprefix("torch.")


# -- nodes -----------------------------------------------------------------------------------------------------------


def value_of(node: fx.Node) -> Any:
    """`TensorInfo` of a node's value, nested as the value is (see `describe`).

    Raises:
        CaptureError: a size depends on data; the message names the module and the line.
    """
    info = node.meta.get("info", node)
    if info is node:
        try:
            info = node.meta["info"] = describe(node.meta.get("val"))
        except UnknownSizeError as error:
            raise data_dependent_size(module_of(node), str(node.meta.get("stack_trace", "")), str(error)) from None
    return info


def module_of(node: fx.Node) -> str:
    """Dotted path of the innermost module whose ``forward`` made the node."""
    path = node.meta.get("module")
    if path is None:
        stack = node.meta.get("nn_module_stack") or {}
        # A second call of one module is marked "path@1".
        path = next(reversed(stack.values()))[0].partition("@")[0] if stack else ""
    return str(path)


def flat(value: Any) -> list[Any]:
    """Leaves of nested lists, tuples and dicts; records are leaves."""
    if type(value) in (TensorInfo, Layout) or not isinstance(value, (tuple, list, dict)):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [leaf for item in items for leaf in flat(item)]


def nested(shape: Any, leaves: Iterator[Any]) -> Any:
    """The leaves, nested as ``shape`` is."""
    if type(shape) is TensorInfo or not isinstance(shape, (tuple, list)):
        return next(leaves)
    return tuple(nested(item, leaves) for item in shape)


def layouts(value: Any) -> Any:
    """Arguments or results with their `Layout` for each tensor, as tuples all the way down."""
    if isinstance(value, fx.Node):
        value = value_of(value)
    if type(value) is TensorInfo:
        return value.layout
    if isinstance(value, dict):
        return tuple((key, layouts(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(layouts(item) for item in value)
    return value


def subgraphs_of(node: fx.Node) -> list[fx.GraphModule]:
    """Branches, loop bodies or wrapped regions that a higher-order call is given."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    owner = node.graph.owning_module
    names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    found = [operator.attrgetter(name)(owner) for name in names]
    return [module for module in found if isinstance(module, fx.GraphModule)]
