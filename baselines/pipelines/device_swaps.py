"""Swaps of equal devices in a split: the parts that exchange most go to neighbours in the network."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from env.problem import Problem
from graphs.opgraph import FloatArray, IntArray


def arranged(problem: Problem, device: IntArray, classes: Iterable[IntArray]) -> IntArray:
    """The same parts, int64 [n], swapped between the devices of each class as long as the busiest link gains by it.

    Only overlapped communication has links to relieve. Each swap takes O(D^2 * links), whatever the graph.
    """
    n_devices = problem.cluster.n_devices
    exclusive = np.array([link.exclusive for link in problem.cluster.links], dtype=np.bool_)
    if problem.cluster.is_blocking or not exclusive.any():
        return device
    traffic, on_link = _traffic(problem, device), _on_link(problem)[:, exclusive]
    per_unit = np.stack([problem.latency_s, 1 / problem.bandwidth_bytes_per_s, problem.hops.astype(np.float64)])

    def busiest_s(place: IntArray) -> float:
        there = per_unit[:, place[:, None], place[None, :]]
        route = (place[:, None] * n_devices + place[None, :]).reshape(-1)
        return float(((traffic * there).sum(axis=0).reshape(-1) @ on_link[route]).max())

    place = np.arange(n_devices)  # where each part goes, by where it is now
    pairs = [pair for members in classes for pair in itertools.combinations(members.tolist(), 2)]
    best_s, improved = busiest_s(place), True
    while improved:
        improved = False
        for a, b in pairs:
            swapped = place.copy()
            swapped[[a, b]] = place[[b, a]]
            value_s = busiest_s(swapped)
            if value_s < best_s * (1 - 1e-9):
                best_s, place, improved = value_s, swapped, True
    return place[device]


def _traffic(problem: Problem, device: IntArray) -> FloatArray:
    """float64 [3, D, D]: transfers, bytes and measured seconds per link, from device to device."""
    graph, n = problem.graph, problem.cluster.n_devices
    producer, consumer, tensor = graph.edge_list
    remote = device[producer] != device[consumer]
    moved, target = np.divmod(np.unique(tensor[remote] * n + device[consumer[remote]]), n)
    pair = device[graph.tensor_producer[moved]] * n + target
    measured = graph.tensor_transfer_s[moved]
    modelled = np.isnan(measured)
    amounts = modelled, graph.tensor_bytes[moved] * modelled, np.where(modelled, 0.0, measured)
    return np.stack([np.bincount(pair, amount, n * n).reshape(n, n) for amount in amounts])


def _on_link(problem: Problem) -> FloatArray:
    """float64 [D * D, links]: 1 where a link is part of a route."""
    ptr, links = problem.route
    result = np.zeros((len(ptr) - 1, len(problem.cluster.links)))
    result[np.repeat(np.arange(len(ptr) - 1), np.diff(ptr)), links] = 1.0
    return result
