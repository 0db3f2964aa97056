"""Folding: one place of the mesh stands for all of a stage, and one op for all ranks of a collective.

Where the devices of a stage are equal, replicas and parts do the same at the same time, so one of them is enough to
tell the step time and the memory. A collective is then one op in the lane of that device, and takes the time that all
groups along its axis take side by side on the real cluster. A transfer from a stage to the next one takes the time of
the busiest link when all places send.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from baselines.strategies.collective_costs import CollectiveCosts
from baselines.strategies.devices import devices_of
from env.cluster import Cluster
from env.communication.formulas import Interconnect
from env.resizing import part_of
from graphs.arrays import IntArray
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph
from graphs.records import HOST
from graphs.transforms.collectives import reduce
from graphs.transforms.derived import Derived
from graphs.transforms.offloading import HOSTED
from graphs.transforms.strategy import Strategy

LARGE_OPS = 150_000  # of a derived graph, about: more of them are folded
SPATIAL = ("hp", "wp")
_EXCHANGES = 0.04  # collectives for each op and axis of a mesh, about
_ROUNDS = 16  # of a collective that is spelt out, at most


def grid_of(cluster: Cluster, strategy: Strategy) -> IntArray:
    """int64 [stages, *sizes of the mesh]: the devices of a strategy.

    Raises:
        StrategyError: as `devices_of`.
    """
    sizes = [rule.size for rule in strategy.mesh if rule.size > 1]
    devices = devices_of(cluster, strategy)[: strategy.devices]
    return np.asarray(devices, dtype=np.int64).reshape(strategy.stages, *sizes)


def expected_ops(graph: OpGraph, strategy: Strategy) -> int:
    """About how many ops the graph of a strategy has where it is not folded."""
    exchanges = sum(2 * min(rule.size, _ROUNDS) * _EXCHANGES for rule in strategy.mesh if rule.size > 1)
    return int(graph.n_ops * strategy.micro_batches * strategy.places * (1 + exchanges))


def is_to_be_folded(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> bool:
    """Whether a strategy's graph would be too large, and one place can stand for all."""
    return expected_ops(graph, strategy) > LARGE_OPS and not why_not_folded(cluster, strategy)


def why_not_folded(cluster: Cluster, strategy: Strategy) -> str:
    """A sentence that says why no place of a strategy's mesh stands for all; "" where one does."""
    if strategy.is_placed:
        return f"strategy {strategy.text!r} places ops one by one, and the replicas' transfers may meet anywhere."
    names = [rule.name for rule in strategy.mesh if rule.size > 1]
    for name in names:
        if name in SPATIAL:
            return (
                f"strategy {strategy.text!r} cuts images by {name}, and parts at the edge are no equals of the others."
            )
    if any(rule.shares for rule in strategy.mesh):
        return f"strategy {strategy.text!r} has uneven shares of the batch, so no place stands for all."
    if not names:
        return f"strategy {strategy.text!r} has no mesh, so there is nothing to fold."
    for stage in grid_of(cluster, strategy).reshape(strategy.stages, -1):
        unlike = np.flatnonzero(cluster.alike[stage] != cluster.alike[stage[0]])
        if len(unlike):
            a, b = (cluster.devices[int(d)].name for d in (stage[0], stage[unlike[0]]))
            return f"strategy {strategy.text!r} has unequal devices, {a!r} and {b!r}, in one stage."
    if strategy.offload:
        hosts, counts = np.unique(cluster.host_devices[grid_of(cluster, strategy)], return_counts=True)
        if (counts != counts[0]).any() or (cluster.alike[hosts] != cluster.alike[hosts[0]]).any():
            return (
                f"strategy {strategy.text!r} offloads to hosts that are unlike, or have unequally many of its devices."
            )
    return ""


def folded_note(strategy: Strategy) -> str:
    """A sentence for people who read the score of a folded strategy."""
    where = " of each stage" if strategy.stages > 1 else ""
    return f"Scored on one of {strategy.places} equal places{where}, which stands for all."


def check_folded(cluster: Cluster, strategy: Strategy) -> None:
    """Refuse to fold what cannot be folded.

    Raises:
        StrategyError: says why.
    """
    why = why_not_folded(cluster, strategy)
    if why:
        raise StrategyError(f"{why[:-1]}; do not fold it.")


def one_place(cluster: Cluster, devices: IntArray, has_hosts: bool) -> tuple[Cluster, IntArray]:
    """``(part of the cluster with one device for each stage, their numbers there, int64 [stages, 1])``.

    Args:
        devices: int64 [stages, places], numbers in the cluster.
        has_hosts: whether the hosts of these devices are in it.
    """
    first = devices[:, 0]
    used = part_of(cluster, np.concatenate([first, cluster.host_devices[first]]) if has_hosts else first)
    return used, np.array([[used.device_index[cluster.devices[d].name]] for d in first.tolist()])


