"""`reduce`: collectives of a derived graph spelt out as ops and point-to-point tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray, groups
from graphs.errors import GraphError, MismatchError
from graphs.opgraph import ANY_DEVICE, OpGraph
from graphs.recipes import number_bytes
from graphs.transforms.collectives.template import Template, fused_template, template
from graphs.transforms.derived import Derived, columns_of, rewired, taken

ITEM_BYTES = 4  # of float32
MOVED_PER_BYTE = 3  # adding two tensors: read both, write one


def reduce(
    derived: Derived,
    algorithm: str | Sequence[str],
    fused_s: FloatArray | None = None,
    buffer_bytes: IntArray | None = None,
) -> Derived:
    """Put an algorithm in the place of every collective of a derived graph.

    The op of a rank stays as the last one of its rank: it writes the result. Before it come ops that add up what others
    sent (FLOPs = elements, bytes moved = 3 for each byte, no launch), and ops that pass on what arrived and take
    no time. All are pinned as the rank's op is and stay on its device. Where a collective is fused, each rank has one
    op that takes the time given, starts when all ranks are ready, and has the buffers given for a workspace.

    Args:
        algorithm: one of `graphs.transforms.collectives.ALGORITHMS`, or one for each of ``derived.collectives``;
            ``"hierarchical8"`` has groups of 8 ranks. Where one does not know the kind of a collective,
            `carried_out_by` tells which one stands in.
        fused_s: float64, for each of ``derived.collectives`` the seconds it takes fused, or NaN to spell it out.
        buffer_bytes: int64, for each of them what a rank holds, at most, of what others sent; used where it is fused.

    Raises:
        UnknownNameError: an unknown algorithm or kind of collective.
        GraphError: the op of a rank reads no tensor of its own place.
        MismatchError: not one time, or not one algorithm, for each collective.
    """
    seconds = np.full(len(derived.collectives), np.nan) if fused_s is None else np.asarray(fused_s, dtype=np.float64)
    names = [algorithm] * len(derived.collectives) if isinstance(algorithm, str) else algorithm
    for what, given in (("time", len(seconds)), ("algorithm", len(names))):
        if given != len(derived.collectives):
            raise MismatchError(f"expected one {what} for each of {len(derived.collectives)} collectives, got {given}.")
    batches: dict[Template, list[int]] = {}
    for c, (collective, name) in enumerate(zip(derived.collectives, names, strict=True)):
        ranks = len(collective.ops)
        form = template(collective.kind, name, ranks) if np.isnan(seconds[c]) else fused_template(ranks)
        batches.setdefault(form, []).append(c)
    if not batches:
        return derived
    buffers = np.zeros(len(seconds), np.int64) if buffer_bytes is None else buffer_bytes
    made = [_Batch.of(derived, form, members, seconds, buffers) for form, members in batches.items()]
    return _replaced(derived, made)


@dataclass(frozen=True, eq=False)
class _Batch:
    """Collectives of one template: c of them."""

    form: Template
    rank_op: IntArray  # [c, p], the op of each rank in the graph before
    size_bytes: IntArray  # [c]
    seconds: FloatArray  # [c], NaN where it is spelt out
    buffer_bytes: IntArray  # [c]

    @staticmethod
    def of(
        derived: Derived, form: Template, members: Sequence[int], seconds: FloatArray, buffer_bytes: IntArray
    ) -> _Batch:
        chosen = [derived.collectives[c] for c in members]
        ops = np.array([collective.ops for collective in chosen], dtype=np.int64)
        sizes = np.array([collective.bytes for collective in chosen], dtype=np.int64)
        return _Batch(form, ops, sizes, seconds[members], buffer_bytes[members])

    @property
    def op_s(self) -> FloatArray:
        """[c * k]: seconds of each new op, NaN where its cost is in what it adds up."""
        return np.where(self.form.op_is_timed, self.seconds[:, None], np.nan).reshape(-1)

    @property
    def workspace_bytes(self) -> IntArray:
        """[c * k]."""
        return np.where(self.form.op_is_timed, self.buffer_bytes[:, None], 0).reshape(-1)

    @property
    def stands_for(self) -> IntArray:
        """[c * k]: the rank's op that each new op belongs to."""
        return self.rank_op[:, self.form.op_rank].reshape(-1)

    @property
    def stands_before(self) -> IntArray:
        """[c * k]: the op of the graph before which each new op has its number."""
        return np.repeat(self.rank_op.min(axis=1), len(self.form.op_rank))


