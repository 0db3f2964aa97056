"""Steady-state loads of devices and links: the objective ``throughput`` (docs/score.md, "Throughput").

Many steps follow each other through the cluster, so a placement yields one result per largest load, whatever the order
of ops within a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from env.cluster import BLOCKING
from env.problem import Problem
from graphs.opgraph import FloatArray, IntArray
from graphs.units import exact_bytes


@dataclass(frozen=True, eq=False)
class Loads:
    """The loads of one placement (D devices, L links), in seconds per step.

    Attributes:
        device_s: float64 [D], computing, and under blocking communication also sending and receiving.
        link_s: float64 [L], transfers over each exclusive link; 0 under blocking communication.
        held_bytes: int64 [D], memory in steady state.
        value_s: the largest load, the objective.
        bytes_moved: bytes sent from device to device in one step, each tensor once per receiver.
        feasible: no device holds more than its memory.
    """

    device_s: FloatArray
    link_s: FloatArray
    held_bytes: IntArray
    value_s: float
    bytes_moved: int
    feasible: bool


@dataclass(frozen=True, eq=False)
class Charges:
    """What moving a tensor from device a to device b costs whom (D devices).

    Under blocking communication a tensor from a to b keeps both ends busy for the time of the transfer (where the graph
    has it measured: of one link), but costs nothing at an end whose own link of the route is free.

    Attributes:
        problem: the graph and the cluster.
    """

    problem: Problem

    @property
    def blocking(self) -> bool:
        """Whether devices stop computing to communicate."""
        return self.problem.cluster.communication == BLOCKING

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
        hops = np.diff(self.problem.route[0]).reshape(self.problem.latency_s.shape)[source, target]
        measured = self.problem.graph.tensor_transfer_s[tensor]
        return np.where(np.isnan(measured), self.busy_s(tensor, source, target), measured * hops)


def loads(problem: Problem, device: ArrayLike) -> Loads:
    """The loads of a placement, int [n]. O(n + e + transfers)."""
    placed = np.asarray(device, dtype=np.int64)
    graph, charges = problem.graph, Charges(problem)
    tensor, source, target = _transfers(problem, placed)
    device_s: FloatArray = np.zeros(problem.cluster.n_devices)
    np.add.at(device_s, placed, problem.op_s[np.arange(graph.n_ops), placed])
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
    held = _held_bytes(problem, placed, tensor, target)
    return Loads(
        device_s=device_s,
        link_s=link_s,
        held_bytes=held,
        value_s=float(max(device_s.max(), link_s.max(initial=0.0))),
        bytes_moved=int(graph.tensor_bytes[tensor].sum()),
        feasible=bool((held <= problem.capacity_bytes).all()),
    )


def _transfers(problem: Problem, placed: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Tensor, source and target of every transfer: one for each other device with a consumer."""
    producer, consumer, tensor = problem.graph.edge_list
    n_devices = problem.cluster.n_devices
    remote = placed[producer] != placed[consumer]
    key = np.unique(tensor[remote] * n_devices + placed[consumer[remote]])
    moved, target = key // n_devices, key % n_devices
    return moved, placed[problem.graph.tensor_producer[moved]], target


def _held_bytes(problem: Problem, placed: IntArray, tensor: IntArray, target: IntArray) -> IntArray:
    graph = problem.graph
    held = np.zeros(problem.cluster.n_devices, dtype=np.int64)
    np.add.at(held, placed, graph.kept_bytes)
    np.add.at(held, placed[graph.tensor_producer], graph.tensor_bytes)
    np.add.at(held, target, graph.tensor_bytes[tensor])
    workspace = np.zeros_like(held)
    np.maximum.at(workspace, placed, graph.workspace_bytes)
    return held + workspace


def held_reason(problem: Problem, device: ArrayLike) -> str | None:
    """One sentence about a device that holds more than its memory in steady state; None if none does."""
    placed = np.asarray(device, dtype=np.int64)
    held = loads(problem, placed).held_bytes
    d = int((held - problem.capacity_bytes).argmax())
    if held[d] <= problem.capacity_bytes[d]:
        return None
    graph = problem.graph
    own = graph.kept_bytes + graph.output_bytes
    own += graph.workspace_bytes
    largest = int(np.where(placed == d, own, -1).argmax())
    others = int(held[d] - own[largest])
    return (
        f"op {graph.op_names[largest]!r} needs {exact_bytes(int(own[largest]))} on {problem.cluster.devices[d].name} "
        f"in steady state, where {exact_bytes(max(0, int(problem.capacity_bytes[d]) - others))} are free beside the "
        f"{exact_bytes(others)} of the other ops placed there."
    )


def owners(problem: Problem, device: ArrayLike) -> tuple[IntArray, IntArray, IntArray]:
    """Who put each tensor on each device that holds it, as ``(tensor, device, op)``, int64 [x] each.

    At its own device that is the producer, elsewhere the first consumer there.
    """
    placed = np.asarray(device, dtype=np.int64)
    graph = problem.graph
    tensor, _, target = _transfers(problem, placed)
    _, consumer, edge_tensor = graph.edge_list
    first = np.full(graph.n_tensors * problem.cluster.n_devices, graph.n_ops, dtype=np.int64)
    np.minimum.at(first, edge_tensor * problem.cluster.n_devices + placed[consumer], consumer)
    reader = first[tensor * problem.cluster.n_devices + target]
    return (
        np.concatenate([np.arange(graph.n_tensors), tensor]),
        np.concatenate([placed[graph.tensor_producer], target]),
        np.concatenate([graph.tensor_producer, reader]),
    )
