"""The data behind the page: schedules, memory, traffic and the drawn graph as plain JSON values.

Number arrays travel as base64 of little-endian bytes; the page reads them as typed arrays. Times are seconds.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from env.cluster import UNLIMITED_BYTES
from env.simulation.timeline import memory_steps
from graphs.opgraph import IntArray, OpGraph, Phase
from placement.report.layout import layered_layout
from placement.solving.methods import SINGLE
from placement.solving.result import schedule_of

if TYPE_CHECKING:
    from env.problem import Problem
    from env.simulation.simulator import Schedule, Score
    from placement.comparison import Comparison
    from placement.solving.result import Result

MAX_SCHEDULES = 4  # besides one device
MAX_SCHEDULED_OPS = 120_000  # ops x schedules on one page: some 25 bytes each
MAX_MEMORY_STEPS = 4000  # per device; beyond, the largest of each stretch
MAX_KINDS = 10
FEW_MODULES = 24  # beyond, modules are not split further
MAX_MODULES = 160


@dataclass(frozen=True, eq=False)
class Shown:
    """One schedule of the page."""

    result: Result
    score: Score
    schedule: Schedule


def shown_schedules(problem: Problem, comparison: Comparison) -> list[Shown]:
    """The best distinct schedules, best first, and one device: what the page has room for."""
    room = max(1, min(MAX_SCHEDULES, MAX_SCHEDULED_OPS // problem.graph.n_ops))
    distinct = [r for r in comparison.results if r.answer is not None and r.method not in comparison.ties]
    chosen = distinct[:room] + [r for r in distinct[room:] if r.method == SINGLE]
    return [Shown(result, *schedule_of(problem, result)) for result in chosen]


def page_data(problem: Problem, shown: Sequence[Shown], lower_bound_s: float) -> dict[str, Any]:
    """Everything the page draws, as JSON values."""
    graph, cluster = problem.graph, problem.cluster
    return {
        "lower_bound_s": lower_bound_s,
        "devices": [
            {
                "name": d.name,
                "kind": d.kind,
                "model": d.model,
                "capacity": d.usable_bytes if d.memory_bytes < UNLIMITED_BYTES else None,
            }
            for d in cluster.devices
        ],
        "links": [{"source": link.src, "target": link.dst} for link in cluster.links],
        "routes": [
            list(cluster.routes[a, b].links) if a != b else []
            for a in range(cluster.n_devices)
            for b in range(cluster.n_devices)
        ],
        "ops": _ops(graph, problem.mean_op_s),
        "graph": _drawing(problem, shown),
        "schedules": [_schedule(problem, one) for one in shown],
    }


def _ops(graph: OpGraph, weight: NDArray[np.float64]) -> dict[str, Any]:
    """Names and the colour groups: kinds by total time, modules by first appearance, phases."""
    kinds = [kind.removeprefix("aten.") for kind in graph.kinds]
    kind_names, kind_of = _top(kinds, weight)
    module_names, module_of = _modules(graph, weight)
    modules = {name: i for i, name in enumerate(dict.fromkeys(graph.modules))}
    all_kinds = {name: i for i, name in enumerate(dict.fromkeys(kinds))}
    phases = [phase for phase in Phase if np.any(graph.phase == phase)]
    return {
        "names": list(graph.op_names),
        "kinds": list(all_kinds),
        "kind": _packed([all_kinds[kind] for kind in kinds], "<u4"),
        "modules": list(modules),
        "module": _packed([modules[module] for module in graph.modules], "<u4"),
        "colours": {
            "kind": {"names": kind_names, "of": _packed(kind_of, "u1")},
            "module": {"names": module_names, "of": _packed(module_of, "u1")},
            "phase": {"names": [p.name.lower() for p in phases], "of": _packed(_positions(graph.phase, phases), "u1")},
        },
    }


def _top(kinds: Sequence[str], weight: NDArray[np.float64]) -> tuple[list[str], IntArray]:
    """The kinds that take the most time, the rest as one group ``"other"``, which comes last."""
    names, of = np.unique(np.array(kinds, dtype=object).astype(str), return_inverse=True)
    total = np.bincount(of, weight, len(names))
    ranked = np.argsort(-total, kind="stable")
    if len(names) <= MAX_KINDS:
        kept, rest = ranked, ranked[:0]
    else:
        kept, rest = ranked[: MAX_KINDS - 1], ranked[MAX_KINDS - 1 :]
    group = np.empty(len(names), dtype=np.int64)
    group[kept] = np.arange(len(kept))
    group[rest] = len(kept)
    return [str(names[i]) for i in kept] + (["other"] if len(rest) else []), group[of]


def _modules(graph: OpGraph, weight: NDArray[np.float64]) -> tuple[list[str], IntArray]:
    """Module paths in topological order, the one that takes the most time split further while there are few.

    Modules of one parent that consist of the same parts (the layers of a transformer) are split together or not at all.
    """
    paths = [module.split(".") for module in graph.modules]
    place = np.argsort(graph.topological_order)
    groups = {"": list(range(graph.n_ops))}
    final: set[str] = set()

    def parts_of(name: str) -> dict[str, list[int]]:
        depth = len(name.split(".")) + 1 if name else 1
        parts: dict[str, list[int]] = {}
        for i in groups[name]:
            parts.setdefault(".".join(paths[i][:depth]), []).append(i)
        return parts

    while len(final) < len(groups) < FEW_MODULES:
        name = max(groups.keys() - final, key=lambda key: (weight[groups[key]].sum(), key))
        shape = {part.removeprefix(name) for part in parts_of(name)}
        siblings = {
            key: parts_of(key) for key in groups.keys() - final if key.rpartition(".")[0] == name.rpartition(".")[0]
        }
        alike = {key: parts for key, parts in siblings.items() if {p.removeprefix(key) for p in parts} == shape}
        split = {part: found for parts in alike.values() for part, found in parts.items()}
        room = MAX_MODULES - len(groups) + len(alike)
        if len(split) > room and len(alike) == 1:
            split = _ranges(split, place, room)
            final |= split.keys()
        if split.keys() == alike.keys() or len(split) > room:
            final |= alike.keys()
            continue
        groups = {key: found for key, found in groups.items() if key not in alike} | split
        final |= split.keys() & alike.keys()  # ops of the module itself
    of = np.empty(graph.n_ops, dtype=np.int64)
    names = sorted(groups, key=lambda key: int(place[groups[key]].min()))
    for g, name in enumerate(names):
        of[groups[name]] = g
    return [name or "(no module)" for name in names], of


def _ranges(parts: Mapping[str, list[int]], place: IntArray, count: int) -> dict[str, list[int]]:
    """Neighbours in topological order taken together, so that no more than `count` are left."""
    ordered = sorted(parts, key=lambda key: int(place[parts[key]].min()))
    size = -(-len(ordered) // count)
    runs = [ordered[k : k + size] for k in range(0, len(ordered), size)]
    names = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1].rpartition('.')[2]}" for run in runs]
    return {name: [i for part in run for i in parts[part]] for name, run in zip(names, runs, strict=True)}


def _positions(values: IntArray, among: Sequence[int]) -> IntArray:
    return np.searchsorted(np.array(among), values).astype(np.int64)


def _drawing(problem: Problem, shown: Sequence[Shown]) -> dict[str, Any]:
    """The layered drawing; a node's device under a schedule is where most of its time is spent."""
    layout = layered_layout(problem.graph)
    n_nodes, n_devices = len(layout.x), problem.cluster.n_devices
    everyone = np.arange(problem.graph.n_ops)
    devices = []
    for one in shown:
        spent = problem.op_s[everyone, one.schedule.device] + 1e-30  # ops that take no time still have a device
        per_node = np.bincount(layout.node_of * n_devices + one.schedule.device, spent, n_nodes * n_devices)
        devices.append(_packed(per_node.reshape(n_nodes, n_devices).argmax(axis=1), "<u2"))
    representative = np.full(n_nodes, -1)
    representative[layout.node_of[::-1]] = everyone[::-1]
    return {
        "x": _packed(layout.x, "<f4"),
        "y": _packed(layout.y, "<f4"),
        "weight": _packed(np.bincount(layout.node_of, problem.mean_op_s, n_nodes), "<f4"),
        "members": _packed(np.bincount(layout.node_of, minlength=n_nodes), "<u4"),
        "op": _packed(representative, "<u4"),
        "source": _packed(layout.source, "<u4"),
        "target": _packed(layout.target, "<u4"),
        "device": devices,
    }


