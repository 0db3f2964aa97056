"""Results as JSON: one flat object, every field of a `Result` and of its `Answer` under its own name.

A file also holds the graph and the cluster; of a strategy, graph, placement, order and transfers are packed columns:
numbers of devices, ops and tensors. A field holds what its annotation says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from types import NoneType
from typing import Any, NoReturn, get_args, get_type_hints

import numpy as np

from env.cluster import Cluster
from graphs.arrays import IntArray
from graphs.codec import plain, short, values_of
from graphs.disk import plain_reason
from graphs.errors import ClusterError, GraphError, GraphFileError, MismatchError, StrategyError
from graphs.files import graph_from_document, graph_to_json, packed_graph
from graphs.formatting import show_line
from graphs.opgraph import OpGraph
from graphs.packed import MOST_NUMBERS, pack_whole, unpack_whole
from placement.results.answer import Answer, named_transfers, order_by_device
from placement.results.result import Result

SCHEMA = "placement.result"
VERSION = 14
_PROBLEM = ("graph", "cluster")
_COLUMNS = ("placement", "order", "transfer_order")
_PACKED, _COUNT = "packed", "count"
_NAMES = ("graph_name", "graph_hash", "cluster_name", "cluster_hash")
_OWN = {name: hint for name, hint in get_type_hints(Result).items() if name not in (*_PROBLEM, "answer")}
_ANSWER = get_type_hints(Answer)
_TYPES: dict[str, Any] = {
    **dict.fromkeys(_NAMES, str),
    "feasible": bool,
    "stack": str,
    **_OWN,
    **{name: hint | None for name, hint in _ANSWER.items()},
}


# -- writing ----------------------------------------------------------------------------------------------------


def result_to_dict(result: Result) -> dict[str, Any]:
    """JSON-ready fields without the graph and the cluster themselves, only their names and hashes."""
    return {name: plain(getattr(result, name)) for name in _TYPES}


def comparison_row(result: Result, single_s: float | None) -> dict[str, Any]:
    """A result's row in a comparison, JSON-ready; `single_s`: of the best single device, None if none holds it."""
    return {
        "strategy": result.strategy.text,
        "method": result.method,
        "chosen": result.chosen,
        "objective_s": result.objective_s,
        "step_time_s": result.step_time_s,
        **asdict(result.utilisation),
        "feasible": result.feasible,
        "reason": result.reason,
        "speedup_vs_single": None if result.answer is None else result.answer.speedup(single_s),
        "gap": result.gap,
        "peak_bytes": None if result.peak_bytes is None else dict(result.peak_bytes),
        "bytes_moved": result.bytes_moved,
        "solve_time_s": result.solve_time_s,
        "interrupted": result.interrupted,
        "note": result.note,
        "not_run": result.not_run,
        "placement": None if result.placement is None else dict(result.placement),
    }


def result_to_json(result: Result) -> str:
    """The result with its graph and cluster as JSON text; `result_from_json` of it equals this result."""
    head = {"schema": SCHEMA, "version": VERSION, **result_to_dict(result)}
    if not result.strategy.is_none:  # a graph that no one made by hand
        head |= {"graph": packed_graph(result.graph), **_packed_answer(result)}
    text = json.dumps({**head, "cluster": result.cluster.to_dict()}, indent=1, allow_nan=False)
    if "graph" in head:
        return f"{text}\n"
    return f'{text[:-2]},\n "graph": {graph_to_json(result.graph).strip()}\n}}\n'


def _packed_answer(result: Result) -> dict[str, Any]:
    """The columns of a file; none without an answer, or of one whose order leaves devices out."""
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


def _packed(values: IntArray) -> dict[str, Any]:
    return {_PACKED: pack_whole(values), _COUNT: values.size}


# -- reading ----------------------------------------------------------------------------------------------------


def result_from_json(text: str, where: str) -> Result:
    """Read what `result_to_json` wrote; `where` names it in errors.

    Raises:
        MismatchError: as `Result.from_json`.
    """
    document = _parsed(text, where)
    _check_version(document, where)
    has_columns = _is_packed(document.get("placement"))
    values = _checked_values(document | {n: None for n in _COLUMNS if has_columns and n in document}, where)
    try:
        graph = graph_from_document(document["graph"], where)
        cluster = Cluster.from_dict(document["cluster"])
        values |= _unpacked_answer(document, graph, cluster) if has_columns else {}
        for kind, there in (("graph", graph), ("cluster", cluster)):
            _check_same(kind, values, there.name, there.hash, where)
        own = {name: values[name] for name in _OWN}
        return Result(graph=graph, cluster=cluster, answer=_answer(values), **own)
    except (GraphError, ClusterError, MismatchError, StrategyError) as error:
        said = str(error)
        raise MismatchError(said if said.startswith((f"{where}: ", f"{where} ")) else f"{where}: {said}") from None


