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

from env.cluster import UNLIMITED_BYTES, Cluster
from env.simulation.timeline import memory_steps
from graphs.arrays import BoolArray
from graphs.formatting import counted
from graphs.opgraph import FloatArray, IntArray, OpGraph, Phase
from placement.report.layout import layered_layout
from placement.results.result import Result, schedule_of
from placement.solving.methods import SINGLE

if TYPE_CHECKING:
    from env.problem import Problem
    from env.simulation.simulator import Schedule, Score
    from placement.comparing.methods import Comparison

MAX_OPS = 60_000  # that have a bar each, of some 60 bytes
MAX_BARS = 40_000  # of a graph with more
MAX_TRANSFERS = 20_000  # of a schedule
MAX_DEVICES = 64
MAX_SCHEDULES = 4  # besides one device
MAX_SCHEDULED_OPS = 120_000  # ops x schedules on one page: some 25 bytes each
MAX_MEMORY_STEPS = 4000  # per device; beyond, the largest of each stretch
MAX_ALL_STEPS = 32_000  # of all devices
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
    room = MAX_SCHEDULED_OPS // problem.graph.n_ops
    distinct = [r for r in comparison.results if r.answer is not None and r.method not in comparison.ties]
    best = distinct[: max(1, min(MAX_SCHEDULES, room))]
    single = [r for r in distinct[len(best) :] if r.method == SINGLE and room > 1]
    return [Shown(result, *schedule_of(problem, result)) for result in best + single]


def drawn_of(problem: Problem, shown: Sequence[Shown]) -> Drawn:
    """Parts drawn one by one, by the best schedule."""
    busy_s = shown[0].score.busy_s if shown else np.zeros(problem.cluster.n_devices)
    return Drawn.of(problem.graph, problem.cluster, [one.schedule for one in shown], busy_s)


def page_data(problem: Problem, shown: Sequence[Shown], drawn: Drawn, lower_bound_s: float) -> dict[str, Any]:
    """Everything the page draws, as JSON values."""
    graph, cluster = problem.graph, problem.cluster
    return {
        "lower_bound_s": lower_bound_s,
        "devices": _devices(cluster, drawn),
        "links": [{"source": cluster.links[i].src, "target": cluster.links[i].dst} for i in drawn.links.tolist()],
        "routes": drawn.routes(cluster),
        "n_ops": graph.n_ops,
        "ops": _ops(graph, problem.mean_op_s, drawn),
        "graph": _drawing(problem, shown, drawn),
        "schedules": [_schedule(problem, one, drawn) for one in shown],
    }


def _devices(cluster: Cluster, drawn: Drawn) -> list[dict[str, Any]]:
    """Devices on the page, and last all others as one, where there are any."""
    devices = (cluster.devices[d] for d in drawn.devices.tolist())
    result: list[dict[str, Any]] = [
        {
            "name": d.name,
            "kind": d.kind,
            "model": d.model,
            "capacity": d.usable_bytes if d.memory_bytes < UNLIMITED_BYTES else None,
        }
        for d in devices
    ]
    if drawn.has_others:
        count = cluster.n_devices - len(result)
        name = counted(count, "other device")
        result.append({"name": name, "kind": "mean, largest peak", "model": "", "capacity": None})
    return result


