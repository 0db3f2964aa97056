"""Memory that a step keeps on its devices, in words and sums, also for other number formats and optimizers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphs.arrays import FloatArray, IntArray
from graphs.formatting import format_bytes
from graphs.optimizers import OPTIMIZERS
from graphs.records import Phase

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph

_USUAL = OPTIMIZERS["momentum"]  # where nobody said which
_BITS = re.compile(r"\d+")


def kept_words(graph: OpGraph) -> str:
    """``"4 GB (parameters 1 GB, gradients 1 GB, adam's state 2 GB)"``; the sum alone where no parts are known."""
    parameters, gradients, states = (
        int(part.sum()) for part in (graph.parameter_bytes, graph.gradient_bytes, graph.optimizer_bytes)
    )
    total = format_bytes(parameters + gradients + states)
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

    As many bytes as their gradients have. Where kept bytes have no parts, the share of one copy among those that the
    optimizer keeps.
    """
    if not (graph.phase != Phase.FORWARD).any():
        return np.zeros(graph.n_ops, dtype=np.int64)
    if graph.gradient_bytes.any():
        return graph.gradient_bytes
    return graph.kept_bytes // OPTIMIZERS.get(graph.origin.optimizer or "", _USUAL).kept_copies


# -- by number format and optimizer ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Precision:
    """Bytes of one number in each part of a training step.

    Attributes:
        parameter, gradient, activation: where ops read and write them.
        state: in what the optimizer remembers.
        master: of the copy that the optimizer updates; 0 where it updates the parameters themselves.
    """

    name: str
    parameter: int
    gradient: int
    activation: int
    state: int
    master: int = 0


# "mixed": S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, "ZeRO", SC 2020, section 3.1: 16 bytes a parameter with adam.
PRECISIONS = {
    "float32": Precision("float32", 4, 4, 4, 4),
    "mixed": Precision("mixed", 2, 2, 2, 4, 4),
    "bfloat16": Precision("bfloat16", 2, 2, 2, 2),
}
# Numbers remembered for each parameter; of adafactor see `_remembered`.
STATES = {"adam": 2.0, "adamw": 2.0, "momentum": 1.0, "adafactor": 0.0, "sgd": 0.0}


@dataclass(frozen=True)
class KeptState:
    """What a model keeps on its devices between steps and all through a step.

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


def parameter_counts(graph: OpGraph) -> tuple[int, int]:
    """How many numbers are in parameters and buffers, and how many of them the step trains."""
    kept, trained = _counts(graph)
    return int(kept.sum()), int(trained.sum())


def activation_width(graph: OpGraph) -> int:
    """Bytes of a floating-point number in most of what the forward ops write; 4 where there is none."""
    widths: dict[int, float] = {}
    for dtype, size in zip(graph.dtypes, graph.output_bytes.tolist(), strict=True):
        if "float" in dtype:
            widths[_width(dtype)] = widths.get(_width(dtype), 0.0) + size
    return max(widths, key=lambda width: widths[width], default=4)


def kept_state(graph: OpGraph, precision: str, optimizer: str | None) -> KeptState:
    """The state of a graph's model, its sizes read off the parameters and gradients that the ops keep.

    What is not trained keeps parameters alone.
    """
    bytes_of = PRECISIONS[precision]
    kept, trained = _counts(graph)
    if optimizer is None:
        return KeptState(precision, None, int(kept.sum()) * bytes_of.parameter, 0, 0)
    n = int(trained.sum())
    return KeptState(
        precision,
        optimizer,
        int(kept.sum()) * bytes_of.parameter,
        n * bytes_of.gradient,
        n * bytes_of.master + int(_remembered(trained, optimizer) * bytes_of.state),
    )


def _counts(graph: OpGraph) -> tuple[FloatArray, FloatArray]:
    """Float64 [n] each: numbers in parameters and buffers of every op, and in those that are trained."""
    width = np.array([_width(dtype) for dtype in graph.dtypes], dtype=np.int64)
    return _parameter_bytes(graph) / width, trained_bytes(graph) / width


def _parameter_bytes(graph: OpGraph) -> IntArray:
    """int64 [n]: where kept bytes have no parts, the trained share of them."""
    if not graph.is_training or graph.gradient_bytes.any():
        return graph.parameter_bytes
    return trained_bytes(graph)


def _remembered(trained: FloatArray, optimizer: str) -> float:
    """Numbers that an optimizer remembers of parameters of these sizes.

    Adafactor remembers the means of the rows and of the columns of each matrix (N. Shazeer, M. Stern, 2018, section 3);
    here of one square matrix for each op, which has fewest.
    """
    if optimizer == "adafactor":
        return float(2 * np.sqrt(trained).sum())
    return STATES[optimizer] * float(trained.sum())


def _width(dtype: str) -> int:
    """Bytes of one number: ``"bfloat16"`` has 2; a format without a number in its name, say ``"bool"``, 1."""
    bits = _BITS.search(dtype.replace("float8", "8"))
    return 1 if bits is None else max(1, int(bits[0]) // 8)
