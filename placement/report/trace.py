"""A schedule, and what was measured of it, as a Chrome trace: https://ui.perfetto.dev and chrome://tracing open it.

Format: "Trace Event Format" (Google, 2016). Times are microseconds; devices and links are tracks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from env.problem import Problem
from env.simulation.simulator import Schedule
from env.simulation.timeline import memory_steps
from graphs.disk import write_atomically
from graphs.opgraph import Phase
from placement.results.result import Result, schedule_of

if TYPE_CHECKING:
    from placement.measuring.runs.steps import RecordedStep, Span, Timeline

DEVICES, LINKS, MEASURED = 1, 2, 3  # process ids
Event = dict[str, Any]


def write_trace(result: Result, path: str | PathLike[str], measured: Timeline | None = None) -> None:
    """Write the schedule of a feasible result, and what was measured of it.

    Raises:
        MismatchError: the result is infeasible and so has no schedule.
        OSError: the file cannot be written; an older file of that name is left as it was.
    """
    problem = Problem(result.graph, result.cluster)
    _, schedule = schedule_of(problem, result)
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "graph": problem.graph.name,
            "cluster": problem.cluster.name,
            "method": result.method,
            "predicted_step_s": schedule.step_time_s,
            **({} if measured is None else {"measured_step_s": measured.step_s}),
        },
        "traceEvents": [
            *_names(problem, () if measured is None else measured.tracks),
            *_ops(problem, schedule),
            *_transfers(problem, schedule),
            *_memory(problem, schedule),
            *(() if measured is None else _measured(problem, measured.tracks)),
        ],
    }
    write_atomically(path, json.dumps(document, separators=(",", ":"), allow_nan=False))


def _names(problem: Problem, measured: Sequence[tuple[str, RecordedStep]]) -> Iterator[Event]:
    """Names of processes and tracks, from top to bottom."""
    links = [f"{link.src} → {link.dst}" for link in problem.cluster.links]
    devices = [f"{d.name} ({d.model or d.kind})" for d in problem.cluster.devices]
    processes = {DEVICES: ("predicted devices", devices), LINKS: ("predicted links", links)}
    if measured:
        processes = {MEASURED: ("measured devices", [name for name, _ in measured]), **processes}
    for position, (pid, (name, tracks)) in enumerate(processes.items()):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": position}}
        for tid, track in enumerate(tracks):
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": track}}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _ops(problem: Problem, schedule: Schedule) -> list[Event]:
    rows = zip(
        schedule.device.tolist(), (schedule.op_start_s * 1e6).tolist(), (schedule.op_end_s * 1e6).tolist(), strict=True
    )
    return [
        {"ph": "X", "pid": DEVICES, "tid": device, "ts": start, "dur": end - start, **_about(problem, i)}
        for i, (device, start, end) in enumerate(rows)
    ]


def _about(problem: Problem, op: int) -> Event:
    """Name and details of a slice that is an op."""
    graph = problem.graph
    return {
        "name": graph.op_names[op],
        "cat": graph.kinds[op],
        "args": {
            "kind": graph.kinds[op],
            "module": graph.modules[op],
            "phase": Phase(int(graph.phase[op])).name.lower(),
            "flops": float(graph.flops[op]),
        },
    }


def _transfers(problem: Problem, schedule: Schedule) -> list[Event]:
    """A slice on every link of the route, and an arrow from the producer through the first link to the consumer."""
    graph, cluster = problem.graph, problem.cluster
    events: list[Event] = []
    for x, tensor in enumerate(schedule.transfer_tensor.tolist()):
        source, target = int(schedule.transfer_source[x]), int(schedule.transfer_target[x])
        start, end = schedule.transfer_start_s[x] * 1e6, schedule.transfer_end_s[x] * 1e6
        producer = int(graph.tensor_producer[tensor])
        name, size_bytes = graph.op_names[producer], int(graph.tensor_bytes[tensor])
        ends = f"{cluster.devices[source].name} → {cluster.devices[target].name}"
        links = cluster.routes[source, target].links
        slice_ = {"ph": "X", "pid": LINKS, "ts": start, "dur": end - start, "name": name, "cat": "transfer"}
        events += [{**slice_, "tid": link, "args": {"route": ends, "bytes": size_bytes}} for link in links]
        readers = [c for c in graph.consumers_of(tensor).tolist() if schedule.device[c] == target]
        first = min(readers, key=lambda c: float(schedule.op_start_s[c]))
        arrow = {"name": "tensor", "cat": "transfer", "id": x}
        middle = (schedule.op_start_s[producer] + schedule.op_end_s[producer]) / 2 * 1e6
        events.append({**arrow, "ph": "s", "pid": DEVICES, "tid": source, "ts": middle})
        if links:
            events.append({**arrow, "ph": "t", "pid": LINKS, "tid": links[0], "ts": start})
        at = float(schedule.op_start_s[first]) * 1e6
        events.append({**arrow, "ph": "f", "bp": "e", "pid": DEVICES, "tid": target, "ts": at})
    return events


def _memory(problem: Problem, schedule: Schedule) -> list[Event]:
    return [
        {"ph": "C", "pid": DEVICES, "name": f"memory {device.name}", "ts": at, "args": {"bytes": used}}
        for device, (time_s, used_bytes) in zip(problem.cluster.devices, memory_steps(problem, schedule), strict=True)
        for at, used in zip((time_s * 1e6).tolist(), used_bytes.tolist(), strict=True)
    ]


def _measured(problem: Problem, tracks: Sequence[tuple[str, RecordedStep]]) -> Iterator[Event]:
    """A slice for the step of each process, in which lie those of what it did."""
    for tid, (_, step) in enumerate(tracks):
        on_track = {"ph": "X", "pid": MEASURED, "tid": tid}
        yield {**on_track, **_during(step), "name": "step", "cat": "step"}
        for span in step.spans:
            peer = "" if span.peer is None else tracks[span.peer][0]
            about = _about(problem, span.op) if span.what == "op" else _about_other(problem, span, peer)
            yield {**on_track, **_during(span), **about}


def _during(stretch: Span | RecordedStep) -> Event:
    return {"ts": stretch.start_s * 1e6, "dur": (stretch.end_s - stretch.start_s) * 1e6}


def _about_other(problem: Problem, span: Span, peer: str) -> Event:
    """Name and details of a slice that is not an op."""
    if span.what == "update":
        return {"name": "optimizer", "cat": "update"}
    made = problem.graph.op_names[span.op] if span.op >= 0 else "an input"
    return {"name": f"{span.what} {made}", "cat": span.what, "args": {"peer": peer}}