def _parsed(text: str, where: str) -> Any:
    def no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise MismatchError(f"{where} has {twice!r} twice in one object; each op is placed exactly once.")
        return result

    def refuse(word: str) -> NoReturn:
        raise MismatchError(f"{where} holds {word}, which is not a JSON number.")

    if not text.strip():
        raise MismatchError(f"{where} is not a saved result: it is empty; save it again.")
    try:
        return json.loads(text, object_pairs_hook=no_doubles, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise MismatchError(
            f"{where} is not a saved result: {error.msg} at line {error.lineno}, column {error.colno}; save it again."
        ) from None
    except RecursionError:
        raise MismatchError(f"{where} nests too deeply to be a result.") from None
    except MismatchError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise MismatchError(f"{where} holds a number that cannot be read: {plain_reason(error)}.") from None


def _check_version(document: Any, where: str) -> None:
    """Raises: MismatchError: no result, or one of another version; says how to make it again."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise MismatchError(
            f'{where} is not a saved result; expected "schema": "{SCHEMA}", as `placement optimize -o` writes.'
        )
    version, command = document.get("version"), document.get("command")
    if type(version) is not int or version != VERSION:
        how = show_line(command) if isinstance(command, str) and command else "placement optimize GRAPH -o FILE"
        raise MismatchError(
            f"{where} is of version {short(version)}, and this release reads version {VERSION}; make it again: {how}"
        )


def _checked_values(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of a file's fields, as they are annotated; every field is there, and no other.

    Raises:
        MismatchError: names the field.
    """
    hints = {"schema": str, "version": int, **_TYPES, **dict.fromkeys(_PROBLEM, Any)}
    for key in hints:
        if key not in document:
            raise MismatchError(f"{where} has no {key!r}; it is not a complete result.")
    found = values_of(hints, document, where, MismatchError, ())
    for key in ("seed", "solve_time_s"):
        if not 0 <= found[key] < math.inf:
            raise MismatchError(f"{where} has {key} = {short(found[key])}; expected a finite number, 0 or more.")
    return found


def _check_same(kind: str, document: Mapping[str, Any], name: str, hash_: str, where: str) -> None:
    """Raises: MismatchError: the graph or the cluster is not the one that the result names."""
    there, named = document[f"{kind}_hash"], document[f"{kind}_name"]
    if there != hash_:
        raise MismatchError(
            f"{where} is a placement for another {kind}: it names the {kind} with hash {short(there)}, "
            f"but the {kind} in the file has hash {hash_[:12]}."
        )
    if named != name:
        raise MismatchError(f"{where} names {kind} {short(named)}, but the {kind} in the file is {name!r}.")


def _answer(document: Mapping[str, Any]) -> Answer | None:
    """The answer, None if there is no placement.

    Raises:
        MismatchError: one without some of its figures, or figures without it.
    """
    given, method = {name: document[name] for name in _ANSWER}, document["method"]
    if not document["feasible"] and document["placement"] is None:
        for name, value in given.items():
            if value is not None:
                raise MismatchError(f"an infeasible result has no {name}; that of {method!r} has one.")
        return None
    for name, hint in _ANSWER.items():
        if given[name] is None and NoneType not in get_args(hint):
            raise MismatchError(f"a feasible result has {name}; that of {method!r} has none.")
    if not document["feasible"] and document["reason"] is None:
        raise MismatchError(f"an infeasible result says why; that of {method!r} has no reason.")
    if given["transfer_order"] is not None:
        given["transfer_order"] = list(given["transfer_order"])
    given["order"] = {device: list(ops) for device, ops in given["order"].items()}
    return Answer(**given)


def _is_packed(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_PACKED, _COUNT}


def _unpacked_answer(document: Mapping[str, Any], graph: OpGraph, cluster: Cluster) -> dict[str, Any]:
    """The columns by names, as a file without them has these.

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
    rows = None
    if document["transfer_order"] is not None:
        rows = _unpacked(document, "transfer_order", None)
        if len(rows) % 2:
            raise MismatchError("the packed transfer_order has half a transfer; save the result again.")
        rows = rows.reshape(-1, 2)
        _check_range(rows[:, 0], graph.n_tensors, "transfer_order", f"tensors of graph {graph.name!r}")
        _check_range(rows[:, 1], len(cluster.devices), "transfer_order", f"devices of cluster {cluster.name!r}")
    names = [device.name for device in cluster.devices]
    return {
        "placement": dict(zip(graph.op_names, (names[device] for device in devices.tolist()), strict=True)),
        "order": order_by_device(graph, cluster, devices, order.tolist()),
        "transfer_order": None if rows is None else named_transfers(graph, cluster, rows),
    }


def _unpacked(document: Mapping[str, Any], field: str, count: int | None) -> IntArray:
    packed: Any = document.get(field)
    if not _is_packed(packed):
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
