"""Memory that a step keeps on its devices, in words and sums, also for other number formats and optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.errors import CaptureError, MismatchError, UnknownNameError
from graphs.formatting import format_bytes
from graphs.recipes import FLOAT8, OPTIMIZERS, PRECISIONS, Precision, number_bytes
from graphs.records import Phase

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph

_USUAL = OPTIMIZERS["momentum"]  # where nobody said which
_FLOAT32 = 4  # bytes
_UNSCALED = ("float16", "fp16", "half")


def kept_words(graph: OpGraph) -> str:
    """``"4 GB (parameters 1 GB, gradients 1 GB, adam's state 2 GB)"``; the sum alone where no parts are known.

    With the precision where the graph was captured in one.
    """
    parameters, gradients, states = (
        int(part.sum()) for part in (graph.parameter_bytes, graph.gradient_bytes, graph.optimizer_bytes)
    )
    precision = f" in {graph.origin.precision}" if graph.origin.precision else ""
    total = f"{format_bytes(parameters + gradients + states)}{precision}"
    if not gradients + states:
        return total
    state = f", {graph.origin.optimizer or 'the optimizer'}'s state {format_bytes(states)}" if states else ""
    return f"{total} (parameters {format_bytes(parameters)}, gradients {format_bytes(gradients)}{state})"


def activation_bytes(graph: OpGraph) -> int:
    """Outputs of forward ops that backward ops read: not kept, but held from their op to its last reader."""
    producer, consumer, tensor = graph.edge_list
    saved = (graph.phase[producer] == Phase.FORWARD) & (graph.phase[consumer] == Phase.BACKWARD)
    return int(graph.tensor_memory_bytes[np.unique(tensor[saved])].sum())


def trained_bytes(graph: OpGraph) -> IntArray:
    """int64 [n]: parameters that each op keeps and the step trains, one copy of them; 0 without a backward pass.

    As many numbers as their gradients have. Where kept bytes have no parts, the share of one copy among those that the
    optimizer keeps.
    """
    if not (graph.phase != Phase.FORWARD).any():
        return np.zeros(graph.n_ops, dtype=np.int64)
    if graph.gradient_bytes.any():
        return _as_parameters(graph, graph.gradient_bytes)
    return graph.kept_bytes // OPTIMIZERS.get(graph.origin.optimizer or "", _USUAL).kept_copies


def _as_parameters(graph: OpGraph, gradient_bytes: IntArray) -> IntArray:
    """Bytes of parameters that have so many bytes of gradients."""
    precision = PRECISIONS.get(graph.origin.precision or "")
    if precision is None or precision.parameter == precision.gradient:
        return gradient_bytes
    return gradient_bytes * number_bytes(precision.parameter) // number_bytes(precision.gradient)


def fixed_bytes(graph: OpGraph) -> IntArray:
    """int64 [n]: parameters and buffers that each op keeps and that stay in another precision as they are.

    Integers, packed or not, float8 and complex numbers.
    """
    result = np.zeros(graph.n_ops, dtype=np.int64)
    index = {name: i for i, name in enumerate(graph.op_names)} if graph.states else {}
    for state in graph.states:
        if state.dtype and not _is_float(state.dtype):
            result[index[state.users[0]]] += state.parameter_bytes
    return result


# -- by number format and optimizer ------------------------------------------------------------------------------------


# Numbers remembered for each parameter; of adafactor and adam8bit see `_remembered_bytes`.
STATES = {"adam": 2.0, "adamw": 2.0, "adam8bit": 2.0, "momentum": 1.0, "adafactor": 0.0, "sgd": 0.0}
# adam8bit: parameters with fewer numbers keep wide states; others have a float32 scale for each block of
# ``block_size=256``, as of torchao's `AdamW8bit`. bitsandbytes does the same, in blocks of 2,048 at first.
_SMALL, _BLOCK = 4096, 256


def precision_named(name: str) -> Precision:
    """The precision of a name.

    Raises:
        UnknownNameError: there is none.
        CaptureError: float16, in which gradients vanish unless somebody scales the loss.
    """
    if isinstance(name, str) and name in _UNSCALED:
        raise CaptureError(
            f"precision {name!r} needs a scaled loss, which a captured step has only where the model returns one",
            "take 'mixed' or 'master', which compute in bfloat16, or convert the model by `half()` and let it scale "
            "its loss",
        )
    if not isinstance(name, str) or name not in PRECISIONS:
        raise UnknownNameError("precision", str(name), PRECISIONS)
    return PRECISIONS[name]


@dataclass(frozen=True)
class KeptState:
    """State that a model keeps on its devices between steps and all through a step.

    Attributes:
        precision, optimizer: names of `PRECISIONS` and `STATES`; no optimizer for inference.
        optimizer_bytes: with the copy of the parameters that the optimizer updates.
    """

    precision: str
    optimizer: str | None
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """All three parts."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def check_formats(graph: OpGraph) -> None:
    """A graph whose step is run here.

    Raises:
        MismatchError: it has products in 8 bit.
    """
    if graph.origin.precision is not None and PRECISIONS[graph.origin.precision].product:
        base = graph.origin.precision.removesuffix(FLOAT8)
        raise MismatchError(
            f"graph {graph.name!r} has products in 8 bit (precision {graph.origin.precision!r}), which nothing here "
            f"runs; write it for Megatron-LM (`export --to megatron`), or capture it in precision {base!r}."
        )


def parameter_counts(graph: OpGraph) -> tuple[int, int]:
    """How many numbers are in parameters and buffers, and how many of them the step trains."""
    numbers = _numbers(graph)
    return int(numbers.kept.sum()), int(numbers.trained.sum())


