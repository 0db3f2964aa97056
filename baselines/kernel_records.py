"""Records of arrays that the compiled loops of several heuristics read (n ops, m tensors, e edges, U units, D devices).

They load no compiler, so that the functions that call the loops can make them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from env.problem import BoolArray, Problem
    from env.units import Units
    from graphs.opgraph import FloatArray, IntArray, OpGraph


class Inputs(NamedTuple):
    """Tensors that ops read."""

    ptr: IntArray  # [n + 1]
    tensor: IntArray  # [e], grouped by the op that reads them
    producer: IntArray  # [m]


class Readers(NamedTuple):
    """Readers of the tensors that ops make."""

    output_ptr: IntArray  # [n + 1], tensors by the op that makes them
    ptr: IntArray  # [m + 1]
    op: IntArray  # [e], grouped by the tensor that they read


class Members(NamedTuple):
    """Units, ops that share a device."""

    ptr: IntArray  # [U + 1]
    op: IntArray  # [n], grouped by unit
    unit_of: IntArray  # [n]


class Wire(NamedTuple):
    """How long transfers take."""

    tensor_bytes: IntArray  # [m]
    measured_s: FloatArray  # [m], per link of the route; not a number where modelled
    hops: IntArray  # [D, D], links of the route
    latency_s: FloatArray  # [D, D]
    bandwidth: FloatArray  # [D, D], bytes/s


class Room(NamedTuple):
    """Devices on which units may run, the bytes they are charged with, and the account so far, which the loops
    write."""

    allowed: BoolArray  # [U, D]
    unit_bytes: IntArray  # [U], of which a device holds the sum
    working_bytes: IntArray  # [U], of which a device holds the largest
    capacity_bytes: IntArray  # [D]
    memory_owner: IntArray  # [D], device in whose memory each works
    used_bytes: IntArray  # [D], in that memory
    largest_bytes: IntArray  # [D]


def inputs_of(graph: OpGraph) -> Inputs:
    """Tensors that the ops of a graph read."""
    return Inputs(*graph.inputs, graph.tensor_producer)


def readers_of(graph: OpGraph) -> Readers:
    """Readers of the tensors that the ops of a graph make."""
    return Readers(graph.output_ptr, graph.consumer_ptr, graph.consumers)


def wire_of(problem: Problem) -> Wire:
    """How long transfers take between the devices of a problem."""
    graph, hops = problem.graph, problem.hops.copy()  # numba compiles anew for arrays that may not be written
    return Wire(graph.transfer_bytes, graph.tensor_transfer_s, hops, problem.latency_s, problem.bandwidth_bytes_per_s)


def room_of(units: Units, unit_bytes: IntArray, working_bytes: IntArray) -> Room:
    """Devices on which nothing is placed yet, under these charges, int64 [U] each (`baselines.memory.Allowance`)."""
    problem = units.problem
    used_bytes, largest_bytes = np.zeros((2, problem.cluster.n_devices), dtype=np.int64)
    memories = problem.capacity_bytes, problem.memory_owner
    return Room(units.allowed, unit_bytes, working_bytes, *memories, used_bytes, largest_bytes)
