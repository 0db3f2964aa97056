"""`OpGraph`: what one step of a neural network computes, as flat arrays.

Ops are numbered ``0 .. n_ops-1`` and tensors ``0 .. n_tensors-1`` (grouped by producer, in op order), so that
the simulator works on arrays alone. Time and devices are unknown here.
"""

from __future__ import annotations

import enum
import hashlib
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from graphs.errors import GraphError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
ANY_DEVICE = "*"  # key of a measured time that holds on every device


class Phase(enum.IntEnum):
    """Which part of a training step an op belongs to."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2


@dataclass(frozen=True)
class Op:
    """One operation, as given by whoever builds a graph.

    Sizes are bytes, times are seconds.

    Attributes:
        name: unique within the graph.
        kind: what it computes, e.g. ``"aten.conv2d"``.
        flops: floating-point operations.
        bytes_moved: bytes read from and written to the device's memory.
        kept_bytes: bytes on its device for the whole step (parameters, gradients, optimizer state).
        workspace_bytes: bytes on its device only while it runs.
        kernels: how many times it is launched (a merged op launches all its parts).
        colocation: ops with the same label (not None) run on one device; a hard constraint.
        phase: forward, backward or update.
        forward_of: for a backward op, the name of the forward op it mirrors.
        dtype: the number format that selects the device's peak FLOP/s, e.g. ``"float32"``.
        module: path of the module it came from, e.g. ``"encoder.layers.0.attn"``.
        pins: device kinds it may run on; empty means any.
        time_s: measured seconds by device name, model or kind (``"*"``: any device); overrides the cost model.
    """

    name: str
    kind: str = "op"
    flops: float = 0.0
    bytes_moved: float = 0.0
    kept_bytes: int = 0
    workspace_bytes: int = 0
    kernels: int = 1
    colocation: Hashable | None = None
    phase: Phase = Phase.FORWARD
    forward_of: str | None = None
    dtype: str = "float32"
    module: str = ""
    pins: tuple[str, ...] = ()
    time_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Tensor:
    """One tensor between ops.

    Attributes:
        producer: name of the op that writes it.
        bytes: its size.
        consumers: names of the ops that read it, each once; empty for a result of the step.
        transfer_s: measured seconds to move it over one link; None means latency + bytes / bandwidth.
    """

    producer: str
    bytes: int
    consumers: tuple[str, ...] = ()
    transfer_s: float | None = None


@dataclass(frozen=True, eq=False)
class OpGraph:
    """A frozen computation graph. Build it with `OpGraph.build`, `from_networkx`, a reader or `capture`.

    Shapes: n ops, m tensors, e (tensor, consumer) pairs, k keys of measured times. Sizes are bytes, times seconds.

    Attributes:
        name: for people.
        op_names, kinds, dtypes, modules: n strings each.
        flops, bytes_moved: float64 [n].
        kept_bytes, workspace_bytes, kernels: int64 [n].
        colocation: int64 [n], group number or -1.
        phase: int64 [n], values of `Phase`.
        forward_of: int64 [n], op number or -1.
        pins: n tuples of device kinds, empty = any.
        time_keys: k names of devices, models or kinds.
        time_s: float64 [n, k], NaN where unmeasured.
        tensor_producer, tensor_bytes: int64 [m]; producers never decrease.
        tensor_transfer_s: float64 [m], NaN where unmeasured.
        consumer_ptr: int64 [m + 1]; consumers: int64 [e]. Tensor t is read by
            ``consumers[consumer_ptr[t]:consumer_ptr[t + 1]]``, increasing.

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
    kept_bytes: IntArray
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
    tensor_transfer_s: FloatArray
    consumer_ptr: IntArray
    consumers: IntArray

    def __post_init__(self) -> None:
        _check_numbers(self)
        _ = self.topological_order  # raises on a cycle
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    # -- construction ---------------------------------------------------------------------------------

    @staticmethod
    def build(ops: Iterable[Op], tensors: Iterable[Tensor], name: str = "graph") -> OpGraph:
        """Make a graph from records; op order is kept, tensors are grouped by producer.

        Raises:
            GraphError: as `OpGraph`, plus an edge whose end does not exist.
        """
        ops = list(ops)
        index: dict[str, int] = {}
        for i, op in enumerate(ops):
            if op.name in index:
                raise GraphError(f"op name {op.name!r} appears twice; op names must be unique, rename one of them.")
            index[op.name] = i
        listed = sorted(tensors, key=lambda t: _lookup(index, t.producer, "a tensor's producer"))
        rows = [sorted({_lookup(index, c, f"a consumer of op {t.producer!r}") for c in t.consumers}) for t in listed]
        for tensor in listed:
            if tensor.transfer_s is not None and tensor.transfer_s != tensor.transfer_s:
                raise GraphError(f"op {tensor.producer!r} has transfer_s = nan; leave an unmeasured time out.")
        groups: dict[Hashable, int] = {}
        keys = tuple(sorted({key for op in ops for key in op.time_s}))
        column = {key: j for j, key in enumerate(keys)}
        time_s = np.full((len(ops), len(keys)), np.nan)
        for i, op in enumerate(ops):
            for key, seconds in op.time_s.items():
                if seconds != seconds:
                    raise GraphError(f"op {op.name!r} has time_s on {key!r} = nan; leave an unmeasured time out.")
                time_s[i, column[key]] = seconds + 0.0
        return OpGraph(
            name=name,
            op_names=tuple(op.name for op in ops),
            kinds=tuple(op.kind for op in ops),
            dtypes=tuple(op.dtype for op in ops),
            modules=tuple(op.module for op in ops),
            flops=_amounts(index, [op.flops for op in ops], "flops"),
            bytes_moved=_amounts(index, [op.bytes_moved for op in ops], "bytes_moved"),
            kept_bytes=_counts(index, [op.kept_bytes for op in ops], "kept_bytes"),
            workspace_bytes=_counts(index, [op.workspace_bytes for op in ops], "workspace_bytes"),
            kernels=_counts(index, [op.kernels for op in ops], "kernels"),
            colocation=np.array(
                [-1 if op.colocation is None else groups.setdefault(op.colocation, len(groups)) for op in ops],
                dtype=np.int64,
            ),
            phase=np.array([int(op.phase) for op in ops], dtype=np.int64),
            forward_of=np.array(
                [
                    -1 if op.forward_of is None else _lookup(index, op.forward_of, f"forward_of of op {op.name!r}")
                    for op in ops
                ],
                dtype=np.int64,
            ),
            pins=tuple(tuple(op.pins) for op in ops),
            time_keys=keys,
            time_s=time_s,
            tensor_producer=np.array([index[t.producer] for t in listed], dtype=np.int64),
            tensor_bytes=_counts([t.producer for t in listed], [t.bytes for t in listed], "output bytes"),
            # A tensor nobody reads is never sent, so a transfer time on it would only change the hash.
            tensor_transfer_s=np.array(
                [np.nan if t.transfer_s is None or not t.consumers else t.transfer_s for t in listed], dtype=np.float64
            ),
            consumer_ptr=np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)]).astype(np.int64),
            consumers=np.array([c for row in rows for c in row], dtype=np.int64),
        )

    def records(self) -> tuple[list[Op], list[Tensor]]:
        """The graph as `Op` and `Tensor` records: ``OpGraph.build(*g.records(), g.name)`` equals ``g``."""
        # Lists: reading numpy arrays one number at a time takes three times as long.
        columns = (self.flops, self.bytes_moved, self.kept_bytes, self.workspace_bytes, self.kernels)
        flops, moved, kept, workspace, kernels = (column.tolist() for column in columns)
        group, forward_of, phase = self.colocation.tolist(), self.forward_of.tolist(), self.phase.tolist()
        times = [
            {key: seconds for key, seconds in zip(self.time_keys, row, strict=True) if seconds == seconds}
            for row in self.time_s.tolist()
        ]
        ops = [
            Op(
                name=name,
                kind=self.kinds[i],
                flops=flops[i],
                bytes_moved=moved[i],
                kept_bytes=kept[i],
                workspace_bytes=workspace[i],
                kernels=kernels[i],
                colocation=None if group[i] < 0 else group[i],
                phase=Phase(phase[i]),
                forward_of=None if forward_of[i] < 0 else self.op_names[forward_of[i]],
                dtype=self.dtypes[i],
                module=self.modules[i],
                pins=self.pins[i],
                time_s=times[i],
            )
            for i, name in enumerate(self.op_names)
        ]
        readers = [self.op_names[c] for c in self.consumers.tolist()]
        ptr, transfer_s = self.consumer_ptr.tolist(), self.tensor_transfer_s.tolist()
        tensors = [
            Tensor(
                producer=self.op_names[producer],
                bytes=size,
                consumers=tuple(readers[ptr[t] : ptr[t + 1]]),
                transfer_s=transfer_s[t] if transfer_s[t] == transfer_s[t] else None,
            )
            for t, (producer, size) in enumerate(
                zip(self.tensor_producer.tolist(), self.tensor_bytes.tolist(), strict=True)
            )
        ]
        return ops, tensors

    @staticmethod
    def from_networkx(graph: nx.DiGraph, name: str | None = None) -> OpGraph:
        """Read a networkx DiGraph or MultiDiGraph; nodes are ops (named ``str(node)``), edges carry tensors.

        Node attributes, all optional: those of `Op` (``time_s`` may also be one number, ``pins`` one kind), and
        ``outputs``, the bytes of each output tensor. Edge attributes: ``tensor``, the number of the producer's output
        it carries (default 0), where the node has ``outputs``; otherwise ``bytes`` (default 0) and each edge is a
        tensor of its own, except that edges of one node with the same ``tensor`` label are one tensor, sent once
        per device. ``transfer_s`` may stand beside ``bytes``.

        Raises:
            GraphError: an unknown attribute or a broken rule of `OpGraph`.
        """
        ops = [_op_from_attributes(str(node), data) for node, data in graph.nodes(data=True)]
        tensors: dict[tuple[Any, Hashable], dict[str, Any]] = {}
        for node, data in graph.nodes(data=True):
            for number, size in enumerate(data.get("outputs", ())):
                tensors[node, number] = {"bytes": size, "consumers": []}
        for serial, (u, v, data) in enumerate(graph.edges(data=True)):
            unknown = set(data) - {"bytes", "tensor", "transfer_s"}
            if unknown:
                raise GraphError(
                    f"edge {u!r} -> {v!r} has unknown attribute {min(unknown)!r}; known: bytes, tensor, transfer_s."
                )
            if "outputs" in graph.nodes[u]:
                key = (u, data.get("tensor", 0))
                if key not in tensors:
                    raise GraphError(
                        f"edge {u!r} -> {v!r} carries output {key[1]!r}, but op {u!r} has "
                        f"{len(graph.nodes[u]['outputs'])} outputs."
                    )
            else:
                key = (u, data.get("tensor", ("edge", serial)))
            entry = tensors.setdefault(key, {"bytes": data.get("bytes", 0), "consumers": []})
            if "bytes" in data and data["bytes"] != entry["bytes"]:
                raise GraphError(
                    f"edge {u!r} -> {v!r} says {data['bytes']} bytes for tensor {key[1]!r}, another edge of the same "
                    f"tensor says {entry['bytes']}; one tensor has one size."
                )
            entry["transfer_s"] = data.get("transfer_s", entry.get("transfer_s"))
            entry["consumers"].append(str(v))
        return OpGraph.build(
            ops,
            [
                Tensor(str(u), entry["bytes"], tuple(entry["consumers"]), entry.get("transfer_s"))
                for (u, _), entry in tensors.items()
            ],
            name=str(name or graph.graph.get("name") or "graph"),
        )

    def to_networkx(self) -> nx.MultiDiGraph:
        """The graph for networkx: attributes as `from_networkx` reads them, and ``from_networkx`` gives it back."""
        result = nx.MultiDiGraph(name=self.name)
        ops, tensors = self.records()
        outputs: dict[str, list[int]] = {op.name: [] for op in ops}
        for op in ops:
            attributes = {key: getattr(op, key) for key in _OP_ATTRIBUTES if key != "name"}
            result.add_node(op.name, **attributes, outputs=outputs[op.name])
        for tensor in tensors:
            number = len(outputs[tensor.producer])
            outputs[tensor.producer].append(tensor.bytes)
            for consumer in tensor.consumers:
                extra = {} if tensor.transfer_s is None else {"transfer_s": tensor.transfer_s}
                result.add_edge(tensor.producer, consumer, tensor=number, bytes=tensor.bytes, **extra)
        return result

    # -- sizes ------------------------------------------------------------------------------------------

    @property
    def n_ops(self) -> int:
        return len(self.op_names)

    @property
    def n_tensors(self) -> int:
        return len(self.tensor_producer)

    @property
    def n_edges(self) -> int:
        """Number of (tensor, consumer) pairs."""
        return len(self.consumers)

    # -- structure --------------------------------------------------------------------------------------

    def consumers_of(self, tensor: int) -> IntArray:
        """Ops that read a tensor, increasing."""
        return self.consumers[self.consumer_ptr[tensor] : self.consumer_ptr[tensor + 1]]

    @cached_property
    def output_ptr(self) -> IntArray:
        """int64 [n + 1]: op i writes tensors ``output_ptr[i] .. output_ptr[i + 1] - 1``."""
        return np.searchsorted(self.tensor_producer, np.arange(self.n_ops + 1)).astype(np.int64)

    @cached_property
    def inputs(self) -> tuple[IntArray, IntArray]:
        """``(ptr [n + 1], tensors [e])``: op i reads ``tensors[ptr[i]:ptr[i + 1]]``, increasing."""
        reader_tensor = np.repeat(np.arange(self.n_tensors), np.diff(self.consumer_ptr))
        order = np.lexsort((reader_tensor, self.consumers))
        ptr = np.concatenate([[0], np.cumsum(np.bincount(self.consumers, minlength=self.n_ops))]).astype(np.int64)
        return ptr, reader_tensor[order].astype(np.int64)

    @cached_property
    def edge_list(self) -> tuple[IntArray, IntArray, IntArray]:
        """``(producer, consumer, tensor)``, each int64 [e]."""
        tensor = np.repeat(np.arange(self.n_tensors), np.diff(self.consumer_ptr)).astype(np.int64)
        return self.tensor_producer[tensor], self.consumers, tensor

    @cached_property
    def topological_order(self) -> IntArray:
        """int64 [n]: every op after its inputs, among ready ops the lowest number first.

        Raises:
            GraphError: the graph has a cycle; the message walks it.
        """
        # A plain Kahn pass over lists: a heap keeps the order independent of how edges are stored.
        import heapq

        producer, consumer, _ = self.edge_list
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
            raise GraphError(_cycle_message(self, stuck))
        return np.array(result, dtype=np.int64)

    # -- identity ---------------------------------------------------------------------------------------

    @cached_property
    def hash(self) -> str:
        """Content hash (SHA-256, hex) of everything but the graph's own name."""
        digest = hashlib.sha256(b"opgraph-1")
        for key in sorted(self.__dataclass_fields__):
            value = getattr(self, key)
            if key == "name":
                continue
            digest.update(key.encode())
            if isinstance(value, np.ndarray):
                digest.update(str((value.shape, value.dtype.str)).encode() + value.tobytes())
            else:
                digest.update(repr(value).encode())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpGraph) and self.name == other.name and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    def __repr__(self) -> str:
        return f"OpGraph({self.name!r}, {self.n_ops} ops, {self.n_edges} edges)"