def with_shared_hosts(derived: Derived, cluster: Cluster, grid: IntArray, rank: IntArray) -> Derived:
    """The folded graph whose tensors take as long to and from hosts as those of all places together.

    Ops on hosts do and keep what those of all places that share a host do; so do tensors that wait there, as many
    micro-batches at a time as are under way. Arguments as of `with_single_place_collectives`.
    """
    graph, flat = derived.graph, grid.reshape(len(grid), -1)
    on_host, is_waiting = graph.is_pinned_to(HOST), np.array([kind == HOSTED for kind in graph.kinds], dtype=np.bool_)
    producer, consumer, tensor = graph.edge_list
    crossing = on_host[producer] != on_host[consumer]
    transfer_s, times, waiting = graph.tensor_transfer_s.copy(), np.ones(graph.n_ops), np.zeros(graph.n_ops)
    made = np.bincount(graph.tensor_producer, graph.tensor_bytes, graph.n_ops)
    for row, devices in enumerate(flat):
        hosts = cluster.host_devices[devices]
        of_host = cluster.host_devices[flat] == hosts[0]
        beside = float(of_host.sum() / of_host[:, 0].sum())
        under_way = min(derived.n_micro_batches, len(flat) - row)
        here = on_host & (rank == row)
        times[here] = beside
        first = here & is_waiting & (derived.micro_batch <= 0)
        waiting[first] = (beside - 1) * under_way * made[first]
        for to_host in (True, False):
            ends = (devices, hosts) if to_host else (hosts, devices)
            together, route = Interconnect.busiest(cluster, *ends), cluster.routes[int(ends[0][0]), int(ends[1][0])]
            sent = np.unique(tensor[crossing & (on_host[consumer] == to_host) & (rank[consumer] == row)])
            taken_s = together.latency_s + graph.tensor_bytes[sent] * together.s_per_byte
            if together.s_per_byte > 1.0 / route.bandwidth_bytes_per_s or together.latency_s > route.latency_s:
                transfer_s[sent] = np.fmax(transfer_s[sent], taken_s / max(len(route.links), 1))
    result = replace(
        graph,
        tensor_transfer_s=transfer_s,
        flops=graph.flops * times,
        bytes_moved=graph.bytes_moved * times,
        kernels=np.rint(graph.kernels * times).astype(np.int64),
        **{key: np.rint(getattr(graph, key) * times).astype(np.int64) for key in ("parameter_bytes", "gradient_bytes")},
        optimizer_bytes=np.rint(graph.optimizer_bytes * times + waiting).astype(np.int64),
        time_s=graph.time_s * times[:, None],
        fixed_s=graph.fixed_s * times[:, None],
    )
    return replace(derived, graph=result)


def with_single_place_collectives(
    exchanged: Derived, algorithm: str, cluster: Cluster, grid: IntArray, rank: IntArray
) -> Derived:
    """The folded graph with one op for each collective, which takes as long as all groups along its axis.

    Args:
        algorithm: of all collectives; "" for the quickest of each.
        grid: int64 [stages, *sizes of the mesh], devices of the cluster.
        rank: int64 [n], the row of `grid` that each op runs on.
    """
    axes = [axis.name for axis in exchanged.mesh]
    copies = {collective.axis: collective.copies for collective in exchanged.collectives if collective.copies != 1.0}
    costs = CollectiveCosts(cluster, grid, axes, [copies.get(axis, 1.0) for axis in axes])
    known: dict[tuple[str, int, int, int], tuple[str, float, int]] = {}
    found = []
    for collective in exchanged.collectives:
        kind, size, stage = collective.kind, collective.bytes, int(rank[collective.ops[0]])
        key = kind, axes.index(collective.axis), size, stage
        if key not in known:
            name = algorithm or costs.quickest(*key)
            known[key] = (name, *costs.exactly(kind, key[1], size, name, stage))
        found.append(known[key])
    names, seconds, buffers = zip(*found, strict=True) if found else ((), (), ())
    return reduce(exchanged, names, np.array(seconds, dtype=np.float64), np.array(buffers, dtype=np.int64))


def with_shared_links(derived: Derived, cluster: Cluster, grid: IntArray, rank: IntArray) -> Derived:
    """The folded graph whose tensors take as long from stage to stage as those of all places together.

    Arguments as of `with_single_place_collectives`.
    """
    graph = derived.graph
    producer, consumer, tensor = graph.edge_list
    crossing = np.flatnonzero((rank[producer] != rank[consumer]) & np.isnan(graph.tensor_transfer_s[tensor]))
    pairs = np.unique(np.column_stack([rank[producer[crossing]], rank[consumer[crossing]]]), axis=0)
    transfer_s = graph.tensor_transfer_s.copy()
    flat = grid.reshape(len(grid), -1)
    for from_, to in pairs.tolist():
        route, together = (
            cluster.routes[int(flat[from_, 0]), int(flat[to, 0])],
            Interconnect.busiest(cluster, flat[from_], flat[to]),
        )
        alone = Interconnect(route.latency_s, 1.0 / route.bandwidth_bytes_per_s)
        if together.latency_s > alone.latency_s or together.s_per_byte > alone.s_per_byte:
            sent = np.unique(tensor[crossing[(rank[producer[crossing]] == from_) & (rank[consumer[crossing]] == to)]])
            taken_s = together.latency_s + graph.tensor_bytes[sent] * together.s_per_byte
            transfer_s[sent] = np.fmax(transfer_s[sent], taken_s / max(len(route.links), 1))
    return replace(derived, graph=replace(graph, tensor_transfer_s=transfer_s))
