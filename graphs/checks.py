"""Columns of `OpGraph` from records, its checks, and the sentence for each rule that is broken."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from graphs.arrays import FloatArray, IntArray
from graphs.errors import GraphError
from graphs.formatting import is_text
from graphs.records import EXTENTS, Op, Phase, Tensor, Work

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph


BYTES_LIMIT = 2**62  # of all bytes of a graph together: sums and differences of them stay within int64


def check_arrays(graph: OpGraph) -> None:
    """Lengths, ranges and order of all arrays; not that the graph is acyclic, which `OpGraph.topological_order` finds.

    Raises:
        GraphError: the first rule that is broken.
    """
    n, m = graph.n_ops, graph.n_tensors
    _check_text(graph)
    if n == 0:
        raise GraphError(f"graph {graph.name!r} has no ops; there is nothing to place.")
    if len(set(graph.op_names)) < n:
        seen: set[str] = set()
        twice = next(name for name in graph.op_names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise GraphError(f"op name {twice!r} appears twice; op names must be unique, rename one of them.")
    sizes = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "workspace_bytes")
    per_op = ("kinds", "dtypes", "modules", "flops", "bytes_moved", *sizes, "kernels", "colocation", "phase")
    for key in (*per_op, "forward_of", "pins", "time_s", "fixed_s", "split_rows", "work", "extents", "stream"):
        if len(getattr(graph, key)) != n:
            raise GraphError(f"{key} has {len(getattr(graph, key))} entries, expected one for each of {n} ops.")
    parts = bool(graph.gradient_bytes.any() or graph.optimizer_bytes.any())
    for key in ("flops", "bytes_moved", *sizes, "kernels"):
        name = kept_name(parts) if key == "parameter_bytes" else key
        _check_not_negative(graph.op_names, getattr(graph, key), name)
    if graph.fixed_s.shape != graph.time_s.shape:
        raise GraphError(f"fixed_s has shape {graph.fixed_s.shape}, expected that of time_s, {graph.time_s.shape}.")
    for j, key in enumerate(graph.time_keys):
        _check_not_negative(graph.op_names, graph.time_s[:, j], f"time_s on {key!r}", nan_ok=True)
        _check_not_negative(graph.op_names, graph.fixed_s[:, j], f"fixed_s on {key!r}")
        if (above := ~(graph.fixed_s[:, j] <= np.nan_to_num(graph.time_s[:, j]))).any():
            i = int(np.argmax(above))
            raise GraphError(
                f"op {graph.op_names[i]!r} has fixed_s on {key!r} = {graph.fixed_s[i, j]:g}; expected no more than "
                f"its time_s there, {graph.time_s[i, j]:g}."
            )
    if graph.extents.shape != (n, EXTENTS):
        raise GraphError(f"extents have shape {graph.extents.shape}, expected ({n}, {EXTENTS}).")
    for column in graph.extents.T:
        _check_not_negative(graph.op_names, column, "extents")
    _check_not_negative(graph.op_names, graph.stream, "stream")
    for key, top in (("phase", len(Phase)), ("work", len(Work)), ("forward_of", n), ("colocation", n)):
        values, least = getattr(graph, key), 0 if key in ("phase", "work") else -1
        if np.any((values < least) | (values >= top)):
            i = int(np.argmax((values < least) | (values >= top)))
            raise GraphError(f"op {graph.op_names[i]!r} has {key} = {values[i]}; expected {least} to {top - 1}.")
    producers = graph.tensor_producer
    if ((producers < 0) | (producers >= n)).any() or np.any(np.diff(producers) < 0):
        raise GraphError("tensors must be grouped by an existing producer, in op order.")
    _check_not_negative(graph.op_names, graph.tensor_bytes, "output bytes", of=producers)
    _check_not_negative(graph.op_names, graph.tensor_transfer_s, "transfer_s", nan_ok=True, of=producers)
    if (given := len(graph.tensor_in_place)) != m:
        raise GraphError(f"tensor_in_place has {given} entries, expected one for each of {m} tensors.")
    ends = graph.consumers
    if (
        len(graph.consumer_ptr) != m + 1
        or graph.consumer_ptr[-1] != len(ends)
        or np.any(np.diff(graph.consumer_ptr) < 0)
    ):
        raise GraphError("consumer_ptr must hold one more entry than there are tensors, and rise from 0 to n_edges.")
    if np.any((ends < 0) | (ends >= n)):
        raise GraphError(
            f"consumers names op number {ends[(ends < 0) | (ends >= n)][0]}, but the ops are 0 to {n - 1}."
        )
    row = np.repeat(np.arange(m), np.diff(graph.consumer_ptr))
    if np.any((np.diff(ends) <= 0) & (np.diff(row) == 0)):
        raise GraphError("the consumers of a tensor must increase; each reads it once.")
    _check_bytes(graph)
    _check_split_rows(graph)


def kept_name(parts: bool) -> str:
    """The name of parameter bytes in errors: kept bytes, where the other `parts` are not there to tell them from."""
    return "parameter_bytes" if parts else "kept_bytes"


def _check_split_rows(graph: OpGraph) -> None:
    """A row speaks of every tensor and every state; states have users, each after the other."""
    index = {name: i for i, name in enumerate(graph.op_names)} if graph.states else {}
    used = [0] * graph.n_ops
    for state in graph.states:
        users = [lookup(index, user, f"a user of state {state.name!r}") for user in state.users]
        if not users or any(a >= b for a, b in pairwise(users)):
            raise GraphError(f"state {state.name!r} has users {state.users!r:.80}; expected ops in the graph's order.")
        for user in users:
            used[user] += 1
    if not any(graph.split_rows):
        return
    written, read = np.diff(graph.output_ptr).tolist(), np.diff(graph.inputs[0]).tolist()
    known: set[tuple[int, int, int]] = set()  # rows of ops that are alike are mostly the same object
    for i, rows in enumerate(graph.split_rows):
        key = id(rows), read[i] + used[i], written[i]
        if key in known:
            continue
        known.add(key)
        for row in rows:
            if (len(row.inputs), len(row.outputs)) != (read[i] + used[i], written[i]):
                raise GraphError(
                    f"op {graph.op_names[i]!r} has split row {str(row)!r:.80}; expected {read[i]} inputs and {used[i]} "
                    f"states before the arrow and {written[i]} outputs after it."
                )


def _check_text(graph: OpGraph) -> None:
    pins = {pin for listed in set(graph.pins) for pin in listed}
    words = dict.fromkeys((*graph.kinds, *graph.dtypes, *graph.modules))
    texts = [graph.name, *graph.op_names, *words, *graph.time_keys, *pins]
    if not is_text("".join(map(str, texts))):
        wrong = next((text for text in texts if not is_text(text)), graph.name)
        raise GraphError(f"graph {graph.name!r} has {wrong!r} for a name, which is not Unicode text; rename it.")


def _check_bytes(graph: OpGraph) -> None:
    """All bytes, a tensor's once for each op that may hold a copy, must stay far from where int64 wraps around."""
    readers = np.diff(graph.consumer_ptr)
    sizes = (graph.parameter_bytes, graph.gradient_bytes, graph.optimizer_bytes, graph.workspace_bytes)
    roughly = sum(float(size.sum(dtype=float)) for size in sizes)
    if roughly + float((graph.tensor_bytes * (1.0 + readers)).sum()) < BYTES_LIMIT / 2:
        return
    producer, tensors = graph.tensor_producer.tolist(), graph.tensor_bytes.tolist()
    of_op = [sum(own) for own in zip(*(size.tolist() for size in sizes), strict=True)]
    for op, size, count in zip(producer, tensors, readers.tolist(), strict=True):
        of_op[op] += size * (1 + count)
    total = sum(of_op)
    if total >= BYTES_LIMIT:
        name = graph.op_names[of_op.index(max(of_op))]
        raise GraphError(
            f"the bytes of graph {graph.name!r} (kept, workspace, and each tensor for its producer and every reader) "
            f"add up to {total:.3g}, most of them of op {name!r}; expected less than 2**62, correct its sizes."
        )


