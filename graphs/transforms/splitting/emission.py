"""Parts of a graph under construction: ops and tensors as columns that grow by whole arrays, then an `OpGraph`.

A derived graph has tens of thousands of ops, so nothing here looks at one op at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from graphs.arrays import FloatArray, IntArray, groups
from graphs.opgraph import OpGraph
from graphs.records import EXTENTS
from graphs.transforms.derived import rewired

_OPS: dict[str, Any] = {
    "kinds": object,
    "dtypes": object,
    "modules": object,
    "flops": np.float64,
    "bytes_moved": np.float64,
    "parameter_bytes": np.int64,
    "gradient_bytes": np.int64,
    "optimizer_bytes": np.int64,
    "workspace_bytes": np.int64,
    "kernels": np.int64,
    "work": np.int64,
    "colocation": np.int64,
    "phase": np.int64,
    "forward_of": np.int64,
    "pins": object,
    "origin": np.int64,  # number in the source
    "part": np.int64,
    "micro_batch": np.int64,
    "along": np.int64,  # number of an axis
}
_DEFAULTS: dict[str, Any] = {"colocation": -1, "forward_of": -1, "kernels": 0, "micro_batch": -1, "along": -1}
_DEFAULTS |= {"dtypes": "float32", "kinds": "op", "modules": "", "pins": ()}


class Emission:
    """Ops, tensors and edges, each added many at a time."""

    def __init__(self, time_keys: tuple[str, ...]) -> None:
        self.n_ops = self.n_tensors = 0
        self._time_keys = time_keys
        self._names: list[str] = []
        self._columns: dict[str, list[Any]] = {key: [] for key in _OPS}
        self._times: list[FloatArray] = []
        self._fixed: list[FloatArray] = []
        self._extents: list[FloatArray] = []
        self._tensors: list[tuple[Any, ...]] = []
        self._edges: list[tuple[IntArray, IntArray]] = []

    def ops(
        self,
        names: Sequence[str],
        time_s: ArrayLike = np.nan,
        fixed_s: ArrayLike = 0.0,
        extents: ArrayLike = 0.0,
        **columns: Any,
    ) -> IntArray:
        """Add ops; columns are those of `OpGraph`, arrays or one value for all. Returns their numbers."""
        n = len(names)
        numbers = np.arange(self.n_ops, self.n_ops + n)
        self.n_ops += n
        self._names.extend(names)
        for key, dtype in _OPS.items():
            value = columns.get(key, _DEFAULTS.get(key, 0))
            column = np.empty(n, dtype=dtype)
            if dtype is object and isinstance(value, (str, tuple)):
                column.fill(value)
            else:
                column[:] = value
            self._columns[key].append(column)
        keys = len(self._time_keys)
        for table, given, width in (
            (self._times, time_s, keys),
            (self._fixed, fixed_s, keys),
            (self._extents, extents, EXTENTS),
        ):
            column = np.empty((n, width))
            column[:] = given
            table.append(column)
        return numbers

    def tensors(
        self, producer: IntArray, size: ArrayLike, in_place: ArrayLike = False, transfer_s: ArrayLike = np.nan
    ) -> IntArray:
        """Add tensors; sizes are rounded to whole bytes. Returns their numbers."""
        n = len(producer)
        numbers = np.arange(self.n_tensors, self.n_tensors + n)
        self.n_tensors += n
        sizes, flags, times = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.bool_), np.empty(n)
        sizes[:], flags[:], times[:] = np.rint(np.asarray(size, dtype=np.float64)), in_place, transfer_s
        self._tensors.append((np.asarray(producer, dtype=np.int64), sizes, flags, times))
        return numbers

    def edges(self, tensor: ArrayLike, consumer: ArrayLike) -> None:
        """Let ops read tensors: pairs, or arrays that broadcast to pairs."""
        pairs = np.broadcast_arrays(np.asarray(tensor, dtype=np.int64), np.asarray(consumer, dtype=np.int64))
        self._edges.append((pairs[0].reshape(-1), pairs[1].reshape(-1)))

    def graph(self, like: OpGraph, name: str) -> tuple[OpGraph, dict[str, IntArray]]:
        """The graph, with the origin of `like`, and the columns ``origin``, ``part``, ``micro_batch`` and ``along``."""
        columns: dict[str, Any] = {key: np.concatenate(parts) for key, parts in self._columns.items()}
        none = np.zeros(0, dtype=np.int64)
        wiring = rewired(self._tensors, self._edges or [(none, none)], np.arange(self.n_ops))
        wiring["tensor_transfer_s"][np.diff(wiring["consumer_ptr"]) == 0] = np.nan  # nobody reads it
        texts: dict[str, Any] = {
            key: tuple(columns.pop(key).tolist()) for key in ("kinds", "dtypes", "modules", "pins")
        }
        about = {key: columns.pop(key) for key in ("origin", "part", "micro_batch", "along")}
        columns["colocation"] = groups(columns["colocation"])
        graph = OpGraph(
            name=name,
            op_names=tuple(self._names),
            **texts,
            **columns,
            time_keys=self._time_keys,
            time_s=np.concatenate(self._times),
            fixed_s=np.concatenate(self._fixed),
            extents=np.concatenate(self._extents),
            stream=_streams(about["part"], about["micro_batch"]),
            **wiring,
            origin=like.origin,
        )
        return graph, about


def _streams(part: IntArray, micro_batch: IntArray) -> IntArray:
    """`OpGraph.stream`: one for each place and micro-batch, and one for what a place does once a step."""
    _, number = np.unique(part * (micro_batch.max(initial=-1) + 2) + micro_batch + 1, return_inverse=True)
    return number.astype(np.int64)
