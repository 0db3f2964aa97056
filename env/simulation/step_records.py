"""Records of one step for the compiled loops: a problem, scratch and outcome."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from env.problem import Problem
from graphs.opgraph import FloatArray, IntArray

Index = NDArray[np.int32]


class Arrays(NamedTuple):
    """A `Problem` for the kernel: n ops, m tensors, e edges, D devices of K kinds, L links, H in the longest route."""

    kind_s: FloatArray  # [n, K], seconds of each op on each kind of device
    kind_of: Index  # [D]
    owner: Index  # [D], device in whose memory each works
    edge_ptr: Index  # [n + 1], edges an op feeds
    consumer: Index  # [e]
    edge_tensor: Index  # [e]
    input_ptr: Index  # [n + 1]
    input_edge: Index  # [e], edges grouped by consumer
    edge_bytes: FloatArray  # [e], 0 where the transfer time is measured
    edge_latency: FloatArray  # [e], 0 where the transfer time is measured, else 1
    edge_measured_s: FloatArray  # [e], per link of the route; 0 where modelled
    topological: Index  # [n]
    tensor_bytes: IntArray  # [m], sent
    memory_bytes: IntArray  # [m], held by the producer's device: 0 in place
    tensor_producer: IntArray  # [m]
    kept_bytes: IntArray  # [n], from the beginning
    workspace_bytes: IntArray  # [n]
    output_bytes: IntArray  # [n], sum over the op's tensors, and what comes with its start to stay
    latency_s: FloatArray  # [D, D]
    bandwidth: FloatArray  # [D, D]
    hops: FloatArray  # [D, D], links of the route
    route: Index  # [D, D, H], links to wait for, padded by repeating; L (always free) where there is none
    route_held: Index  # [D, D, H], links to occupy likewise; L + 1 (never waited for) where there is none
    route_ptr: IntArray  # [D * D + 1], routes without padding
    route_link: IntArray  # [...]


class StepState(NamedTuple):
    """Scratch of one simulation."""

    priority: FloatArray  # [n], higher first
    edge_s: FloatArray  # [e], transfer time of each edge, 0 on one device
    arrival_s: FloatArray  # [e], when the tensor is (or will be) on its consumer's device; infinite until requested
    op_s: FloatArray  # [n], time of each op where it is placed
    missing: Index  # [n], inputs not requested yet
    ready_s: FloatArray  # [n], arrival of the last input requested so far
    copy_of: Index  # [e], the copy each edge reads
    base: Index  # [D + 1], where a device's ops begin in the next two
    ready: Index  # [n], heap by priority (under MSR a list) of the ops that may start
    future: Index  # [n], heap by ready time of those whose inputs are all on their way
    n_ready: Index  # [D]
    n_future: Index  # [D]
    running: Index  # [D], op or -1
    next_s: FloatArray  # [D], end of the running op, or, idle, when the next op may be ready
    never: FloatArray  # [D], infinite while an op runs, else 0
    pair_bytes: FloatArray  # [D * D]
    link_free: FloatArray  # [L + 2], when the last transfer requested so far leaves each link
    sent: Index  # [D + 1], last transfer to each device, so that a tensor is sent only once
    free_s: FloatArray  # [m + e], last use of each copy
    bucket_in: IntArray  # [D * buckets], bytes allocated
    bucket_out: IntArray  # [D * buckets], bytes freed
    bucket_head: Index  # [D * buckets], last change of memory in the bucket, or -1
    change_s: FloatArray  # [2 n + m + 2 e], instants of changes of memory
    change_bytes: IntArray  # [2 n + m + 2 e]
    change_next: Index  # [2 n + m + 2 e], previous change of the same bucket, or -1
    sorted_change: Index  # [2 n + m + 2 e]


class Output(NamedTuple):
    """Arrays that `run` leaves behind (x: up to e transfers, in order of request)."""

    busy_s: FloatArray  # [D]
    peak_bytes: IntArray  # [D]
    link_bytes: FloatArray  # [L]
    op_start: FloatArray  # [n]
    op_end: FloatArray  # [n]
    op_rank: Index  # [n], place in the sequence of starts
    transfer_tensor: Index  # [e + 1]
    transfer_pair: Index  # [e + 1]
    transfer_start: FloatArray  # [e + 1]
    transfer_end: FloatArray  # [e + 1]


class StepSizes(NamedTuple):
    """Numbers of ops, tensors, edges, devices, kinds of devices, links, and links of the longest route."""

    n: int
    m: int
    e: int
    n_devices: int
    n_kinds: int
    n_links: int
    n_hops: int


def arrays_of(problem: Problem) -> Arrays:
    """A problem as the kernels take it."""
    graph = problem.graph
    edge_tensor = graph.edge_list[2]
    measured_s = graph.tensor_transfer_s[edge_tensor]
    modelled = np.isnan(measured_s)
    route_ptr, route_link = problem.route
    waited, held = _padded_routes(problem)
    return Arrays(
        kind_s=problem.kind_s,
        kind_of=problem.kind_of.astype(np.int32),
        owner=problem.memory_owner.astype(np.int32),
        edge_ptr=graph.consumer_ptr[graph.output_ptr].astype(np.int32),
        consumer=graph.consumers.astype(np.int32),
        edge_tensor=edge_tensor.astype(np.int32),
        input_ptr=graph.inputs[0].astype(np.int32),
        input_edge=np.lexsort((edge_tensor, graph.consumers)).astype(np.int32),
        edge_bytes=np.where(modelled, graph.tensor_bytes[edge_tensor], 0).astype(np.float64),
        edge_latency=modelled.astype(np.float64),
        edge_measured_s=np.where(modelled, 0.0, measured_s),
        topological=graph.topological_order.astype(np.int32),
        tensor_bytes=graph.tensor_bytes,
        memory_bytes=graph.tensor_memory_bytes,
        tensor_producer=graph.tensor_producer,
        kept_bytes=graph.standing_bytes,
        workspace_bytes=graph.workspace_bytes,
        output_bytes=graph.output_bytes + graph.coming_bytes,
        latency_s=problem.latency_s,
        bandwidth=problem.bandwidth_bytes_per_s,
        hops=problem.hops.reshape(-1).astype(np.float64),
        route=waited,
        route_held=held,
        route_ptr=route_ptr,
        route_link=route_link,
    )


def _padded_routes(problem: Problem) -> tuple[Index, Index]:
    """``(route, route_held)`` of `Arrays`: all of one length, so that the loop over them never mispredicts."""
    links, n_devices = problem.cluster.links, problem.cluster.n_devices
    ptr, route_link = problem.route
    pair = np.repeat(np.arange(n_devices * n_devices), np.diff(ptr))
    waits = np.array([link.exclusive for link in links], dtype=np.bool_)[route_link]
    pair, link = pair[waits], route_link[waits]
    count = np.bincount(pair, minlength=n_devices * n_devices)
    longest = max(1, int(count.max()))
    waited = np.full((n_devices * n_devices, longest), len(links), np.int32)
    held = waited + np.int32(1)
    some = np.flatnonzero(count)
    last = link[np.cumsum(count)[some] - 1]
    waited[some] = held[some] = last[:, None]
    place = np.arange(len(pair)) - (np.cumsum(count) - count)[pair]
    waited[pair, place] = held[pair, place] = link
    shape = (n_devices, n_devices, longest)
    return waited.reshape(shape), held.reshape(shape)