def _ops(graph: OpGraph, weight: NDArray[np.float64], drawn: Drawn) -> dict[str, Any]:
    """Names and the colour groups: kinds by total time, modules by first appearance, phases."""
    kinds = [kind.removeprefix("aten.") for kind in graph.kinds]
    kind_names, kind_of = _top(kinds, weight)
    module_names, module_of = _modules(graph, weight)
    ops = drawn.op.tolist()
    modules = {name: i for i, name in enumerate(dict.fromkeys(graph.modules[i] for i in ops))}
    all_kinds = {name: i for i, name in enumerate(dict.fromkeys(kinds[i] for i in ops))}
    phases = [phase for phase in Phase if np.any(graph.phase == phase)]
    return {
        "names": drawn.names(graph),
        "kinds": list(all_kinds),
        "kind": _packed([all_kinds[kinds[i]] for i in ops], "<u4"),
        "modules": list(modules),
        "module": _packed([modules[graph.modules[i]] for i in ops], "<u4"),
        "colours": {
            "kind": {"names": kind_names, "of": _packed(kind_of[drawn.op], "u1")},
            "module": {"names": module_names, "of": _packed(module_of[drawn.op], "u1")},
            "phase": {
                "names": [p.name.lower() for p in phases],
                "of": _packed(_positions(graph.phase[drawn.op], phases), "u1"),
            },
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
    """Merge neighbours in topological order until at most `count` groups are left."""
    ordered = sorted(parts, key=lambda key: int(place[parts[key]].min()))
    size = -(-len(ordered) // count)
    runs = [ordered[k : k + size] for k in range(0, len(ordered), size)]
    names = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1].rpartition('.')[2]}" for run in runs]
    return {name: [i for part in run for i in parts[part]] for name, run in zip(names, runs, strict=True)}


def _positions(values: IntArray, among: Sequence[int]) -> IntArray:
    return np.searchsorted(np.array(among), values).astype(np.int64)


def _drawing(problem: Problem, shown: Sequence[Shown], drawn: Drawn) -> dict[str, Any]:
    """The layered drawing; a node's device under a schedule is where most of its time is spent."""
    layout = layered_layout(problem.graph)
    n_nodes, n_devices = len(layout.x), len(drawn.devices) + drawn.has_others
    everyone = np.arange(problem.graph.n_ops)
    devices = []
    for one in shown:
        spent = problem.seconds_of(one.schedule.device) + 1e-30  # ops that take no time still have a device
        where = layout.node_of * n_devices + drawn.place[one.schedule.device]
        per_node = np.bincount(where, spent, n_nodes * n_devices)
        devices.append(_packed(per_node.reshape(n_nodes, n_devices).argmax(axis=1), "<u2"))
    representative = np.full(n_nodes, -1)
    representative[layout.node_of[::-1]] = everyone[::-1]
    return {
        "x": _packed(layout.x, "<f4"),
        "y": _packed(layout.y, "<f4"),
        "weight": _packed(np.bincount(layout.node_of, problem.mean_op_s, n_nodes), "<f4"),
        "members": _packed(np.bincount(layout.node_of, minlength=n_nodes), "<u4"),
        "op": _packed(drawn.bar_of[representative], "<u4"),
        "source": _packed(layout.source, "<u4"),
        "target": _packed(layout.target, "<u4"),
        "device": devices,
    }


def _schedule(problem: Problem, one: Shown, drawn: Drawn) -> dict[str, Any]:
    schedule, score = one.schedule, one.score
    n_devices = len(drawn.devices) + drawn.has_others
    source, target = drawn.place[schedule.transfer_source], drawn.place[schedule.transfer_target]
    sent = problem.graph.tensor_bytes[schedule.transfer_tensor]
    start_s, end_s = drawn.spans(schedule)
    shown = drawn.transfers(schedule)
    producer = drawn.bar_of[problem.graph.tensor_producer[schedule.transfer_tensor[shown]]]
    busy_s, peak_bytes = score.busy_s[drawn.devices], score.peak_bytes[drawn.devices]
    steps = memory_steps(problem, schedule)
    most = MAX_ALL_STEPS // n_devices
    memory = [_steps(steps[d][0], steps[d][1], most) for d in drawn.devices.tolist()]
    if drawn.has_others:
        others = np.setdiff1d(np.arange(len(drawn.place)), drawn.devices)
        busy_s = np.append(busy_s, score.busy_s[others].mean())
        peak_bytes = np.append(peak_bytes, score.peak_bytes[others].max())
        memory.append(_steps(np.zeros(1), np.zeros(1, dtype=np.int64)))
    return {
        "method": one.result.method,
        "step_time_s": score.step_time_s,
        "busy_s": busy_s.tolist(),
        "peak_bytes": peak_bytes.tolist(),
        "link_bytes": score.link_bytes[drawn.links].tolist(),
        "link_busy_s": link_seconds(problem.cluster, schedule)[drawn.links].tolist(),
        "pair_bytes": np.bincount(source * n_devices + target, sent, n_devices * n_devices).tolist(),
        "op_counts": np.bincount(drawn.place[schedule.device], minlength=n_devices).tolist(),
        "n_transfers": len(schedule.transfer_tensor),
        "device": _packed(drawn.place[schedule.device[drawn.op]], "<u2"),
        "start": _packed(start_s, "<f4"),
        "end": _packed(end_s, "<f4"),
        "producer": _packed(producer, "<u4"),
        "bytes": _packed(sent[shown], "<f4"),
        "source": _packed(source[shown], "<u2"),
        "target": _packed(target[shown], "<u2"),
        "sent": _packed(schedule.transfer_start_s[shown], "<f4"),
        "arrived": _packed(schedule.transfer_end_s[shown], "<f4"),
        "memory": memory,
    }


def _steps(time_s: NDArray[np.float64], used_bytes: IntArray, most: int = MAX_MEMORY_STEPS) -> dict[str, str]:
    """A step function, with the largest of each stretch where it has too many steps to draw."""
    most = min(most, MAX_MEMORY_STEPS)
    if len(time_s) > most:
        first = np.linspace(0, len(time_s), most, endpoint=False).astype(np.int64)
        time_s, used_bytes = time_s[first], np.maximum.reduceat(used_bytes, first)
    return {"time": _packed(time_s, "<f4"), "bytes": _packed(used_bytes, "<f8")}


def _packed(values: ArrayLike, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode("ascii")


# -- parts that are drawn one by one ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Drawn:
    """Drawn parts of a graph and a cluster (n ops, b bars, D devices, p of them on the page).

    Attributes:
        bar_of: int64 [n], the bar of the timeline that stands for each op.
        op: int64 [b], the op that gives a bar its name and colours: of several the one that takes the most time.
        count: int64 [b], ops of each.
        devices: int64 [p], by number; all, or those that compute the most.
        place: int64 [D], where a device is on the page; others are at p, together.
        links: int64, numbers of those between the devices on the page.
    """

    bar_of: IntArray
    op: IntArray
    count: IntArray
    devices: IntArray
    place: IntArray
    links: IntArray

    @staticmethod
    def of(graph: OpGraph, cluster: Cluster, schedules: Sequence[Schedule], busy_s: FloatArray) -> Drawn:
        """Drawn parts for schedules, best first, or none; ``busy_s`` float64 [D] tells devices that compute."""
        n_devices = cluster.n_devices
        devices, links = np.arange(n_devices), np.arange(len(cluster.links))
        if n_devices > MAX_DEVICES:
            devices = np.sort(np.argsort(-busy_s, kind="stable")[:MAX_DEVICES])
            there = devices.tolist()
            links = np.array(sorted({i for a in there for b in there if a != b for i in cluster.routes[a, b].links}))
        place = np.full(n_devices, len(devices))
        place[devices] = np.arange(len(devices))
        bar_of, op = np.arange(graph.n_ops), np.arange(graph.n_ops)
        if graph.n_ops > MAX_OPS and schedules:
            bar_of, op = together(schedules[0], place < len(devices), MAX_BARS)
        elif graph.n_ops > MAX_OPS:  # nothing fits, and there is no timeline
            bar_of = bar_of * MAX_BARS // graph.n_ops
            op = np.searchsorted(bar_of, np.arange(MAX_BARS))
        return Drawn(bar_of, op, np.bincount(bar_of), devices, place, links.astype(np.int64))

    @property
    def has_others(self) -> bool:
        """True if some devices are not on the page."""
        return len(self.place) > len(self.devices)

    def names(self, graph: OpGraph) -> list[str]:
        """Names of bars: one op's, and how many more there are."""
        rows = zip(self.op.tolist(), self.count.tolist(), strict=True)
        return [graph.op_names[i] + (f" and {count - 1:,} more" if count > 1 else "") for i, count in rows]

    def spans(self, schedule: Schedule) -> tuple[FloatArray, FloatArray]:
        """float64 [b] each: when bars begin and end; equal on devices that are not on the page."""
        start_s, end_s = np.full(len(self.op), np.inf), np.zeros(len(self.op))
        np.minimum.at(start_s, self.bar_of, schedule.op_start_s)
        np.maximum.at(end_s, self.bar_of, schedule.op_end_s)
        is_there = self.place[schedule.device[self.op]] < len(self.devices)
        return start_s, np.where(is_there, end_s, start_s)

    def transfers(self, schedule: Schedule) -> IntArray:
        """Numbers of those between devices on the page, in their order; where there are many, the longest."""
        ends = self.place[np.stack([schedule.transfer_source, schedule.transfer_target])]
        there = np.flatnonzero((ends < len(self.devices)).all(axis=0))
        if len(there) <= MAX_TRANSFERS:
            return there
        seconds = (schedule.transfer_end_s - schedule.transfer_start_s)[there]
        return np.sort(there[np.argsort(-seconds, kind="stable")[:MAX_TRANSFERS]])

    def routes(self, cluster: Cluster) -> list[list[int]]:
        """Links on the page from each device to each, as the page numbers both."""
        number = {link: k for k, link in enumerate(self.links.tolist())}
        ends = [*self.devices.tolist(), *([None] if self.has_others else [])]
        return [
            [] if a is None or b is None or a == b else [number[link] for link in cluster.routes[a, b].links]
            for a in ends
            for b in ends
        ]

    def left_out(self, graph: OpGraph, schedules: Sequence[Schedule]) -> str:
        """Parts that are not drawn one by one, in words; "" where all are."""
        texts = []
        if len(self.op) < graph.n_ops:
            texts.append(f"{len(self.op):,} bars for {graph.n_ops:,} ops")
        most = max((len(schedule.transfer_tensor) for schedule in schedules), default=0)
        if most > MAX_TRANSFERS:
            texts.append(f"of up to {most:,} transfers the {MAX_TRANSFERS:,} that take the longest")
        if self.has_others:
            texts.append(f"of {len(self.place):,} devices the {len(self.devices)} that compute the most")
        return "; ".join(texts)


def together(schedule: Schedule, is_drawn: BoolArray, most: int) -> tuple[IntArray, IntArray]:
    """At most so many bars, and one more for each device, of ops that follow one another on a device.

    A bar has no idle time in it but what is too short to be seen. All ops of a device that is not drawn are one bar;
    ``is_drawn``: bool [D].

    Returns:
        int64 [n], the bar of each op, and int64 [b], the op of each bar that takes the most time.
    """
    n, device = len(schedule.device), schedule.device
    start_s, end_s = schedule.op_start_s, schedule.op_end_s
    order = np.lexsort((end_s, start_s, device))
    is_first, gap_s = np.ones(n, dtype=np.bool_), np.zeros(n)
    is_first[1:] = device[order][1:] != device[order][:-1]
    gap_s[1:] = start_s[order][1:] - end_s[order][:-1]
    # Gaps of a device add up to a step at most, so no more than half of the bars begin after one as long as this.
    visible_s = 2 * int(is_first.sum()) * float(end_s.max(initial=0.0)) / most
    can_begin = is_drawn[device[order]]
    is_first |= can_begin & (gap_s > visible_s)
    place = np.arange(n) - np.maximum.accumulate(np.where(is_first, np.arange(n), 0))
    is_first |= can_begin & (place % -(-2 * n // most) == 0)
    bar_of = np.empty(n, dtype=np.int64)
    bar_of[order] = np.cumsum(is_first) - 1
    longest = np.lexsort((start_s - end_s, bar_of))  # by bar, and in it the longest first
    return bar_of, longest[np.searchsorted(bar_of[longest], np.arange(int(is_first.sum())))]


def link_seconds(cluster: Cluster, schedule: Schedule) -> FloatArray:
    """float64 [L]: how long transfers are on each link, one after the other."""
    n_devices, result = cluster.n_devices, np.zeros(len(cluster.links))
    pair = schedule.transfer_source * n_devices + schedule.transfer_target
    seconds: Any = np.bincount(pair, schedule.transfer_end_s - schedule.transfer_start_s, n_devices * n_devices)
    for both in np.flatnonzero(seconds).tolist():
        source, target = divmod(both, n_devices)
        result[list(cluster.routes[source, target].links)] += seconds[both]
    return result
