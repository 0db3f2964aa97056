"""Ops and tensors from and to networkx graphs; `OpGraph.from_networkx` says what the attributes mean."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import networkx as nx

from graphs.codec import record_of
from graphs.errors import GraphError
from graphs.origin import Origin
from graphs.records import ANY_DEVICE, Op, Phase, SplitRow, State, Tensor, Work

_OP_ATTRIBUTES = tuple(Op.__dataclass_fields__)
_KEPT, _PARAMETERS = "kept_bytes", "parameter_bytes"
_TENSOR_LISTS = ("outputs", "in_place")


def records_from_networkx(graph: nx.DiGraph) -> tuple[list[Op], list[Tensor], Origin, list[State]]:
    """Ops, tensors, origin and states for `OpGraph.build`.

    Raises:
        GraphError: not a directed graph, an unknown attribute, or edges that say unlike things of one tensor.
    """
    if not isinstance(graph, nx.Graph):  # the base of all four kinds of networkx graph
        raise GraphError(f"got a {type(graph).__name__}; expected a networkx.DiGraph or MultiDiGraph.")
    if not graph.is_directed():
        raise GraphError(
            f"got an undirected networkx.{type(graph).__name__}, which does not say who reads; "
            "expected a DiGraph or MultiDiGraph with edges from producer to consumer."
        )
    ops = [_op_from_attributes(str(node), data) for node, data in graph.nodes(data=True)]
    tensors: dict[tuple[Any, Hashable], dict[str, Any]] = {}
    for node, data in graph.nodes(data=True):
        in_place = _in_place(node, data)
        for number, size in enumerate(data.get("outputs", ())):
            tensors[node, number] = {"bytes": size, "consumers": [], "in_place": number in in_place}
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
    read = [
        Tensor(str(u), entry["bytes"], tuple(entry["consumers"]), entry.get("transfer_s"), entry.get("in_place", False))
        for (u, _), entry in tensors.items()
    ]
    states = [State(**entry) for entry in graph.graph.get("states", ())]
    origin = graph.graph.get("origin", {"source": "networkx"})
    return ops, read, record_of(Origin, origin, "the origin", GraphError, checked=False), states


def records_to_networkx(
    ops: Iterable[Op], tensors: Iterable[Tensor], name: str, origin: Origin, states: Iterable[State]
) -> nx.MultiDiGraph:
    """The inverse of `records_from_networkx`."""
    result = nx.MultiDiGraph(name=name, origin=origin.known())
    if listed := [asdict(state) for state in states]:
        result.graph["states"] = listed
    outputs: dict[str, list[int]] = {op.name: [] for op in ops}
    for op in ops:
        # Kept bytes stand for parameters, so that whoever changes them has to change nothing else.
        attributes = {key: getattr(op, key) for key in (*_OP_ATTRIBUTES, _KEPT) if key not in ("name", _PARAMETERS)}
        attributes["split_rows"] = [str(row) for row in op.split_rows]
        result.add_node(op.name, **attributes, outputs=outputs[op.name])
    for tensor in tensors:
        number = len(outputs[tensor.producer])
        outputs[tensor.producer].append(tensor.bytes)
        if tensor.in_place:
            result.nodes[tensor.producer].setdefault("in_place", []).append(number)
        for consumer in tensor.consumers:
            extra = {} if tensor.transfer_s is None else {"transfer_s": tensor.transfer_s}
            result.add_edge(tensor.producer, consumer, tensor=number, bytes=tensor.bytes, **extra)
    return result


def _op_from_attributes(name: str, data: Mapping[str, Any]) -> Op:
    known = (*_OP_ATTRIBUTES, _KEPT, *_TENSOR_LISTS)
    unknown = set(data) - set(known)
    if unknown:
        raise GraphError(f"op {name!r} has unknown attribute {min(unknown)!r}; known: {', '.join(known[1:])}.")
    fields = {key: value for key, value in data.items() if key not in (*_TENSOR_LISTS, "name")}
    if _KEPT in fields and _PARAMETERS in fields:
        raise GraphError(f"op {name!r} has kept_bytes and parameter_bytes; the first hold the second, leave one out.")
    for key in ("time_s", "fixed_s"):
        if key in fields and not isinstance(fields[key], Mapping):
            fields[key] = {ANY_DEVICE: float(fields[key])}
    if isinstance(fields.get("pins"), str):
        fields["pins"] = (fields["pins"],)
    if "phase" in fields and isinstance(fields["phase"], str):
        try:
            fields["phase"] = Phase[fields["phase"].upper()]
        except KeyError:
            raise GraphError(
                f"op {name!r} has phase {fields['phase']!r}; expected forward, backward or update."
            ) from None
    if isinstance(word := fields.get("work"), str):
        if word.upper() not in Work.__members__:
            known_works = ", ".join(work.lower() for work in Work.__members__)
            raise GraphError(f"op {name!r} has work {word!r}; expected one of {known_works}.")
        fields["work"] = Work[word.upper()]
    if "extents" in fields:
        fields["extents"] = tuple(fields["extents"])
    if fields.get("forward_of") is not None:
        fields["forward_of"] = str(fields["forward_of"])
    if fields.get("split_rows"):
        fields["split_rows"] = tuple(SplitRow.parse(str(row)) for row in fields["split_rows"])
    return Op(name=name, **fields)


def _in_place(node: Any, data: Mapping[str, Any]) -> set[int]:
    """The numbers of the outputs that are written in place."""
    listed, count = data.get("in_place", ()), len(data.get("outputs", ()))
    if not isinstance(listed, list | tuple | set) or not all(k in range(count) for k in listed):
        raise GraphError(f"op {node!r} has in_place = {listed!r:.60}; expected numbers of its {count} outputs, from 0.")
    return set(listed)
