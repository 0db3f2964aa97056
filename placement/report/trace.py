"""A schedule as a Chrome trace: https://ui.perfetto.dev and chrome://tracing open it.

Format: "Trace Event Format" (Google, 2016). Times are microseconds; devices and links are tracks.
"""

from __future__ import annotations

import json
from os import PathLike
from typing import Any

from env.problem import Problem
from env.simulator import Schedule
from env.timeline import memory_steps
from graphs.disk import write_atomically
from graphs.opgraph import Phase
from placement.report.schedules import schedule_of
from placement.result import Result

DEVICES, LINKS = 1, 2  # process ids
Event = dict[str, Any]


def write_trace(result: Result, path: str | PathLike[str]) -> None:
    """Write the schedule of a feasible result.

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
            "step_time_s": schedule.step_time_s,
        },
        "traceEvents": [
            *_names(problem),
            *_ops(problem, schedule),
            *_transfers(problem, schedule),
            *_memory(problem, schedule),
        ],
    }
    write_atomically(path, json.dumps(document, separators=(",", ":"), allow_nan=False))


def _names(problem: Problem) -> list[Event]:
    events: list[Event] = []
    links = [f"{link.src} → {link.dst}" for link in problem.cluster.links]
    devices = [f"{d.name} ({d.model or d.kind})" for d in problem.cluster.devices]
    for pid, name, tracks in ((DEVICES, "devices", devices), (LINKS, "links", links)):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
        for tid, track in enumerate(tracks):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": track}})
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    return events


def _ops(problem: Problem, schedule: Schedule) -> list[Event]:
    graph = problem.graph
    rows = zip(
        schedule.device.tolist(), (schedule.op_start_s * 1e6).tolist(), (schedule.op_end_s * 1e6).tolist(), strict=True
    )
    return [
        {
            "ph": "X",
            "pid": DEVICES,
            "tid": device,
            "ts": start,
            "dur": end - start,
            "name": graph.op_names[i],
            "cat": graph.kinds[i],
            "args": {
                "kind": graph.kinds[i],
                "module": graph.modules[i],
                "phase": Phase(int(graph.phase[i])).name.lower(),
                "flops": float(graph.flops[i]),
            },
        }
        for i, (device, start, end) in enumerate(rows)
    ]


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
