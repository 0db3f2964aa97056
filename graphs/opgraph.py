"""`OpGraph`: what one step of a neural network computes, as flat arrays.

Ops are numbered ``0 .. n_ops-1`` and tensors ``0 .. n_tensors-1`` (grouped by producer, in op order), so that
the simulator works on arrays alone. Time and devices are unknown here.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray, frozen, pointers, sums
from graphs.checks import (
    amounts,
    check_arrays,
    counts,
    cycle_message,
    facts,
    kept_name,
    lookup,
    numbers,
    times,
    transfer_times,
)
from graphs.errors import GraphError
from graphs.origin import FUSED, UNKNOWN, Origin
from graphs.records import ANY_DEVICE, EXTENTS, HOST, LANE, Op, Phase, Tensor, Work

if TYPE_CHECKING:
    import networkx as nx

    from graphs.records import SplitRow, State

__all__ = ["ANY_DEVICE", "BoolArray", "FloatArray", "IntArray", "Op", "OpGraph", "Origin", "Phase", "Tensor", "Work"]

# Fields that a score depends on, in the order in which they are hashed.
_SCORED = (
    *("bytes_moved", "colocation", "consumer_ptr", "consumers", "dtypes", "flops", "forward_of", "kept_bytes"),
    *("kernels", "kinds", "modules", "op_names", "phase", "pins", "tensor_bytes", "tensor_producer"),
    *("tensor_transfer_s", "time_keys", "time_s", "workspace_bytes"),
)
# And where any of it is not 0; graphs without have the hash of before.
_SCORED_IF_ANY = ("fixed_s", "work", "extents", "stream")
# Fields that equal graphs share beyond those; their origins may differ.
_DESCRIBED = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "tensor_bytes", "tensor_in_place")


# Columns by op that hold fields of `Op` as they are.
_TEXTS = {"op_names": "name", "kinds": "kind", "dtypes": "dtype", "modules": "module"}
_LISTS = ("pins", "split_rows")
_AMOUNTS = ("flops", "bytes_moved")
_COUNTS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "workspace_bytes", "kernels")


@dataclass(frozen=True, eq=False)
class OpGraph:
    """A frozen computation graph. Build it with `OpGraph.build`, `from_networkx`, a reader or `capture`.

    Shapes: n ops, m tensors, e (tensor, consumer) pairs, k keys of measured times. Sizes are bytes, times seconds.

    Attributes:
        name: for people.
        op_names, kinds, dtypes, modules: n strings each.
        flops, bytes_moved: float64 [n].
        parameter_bytes, gradient_bytes, optimizer_bytes: int64 [n], the parts of `kept_bytes`.
        workspace_bytes, kernels: int64 [n].
        colocation: int64 [n], group number or -1.
        phase: int64 [n], values of `Phase`.
        forward_of: int64 [n], op number or -1.
        pins: n tuples of device names, models or kinds, empty = any.
        time_keys: k names of devices, models or kinds.
        time_s: float64 [n, k], NaN where unmeasured.
        fixed_s: float64 [n, k], of `time_s` what every part of an op takes in full, however small; 0 where unknown.
            Not given, it is 0 throughout, as are the three below.
        work: int64 [n], values of `Work`.
        extents: float64 [n, 5], sizes of what an op computes; see `Op.extents`.
        stream: int64 [n], which of several hosts launches the op: 0 throughout for a captured graph; splitting numbers
            them from 0, one for each place and micro-batch.
        tensor_producer, tensor_bytes: int64 [m]; producers never decrease.
        tensor_in_place: bool [m], whether it lies in bytes that its colocation group keeps, or inside of a kernel: it
            has no `tensor_memory_bytes`.
        tensor_transfer_s: float64 [m], NaN where unmeasured.
        consumer_ptr: int64 [m + 1]; consumers: int64 [e]. Tensor t is read by
            ``consumers[consumer_ptr[t]:consumer_ptr[t + 1]]``, increasing.
        split_rows: for each op the ways in which it may be split; n tuples, none where nothing is given.
        states: the parameters, buffers and constants that rows speak of; none where nothing is given.
        origin: where the graph comes from.

    Raises:
        GraphError: a cycle, a dangling edge, a negative size, or a duplicate name; the message names the op.
    """

    name: str
    op_names: tuple[str, ...]
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    modules: tuple[str, ...]
    flops: FloatArray
    bytes_moved: FloatArray
    parameter_bytes: IntArray
    gradient_bytes: IntArray
    optimizer_bytes: IntArray
    workspace_bytes: IntArray
    kernels: IntArray
    colocation: IntArray
    phase: IntArray
    forward_of: IntArray
    pins: tuple[tuple[str, ...], ...]
    time_keys: tuple[str, ...]
    time_s: FloatArray
    tensor_producer: IntArray
    tensor_bytes: IntArray
    tensor_in_place: BoolArray
    tensor_transfer_s: FloatArray
    consumer_ptr: IntArray
    consumers: IntArray
    split_rows: tuple[tuple[SplitRow, ...], ...] = ()
    states: tuple[State, ...] = ()
    origin: Origin = UNKNOWN
    fixed_s: FloatArray = None  # type: ignore[assignment]
    work: IntArray = None  # type: ignore[assignment]
    extents: FloatArray = None  # type: ignore[assignment]
    stream: IntArray = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        n = self.n_ops
        shapes = {"fixed_s": self.time_s.shape, "work": (n,), "extents": (n, EXTENTS), "stream": (n,)}
        for key, shape in shapes.items():
            value = getattr(self, key)
            if value is None or not value.any():  # of as many ops and keys as `replace` gives
                dtype = np.int64 if key in ("work", "stream") else np.float64
                object.__setattr__(self, key, np.zeros(shape, dtype=dtype))
        if not self.split_rows:
            object.__setattr__(self, "split_rows", ((),) * len(self.op_names))
        check_arrays(self)
        _ = self.topological_order  # raises on a cycle
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, in another process say, is built anew, so that its arrays are read-only, as kernels expect them."""
        return OpGraph, tuple(getattr(self, each.name) for each in fields(self))

    # -- construction ---------------------------------------------------------------------------------

    @staticmethod
    def build(
        ops: Iterable[Op],
        tensors: Iterable[Tensor],
        name: str = "graph",
        origin: Origin = UNKNOWN,
        states: Iterable[State] = (),
    ) -> OpGraph:
        """Make a graph from records; op order is kept, tensors are grouped by producer.

        Raises:
            GraphError: as `OpGraph`, plus an edge whose end does not exist.
        """
        ops = list(ops)
        index = numbers(ops)
        listed = sorted(tensors, key=lambda t: lookup(index, t.producer, "a tensor's producer"))
        makers = [t.producer for t in listed]
        rows = [sorted({lookup(index, c, f"a consumer of op {t.producer!r}") for c in t.consumers}) for t in listed]
        groups: dict[Hashable, int] = {}
        group = [-1 if op.colocation is None else groups.setdefault(op.colocation, len(groups)) for op in ops]
        mirrored = [
            -1 if op.forward_of is None else lookup(index, op.forward_of, f"forward_of of op {op.name!r}") for op in ops
        ]
        time_keys, time_s, fixed_s = times(ops, name)
        work, extents, stream = facts(ops)
        parts = any(op.gradient_bytes or op.optimizer_bytes for op in ops)
        columns: dict[str, Any] = {key: tuple(getattr(op, field) for op in ops) for key, field in _TEXTS.items()}
        columns |= {key: tuple(tuple(getattr(op, key)) for op in ops) for key in _LISTS}
        columns |= {key: amounts(index, [getattr(op, key) for op in ops], key) for key in _AMOUNTS}
        columns |= {
            key: counts(index, [getattr(op, key) for op in ops], kept_name(parts) if key == "parameter_bytes" else key)
            for key in _COUNTS
        }
        return OpGraph(
            name=name,
            **columns,
            colocation=np.array(group, dtype=np.int64),
            phase=np.array([int(op.phase) for op in ops], dtype=np.int64),
            forward_of=np.array(mirrored, dtype=np.int64),
            time_keys=time_keys,
            time_s=time_s,
            tensor_producer=np.array([index[maker] for maker in makers], dtype=np.int64),
            tensor_bytes=counts(makers, [t.bytes for t in listed], "output bytes"),
            tensor_in_place=np.array([t.in_place for t in listed], dtype=np.bool_),
            tensor_transfer_s=transfer_times(listed),
            consumer_ptr=np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)]).astype(np.int64),
            consumers=np.array([c for row in rows for c in row], dtype=np.int64),
            states=tuple(states),
            origin=origin,
            fixed_s=fixed_s,
            work=work,  # type: ignore[arg-type]
            extents=extents,  # type: ignore[arg-type]
            stream=stream,
        )

    def records(self) -> tuple[list[Op], list[Tensor]]:
        """Its `Op` and `Tensor` records: ``OpGraph.build(*g.records(), g.name, g.origin, g.states)`` equals ``g``."""
        # Lists: reading numpy arrays one number at a time takes three times as long.
        columns: dict[str, Iterable[Any]] = {field: getattr(self, key) for key, field in _TEXTS.items()}
        columns |= {key: getattr(self, key) for key in _LISTS}
        columns |= {key: getattr(self, key).tolist() for key in (*_AMOUNTS, *_COUNTS, "stream")}
        columns |= {
            "colocation": (None if group < 0 else group for group in self.colocation.tolist()),
            "phase": map(Phase, self.phase.tolist()),
            "forward_of": (None if op < 0 else self.op_names[op] for op in self.forward_of.tolist()),
            "time_s": (
                {key: seconds for key, seconds in zip(self.time_keys, row, strict=True) if seconds == seconds}
                for row in self.time_s.tolist()
            ),
            "fixed_s": (
                {key: seconds for key, seconds in zip(self.time_keys, row, strict=True) if seconds}
                for row in self.fixed_s.tolist()
            ),
            "work": map(Work, self.work.tolist()),
            "extents": map(tuple, self.extents.tolist()),
        }
        ops = [Op(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        readers = [self.op_names[c] for c in self.consumers.tolist()]
        ptr, transfer_s = self.consumer_ptr.tolist(), self.tensor_transfer_s.tolist()
        in_place = self.tensor_in_place.tolist()
        tensors = [
            Tensor(
                producer=self.op_names[producer],
                bytes=size,
                consumers=tuple(readers[ptr[t] : ptr[t + 1]]),
                transfer_s=transfer_s[t] if transfer_s[t] == transfer_s[t] else None,
                in_place=in_place[t],
            )
            for t, (producer, size) in enumerate(
                zip(self.tensor_producer.tolist(), self.tensor_bytes.tolist(), strict=True)
            )
        ]
        return ops, tensors

    @staticmethod
    def from_networkx(graph: nx.DiGraph, name: str | None = None) -> OpGraph:
        """Read a networkx DiGraph or MultiDiGraph; nodes are ops (named ``str(node)``), edges carry tensors.

        Node attributes, all optional: those of `Op` (``time_s`` may also be one number, ``pins`` one name,
        ``split_rows`` are texts), ``outputs``, the bytes of each output tensor, and ``in_place``, the numbers of those
        in place. Edge attributes: ``tensor``, the number of the producer's output it carries (default 0), where the
        node has ``outputs``; otherwise ``bytes`` (default 0) and each edge is a tensor of its own, except that edges of
        one node with the same ``tensor`` label are one tensor, sent once per device. ``transfer_s`` may stand beside
        ``bytes``. The graph's attribute ``origin`` holds the fields of `Origin`.

        Raises:
            GraphError: not a directed graph, an unknown attribute or a broken rule of `OpGraph`.
        """
        from graphs.networkx_io import records_from_networkx  # networkx takes a while to import

        ops, tensors, origin, states = records_from_networkx(graph)
        return OpGraph.build(ops, tensors, str(name or graph.graph.get("name") or "graph"), origin, states)

    def to_networkx(self) -> nx.MultiDiGraph:
        """The graph for networkx: attributes as `from_networkx` reads them, and ``from_networkx`` gives it back."""
        from graphs.networkx_io import records_to_networkx

        return records_to_networkx(*self.records(), self.name, self.origin, self.states)

    # -- sizes ------------------------------------------------------------------------------------------

    @property
    def is_training(self) -> bool:
        """Whether it is a training step: as its origin says, or else by whether it has a backward pass."""
        return bool((self.phase == Phase.BACKWARD).any()) if self.origin.train is None else self.origin.train

    @property
    def n_ops(self) -> int:
        return len(self.op_names)

    @property
    def n_tensors(self) -> int:
        return len(self.tensor_producer)

    @cached_property
    def tokens(self) -> int | None:
        """Positions of the longest input that has samples and a sequence; None where there is none."""
        found = []
        for kind, rows in zip(self.kinds, self.split_rows, strict=False):
            extents = {row.axis: row.extent for row in rows} if kind == "input" else {}
            if "batch" in extents and "sequence" in extents:
                found.append(extents["batch"] * extents["sequence"])
        return max(found, default=None)

    @property
    def n_edges(self) -> int:
        """Number of (tensor, consumer) pairs."""
        return len(self.consumers)

    def is_pinned_to(self, kind: str) -> BoolArray:
        """bool [n]: ops whose pins have that name, model or kind of device."""
        return np.array([kind in pins for pins in self.pins], dtype=np.bool_)

    # -- structure --------------------------------------------------------------------------------------

    def consumers_of(self, tensor: int) -> IntArray:
        """Ops that read a tensor, increasing."""
        return self.consumers[self.consumer_ptr[tensor] : self.consumer_ptr[tensor + 1]]

    @cached_property
    def output_ptr(self) -> IntArray:
        """int64 [n + 1]: op i writes tensors ``output_ptr[i] .. output_ptr[i + 1] - 1``."""
        return np.searchsorted(self.tensor_producer, np.arange(self.n_ops + 1)).astype(np.int64)

    @cached_property
    def kept_bytes(self) -> IntArray:
        """int64 [n]: bytes that each op keeps on its device until the step ends, the sum of three parts."""
        return frozen(self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes)

    @cached_property
    def standing_bytes(self) -> IntArray:
        """int64 [n]: those of them that are there from the beginning of the step."""
        return frozen(self.kept_bytes - np.where(self.gradient_maker >= 0, self.gradient_bytes, 0))

    @cached_property
    def coming_bytes(self) -> IntArray:
        """int64 [n]: those that come when each op starts: gradients that it makes."""
        comes = self.gradient_maker >= 0
        return frozen(sums(self.gradient_maker[comes], self.gradient_bytes[comes], self.n_ops))

    @cached_property
    def gradient_maker(self) -> IntArray:
        """int64 [n]: the op with whose start an op's gradient bytes come; -1 where they are there from the beginning.

        PyTorch makes gradients in the backward pass and drops all of them after the update (``zero_grad``). So a
        colocation group's come with the first of its backward ops, in graph order, that writes in place what only the
        group reads, if its updates alone read the last of it; or with the op of a lane that gives its updates a part,
        as ZeRO-2 and 3 have it. They are there from the beginning where a lane reads what lies in place, since buckets
        of replicas stay, on the stack ``"fused"``, since Megatron's gradients have buffers, on hosts, and where nothing
        says who makes them. O(n + e).
        """
        n, m, group = self.n_ops, self.n_tensors, self.colocation
        result = np.full(n, -1, dtype=np.int64)
        is_keeper = (self.gradient_bytes > 0) & (group >= 0) & ~self.is_pinned_to(HOST)
        if self.origin.stack == FUSED or not is_keeper.any() or not self.tensor_in_place.any():
            return frozen(result)
        producer, consumer, tensor = self.edge_list
        first, last = np.full(m, n, dtype=np.int64), np.full(m, -1, dtype=np.int64)
        np.minimum.at(first, tensor, group[consumer])
        np.maximum.at(last, tensor, group[consumer])
        is_lane, is_backward, maker = self.is_pinned_to(LANE), self.phase == Phase.BACKWARD, self.tensor_producer
        of_group = self.tensor_in_place & (first == last) & (first >= 0)
        of_backward = of_group & is_backward[maker] & (group[maker] == first)
        is_last = self.tensor_is_kept & (of_backward | (of_group & is_lane[maker]))
        makes, is_made = np.full(1 + group.max(), n, dtype=np.int64), np.zeros(1 + group.max(), dtype=np.bool_)
        np.minimum.at(makes, first[is_last | of_backward], maker[is_last | of_backward])
        is_made[first[is_last]] = True
        in_bucket = self.tensor_in_place[tensor] & is_backward[producer] & (group[producer] >= 0) & is_lane[consumer]
        is_made[group[producer[in_bucket]]] = False
        result[is_keeper] = np.where(is_made, makes, -1)[group[is_keeper]]
        return frozen(result)

    @cached_property
    def tensor_memory_bytes(self) -> IntArray:
        """int64 [m]: what each tensor takes of its producer's device; 0 in place, where its bytes are kept anyway."""
        return frozen(np.where(self.tensor_in_place, 0, self.tensor_bytes))

    @cached_property
    def tensor_is_kept(self) -> BoolArray:
        """bool [m]: tensors in place that updates alone read: gradients, in bytes that last for the whole step.

        Other tensors in place are those inside of a kernel, which lie nowhere.
        """
        _, consumer, tensor = self.edge_list
        result = self.tensor_in_place.copy()
        result[tensor[self.phase[consumer] != Phase.UPDATE]] = False
        return frozen(result)

    @cached_property
    def transfer_bytes(self) -> IntArray:
        """int64 [m]: what a transfer of each tensor moves; 0 where none can be: in place, and read in its group alone.

        For estimates that treat all edges alike. `tensor_bytes` will do where a tensor is really sent.
        """
        producer, consumer, tensor = self.edge_list
        apart = (self.colocation[producer] < 0) | (self.colocation[producer] != self.colocation[consumer])
        is_sent = np.zeros(self.n_tensors, dtype=np.bool_)
        is_sent[tensor[apart]] = True
        return frozen(np.where(self.tensor_in_place & ~is_sent, 0, self.tensor_bytes))

    @cached_property
    def output_bytes(self) -> IntArray:
        """int64 [n]: what the tensors that each op writes take of its device."""
        return sums(self.tensor_producer, self.tensor_memory_bytes, self.n_ops)

    @cached_property
    def inputs(self) -> tuple[IntArray, IntArray]:
        """``(ptr [n + 1], tensors [e])``: op i reads ``tensors[ptr[i]:ptr[i + 1]]``, increasing."""
        _, consumer, tensor = self.edge_list
        return pointers(consumer, self.n_ops), tensor[np.lexsort((tensor, consumer))]

    @cached_property
    def edge_list(self) -> tuple[IntArray, IntArray, IntArray]:
        """``(producer, consumer, tensor)``, each int64 [e]."""
        tensor = np.repeat(np.arange(self.n_tensors), np.diff(self.consumer_ptr)).astype(np.int64)
        return self.tensor_producer[tensor], self.consumers, tensor

    @cached_property
    def row_numbers(self) -> list[int]:
        """A number for each op; ops with equal split rows have the same."""
        number: dict[tuple[SplitRow, ...], int] = {}
        by_identity: dict[int, int] = {}  # rows of copies are mostly the same object
        for rows in self.split_rows:
            if id(rows) not in by_identity:
                by_identity[id(rows)] = number.setdefault(rows, len(number))
        return [by_identity[id(rows)] for rows in self.split_rows]

    @cached_property
    def topological_order(self) -> IntArray:
        """int64 [n]: every op after its inputs, among ready ops the lowest number first.

        Raises:
            GraphError: the graph has a cycle; the message walks it.
        """
        # A plain Kahn pass over lists: a heap keeps the order independent of how edges are stored.
        producer, consumer, _ = self.edge_list
        if (producer < consumer).all():  # their own order, as of a captured graph
            return np.arange(self.n_ops)
        missing = np.bincount(consumer, minlength=self.n_ops).tolist()
        order_by_producer = np.argsort(producer, kind="stable")
        ptr = np.searchsorted(producer[order_by_producer], np.arange(self.n_ops + 1)).tolist()
        successors = consumer[order_by_producer].tolist()
        ready = [i for i in range(self.n_ops) if missing[i] == 0]
        result: list[int] = []
        while ready:
            op = heapq.heappop(ready)
            result.append(op)
            for c in successors[ptr[op] : ptr[op + 1]]:
                missing[c] -= 1
                if missing[c] == 0:
                    heapq.heappush(ready, c)
        if len(result) < self.n_ops:
            stuck = {i for i in range(self.n_ops) if missing[i] > 0}
            raise GraphError(cycle_message(self, stuck))
        return np.array(result, dtype=np.int64)

    @cached_property
    def topological_position(self) -> IntArray:
        """int64 [n]: where each op stands in `topological_order`."""
        position = np.empty(self.n_ops, dtype=np.int64)
        position[self.topological_order] = np.arange(self.n_ops)
        return position

    # -- identity ---------------------------------------------------------------------------------------

    @cached_property
    def hash(self) -> str:
        """Content hash (SHA-256, hex) of all that a score depends on; docs/files.md tells what that is."""
        digest = hashlib.sha256(b"opgraph-1")
        for key in _SCORED:
            value = self.transfer_bytes if key == "tensor_bytes" else getattr(self, key)
            digest.update(key.encode())
            if isinstance(value, np.ndarray):
                digest.update(str((value.shape, value.dtype.str)).encode() + value.tobytes())
            else:
                digest.update(repr(value).encode())
        if (self.transfer_bytes != self.tensor_memory_bytes).any():  # sent from where it takes no memory
            digest.update(b"tensor_in_place" + self.tensor_in_place.tobytes())
        for key in _SCORED_IF_ANY:
            if (value := getattr(self, key)).any():
                digest.update(key.encode() + value.tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, OpGraph)
            and (self.name, self.hash) == (other.name, other.hash)
            and (self.split_rows, self.states) == (other.split_rows, other.states)
            and self.origin.summed_loss == other.origin.summed_loss
            and all(np.array_equal(getattr(self, key), getattr(other, key)) for key in _DESCRIBED)
        )

    def __hash__(self) -> int:
        return hash(self.hash)

    def __repr__(self) -> str:
        return f"OpGraph({self.name!r}, {self.n_ops} ops, {self.n_edges} edges)"