def _replaced(derived: Derived, batches: list[_Batch]) -> Derived:
    """The graph with new ops; they stand before the first op of their collective, so that numbers rise with time."""
    graph, n = derived.graph, derived.graph.n_ops
    origin = np.concatenate([np.arange(n), *(batch.stands_for for batch in batches)])  # of ops in `graph`
    is_new = np.arange(len(origin)) >= n
    place = np.concatenate([2 * np.arange(n) + 1, *(2 * batch.stands_before for batch in batches)])
    order = np.argsort(place, kind="stable")
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order))
    tensors, edges, adds = _wiring(derived, batches)
    rank_ops = np.concatenate([batch.rank_op.reshape(-1) for batch in batches])
    time_keys, time_s, fixed_s = _times(graph, batches, rank_ops, origin)
    workspace = np.concatenate([np.zeros(n, np.int64), *(batch.workspace_bytes for batch in batches)])
    added = np.concatenate(adds)
    columns = columns_of(graph, origin[order]) | _texts(graph, batches, order)
    columns |= _numbers(graph, origin, is_new, added, rank_ops, order)
    mirrored = graph.forward_of[origin]
    columns |= {
        "workspace_bytes": np.where(is_new, workspace, graph.workspace_bytes[origin])[order],
        "forward_of": np.where(is_new | (mirrored < 0), -1, number[np.maximum(mirrored, 0)])[order],
        "colocation": groups(_colocation(graph, rank_ops)[origin][order]),
        "time_s": time_s[order],
        "fixed_s": fixed_s[order],
    }
    result = replace(graph, **columns, **rewired(tensors, edges, number), time_keys=time_keys)
    source = origin[order]
    ptr, origins = taken(derived.origin_ptr, derived.origins, source)
    return replace(
        derived,
        graph=result,
        origin_ptr=ptr,
        origins=origins,
        part=derived.part[source],
        micro_batch=derived.micro_batch[source],
        along=derived.along[source],
        collectives=(),
    )


def _wiring(
    derived: Derived, batches: list[_Batch]
) -> tuple[list[tuple[Any, ...]], list[tuple[IntArray, IntArray]], list[IntArray]]:
    """Tensors as (producer, bytes, in place, transfer_s), edges as (tensor, op), and bytes added by each new op."""
    graph, n, m = derived.graph, derived.graph.n_ops, derived.graph.n_tensors
    producer, reader, tensor = graph.edge_list
    tensors = [(graph.tensor_producer, graph.tensor_bytes, graph.tensor_in_place, graph.tensor_transfer_s)]
    is_rank_op = np.zeros(n, dtype=np.bool_)
    first = np.arange(n)  # the op that reads what a rank gives: besides its last op its first one
    adds: list[IntArray] = []
    edges: list[tuple[IntArray, IntArray]] = []
    for batch in batches:
        form, count, k = batch.form, len(batch.rank_op), len(batch.form.op_rank)
        ops = n + np.arange(count * k).reshape(count, k)
        everyone = np.hstack([ops, batch.rank_op])
        is_rank_op[batch.rank_op] = True
        first[batch.rank_op] = everyone[:, : form.ranks]
        sizes = form.tensor_bytes(batch.size_bytes)
        shape = sizes.shape
        tensors.append(
            (
                ops[:, form.tensor_producer].reshape(-1),
                sizes.reshape(-1),
                np.broadcast_to(form.tensor_in_place, shape).reshape(-1),
                np.broadcast_to(form.tensor_transfer_s, shape).reshape(-1),
            )
        )
        ids = m + np.arange(sizes.size).reshape(shape)
        edges.append((ids[:, form.edge_tensor].reshape(-1), everyone[:, form.edge_op].reshape(-1)))
        adds.append(form.op_bytes(batch.size_bytes).reshape(-1))
        n, m = n + ops.size, m + sizes.size
    own = ~is_rank_op[reader] | (derived.part[producer] == derived.part[reader])
    edges.append((tensor[own], reader[own]))
    given = own & (first[reader] != reader)
    edges.append((tensor[given], first[reader[given]]))
    _refuse_without_input(derived, is_rank_op, reader[own])
    return tensors, edges, adds


