"""Steady-state loads of devices and links: the objective ``throughput`` (docs/score.md, "Throughput").

Many steps follow each other through the cluster, so a placement yields one result per largest load, whatever the order
of ops within a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from env.simulation.charges import Charges

if TYPE_CHECKING:
    from env.plan import Plan
    from env.problem import Problem
    from env.simulation.steady_memory import Steady
    from graphs.opgraph import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Loads:
    """The loads of one plan (D devices, L links), in seconds per step.

    Attributes:
        problem: graph and cluster.
        plan: where every op runs; its order counts for `steady` only.
        device_s: float64 [D], computing, and under blocking communication also sending and receiving.
        link_s: float64 [L], transfers over each exclusive link; 0 under blocking communication.
        bytes_moved: bytes sent from device to device in one step, each tensor once per receiver.
    """

    problem: Problem
    plan: Plan
    device_s: FloatArray
    link_s: FloatArray
    bytes_moved: int

    @cached_property
    def value_s(self) -> float:
        """The largest load, the objective."""
        return float(max(self.device_s.max(), self.link_s.max(initial=0.0)))

    @cached_property
    def steady(self) -> Steady:
        """Memory in steady state under the order of the plan. O(one step + i log i)."""
        from env.simulation.simulator import Simulator  # loads the compiler: only when memory is asked for
        from env.simulation.steady_memory import steady_memory

        _, schedule = Simulator(self.problem).schedule(self.plan)
        return steady_memory(self.problem, schedule, self.value_s)

    @property
    def held_bytes(self) -> IntArray:
        """int64 [D]: that of `steady`."""
        return self.steady.held_bytes

    @property
    def feasible(self) -> bool:
        """No device holds more than its memory."""
        return self.steady.fits


def loads(problem: Problem, plan: Plan) -> Loads:
    """The loads of a plan. O(n + e + transfers)."""
    placed = plan.device
    graph, charges = problem.graph, Charges(problem)
    tensor, source, target = _transfers(problem, placed)
    device_s: FloatArray = np.zeros(problem.cluster.n_devices)
    np.add.at(device_s, placed, problem.seconds_of(placed))
    link_s = np.zeros(len(problem.cluster.links))
    if charges.blocking:
        busy_s = charges.busy_s(tensor, source, target)
        np.add.at(device_s, target, busy_s * charges.receiver_pays[source, target])
        sent_s = np.zeros(graph.n_tensors)
        np.maximum.at(sent_s, tensor, busy_s * charges.sender_pays[source, target])
        np.add.at(device_s, placed[graph.tensor_producer], sent_s)
    else:
        ptr, links = problem.route
        pair = source * problem.cluster.n_devices + target
        seconds = charges.transfer_s(tensor, source, target)
        for p in np.unique(pair).tolist():
            link_s[links[ptr[p] : ptr[p + 1]]] += seconds[pair == p].sum()
        link_s[[not link.exclusive for link in problem.cluster.links]] = 0.0
    return Loads(problem, plan, device_s, link_s, int(graph.tensor_bytes[tensor].sum()))


def _transfers(problem: Problem, placed: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Tensor, source and target of every transfer: one for each other device with a consumer."""
    producer, consumer, tensor = problem.graph.edge_list
    n_devices = problem.cluster.n_devices
    remote = placed[producer] != placed[consumer]
    key = np.unique(tensor[remote] * n_devices + placed[consumer[remote]])
    moved, target = key // n_devices, key % n_devices
    return moved, placed[problem.graph.tensor_producer[moved]], target