_OP_ATTRIBUTES = tuple(Op.__dataclass_fields__)


def _lookup(index: Mapping[str, int], name: str, role: str) -> int:
    if name not in index:
        raise GraphError(f"{role} is {name!r}, but the graph has no op of that name; add the op or drop the edge.")
    return index[name]


def _counts(names: Iterable[str], values: Sequence[Any], what: str) -> IntArray:
    """Whole numbers as int64; refuses what a cast would silently cut off or wrap around."""
    for name, value in zip(names, values, strict=True):
        whole = isinstance(value, int | np.integer) or (isinstance(value, float | np.floating) and value.is_integer())
        if not whole or abs(value) >= 2**63:
            raise GraphError(f"op {name!r} has {what} = {value!r:.40}; expected a whole number below 2**63.")
    return np.array([int(value) for value in values], dtype=np.int64)


def _amounts(names: Iterable[str], values: Sequence[Any], what: str) -> FloatArray:
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, int | float | np.integer | np.floating) or value > sys.float_info.max:
            raise GraphError(f"op {name!r} has {what} = {value!r:.40}; expected a finite number, 0 or more.")
    return np.array(values, dtype=np.float64) + 0.0  # + 0.0: minus zero would change the hash


def _op_from_attributes(name: str, data: Mapping[str, Any]) -> Op:
    unknown = set(data) - set(_OP_ATTRIBUTES) - {"outputs"}
    if unknown:
        raise GraphError(
            f"op {name!r} has unknown attribute {min(unknown)!r}; known: {', '.join(_OP_ATTRIBUTES[1:])}, outputs."
        )
    fields = {key: value for key, value in data.items() if key not in ("outputs", "name")}
    if "time_s" in fields and not isinstance(fields["time_s"], Mapping):
        fields["time_s"] = {ANY_DEVICE: float(fields["time_s"])}
    if isinstance(fields.get("pins"), str):
        fields["pins"] = (fields["pins"],)
    if "phase" in fields and isinstance(fields["phase"], str):
        try:
            fields["phase"] = Phase[fields["phase"].upper()]
        except KeyError:
            raise GraphError(
                f"op {name!r} has phase {fields['phase']!r}; expected forward, backward or update."
            ) from None
    if fields.get("forward_of") is not None:
        fields["forward_of"] = str(fields["forward_of"])
    return Op(name=name, **fields)


