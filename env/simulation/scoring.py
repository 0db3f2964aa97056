"""Scores of plans: steady-state loads, the objective ``throughput``, and `Scorer`, whichever the objective.

Throughput (docs/score.md, "Throughput"): many steps follow each other through the cluster, so a placement yields one
result per largest load, whatever the order of ops within a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from env.objectives import THROUGHPUT
from env.plan import Plan
from env.problem import Problem

if TYPE_CHECKING:
    from env.plan import Plan
    from env.problem import Problem
    from env.simulation.simulator import Simulator
    from env.simulation.steady_memory import Steady
    from graphs.opgraph import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Charges:
    """Charges for moving a tensor from device a to device b, by who pays (D devices).

    Under blocking communication a tensor from a to b keeps both ends busy for the time of the transfer (where the graph
    has it measured: of one link), but costs nothing at an end whose own link of the route is free.

    Attributes:
        problem: the graph and the cluster.
    """

    problem: Problem

    @property
    def blocking(self) -> bool:
        """True if devices stop computing to communicate."""
        return self.problem.cluster.is_blocking

    @cached_property
    def sender_pays(self) -> FloatArray:
        """float64 [D, D]: 1 where the first link of the route from a to b is the sender's own, else 0."""
        return self._pays(first=True)

    @cached_property
    def receiver_pays(self) -> FloatArray:
        """float64 [D, D]: 1 where the last link of the route from a to b is the receiver's own, else 0."""
        return self._pays(first=False)

    def _pays(self, first: bool) -> FloatArray:
        cluster, n = self.problem.cluster, self.problem.cluster.n_devices
        end_of = [cluster.device_index.get(link.src if first else link.dst, -1) for link in cluster.links]
        ptr, links = self.problem.route
        pair = np.flatnonzero(np.diff(ptr))
        own = pair // n if first else pair % n
        result: FloatArray = np.zeros(n * n)
        result[pair] = np.array(end_of, dtype=np.int64)[links[ptr[pair] if first else ptr[pair + 1] - 1]] == own
        return result.reshape(n, n)

    def busy_s(self, tensor: IntArray, source: IntArray, target: IntArray) -> FloatArray:
        """float64 [x]: seconds an end of the route is busy with each transfer; measured times are per link."""
        graph, problem = self.problem.graph, self.problem
        modelled = problem.latency_s[source, target] + (
            graph.tensor_bytes[tensor] / problem.bandwidth_bytes_per_s[source, target]
        )
        measured = graph.tensor_transfer_s[tensor]
        return np.where(np.isnan(measured), modelled, measured)

    def transfer_s(self, tensor: IntArray, source: IntArray, target: IntArray) -> FloatArray:
        """float64 [x]: seconds each transfer occupies its route."""
        hops = self.problem.hops[source, target]
        measured = self.problem.graph.tensor_transfer_s[tensor]
        return np.where(np.isnan(measured), self.busy_s(tensor, source, target), measured * hops)


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


class Scorer:
    """Scores plans of one problem by its objective."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._simulator: Simulator | None = None

    @property
    def simulator(self) -> Simulator:
        """Made when first used: it loads the compiler."""
        from env.simulation.simulator import Simulator

        self._simulator = self._simulator or Simulator(self.problem)
        return self._simulator

    def value(self, plan: Plan) -> float:
        """Objective in seconds, infinite where a device's memory does not suffice.

        For throughput, the plan's order changes memory only.
        """
        if self.problem.objective == THROUGHPUT:
            found = loads(self.problem, plan)
            return found.value_s if found.feasible else math.inf
        score = self.simulator.score(plan)
        return score.step_time_s if score.feasible else math.inf