def _refuse_without_input(derived: Derived, is_rank_op: BoolArray, reading: IntArray) -> None:
    without = is_rank_op.copy()
    without[reading] = False
    if without.any():
        name = derived.graph.op_names[int(np.argmax(without))]
        raise GraphError(f"op {name!r} takes part in a collective and reads no tensor of its own place; give it one.")


def _texts(graph: OpGraph, batches: list[_Batch], order: IntArray) -> dict[str, Any]:
    """Names, kinds and the like; a new op is called after the op of its rank."""
    n = graph.n_ops
    kinds, names = list(graph.kinds), list(graph.op_names)
    for batch in batches:
        k, of = len(batch.form.op_rank), batch.stands_for.tolist()
        names += [f"{names[op]}.{batch.form.algorithm}{j % k}" for j, op in enumerate(of)]
        kinds += [f"{kinds[op]}.{batch.form.algorithm}" for op in of]
    return {
        "op_names": tuple([names[i] for i in order.tolist()]),
        "kinds": tuple([kinds[i] for i in order.tolist()]),
        "split_rows": tuple([graph.split_rows[i] if i < n else () for i in order.tolist()]),
    }


def _numbers(
    graph: OpGraph, origin: IntArray, is_new: BoolArray, added: IntArray, rank_ops: IntArray, order: IntArray
) -> dict[str, Any]:
    """Columns of numbers: a new op keeps nothing and is no kernel of its own; what the algorithm costs is in them."""
    result: dict[str, Any] = {}
    for key in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        result[key] = np.where(is_new, 0, getattr(graph, key)[origin])[order]
    item_bytes = np.array([number_bytes(dtype) for dtype in graph.dtypes], dtype=np.float64)
    work = np.concatenate([np.zeros(graph.n_ops), added])
    spelt_out = is_new.copy()
    spelt_out[rank_ops] = True
    result["flops"] = np.where(spelt_out, work / item_bytes[origin], graph.flops[origin])[order]
    result["bytes_moved"] = np.where(spelt_out, MOVED_PER_BYTE * work, graph.bytes_moved[origin])[order]
    result["kernels"] = np.where(spelt_out, 0, graph.kernels[origin])[order]
    for key in ("work", "extents"):
        values = getattr(graph, key)[origin]
        values[spelt_out] = 0
        result[key] = values[order]
    return result


def _colocation(graph: OpGraph, rank_ops: IntArray) -> IntArray:
    """int64 [n]: the group of each op; those of ranks have one, which all ops of the rank will belong to."""
    group = graph.colocation.copy()
    free = rank_ops[group[rank_ops] < 0]
    group[free] = group.max(initial=-1) + 1 + np.arange(len(free))
    return group


def _times(
    graph: OpGraph, batches: list[_Batch], rank_ops: IntArray, origin: IntArray
) -> tuple[tuple[str, ...], FloatArray, FloatArray]:
    """Measured times of all ops, new ones last: of fused collectives those given, of others that are spelt out none."""
    keys, time_s, fixed_s = graph.time_keys, graph.time_s[origin], graph.fixed_s[origin]
    for times, unknown in ((time_s, np.nan), (fixed_s, 0.0)):
        times[rank_ops] = unknown
        times[graph.n_ops :] = unknown
    new_s = np.concatenate([batch.op_s for batch in batches])
    if not np.isnan(new_s).all():
        if ANY_DEVICE not in keys:
            keys = tuple(sorted((*keys, ANY_DEVICE)))  # in the order in which files have them
            time_s = np.insert(time_s, keys.index(ANY_DEVICE), np.nan, axis=1)
            fixed_s = np.insert(fixed_s, keys.index(ANY_DEVICE), 0.0, axis=1)
        time_s[graph.n_ops :, keys.index(ANY_DEVICE)] = new_s
    return keys, time_s, fixed_s
