"""The step of a model on a part of its batch, which tells what every part of an op takes in full.

A part is launched as the whole op is, and reads the same weights. So of the whole's time t it takes more than its share
s of the work: fixed + s (t - fixed). That is measured, and so fixed = (part - s t) / (1 - s).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphs.capture import Program
from graphs.capture.record import argument_leaves
from graphs.errors import PlacementError
from graphs.opgraph import OpGraph
from graphs.records import ANY_DEVICE
from graphs.rows import Shard
from graphs.transforms.splitting.splitter import BATCH, chunk
from placement.inputs.call_arguments import tensors_of

_PARTS = (4, 2)  # as many as leave two samples to each: statistics of a single one do not exist
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class PartOfStep:
    """A step on the first samples of the batch.

    Attributes:
        program: of the same ops.
        inputs: tensors among its arguments by their path.
        share: op -> work of its part, in work of the op; what is not cut is left out.
    """

    program: Program
    inputs: Mapping[str, torch.Tensor]
    share: Mapping[int, float]

    @staticmethod
    def of(
        model: nn.Module, whole: Program, arguments: Arguments, capture: Callable[..., Program]
    ) -> PartOfStep | None:
        """A part of a whole step; None where its batch is unknown, or too small, or cannot be cut.

        Args:
            arguments: positional ones, and those by keyword.
            capture: makes the program of others.
        """
        leaves = argument_leaves(model, *arguments)
        dims = {path: dim for path, dim in _batch_dims(whole).items() if path in leaves}
        samples = min((leaves[path].shape[dim] for path, dim in dims.items()), default=0)
        for number in _PARTS:
            size = samples // number
            if size < 2:
                continue
            parts = {id(leaves[path]): _first(leaves[path], dim, samples, size) for path, dim in dims.items()}
            positional, keywords = pytree.tree_map(lambda leaf, parts=parts: parts.get(id(leaf), leaf), arguments)
            try:  # some models cannot be cut, or are made for one batch
                share = _shares(whole.graph, number)
                program = capture(positional, keywords)
            except PlacementError:
                continue
            if program.graph.op_names == whole.graph.op_names and program.graph.kinds == whole.graph.kinds:
                return PartOfStep(program, tensors_of(argument_leaves(model, positional, keywords)), share)
        return None

    def fixed_s(self, whole_s: Mapping[int, float], part_s: Mapping[int, float]) -> dict[int, float]:
        """The fixed part of each op that is cut, from one run of the whole and one of a part; noise may make it < 0."""
        return {
            op: (part_s[op] - share * whole_s[op]) / (1 - share)
            for op, share in self.share.items()
            if op in whole_s and op in part_s
        }


def _batch_dims(program: Program) -> dict[str, int]:
    """The dimension of samples of each tensor among the arguments that has them."""
    found = {}
    for path, node in program.trace.arguments.items():
        op = program.op_of.get(node)
        rows = () if op is None else program.graph.split_rows[op]
        parts = [part for row in rows if row.axis == BATCH for part in row.outputs if isinstance(part, Shard)]
        if parts:
            found[path] = parts[0].dim
    return found


def _first(tensor: torch.Tensor, dim: int, samples: int, size: int) -> torch.Tensor:
    """What the first samples have of a tensor, several entries of each perhaps."""
    return tensor.narrow(dim, 0, tensor.shape[dim] * size // samples).clone()


def _shares(graph: OpGraph, number: int) -> dict[int, float]:
    """`PartOfStep.share`, by the smallest of so many parts."""
    # As if each op took a second, so that times of parts are shares of the work.
    ones = np.ones((graph.n_ops, 1))
    cut = chunk(replace(graph, time_keys=(ANY_DEVICE,), time_s=ones, fixed_s=0 * ones), number)
    is_copy = ~np.isnan(cut.graph.time_s[:, 0])
    origin = cut.origins[cut.origin_ptr[:-1]][is_copy]
    share = np.ones(graph.n_ops)
    np.minimum.at(share, origin, cut.graph.time_s[is_copy, 0])
    return {op: float(share[op]) for op in np.flatnonzero(share < 1).tolist()}
