"""Most that placement could gain: total work over the critical path."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from env.checking.reference import simulate_reference
from env.cluster import UNLIMITED_BYTES, Cluster, Device
from env.plan import Plan
from env.problem import Problem
from graphs.opgraph import OpGraph

REFERENCE_CLUSTER = "1xV100"  # its GPU is the device that `reference_device` means


@dataclass(frozen=True)
class Potential:
    """The limit of what any number of devices of one kind could make of a graph.

    Attributes:
        work_s: all op times together: the step time on one device.
        critical_path_s: the longest path of op times, transfers free: no number of devices is faster.
    """

    work_s: float
    critical_path_s: float

    @property
    def best_speedup(self) -> float:
        """No placement on such devices is more times faster than one of them."""
        return self.work_s / self.critical_path_s if self.critical_path_s > 0 else 1.0


def reference_device() -> Device:
    """The GPU of `REFERENCE_CLUSTER`."""
    return next(device for device in Cluster.preset(REFERENCE_CLUSTER).devices if device.kind == "gpu")


def peak_bytes(graph: OpGraph, device: Device) -> int:
    """The largest memory of one step in program order on one device like this one, whatever memory and pins are."""
    alone = Cluster(device.name, (dataclasses.replace(device, memory_bytes=UNLIMITED_BYTES),))
    everything = Plan(np.zeros(graph.n_ops, np.int64), np.arange(graph.n_ops, dtype=np.float64))
    return simulate_reference(graph, alone, everything).peak_bytes[0]  # in plain Python: nothing to compile


def potential(graph: OpGraph, device: Device) -> Potential:
    """Work and critical path of a graph on devices like this one, memory not considered.

    Raises:
        InfeasibleError: an op may not run on this kind of device.
    """
    op_s = Problem(graph, Cluster(device.name, (device,))).op_s[:, 0].tolist()
    producer, consumer, _ = graph.edge_list
    order = np.argsort(producer, kind="stable")
    ptr = np.searchsorted(producer[order], np.arange(graph.n_ops + 1)).tolist()
    successors = consumer[order].tolist()
    start_s, longest_s = [0.0] * graph.n_ops, 0.0
    for i in graph.topological_order.tolist():
        end_s = start_s[i] + op_s[i]
        longest_s = max(longest_s, end_s)
        for c in successors[ptr[i] : ptr[i + 1]]:
            start_s[c] = max(start_s[c], end_s)
    return Potential(sum(op_s), longest_s)
