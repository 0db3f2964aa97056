"""Stages as placements of a graph for one micro-batch, so that exchanges count.

Where a pipeline puts the ops of a micro-batch is a placement of the graph with that micro-batch's times and tensors. So
`env.bounds` says how soon an op can start and how much must follow it, as it waits for transfers or has what it waits
for run on its own device. Between an early start and a late end lies the work of all micro-batches; and a colocation
group, as of weights that all steps of a recurrent net use, does all of its own in one stage. Second runs and adding up
only come on top. With a mesh it holds at one of its places, that has its even share of every op at least: the first of
those that have most samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from env.bounds.bounds import interval_work, one_device
from env.bounds.heads import Pairs
from env.cluster import Cluster
from env.problem import Problem
from env.routes import TABLE_DEVICES
from graphs.arrays import FloatArray
from graphs.opgraph import OpGraph, Phase

_NEAR = 64  # ops brought to one device at most, where an op waits for others


@dataclass(frozen=True, eq=False)
class Placed:
    """A graph on a cluster, for pipelines.

    Attributes:
        graph, cluster: which.
        keeps_updates: whether updates are where what they update is used; else hosts may do them.
    """

    graph: OpGraph
    cluster: Cluster
    keeps_updates: bool

    def least_s(self, smallest_s: FloatArray, share: FloatArray, each_s: FloatArray) -> float:
        """Seconds that no stages can beat.

        Args:
            smallest_s: float64 [n], of the copy for the smallest micro-batch, on the device where it takes least.
            share: float64 [n], of what an op makes: what is sent of this copy's part at a time, at least.
            each_s: float64 [2, n], of all copies of an op at a place: on the device where they take least, and spread
                over all stages.
        """
        graph, problem = self.graph, self._problem
        if problem is None:
            return 0.0
        # Bytes of parts are rounded, so that one may be missing.
        of_tensor = share[graph.tensor_producer]
        least = np.maximum(np.floor(graph.tensor_bytes * of_tensor) - 1, 0).astype(np.int64)
        pairs = Pairs.of(problem, np.where(of_tensor < 1, least, graph.tensor_bytes))
        pairs = replace(pairs, op_s=smallest_s)
        head_s, tail_s = pairs.heads(_NEAR), pairs.tails(_NEAR)
        on_one_s, on_all_s = each_s
        groups = [members for members in problem.units if len(members) > 1]
        return max(
            float((head_s + smallest_s + tail_s).max()),
            interval_work(head_s, tail_s, on_all_s, 0.0, 0, lambda some: float(on_all_s[some].sum())),
            max((one_device(on_one_s[some], head_s[some], tail_s[some]) for some in groups), default=0.0),
        )

    @cached_property
    def _problem(self) -> Problem | None:
        """Where ops may be: what a copy reads and writes may take little room. None where transfers were measured."""
        graph = self.graph
        if not np.isnan(graph.tensor_transfer_s).all() or self.cluster.n_devices > TABLE_DEVICES:
            return None
        none: dict[str, Any] = {"tensor_bytes": graph.tensor_bytes * 0, "workspace_bytes": graph.workspace_bytes * 0}
        if not self.keeps_updates:
            none["colocation"] = np.where(graph.phase == Phase.UPDATE, -1, graph.colocation)
        return Problem(replace(graph, **none), self.cluster)
