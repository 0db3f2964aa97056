"""What a step keeps on its devices from beginning to end, in parts, as far as the graph says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphs.formatting import format_bytes
from graphs.opgraph import IntArray, OpGraph, Phase
from graphs.optimizers import OPTIMIZERS, UPDATE_KIND, Optimizer


@dataclass(frozen=True)
class Kept:
    """The kept bytes of a graph.

    Attributes:
        total_bytes: all that is kept.
        trained_bytes: parameters that the step updates; 0 where the graph has no updates of a known optimizer.
        optimizer: of these updates; None without.
        activation_bytes: outputs of forward ops that backward ops read. They are not among the kept bytes: each is
            held from its op to its last reader.
    """

    total_bytes: int
    trained_bytes: int
    optimizer: Optimizer | None
    activation_bytes: int

    @property
    def gradient_bytes(self) -> int:
        return self.trained_bytes

    @property
    def optimizer_bytes(self) -> int:
        return 0 if self.optimizer is None else self.optimizer.states * self.trained_bytes

    @property
    def parameter_bytes(self) -> int:
        """Parameters and buffers, trained or not."""
        return self.total_bytes - self.gradient_bytes - self.optimizer_bytes

    def words(self) -> str:
        """``"4 GB (parameters 1 GB, gradients 1 GB, adam's state 2 GB)"``."""
        total = format_bytes(self.total_bytes)
        if self.optimizer is None:
            return total
        state = f", {self.optimizer.name}'s state {format_bytes(self.optimizer_bytes)}" if self.optimizer.states else ""
        parts = f"parameters {format_bytes(self.parameter_bytes)}, gradients {format_bytes(self.gradient_bytes)}{state}"
        return f"{total} ({parts})"


def kept(graph: OpGraph) -> Kept:
    """The parts of what a graph keeps."""
    optimizer, trained = trained_bytes(graph)
    producer, consumer, tensor = graph.edge_list
    saved = (graph.phase[producer] == Phase.FORWARD) & (graph.phase[consumer] == Phase.BACKWARD)
    return Kept(
        total_bytes=int(graph.kept_bytes.sum()),
        trained_bytes=int(trained.sum()),
        optimizer=optimizer,
        activation_bytes=int(graph.tensor_bytes[np.unique(tensor[saved])].sum()),
    )


def trained_bytes(graph: OpGraph) -> tuple[Optimizer | None, IntArray]:
    """The optimizer of a graph's update ops, None if not known, and int64 [n], the parameter that each of them updates.

    An update op of capture moves a fixed number of copies of its parameter, so its bytes moved tell the parameter's.
    """
    nothing = np.zeros(graph.n_ops, dtype=np.int64)
    is_update = np.array([kind.startswith(UPDATE_KIND) for kind in graph.kinds], dtype=np.bool_)
    names = {kind.removeprefix(UPDATE_KIND) for kind in graph.kinds if kind.startswith(UPDATE_KIND)}
    optimizer = OPTIMIZERS.get(names.pop()) if len(names) == 1 else None
    if optimizer is None:
        return None, nothing
    trained = np.where(is_update, graph.bytes_moved / optimizer.moved_copies, 0).astype(np.int64)
    if optimizer.kept_copies * int(trained.sum()) > int(graph.kept_bytes.sum()):  # of another maker, or changed since
        return None, nothing
    return optimizer, trained
