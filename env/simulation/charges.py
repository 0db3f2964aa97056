"""`Charges`: what moving a tensor costs the devices and links at its ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from env.problem import Problem
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
        """Whether devices stop computing to communicate."""
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
