"""Loads in plain Python (docs/score.md, "Throughput"): a second opinion that shares no code with `env.simulation`."""

from __future__ import annotations

from dataclasses import dataclass

from env.checking.reference import ReferenceResult, device_numbers, simulate_reference, transfer_seconds
from env.checking.reference_memory import kept_bytes, memory_intervals, memory_numbers, steady_memory
from env.checking.reference_times import op_times
from env.cluster import Cluster
from env.plan import Plan
from graphs.opgraph import OpGraph, Tensor


@dataclass(frozen=True)
class ReferenceLoads:
    """Load of every device and link by one step in steady state (D devices, L links).

    Attributes:
        device_s: D numbers, seconds.
        link_s: L numbers, seconds; 0 for links that are not exclusive, and under blocking communication.
        held_bytes: D numbers, memory in steady state; of devices on one memory at its owner, and 0 at the others.
        value_s: the largest load.
        bytes_moved: bytes sent from device to device, each tensor once per receiver.
        feasible: no device holds more than its memory.
    """

    device_s: tuple[float, ...]
    link_s: tuple[float, ...]
    held_bytes: tuple[int, ...]
    value_s: float
    bytes_moved: int
    feasible: bool


def reference_loads(
    graph: OpGraph, cluster: Cluster, plan: Plan, step: ReferenceResult | None = None
) -> ReferenceLoads:
    """The loads of a plan.

    Args:
        graph, cluster: any; pins and colocation are not looked at.
        plan: where every op runs; its order counts for memory only.
        step: one step of it, if it is known already.

    Raises:
        MismatchError: the plan is not one device of the cluster per op of the graph.
    """
    numbers = device_numbers(graph, cluster, plan)
    ops, tensors = graph.records()
    place = dict(zip(graph.op_names, numbers, strict=True))
    device_s = [0.0 for _ in cluster.devices]
    link_s = [0.0 for _ in cluster.links]
    memory, kept = memory_numbers(cluster.devices), [0 for _ in cluster.devices]
    moved = 0
    op_s = op_times(ops, cluster.devices, numbers, graph.origin.stack)
    of_ops = kept_bytes(ops, tensors, graph.origin.stack)
    for d in range(len(cluster.devices)):
        own = [i for i, number in enumerate(numbers) if number == d]
        device_s[d] = sum(op_s[i] for i in own)
        kept[memory[d]] += sum(of_ops.standing[i] for i in own)
    for tensor in tensors:
        home = place[tensor.producer]
        receivers = {place[name] for name in tensor.consumers} - {home}
        moved += tensor.bytes * len(receivers)
        if cluster.communication == "blocking":
            device_s[home] += max((_sending_s(tensor, cluster, home, d) for d in receivers), default=0.0)
            for d in receivers:
                device_s[d] += _receiving_s(tensor, cluster, home, d)
        else:
            for d in receivers:
                for number in cluster.routes[home, d].links:
                    if cluster.links[number].exclusive:
                        link_s[number] += transfer_seconds(tensor, cluster, home, d)
    value_s = max(device_s + link_s)
    step = step or simulate_reference(graph, cluster, plan)
    times = numbers, memory, step.op_start_s, step.op_end_s
    intervals = memory_intervals(ops, tensors, of_ops.coming, *times, step.transfers)
    held = steady_memory(kept, intervals, *times, value_s)
    return ReferenceLoads(
        device_s=tuple(device_s),
        link_s=tuple(link_s),
        held_bytes=held,
        value_s=value_s,
        bytes_moved=moved,
        feasible=all(
            size <= device.memory_bytes - device.reserved_bytes
            for size, device in zip(held, cluster.devices, strict=True)
        ),
    )


def _sending_s(tensor: Tensor, cluster: Cluster, source: int, target: int) -> float:
    """Seconds for which blocking communication keeps the sender; none if the device's own link is free."""
    links = cluster.routes[source, target].links
    if not links or cluster.links[links[0]].src != cluster.devices[source].name:
        return 0.0
    return _blocked_s(tensor, cluster, source, target)


def _receiving_s(tensor: Tensor, cluster: Cluster, source: int, target: int) -> float:
    """As `_sending_s`, for the receiver."""
    links = cluster.routes[source, target].links
    if not links or cluster.links[links[-1]].dst != cluster.devices[target].name:
        return 0.0
    return _blocked_s(tensor, cluster, source, target)


def _blocked_s(tensor: Tensor, cluster: Cluster, source: int, target: int) -> float:
    """A measured time is that of one link; otherwise the transfer time of the route."""
    return transfer_seconds(tensor, cluster, source, target) if tensor.transfer_s is None else tensor.transfer_s
