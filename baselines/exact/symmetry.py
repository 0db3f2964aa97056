"""Equal devices in the mixed-integer programme: which can change names, and one name for each of equal placements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from env.objectives import THROUGHPUT
from env.problem import Problem
from env.simulation.scoring import Charges
from env.units import Units
from graphs.opgraph import IntArray


def unit_sequence(units: Units) -> IntArray:
    """int64 [U]: units, the longest first."""
    return np.argsort(-units.op_s.min(axis=1), kind="stable").astype(np.int64)


def interchangeable(problem: Problem) -> list[list[int]]:
    """Classes of devices, two or more each, that can change names without changing any score.

    Two devices are in one class if exchanging them, and links accordingly, changes neither what may run there, nor for
    how long, nor memory, nor what any transfer costs. O(D^2 (n + D^2 h)) for routes of h links.
    """
    classes: list[list[int]] = []
    for d in range(problem.cluster.n_devices):
        alike = next((members for members in classes if _exchangeable(problem, members[0], d)), None)
        if alike is None:
            classes.append([d])
        else:
            alike.append(d)
    return [members for members in classes if len(members) > 1]


def _exchangeable(problem: Problem, a: int, b: int) -> bool:
    n, charges = problem.cluster.n_devices, Charges(problem)
    if problem.capacity_bytes[a] != problem.capacity_bytes[b] or any(
        not np.array_equal(table[:, a], table[:, b]) for table in (problem.allowed, problem.op_s)
    ):
        return False
    swapped = np.arange(n)
    swapped[[a, b]] = b, a
    routes = (problem.latency_s, problem.bandwidth_bytes_per_s, problem.hops)
    share_memory = problem.memory_owner[:, None] == problem.memory_owner
    tables = (*routes, charges.sender_pays, charges.receiver_pays, share_memory)
    if any(not np.array_equal(table, table[np.ix_(swapped, swapped)]) for table in tables):
        return False
    by_devices_only = problem.objective == THROUGHPUT and charges.blocking
    return by_devices_only or _links_follow(problem, swapped)


def _links_follow(problem: Problem, renamed: IntArray) -> bool:
    """True if links can be renamed one to one such that every route becomes the route of the renamed devices."""
    cluster = problem.cluster
    image: dict[int, int] = {}
    for (source, target), route in cluster.routes.items():
        other = cluster.routes[int(renamed[source]), int(renamed[target])].links
        for link, onto in zip(route.links, other, strict=True):
            if image.setdefault(link, onto) != onto or cluster.links[link].exclusive != cluster.links[onto].exclusive:
                return False
    return len(set(image.values())) == len(image)


def canonical(units: Units, device: IntArray, classes: Sequence[Sequence[int]]) -> IntArray:
    """int64 [n]: the same placement, devices of a class renamed in the order in which `unit_sequence` opens them."""
    renamed = np.arange(units.problem.cluster.n_devices)
    opened = list(dict.fromkeys(device[units.first_op][unit_sequence(units)].tolist()))
    for members in classes:
        used = [d for d in opened if d in members]
        renamed[used + [d for d in members if d not in used]] = members
    return renamed[device]