def _check_numbers(graph: OpGraph) -> None:
    n, m = graph.n_ops, graph.n_tensors
    if n == 0:
        raise GraphError(f"graph {graph.name!r} has no ops; there is nothing to place.")
    if len(set(graph.op_names)) < n:
        seen: set[str] = set()
        twice = next(name for name in graph.op_names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise GraphError(f"op name {twice!r} appears twice; op names must be unique, rename one of them.")
    per_op = ("kinds", "dtypes", "modules", "flops", "bytes_moved", "kept_bytes", "workspace_bytes", "kernels")
    for key in (*per_op, "colocation", "phase", "forward_of", "pins", "time_s"):
        if len(getattr(graph, key)) != n:
            raise GraphError(f"{key} has {len(getattr(graph, key))} entries, expected one for each of {n} ops.")
    for key in ("flops", "bytes_moved", "kept_bytes", "workspace_bytes", "kernels"):
        _check_not_negative(graph.op_names, getattr(graph, key), key)
    for j, key in enumerate(graph.time_keys):
        _check_not_negative(graph.op_names, graph.time_s[:, j], f"time_s on {key!r}", nan_ok=True)
    for key, top in (("phase", len(Phase)), ("forward_of", n), ("colocation", n)):
        values, least = getattr(graph, key), 0 if key == "phase" else -1
        if np.any((values < least) | (values >= top)):
            i = int(np.argmax((values < least) | (values >= top)))
            raise GraphError(f"op {graph.op_names[i]!r} has {key} = {values[i]}; expected {least} to {top - 1}.")
    producers = [graph.op_names[p] for p in graph.tensor_producer if 0 <= p < n]
    if len(producers) < m or (m and np.any(np.diff(graph.tensor_producer) < 0)):
        raise GraphError("tensors must be grouped by an existing producer, in op order.")
    _check_not_negative(producers, graph.tensor_bytes, "output bytes")
    _check_not_negative(producers, graph.tensor_transfer_s, "transfer_s", nan_ok=True)
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


def _check_not_negative(names: Sequence[str], values: NDArray[Any], what: str, nan_ok: bool = False) -> None:
    bad = ~(values >= 0) | np.isinf(values)
    if nan_ok:
        bad &= ~np.isnan(values)
    if bad.any():
        i = int(np.argmax(bad))
        raise GraphError(f"op {names[i]!r} has {what} = {values[i]}; expected a finite number, 0 or more.")


def _cycle_message(graph: OpGraph, stuck: set[int]) -> str:
    producer, consumer, _ = graph.edge_list
    before = {int(c): int(p) for p, c in zip(producer, consumer, strict=True) if int(p) in stuck and int(c) in stuck}
    # Every stuck op waits for another stuck op, so walking backwards must come round.
    path = [min(stuck)]
    while path[-1] not in path[:-1]:
        path.append(before[path[-1]])
    loop = path[path.index(path[-1]) :][::-1]
    shown = [graph.op_names[i] for i in loop]
    if len(shown) > 8:
        shown = [*shown[:4], "...", *shown[-3:]]
    return f"the graph has a cycle: {' -> '.join(shown)}; a step's graph must be acyclic, remove one of these edges."
