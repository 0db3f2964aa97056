"""Results as JSON: one flat object, every field of a `Result` and of its `Answer` under its own name.

A file also holds the graph and the cluster; of a strategy, the graph, placement and order are packed columns. A field
may hold what its annotation says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from env.cluster import Cluster
from graphs.disk import plain_reason
from graphs.errors import ClusterError, GraphError, MismatchError, StrategyError
from graphs.files import graph_from_document, graph_to_json, packed_graph
from graphs.transforms.strategy import NONE, Strategy
from placement.results.alternatives import Alternative, KeptTo, Rung
from placement.results.answer import Answer
from placement.results.packed_answer import is_packed, packed_answer, unpacked_answer, without_answer_columns
from placement.results.result import Result

SCHEMA = "placement.result"
VERSION = 14
_PROBLEM = ("graph", "cluster")
_ANSWER = tuple(f.name for f in fields(Answer))
_DECISIONS = "decisions"  # which files of versions 9 to 13 have
_OWN = tuple(f.name for f in fields(Result) if f.name not in (*_PROBLEM, "answer"))
_NAMES = ("graph_name", "graph_hash", "cluster_name", "cluster_hash")
_TYPES: dict[str, Any] = {
    **dict.fromkeys(_NAMES, str),
    "feasible": bool,
    "stack": str,
    **{name: hint for name, hint in get_type_hints(Result).items() if name in _OWN},
    **{name: hint | None for name, hint in get_type_hints(Answer).items()},
}
# Fields that earlier versions did not have yet, with their values there; `source_hash` is that of the graph.
_ADDED: dict[int, dict[str, Any]] = {
    2: {"budget_s": None, "evaluations": None, "interrupted": False, "transfer_order": None, "note": ""},
    3: {"strategy": NONE},
    4: {"alternatives": [], "bounds": {}},
    5: {"stage_cuts": []},
    6: {},  # the device of an alternative
    7: {"samples": None, "tokens": None, "flops": {}, "checked": ""},
    8: {"compiled_s": None, "stack": "eager"},
    9: {},
    10: {"ladder": []},
    11: {"spent": "", "why": ""},
    12: {"kept_to": None},
    13: {"limit_s": None},
    14: {"not_run": "", "model_hash": ""},
}
_WORDS: dict[Any, str] = {
    str: "a string",
    Strategy: "the text of a strategy",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Mapping[str, str]: "an object of strings",
    Mapping[str, int]: "an object of whole numbers",
    Mapping[str, float]: "an object of numbers",
    Mapping[str, Sequence[str]]: "an object of lists of strings",
    Sequence[str]: "a list of strings",
    Sequence[tuple[str, int, str]]: "a list of [op, number, device]",
    Sequence[Alternative]: f"a list of objects with {', '.join(f.name for f in fields(Alternative))}",
    KeptTo: f"an object with {', '.join(f.name for f in fields(KeptTo))}",
    Sequence[Rung]: f"a list of objects with {', '.join(f.name for f in fields(Rung))}",
}


# -- writing ----------------------------------------------------------------------------------------------------


def result_to_dict(result: Result) -> dict[str, Any]:
    """JSON-ready fields without the graph and the cluster themselves, only their names and hashes."""
    return {name: _plain(getattr(result, name)) for name in _TYPES}


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
        head |= {"graph": packed_graph(result.graph), **packed_answer(result)}
    text = json.dumps({**head, "cluster": result.cluster.to_dict()}, indent=1, allow_nan=False)
    if "graph" in head:
        return f"{text}\n"
    return f'{text[:-2]},\n "graph": {graph_to_json(result.graph).strip()}\n}}\n'


def _plain(value: Any) -> Any:
    """Any mapping or record as a dict, any sequence as a list."""
    if isinstance(value, Strategy):
        return value.text
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


# -- reading ----------------------------------------------------------------------------------------------------


def result_from_json(text: str, where: str) -> Result:
    """Read what `result_to_json` wrote, also in earlier versions; `where` names it in errors.

    Raises:
        MismatchError: as `Result.from_json`.
    """
    document = _completed(_parsed(text, where), where)
    has_columns = is_packed(document)
    _check_fields(without_answer_columns(document) if has_columns else document, where)
    try:
        graph = graph_from_document(document["graph"], where)
        cluster = Cluster.from_dict(document["cluster"])
        document |= unpacked_answer(document, graph, cluster) if has_columns else {}
    except (GraphError, ClusterError, MismatchError) as error:
        raise MismatchError(str(error) if str(error).startswith(f"{where}: ") else f"{where}: {error}") from None
    _check_same("graph", document, graph.name, graph.hash, where)
    _check_same("cluster", document, cluster.name, cluster.hash, where)
    try:
        own = {name: document[name] for name in _OWN}
        own["stage_cuts"] = tuple(own["stage_cuts"])
        own["strategy"] = Strategy.parse(own["strategy"])
        for name, kind in (("alternatives", Alternative), ("ladder", Rung)):
            own[name] = tuple(kind(**{**one, "strategy": Strategy.parse(one["strategy"])}) for one in own[name])
        own["kept_to"] = None if own["kept_to"] is None else KeptTo(**own["kept_to"])
        return Result(graph=graph, cluster=cluster, answer=_answer(document), **own)
    except (GraphError, MismatchError, StrategyError) as error:
        raise MismatchError(f"{where}: {error}") from None


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


def _completed(document: Any, where: str) -> dict[str, Any]:
    """The document with what its version did not have yet."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise MismatchError(
            f'{where} is not a saved result; expected "schema": "{SCHEMA}", as `placement optimize -o` writes.'
        )
    version = document.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise MismatchError(
            f"{where} is of version {_short(version)}; this release reads versions 1 to {VERSION}, make it again."
        )
    added: dict[str, Any] = {}
    for later in range(version + 1, VERSION + 1):
        added |= _ADDED[later]
    if version < 3:
        added["source_hash"] = document.get("graph_hash")
    completed = {**added, **document}
    if version < 14:
        completed.pop(_DECISIONS, None)
    if version < 6 and isinstance(completed.get("alternatives"), list):
        completed["alternatives"] = [
            {"device": "", **one} if isinstance(one, dict) else one for one in completed["alternatives"]
        ]
    return completed