def _check_not_negative(
    names: Sequence[str], values: NDArray[Any], what: str, nan_ok: bool = False, of: IntArray | None = None
) -> None:
    """Values are finite numbers, 0 or more; each is of the op of its place, or else of the number in `of`."""
    bad = ~(values >= 0) | np.isinf(values)
    if nan_ok:
        bad &= ~np.isnan(values)
    if bad.any():
        i = int(np.argmax(bad))
        name = names[i if of is None else int(of[i])]
        raise GraphError(f"op {name!r} has {what} = {values[i]}; expected a finite number, 0 or more.")


def cycle_message(graph: OpGraph, stuck: set[int]) -> str:
    """The sentence for a cycle among the ops `stuck`, each of which waits for another one of them."""
    producer, consumer, _ = graph.edge_list
    before = {int(c): int(p) for p, c in zip(producer, consumer, strict=True) if int(p) in stuck and int(c) in stuck}
    # Every stuck op waits for another stuck op, so walking backwards must come round.
    path: dict[int, int] = {}  # each op with its place on the path
    op = min(stuck)
    while op not in path:
        path[op] = len(path)
        op = before[op]
    loop = [*list(path)[path[op] :], op][::-1]
    shown = [graph.op_names[i] for i in loop]
    if len(shown) > 8:
        shown = [*shown[:4], "...", *shown[-3:]]
    return f"the graph has a cycle: {' -> '.join(shown)}; a step's graph must be acyclic, remove one of these edges."


def lookup(index: Mapping[str, int], name: str, role: str) -> int:
    """The number of an op by its name; `role` says in the error what the name was given as."""
    if name not in index:
        raise GraphError(f"{role} is {name!r}, but the graph has no op of that name; add the op or drop the edge.")
    return index[name]


