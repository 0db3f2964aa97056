"""Memory that a step keeps on its devices, in words and sums."""

from __future__ import annotations

import numpy as np

from graphs.arrays import IntArray
from graphs.formatting import format_bytes
from graphs.opgraph import OpGraph, Phase
from graphs.optimizers import OPTIMIZERS

_USUAL = OPTIMIZERS["momentum"]  # where nobody said which


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