def _check_fields(document: Mapping[str, Any], where: str) -> None:
    """Every field is there, of its type, and no other is."""
    for key in (*_TYPES, *_PROBLEM):
        if key not in document:
            raise MismatchError(f"{where} has no {key!r}; it is not a complete result.")
    for key, value in document.items():
        if key not in (*_TYPES, *_PROBLEM, "schema", "version"):
            raise MismatchError(f"{where} has unknown field {key!r}; known: {', '.join((*_TYPES, *_PROBLEM))}.")
        if key in _TYPES and not _fits(value, _TYPES[key]):
            raise MismatchError(f"{where} has {key} = {_short(value)}; expected {_words(_TYPES[key])}.")
    for key in ("seed", "solve_time_s"):
        if not 0 <= document[key] < math.inf:
            raise MismatchError(f"{where} has {key} = {_short(document[key])}; expected a finite number, 0 or more.")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of an annotated type, all the way down; a strategy is its text."""
    if hint is Strategy:
        return isinstance(value, str)
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return (
            isinstance(value, dict) and value.keys() == hints.keys() and all(_fits(value[k], hints[k]) for k in hints)
        )
    if isinstance(hint, type):
        return type(value) in ((int, float) if hint is float else (hint,))
    parts = get_args(hint)
    if get_origin(hint) is UnionType:
        return any(_fits(value, part) for part in parts)
    if get_origin(hint) is Mapping:
        return isinstance(value, dict) and all(_fits(item, parts[1]) for item in value.values())
    if get_origin(hint) is Sequence:
        return isinstance(value, list) and all(_fits(item, parts[0]) for item in value)
    return isinstance(value, list) and len(value) == len(parts) and all(map(_fits, value, parts))


def _words(hint: Any) -> str:
    """A type, for people."""
    known = next(_WORDS[part] for part in (hint, *get_args(hint)) if part in _WORDS)
    return f"{known} or null" if NoneType in get_args(hint) else known


def _check_same(kind: str, document: Mapping[str, Any], name: str, hash_: str, where: str) -> None:
    """The graph or the cluster is the one that the result names."""
    there = document[f"{kind}_hash"]
    if there != hash_:
        raise MismatchError(
            f"{where} is a placement for another {kind}: it names the {kind} with hash {_short(there)}, "
            f"but the {kind} in the file has hash {hash_[:12]}."
        )
    if document[f"{kind}_name"] != name:
        raise MismatchError(
            f"{where} names {kind} {_short(document[f'{kind}_name'])}, but the {kind} in the file is {name!r}."
        )


def _answer(document: Mapping[str, Any]) -> Answer | None:
    """The answer, None if there is no placement.

    Raises:
        MismatchError: one without some of its figures, or figures without it.
    """
    given = {name: document[name] for name in _ANSWER}
    if not document["feasible"] and document["placement"] is None:
        for name, value in given.items():
            if value is not None:
                raise MismatchError(f"an infeasible result has no {name}; that of {document['method']!r} has one.")
        return None
    for name, hint in get_type_hints(Answer).items():
        if given[name] is None and not _fits(None, hint):
            raise MismatchError(f"a feasible result has {name}; that of {document['method']!r} has none.")
    if not document["feasible"] and document["reason"] is None:
        raise MismatchError(f"an infeasible result says why; that of {document['method']!r} has no reason.")
    if given["transfer_order"] is not None:
        given["transfer_order"] = [tuple(transfer) for transfer in given["transfer_order"]]
    return Answer(**given)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