FEW_KEYS = 64  # of measured times: any number of ops may have that many
TIMES_LIMIT = 10**7  # measured times of a graph with more keys: one for each op and key, measured or not


def numbers(ops: list[Op]) -> dict[str, int]:
    """The number of each op by its name."""
    index: dict[str, int] = {}
    for i, op in enumerate(ops):
        if op.name in index:
            raise GraphError(f"op name {op.name!r} appears twice; op names must be unique, rename one of them.")
        index[op.name] = i
    return index


def times(ops: list[Op], name: str) -> tuple[tuple[str, ...], FloatArray, FloatArray]:
    """`OpGraph.time_keys`, `OpGraph.time_s` and `OpGraph.fixed_s`."""
    keys = tuple(sorted({key for op in ops for key in op.time_s}))
    check_time_keys(name, len(ops), len(keys))
    column = {key: j for j, key in enumerate(keys)}
    time_s = np.full((len(ops), len(keys)), np.nan)
    fixed_s = np.zeros(time_s.shape)
    for i, op in enumerate(ops):
        for key, seconds in op.time_s.items():
            if seconds != seconds:
                raise GraphError(f"op {op.name!r} has time_s on {key!r} = nan; leave an unmeasured time out.")
            time_s[i, column[key]] = amount(op.name, seconds, f"time_s on {key!r}")
        for key, seconds in op.fixed_s.items():
            if key not in op.time_s:
                raise GraphError(f"op {op.name!r} has fixed_s on {key!r} and no time_s there; give both or neither.")
            fixed_s[i, column[key]] = amount(op.name, seconds, f"fixed_s on {key!r}")
    return keys, time_s, fixed_s


def transfer_times(tensors: list[Tensor]) -> FloatArray:
    """`OpGraph.tensor_transfer_s`."""
    for tensor in tensors:
        if tensor.transfer_s is not None and tensor.transfer_s != tensor.transfer_s:
            raise GraphError(f"op {tensor.producer!r} has transfer_s = nan; leave an unmeasured time out.")
    # A tensor nobody reads is never sent, so a transfer time on it would only change the hash.
    given = [np.nan if t.transfer_s is None or not t.consumers else t.transfer_s for t in tensors]
    return amounts([t.producer for t in tensors], given, "transfer_s")


def facts(ops: Sequence[Op]) -> tuple[IntArray | None, FloatArray | None, IntArray]:
    """`OpGraph.work`, `OpGraph.extents` and `OpGraph.stream`; None where no op has any."""
    stream = counts([op.name for op in ops], [op.stream for op in ops], "stream")
    if not any(op.work or any(op.extents) for op in ops):
        return None, None, stream
    for op in ops:
        if not isinstance(op.work, Work):
            raise GraphError(f"op {op.name!r} has work = {op.work!r:.40}; expected a graphs.Work.")
        if len(op.extents) != EXTENTS:
            raise GraphError(f"op {op.name!r} has {len(op.extents)} extents; expected {EXTENTS} numbers.")
    names = [op.name for op in ops for _ in range(EXTENTS)]
    extents = amounts(names, [extent for op in ops for extent in op.extents], "extents").reshape(-1, EXTENTS)
    return np.array([int(op.work) for op in ops], dtype=np.int64), extents, stream


def check_time_keys(name: str, n_ops: int, n_keys: int) -> None:
    """Whether the table of measured times, one row an op and one column a key, may be made.

    Raises:
        GraphError: many ops with many keys.
    """
    if n_keys > FEW_KEYS and n_ops * n_keys > TIMES_LIMIT:
        raise GraphError(
            f"graph {name!r} has {n_ops} ops with time_s on {n_keys} different names; expected at most {FEW_KEYS} "
            f"names, or ops times names at most {TIMES_LIMIT:,}; give times by the devices' models or kinds."
        )


def counts(names: Iterable[str], values: Sequence[Any], what: str) -> IntArray:
    """Whole numbers as int64; refuses what a cast would silently cut off or wrap around."""
    for name, value in zip(names, values, strict=True):
        whole = isinstance(value, int | np.integer) or (isinstance(value, float | np.floating) and value.is_integer())
        if not whole or abs(value) >= 2**63:
            raise GraphError(f"op {name!r} has {what} = {value!r:.40}; expected a whole number below 2**63.")
    return np.array([int(value) for value in values], dtype=np.int64)


def amount(name: str, value: Any, what: str) -> float:
    """A number as a float; refuses what is no number or would become infinite."""
    largest = sys.float_info.max
    if not isinstance(value, int | float | np.integer | np.floating) or value > largest or value < -largest:
        raise GraphError(f"op {name!r} has {what} = {value!r:.40}; expected a finite number, 0 or more.")
    return float(value) + 0.0  # + 0.0: minus zero would change the hash


def amounts(names: Iterable[str], values: Sequence[Any], what: str) -> FloatArray:
    """Numbers as float64; refuses as `amount`."""
    return np.array([amount(name, value, what) for name, value in zip(names, values, strict=True)], dtype=np.float64)
