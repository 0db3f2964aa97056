"""`Result`: the answer of one method on one problem, the same fields for every method, as JSON both ways."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import numpy as np

from env.cluster import Cluster
from env.problem import THROUGHPUT, scope
from graphs.disk import plain_reason, read_text, write_atomically
from graphs.errors import BoundError, ClusterError, GraphError, MismatchError
from graphs.files import graph_from_document, graph_to_json
from graphs.formatting import format_bytes, format_seconds
from graphs.opgraph import FloatArray, IntArray, OpGraph
from graphs.show import show, show_line
from placement.inputs.cluster_json import cluster_from_dict, cluster_to_dict

SCHEMA = "placement.solving.result"
VERSION = 2
OWN_ORDER = "own"  # the value of `Result.priority` when the method itself said in which order ops run
BOUND_TOLERANCE = 1e-6  # relative: by so much rounding may lift a lower bound above a value that was reached


@dataclass(frozen=True)
class Result:
    """What a method found, and everything needed to replay it. Fields from `placement` to `gap` are None if infeasible.

    Attributes:
        graph, cluster: the problem.
        method: the name asked for.
        chosen: the method whose placement this is; differs from `method` for methods that search.
        seed: of everything random in the method.
        objective: what was minimised: ``"latency"``, the makespan of one step, or ``"throughput"``, the largest load of
            a device or link in steady state.
        budget_s: seconds the method was allowed to search; None if it does not search or had no such limit.
        evaluations: placements it scored; None if it does not search.
        interrupted: it was asked to stop early (Ctrl-C), and this is the best it had.
        priority: how devices chose among ready ops (docs/score.md), or ``"own"``: in an order the method gave.
        feasible: it fits memory and pins.
        reason: None, or the sentence that says why it is not feasible.
        lower_bound_s: no placement can have a smaller objective.
        placement: device name of each op, by op name.
        order: op names in the order each device ran them, by device name; run so, the step repeats exactly.
        transfer_order: None where transfers go first come, first served; else the whole is a fixed sequence
            (docs/score.md), and these are its transfers as (producing op, number among its outputs, receiving device).
        objective_s: value of the objective, seconds.
        step_time_s: makespan of one step.
        throughput: steps per second: one after the other for objective latency, in steady state for throughput; None
            for a step of no time.
        peak_bytes: peak memory of each device, by device name; for objective throughput that of the steady state.
        bytes_moved: bytes sent from device to device in one step.
        gap: (objective_s - lower_bound_s) / objective_s; 0 proves the placement optimal.
        note: what the method has to say that a placement cannot (replication factors, for one), or "".
        versions: of Python and the packages that made it.
        command: the command line that made it, or "".
        solve_time_s: how long the method took; two results that differ only here are equal.
    """

    graph: OpGraph
    cluster: Cluster
    method: str
    chosen: str
    seed: int
    objective: str
    budget_s: float | None
    evaluations: int | None
    interrupted: bool
    priority: str
    feasible: bool
    reason: str | None
    lower_bound_s: float
    placement: Mapping[str, str] | None
    order: Mapping[str, Sequence[str]] | None
    transfer_order: Sequence[tuple[str, int, str]] | None
    objective_s: float | None
    step_time_s: float | None
    throughput: float | None
    peak_bytes: Mapping[str, int] | None
    bytes_moved: int | None
    gap: float | None
    versions: Mapping[str, str]
    note: str = ""
    command: str = field(default="", compare=False)
    solve_time_s: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        if not self.feasible:
            if self.reason is None:
                raise MismatchError(f"an infeasible result says why; that of {self.method!r} has no reason.")
            return
        for name in _ANSWER:
            if getattr(self, name) is None:
                raise MismatchError(f"a feasible result has {name}; that of {self.method!r} has none.")
        self._check_placement()

    # -- identity -----------------------------------------------------------------------------------------

    @property
    def graph_name(self) -> str:
        return self.graph.name

    @property
    def graph_hash(self) -> str:
        return self.graph.hash

    @property
    def cluster_name(self) -> str:
        return self.cluster.name

    @property
    def cluster_hash(self) -> str:
        return self.cluster.hash

    # -- as arrays ----------------------------------------------------------------------------------------

    def device_numbers(self) -> IntArray:
        """int64 [n]: number of each op's device in the cluster.

        Raises:
            MismatchError: the result is infeasible and so has no placement.
        """
        placement, index = self._answered(self.placement), self.cluster.device_index
        return np.array([index[placement[op]] for op in self.graph.op_names], dtype=np.int64)

    def order_numbers(self) -> FloatArray:
        """float64 [n]: an explicit order for the simulator, position of each op in the order of its device.

        Raises:
            MismatchError: the result is infeasible and so has no order.
        """
        position = {op: k for ops in self._answered(self.order).values() for k, op in enumerate(ops)}
        return np.array([position[op] for op in self.graph.op_names], dtype=np.float64)

    def transfer_numbers(self) -> IntArray | None:
        """int64 [x, 2]: (tensor, receiving device) of a fixed sequence, for the simulator; None without one."""
        if self.transfer_order is None:
            return None
        first, device_index = self.graph.output_ptr, self.cluster.device_index
        op_index = {op: i for i, op in enumerate(self.graph.op_names)}
        rows = [(first[op_index[op]] + number, device_index[device]) for op, number, device in self.transfer_order]
        return np.array(rows, dtype=np.int64).reshape(-1, 2)

    # -- for people ---------------------------------------------------------------------------------------

    def summary(self) -> str:
        """A few lines for people."""
        how = show(self.method) + ("" if self.chosen == self.method else f" (chose {show(self.chosen)})")
        head = f"{show(self.graph.name)} on {show(self.cluster.name)}, method {how}, seed {self.seed}"
        if not self.feasible or self.step_time_s is None or self.gap is None or self.bytes_moved is None:
            return f"{head}\ninfeasible: {show_line(self.reason or '')}"
        used = [d.name for d in self.cluster.devices if self._answered(self.order).get(d.name)]
        peaks = ", ".join(
            f"{show(name)} {format_bytes(size)}" for name, size in self._answered(self.peak_bytes).items()
        )
        lines = [
            head,
            f"step time    {format_seconds(self.step_time_s)} on {len(used)} of {self.cluster.n_devices} devices",
            f"lower bound  {format_seconds(self.lower_bound_s)}, gap {self.gap:.1%} {scope(self.objective)}",
            f"peak memory  {peaks}",
            f"moved        {format_bytes(self.bytes_moved)} between devices",
        ]
        if self.objective == THROUGHPUT:
            lines.insert(1, f"largest load {format_seconds(self._answered(self.objective_s))} in steady state")
        if self.note:
            lines.append(f"note         {show_line(self.note)}")
        if self.interrupted:
            lines.append("interrupted: the best found so far")
        return "\n".join(lines)

    # -- JSON ---------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields without the graph and the cluster themselves, only their names and hashes."""
        record = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("graph", "cluster")}
        for key in ("placement", "peak_bytes", "versions"):
            record[key] = None if record[key] is None else dict(record[key])
        if self.order is not None:
            record["order"] = {device: list(ops) for device, ops in self.order.items()}
        if self.transfer_order is not None:
            record["transfer_order"] = [list(transfer) for transfer in self.transfer_order]
        names = {key: getattr(self, key) for key in ("graph_name", "graph_hash", "cluster_name", "cluster_hash")}
        return {**names, **record}

    def to_json(self) -> str:
        """The result with its graph and cluster as JSON text; `from_json` of it equals this result."""
        head = {"schema": SCHEMA, "version": VERSION, **self.to_dict(), "cluster": cluster_to_dict(self.cluster)}
        text = json.dumps(head, indent=1, allow_nan=False)
        return f'{text[:-2]},\n "graph": {graph_to_json(self.graph).strip()}\n}}\n'

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file, atomically.

        Raises:
            OSError: the folder does not exist or cannot be written.
        """
        write_atomically(path, self.to_json())

    @staticmethod
    def from_json(text: str, where: str = "the text") -> Result:
        """Read what `to_json` wrote; `where` names it in errors.

        Raises:
            MismatchError: not a result, or not one of its own graph and cluster: another hash, or a missing, unknown
                or doubly placed op; the message names it.
        """
        return _result_from_document(_parse(text, where), where)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Result:
        """Read a file that `save` wrote.

        Raises:
            GraphFileError: the file cannot be read.
            MismatchError: as `from_json`.
        """
        return Result.from_json(read_text(path), os.fspath(path))

    def _answered(self, value: Any) -> Any:
        if value is None:
            raise MismatchError(f"{self.method} found no feasible placement, so there is none to use: {self.reason}")
        return value

    def _check_placement(self) -> None:
        placement, order, devices = (
            self._answered(self.placement),
            self._answered(self.order),
            self.cluster.device_index,
        )
        ops = {op: i for i, op in enumerate(self.graph.op_names)}
        for op in self.graph.op_names:
            if op not in placement:
                raise MismatchError(f"op {op!r} of graph {self.graph.name!r} is not placed; every op needs a device.")
        for op, device in placement.items():
            if op not in ops:
                raise MismatchError(f"op {op!r} is placed, but graph {self.graph.name!r} has no such op.")
            if device not in devices:
                raise MismatchError(
                    f"op {op!r} is placed on {device!r}, but cluster {self.cluster.name!r} has {', '.join(devices)}."
                )
        seen: set[str] = set()
        for device, listed in order.items():
            for op in listed:
                if op in seen:
                    raise MismatchError(f"op {op!r} stands twice in the order; each op runs once.")
                seen.add(op)
                if placement.get(op) != device:
                    raise MismatchError(
                        f"op {op!r} is in the order of {device!r}, but placed on {placement.get(op)!r}."
                    )
        for op in self.graph.op_names:
            if op not in seen:
                raise MismatchError(f"op {op!r} is in no device's order; every op has to run.")
        for op, number, device_name in self.transfer_order or ():
            if op not in ops or device_name not in devices:
                raise MismatchError(
                    f"transfer_order sends an output of {op!r} to {device_name!r}; expected an op of graph "
                    f"{self.graph.name!r} and a device of cluster {self.cluster.name!r}."
                )
            outputs = int(self.graph.output_ptr[ops[op] + 1] - self.graph.output_ptr[ops[op]])
            if not 0 <= number < outputs:
                raise MismatchError(f"transfer_order names output {number} of op {op!r}, which has {outputs}.")


_ANSWER = ("placement", "order", "objective_s", "step_time_s", "peak_bytes", "bytes_moved", "gap")


def order_by_device(
    graph: OpGraph, cluster: Cluster, device: IntArray, sequence: Iterable[int]
) -> dict[str, list[str]]:
    """`Result.order` from the device number of each op and all op numbers in the order they ran."""
    result: dict[str, list[str]] = {d.name: [] for d in cluster.devices}
    lists = list(result.values())
    for op in sequence:
        lists[device[op]].append(graph.op_names[op])
    return result


def named_transfers(graph: OpGraph, cluster: Cluster, transfer_order: IntArray) -> list[tuple[str, int, str]]:
    """`Result.transfer_order` from (tensor, receiving device), int64 [x, 2]."""
    producer, first = graph.tensor_producer, graph.output_ptr
    return [
        (graph.op_names[producer[t]], int(t - first[producer[t]]), cluster.devices[target].name)
        for t, target in transfer_order.tolist()
    ]


def measured_note(measured_s: float, result: Result) -> str:
    """`Result.note` of a placement that was really run."""
    predicted = format_seconds(result.step_time_s or 0.0)
    return "; ".join([f"measured {format_seconds(measured_s)}, predicted {predicted}", *filter(None, [result.note])])


def relative_gap(objective_s: float, lower_bound_s: float) -> float:
    """(objective - bound) / objective; 0 for a step of no time, and where the two differ by rounding only."""
    if math.isclose(objective_s, lower_bound_s, rel_tol=1e-9):
        return 0.0
    return (objective_s - lower_bound_s) / objective_s


def agreed_bound_s(lower_bound_s: float, objective_s: float, source: str) -> float:
    """A lower bound that is at most the value that was reached; above it by rounding only, it is that value.

    Solvers prove in units and with tolerances of their own, the coarsest of them to one part in a million.

    Args:
        source: who gave the bound, for the message.

    Raises:
        BoundError: the bound is above the value by more than that.
    """
    if lower_bound_s > objective_s * (1 + BOUND_TOLERANCE):
        raise BoundError(
            f"{source} gave a lower bound of {lower_bound_s:.9g} s, but a placement takes {objective_s:.9g} s, so one "
            "of the two is wrong; please report it with the graph and the cluster."
        )
    return min(lower_bound_s, objective_s)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a result looks like."""
    found = {"python": platform.python_version()}
    for package in ("placement", "numpy", "numba", "torch"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # running from a source tree, or without torch
            continue
    return found


# -- reading ----------------------------------------------------------------------------------------------------


def _parse(text: str, where: str) -> Any:
    def no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise MismatchError(f"{where} has {twice!r} twice in one object; each op is placed exactly once.")
        return result

    def refuse(word: str) -> NoReturn:
        raise MismatchError(f"{where} holds {word}, which is not a JSON number.")

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


def _result_from_document(document: Any, where: str) -> Result:
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise MismatchError(
            f'{where} is not a saved result; expected "schema": "{SCHEMA}", as `placement optimize -o` writes.'
        )
    if document.get("version") != VERSION:
        raise MismatchError(
            f"{where} is of version {document.get('version')!r}; this release reads version {VERSION}, make it again."
        )
    names = [f.name for f in fields(Result)]
    extra = ["schema", "version", "graph_name", "graph_hash", "cluster_name", "cluster_hash"]
    for key in (*names, *extra):
        if key not in document:
            raise MismatchError(f"{where} has no {key!r}; it is not a complete result.")
    for key, value in document.items():
        if key not in names and key not in extra:
            raise MismatchError(f"{where} has unknown field {key!r}; known: {', '.join(names)}.")
        if key in _TYPES and not _is(value, _TYPES[key]):
            raise MismatchError(f"{where} has {key} = {_short(value)}; expected {_TYPES[key]}.")
    try:
        graph = graph_from_document(document["graph"], where)
        cluster = cluster_from_dict(document["cluster"])
    except (GraphError, ClusterError) as error:
        raise MismatchError(f"{where}: {error}") from None
    for kind, there, here in (
        ("graph", document["graph_hash"], graph.hash),
        ("cluster", document["cluster_hash"], cluster.hash),
    ):
        if there != here:
            raise MismatchError(
                f"{where} is a placement for another {kind}: it names the {kind} with hash {_short(there)}, "
                f"but the {kind} in the file has hash {here[:12]}."
            )
    for kind, there, here in (
        ("graph", document["graph_name"], graph.name),
        ("cluster", document["cluster_name"], cluster.name),
    ):
        if there != here:
            raise MismatchError(f"{where} names {kind} {_short(there)}, but the {kind} in the file is {here!r}.")
    for key in ("seed", "solve_time_s"):
        if not 0 <= document[key] < math.inf:
            raise MismatchError(f"{where} has {key} = {_short(document[key])}; expected a finite number, 0 or more.")
    try:
        values = {**{key: document[key] for key in names}, "graph": graph, "cluster": cluster}
        if document["transfer_order"] is not None:
            values["transfer_order"] = [tuple(transfer) for transfer in document["transfer_order"]]
        return Result(**values)
    except MismatchError as error:
        raise MismatchError(f"{where}: {error}") from None


_TYPES = {
    **dict.fromkeys(("method", "chosen", "objective", "priority", "note", "command"), "a string"),
    **dict.fromkeys(("graph_name", "graph_hash", "cluster_name", "cluster_hash"), "a string"),
    **dict.fromkeys(("lower_bound_s", "solve_time_s"), "a number"),
    **dict.fromkeys(("objective_s", "step_time_s", "throughput", "gap", "budget_s"), "a number or null"),
    "seed": "a whole number",
    "bytes_moved": "a whole number or null",
    "evaluations": "a whole number or null",
    "feasible": "true or false",
    "interrupted": "true or false",
    "reason": "a string or null",
    "versions": "an object of strings",
    "placement": "an object of strings or null",
    "order": "an object of lists of strings or null",
    "transfer_order": "a list of [op, number, device] or null",
    "peak_bytes": "an object of whole numbers or null",
}


def _is(value: Any, expected: str) -> bool:
    if expected.endswith(" or null"):
        return value is None or _is(value, expected.removesuffix(" or null"))
    if expected == "a string":
        return isinstance(value, str)
    if expected == "a whole number":
        return type(value) is int
    if expected == "a number":
        return type(value) in (int, float)
    if expected == "true or false":
        return isinstance(value, bool)
    if expected == "a list of [op, number, device]":
        return isinstance(value, list) and all(
            isinstance(row, list) and [type(item) for item in row] == [str, int, str] for row in value
        )
    if not isinstance(value, dict):
        return False
    if expected == "an object of strings":
        return all(isinstance(item, str) for item in value.values())
    if expected == "an object of whole numbers":
        return all(type(item) is int for item in value.values())
    return all(isinstance(item, list) and all(isinstance(op, str) for op in item) for item in value.values())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