def own_precision(graph: OpGraph) -> str:
    """The name among `PRECISIONS` of what a graph was captured in.

    Where it was captured as the model was, training with parameters of 4 bytes and activations of 2 is ``"mixed"``, as
    autocast does it.
    """
    if graph.origin.precision is not None:
        return graph.origin.precision
    if _numbers(graph).own_width < _FLOAT32:
        return "bfloat16"
    return "mixed" if graph.is_training and activation_width(graph) < _FLOAT32 else "float32"


def activation_width(graph: OpGraph) -> int:
    """Bytes of a floating-point number in most of what the forward ops write; 4 where there is none.

    Where parameters are narrower, theirs: some ops, norms say, write wider ones even then.
    """
    return min(_most_used(graph.dtypes, graph.output_bytes), _numbers(graph).own_width)


def kept_state(graph: OpGraph, precision: str, optimizer: str | None) -> KeptState:
    """The state of a graph's model, its sizes read off the parameters and gradients that the ops keep.

    A parameter that is not trained has no gradient and no optimizer state. Numbers in another format than most
    parameters stay in theirs: integers of quantised weights, say, complex numbers, or the few of a model that are wider
    or narrower.
    """
    formats, numbers = PRECISIONS[precision], _numbers(graph)
    is_own, kept, trained = numbers.is_own, numbers.kept, numbers.trained
    parameters = kept * np.where(is_own, number_bytes(formats.parameter), numbers.width)
    if optimizer is None:
        return KeptState(precision, None, int(parameters.sum()), 0, 0)
    gradients = trained * np.where(is_own, number_bytes(formats.gradient), numbers.width)
    state = number_bytes(formats.state)
    master = trained * np.where(is_own, state if formats.has_masters else 0, 0)
    states = _remembered_bytes(trained, optimizer, np.where(is_own, state, numbers.width))
    return KeptState(
        precision, optimizer, int(parameters.sum()), int(gradients.sum()), int(master.sum()) + int(states.sum())
    )


@dataclass(frozen=True, eq=False)
class _Numbers:
    """Numbers that a step keeps, in k pieces: states, and what ops keep beside them.

    Attributes:
        kept, trained: float64 [k], how many there are, and of how many the step keeps gradients.
        width: int64 [k], bytes of one.
        own_width: bytes of a floating-point number in most parameters and buffers.
        is_own: bool [k], whether they are floating-point numbers of that width.
    """

    kept: FloatArray
    trained: FloatArray
    width: IntArray
    own_width: int
    is_own: BoolArray


@lru_cache(maxsize=4)
def _numbers(graph: OpGraph) -> _Numbers:
    index = {name: i for i, name in enumerate(graph.op_names)} if graph.states else {}
    owners = [index[state.users[0]] for state in graph.states]
    dtypes = [state.dtype or graph.dtypes[owner] for state, owner in zip(graph.states, owners, strict=True)]
    dtypes.extend(graph.dtypes)
    kept = _pieces(owners, [state.parameter_bytes for state in graph.states], _parameter_bytes(graph))
    gradients = _as_parameters(graph, np.array([state.gradient_bytes for state in graph.states], dtype=np.int64))
    trained = _pieces(owners, gradients.tolist(), trained_bytes(graph))
    width = np.array([number_bytes(dtype) for dtype in dtypes], dtype=np.int64)
    own = _most_used(dtypes, kept)
    is_own = np.array([_is_float(dtype) for dtype in dtypes], dtype=np.bool_) & (width == own)
    return _Numbers(kept / width, trained / width, width, own, is_own)


def _pieces(owners: list[int], sizes: list[int], of_ops: IntArray) -> IntArray:
    """int64 [k]: bytes of each state, then what each op keeps beside those that it owns."""
    rest = of_ops.copy()
    np.subtract.at(rest, owners, sizes)
    return np.concatenate([np.array(sizes, dtype=np.int64), np.maximum(rest, 0)])


def _most_used(dtypes: Sequence[str], sizes: IntArray) -> int:
    """Bytes of a floating-point number of the width that has most of these bytes; 4 where none has any."""
    widths: dict[int, int] = {}
    for dtype, size in zip(dtypes, sizes.tolist(), strict=True):
        if _is_float(dtype) and size:
            widths[number_bytes(dtype)] = widths.get(number_bytes(dtype), 0) + size
    return max(widths, key=lambda width: widths[width], default=4)


def _is_float(dtype: str) -> bool:
    """Whether numbers are what a model in another format would have in that one; float8 is a format of its own."""
    return "float" in dtype and number_bytes(dtype) > 1


def _parameter_bytes(graph: OpGraph) -> IntArray:
    """int64 [n]: where kept bytes have no parts, the trained share of them."""
    if not graph.is_training or graph.gradient_bytes.any():
        return graph.parameter_bytes
    return trained_bytes(graph)


def _remembered_bytes(trained: FloatArray, optimizer: str, width: IntArray) -> FloatArray:
    """Float64 [k]: bytes that an optimizer remembers of parameters of these sizes, in numbers of these widths.

    Adafactor remembers the means of the rows and of the columns of each matrix (N. Shazeer, M. Stern, 2018, section 3);
    here of one square matrix for each state, which has fewest. Adam in 8 bits has a byte for each number, and scales.
    """
    if optimizer == "adafactor":
        return 2 * np.sqrt(trained) * width
    wide = STATES[optimizer] * trained * width
    if optimizer != "adam8bit":
        return wide
    return np.where(trained < _SMALL, wide, STATES[optimizer] * (trained + _FLOAT32 * np.ceil(trained / _BLOCK)))
