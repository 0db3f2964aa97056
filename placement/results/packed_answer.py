"""Placement, order and transfers of a rewritten graph as packed columns: numbers of devices, ops and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from env.cluster import Cluster
from graphs.arrays import IntArray
from graphs.errors import GraphFileError, MismatchError
from graphs.opgraph import OpGraph
from graphs.packed import MOST_NUMBERS, pack_whole, unpack_whole
from placement.results.answer import named_transfers, order_by_device

if TYPE_CHECKING:
    from placement.results.result import Result

_FIELDS = ("placement", "order", "transfer_order")
_PACKED, _COUNT = "packed", "count"


def packed_answer(result: Result) -> dict[str, Any]:
    """The three fields of a file, packed; nothing without an answer, or of one whose order leaves devices out."""
    answer = result.answer
    if answer is None or list(answer.order) != [device.name for device in result.cluster.devices]:
        return {}
    number = {op: i for i, op in enumerate(result.graph.op_names)}
    order = [number[op] for ops in answer.order.values() for op in ops]
    transfers = result.transfer_numbers()
    return {
        "placement": _packed(result.device_numbers()),
        "order": _packed(np.array(order, dtype=np.int64)),
        "transfer_order": None if transfers is None else _packed(transfers),
    }


def is_packed(document: Mapping[str, Any]) -> bool:
    """Whether a file has these fields packed."""
    return isinstance(document.get("placement"), dict) and document["placement"].keys() == {_PACKED, _COUNT}


def without_answer_columns(document: Mapping[str, Any]) -> dict[str, Any]:
    """A packed file's other fields, and null for these."""
    return {**document, **{field: None for field in _FIELDS if field in document}}


def unpacked_answer(document: Mapping[str, Any], graph: OpGraph, cluster: Cluster) -> dict[str, Any]:
    """The three fields by names, as a plain file has them.

    Raises:
        GraphFileError: what is no packed column.
        MismatchError: a number of no op, device or tensor, or an op that does not stand in the order once.
    """
    devices = _unpacked(document, "placement", graph.n_ops)
    _check_range(devices, len(cluster.devices), "placement", f"devices of cluster {cluster.name!r}")
    order = _unpacked(document, "order", graph.n_ops)
    _check_range(order, graph.n_ops, "order", f"ops of graph {graph.name!r}")
    if len(np.unique(order)) < graph.n_ops:
        raise MismatchError(f"the packed order does not have each of {graph.n_ops} ops once; save the result again.")
    names = [device.name for device in cluster.devices]
    return {
        "placement": dict(zip(graph.op_names, (names[device] for device in devices.tolist()), strict=True)),
        "order": order_by_device(graph, cluster, devices, order.tolist()),
        "transfer_order": _unpacked_transfers(document, graph, cluster),
    }


def _unpacked_transfers(
    document: Mapping[str, Any], graph: OpGraph, cluster: Cluster
) -> list[tuple[str, int, str]] | None:
    if document["transfer_order"] is None:
        return None
    rows = _unpacked(document, "transfer_order", None)
    if len(rows) % 2:
        raise MismatchError("the packed transfer_order has half a transfer; save the result again.")
    rows = rows.reshape(-1, 2)
    _check_range(rows[:, 0], graph.n_tensors, "transfer_order", f"tensors of graph {graph.name!r}")
    _check_range(rows[:, 1], len(cluster.devices), "transfer_order", f"devices of cluster {cluster.name!r}")
    return named_transfers(graph, cluster, rows)


def _packed(values: IntArray) -> dict[str, Any]:
    return {_PACKED: pack_whole(values), _COUNT: values.size}


def _unpacked(document: Mapping[str, Any], field: str, count: int | None) -> IntArray:
    packed = document.get(field)
    if not isinstance(packed, dict) or packed.keys() != {_PACKED, _COUNT}:
        raise GraphFileError(f"{field} is not packed, and placement is; save the result again.")
    given = packed[_COUNT]
    if type(given) is not int or not 0 <= given <= MOST_NUMBERS or count not in (None, given):
        expected = "a whole number" if count is None else f"{count}, one for each op"
        raise GraphFileError(f"{field} has count = {given!r:.40}; expected {expected}.")
    return unpack_whole(packed[_PACKED], given, field)


def _check_range(values: IntArray, top: int, field: str, things: str) -> None:
    wrong = values[(values < 0) | (values >= top)]
    if len(wrong):
        raise MismatchError(f"the packed {field} names number {wrong[0]} of {top} {things}; save the result again.")