def _schedule(problem: Problem, one: Shown) -> dict[str, Any]:
    schedule, score = one.schedule, one.score
    n_devices = problem.cluster.n_devices
    sent = problem.graph.tensor_bytes[schedule.transfer_tensor]
    pair = schedule.transfer_source * n_devices + schedule.transfer_target
    return {
        "method": one.result.method,
        "step_time_s": score.step_time_s,
        "busy_s": score.busy_s.tolist(),
        "peak_bytes": score.peak_bytes.tolist(),
        "link_bytes": score.link_bytes.tolist(),
        "pair_bytes": np.bincount(pair, sent, n_devices * n_devices).tolist(),
        "device": _packed(schedule.device, "<u2"),
        "start": _packed(schedule.op_start_s, "<f4"),
        "end": _packed(schedule.op_end_s, "<f4"),
        "producer": _packed(problem.graph.tensor_producer[schedule.transfer_tensor], "<u4"),
        "bytes": _packed(sent, "<f4"),
        "source": _packed(schedule.transfer_source, "<u2"),
        "target": _packed(schedule.transfer_target, "<u2"),
        "sent": _packed(schedule.transfer_start_s, "<f4"),
        "arrived": _packed(schedule.transfer_end_s, "<f4"),
        "memory": [_steps(time_s, used) for time_s, used in memory_steps(problem, schedule)],
    }


def _steps(time_s: NDArray[np.float64], used_bytes: IntArray) -> dict[str, str]:
    """A step function, with the largest of each stretch where it has too many steps to draw."""
    if len(time_s) > MAX_MEMORY_STEPS:
        first = np.linspace(0, len(time_s), MAX_MEMORY_STEPS, endpoint=False).astype(np.int64)
        time_s, used_bytes = time_s[first], np.maximum.reduceat(used_bytes, first)
    return {"time": _packed(time_s, "<f4"), "bytes": _packed(used_bytes, "<f8")}


def _packed(values: ArrayLike, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode("ascii")
