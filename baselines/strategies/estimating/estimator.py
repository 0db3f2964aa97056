"""`Estimator`: what a strategy takes, without making its graph, for choosing which ones to score exactly.

One place of the mesh stands for all: its ops run one after the other, its communication beside them, block by block;
the blocks of a pipeline follow their order. The simulator adds contention between unlike places, and ops that overtake
each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from baselines.strategies.allowed import joins_micro_batches
from baselines.strategies.collective_costs import CollectiveCosts
from baselines.strategies.devices import are_alike, problem_of, recomputed
from baselines.strategies.estimating.block_kernel import BlockArrays
from baselines.strategies.estimating.cuts import AxisCut, Cuts
from baselines.strategies.estimating.estimate import Estimate
from baselines.strategies.estimating.estimation import Estimation
from baselines.strategies.estimating.local_costs import OpTimes
from baselines.strategies.estimating.step import (
    BACKWARD,
    FORWARD,
    GROUPS,
    ONCE,
    WEIGHTS,
    Frame,
    LocalStep,
    Split,
    States,
    step_of,
)
from baselines.strategies.memory_order import order_of
from baselines.strategies.orders import PipelineOrder
from baselines.strategies.stage_cuts import equal_cuts, is_overfull, recomputed_in_stages
from env.cluster import Cluster
from graphs.arrays import BoolArray, IntArray, pointers
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.derived import Derived
from graphs.transforms.expert_load import expert_choices
from graphs.transforms.offloading import HostedTensors, hosted_tensors
from graphs.transforms.sequencing import block_map
from graphs.transforms.strategy import VIRTUAL, MeshRule, Strategy

_MOST_KEPT = 64  # steps and the like that are kept for the next estimate


@dataclass(frozen=True, eq=False)
class PreparedGraph:
    """A graph after recomputation, with what is worked out once for it."""

    graph: OpGraph
    cuts: Cuts
    states: States
    times: OpTimes

    @cached_property
    def is_late(self) -> BoolArray:
        """bool [n]: ops that make gradients of weights, for which nothing but updates waits."""
        result: BoolArray = _kinds(self.graph, np.zeros(self.graph.n_ops, dtype=np.int64)) == 2
        return result

    @cached_property
    def ready_after(self) -> IntArray:
        """int64 [n]: the last forward op before, for ops of the backward pass that need no gradient; else itself."""
        graph, result = self.graph, np.arange(self.graph.n_ops)
        is_forward, position = graph.phase == Phase.FORWARD, graph.topological_position
        ptr, tensors = graph.inputs
        producers, order = graph.tensor_producer[tensors], graph.topological_order
        for op in order[graph.phase[order] == Phase.BACKWARD].tolist():
            before = result[producers[ptr[op] : ptr[op + 1]]]
            if len(before) and is_forward[before].all():
                result[op] = before[position[before].argmax()]
        # An op that waits for the loss is a gradient.
        producer, consumer, _ = graph.edge_list
        inner = position[producer[is_forward[producer] & is_forward[consumer]]].max(initial=-1)
        waits_for_loss = position[result] >= inner
        result[waits_for_loss] = np.flatnonzero(waits_for_loss)
        return result


class Estimator:
    """Estimates of strategies for one graph on one cluster; what they have in common is worked out once."""

    def __init__(self, graph: OpGraph, cluster: Cluster) -> None:
        self.graph, self.cluster = graph, cluster
        self._are_alike = are_alike(cluster, cluster.compute_devices.tolist())
        self.capacity = np.array([device.usable_bytes for device in cluster.devices], dtype=np.float64)
        self._sources: dict[tuple[tuple[str, ...], bool], PreparedGraph] = {}
        self._stages: dict[tuple[object, ...], tuple[PreparedGraph, IntArray, BoolArray]] = {}
        self._equal_cuts: dict[tuple[object, ...], IntArray] = {}
        self._frames: dict[tuple[object, ...], Frame] = {}
        self._steps: dict[tuple[object, ...], tuple[LocalStep, tuple[BlockArrays, ...]]] = {}
        self._orders: dict[tuple[object, ...], PipelineOrder] = {}
        self._networks: dict[tuple[object, ...], CollectiveCosts] = {}
        self._hosted: dict[tuple[object, ...], HostedTensors] = {}
        self._joined: dict[tuple[object, ...], tuple[str, str] | None] = {}

    def estimate(self, strategy: Strategy) -> Estimate:
        """Time and memory that a strategy takes.

        Raises:
            StrategyError: graph or cluster do not allow it.
        """
        return Estimation(self, strategy).result()

    # -- what many strategies share ---------------------------------------------------------------------------

    def source(self, patterns: tuple[str, ...], in_time: bool = False) -> PreparedGraph:
        """The graph with recomputation, to be cut into micro-batches or not."""
        key = patterns, in_time and bool(patterns)
        if key not in self._sources:
            self._sources[key] = self._prepared(recomputed(self.graph, *key), bool(patterns))
        return self._sources[key]

    def _prepared(self, runs: Derived, has_runs: bool) -> PreparedGraph:
        graph = runs.graph
        cuts = Cuts(graph, runs, self.source(()).cuts) if has_runs else Cuts(graph)
        return PreparedGraph(graph, cuts, States.of(graph), OpTimes(graph, self.cluster))

    def order(self, strategy: Strategy, is_joined: bool) -> PipelineOrder:
        key = (strategy.order, strategy.stages, strategy.micro_batches, strategy.virtual_stages, is_joined)
        if key not in self._orders:
            self._orders[key] = order_of(strategy, is_joined)
        return self._orders[key]

    def joined(self, source: PreparedGraph, is_chunked: BoolArray, chunks: AxisCut) -> tuple[str, str] | None:
        """As `joins_micro_batches`."""
        key = source, is_chunked.tobytes(), chunks.key
        if key not in self._joined:
            self._joined[key] = joins_micro_batches(source.graph, is_chunked, chunks.written, chunks.read)
        return self._joined[key]

    def hosted(self, source: PreparedGraph, patterns: tuple[str, ...], stage: IntArray) -> HostedTensors | None:
        """As `hosted_tensors`; None without patterns."""
        if not patterns:
            return None
        key = source, patterns, stage.tobytes()
        if key not in self._hosted:
            self._hosted[key] = hosted_tensors(source.graph, patterns, stage)
        return self._hosted[key]

    def network(self, grid: IntArray, mesh: Sequence[MeshRule]) -> CollectiveCosts:
        axes = tuple(rule.name for rule in mesh)
        copies = tuple(expert_choices(self.graph) if rule.once_a_host else 1.0 for rule in mesh)
        key = (grid.shape, grid.tobytes(), axes, copies)
        if key not in self._networks:
            self._networks[key] = CollectiveCosts(self.cluster, grid, axes, copies)
        return self._networks[key]

    def staged(self, strategy: Strategy, grid: IntArray) -> tuple[PreparedGraph, IntArray, BoolArray]:
        """The graph with recomputation, and of every op its virtual stage and whether it waits for the backward pass of
        another one: int64 and bool [n].
        """
        order = strategy.order if strategy.order in VIRTUAL else ""
        key = (
            strategy.recompute,
            strategy.micro_batches > 1,
            strategy.stages,
            order,
            strategy.virtual_stages,
            strategy.cuts,
        )
        known = key if self._are_alike else (*key, grid.tobytes(), tuple(rule.shares for rule in strategy.mesh))
        if not strategy.cuts and self._is_overfull(strategy, grid, known):
            mesh = tuple((rule.name, rule.size) for rule in strategy.mesh)
            known = (*known, strategy.order, strategy.micro_batches, strategy.zero, mesh)
        if known not in self._stages:
            runs, stage, is_apart = recomputed_in_stages(self.graph, self.cluster, strategy, grid.reshape(-1))
            source = self.source(strategy.recompute, strategy.micro_batches > 1)
            if runs.graph is not source.graph:
                source = self._prepared(runs, True)
            self._stages[known] = source, stage, is_apart & (runs.graph.phase == Phase.BACKWARD)
        return self._stages[known]

    def _is_overfull(self, strategy: Strategy, grid: IntArray, key: tuple[object, ...]) -> bool:
        """Whether stages of equal times do not fit, so that others depend on all that takes memory."""
        source, devices = self.source(strategy.recompute, strategy.micro_batches > 1), grid.reshape(-1)
        if key not in self._equal_cuts:
            self._equal_cuts[key] = equal_cuts(problem_of(source.graph, self.cluster), strategy, devices)
        return is_overfull(source.graph, self.cluster, strategy, devices, self._equal_cuts[key])

    def frame(
        self,
        source: PreparedGraph,
        stage: IntArray,
        n_stages: int,
        is_split: bool,
        is_chunked: BoolArray,
        is_late: BoolArray,
    ) -> Frame:
        """Ops in blocks.

        Args:
            n_stages: virtual stages, some of which may have no op: ops that share a weight are of one stage.
            is_split: whether the two backward passes are blocks of their own.
            is_chunked: bool [n], ops that run for each micro-batch.
            is_late: as of `Frame`.
        """
        known = (source, stage.tobytes(), n_stages, is_split, is_chunked.tobytes(), is_late.tobytes())
        if known not in self._frames:
            graph = source.graph
            group = np.where(graph.phase == Phase.FORWARD, FORWARD, BACKWARD)
            if is_split:
                group = np.where(_kinds(graph, stage) == 2, WEIGHTS, group)
            group = np.where((graph.phase == Phase.UPDATE) | ~is_chunked | is_late, ONCE, group)
            self._frames[known] = Frame.of(graph, stage, n_stages, group, is_late)
        return self._frames[known]

    def step(
        self,
        frame: Frame,
        split: Split,
        source: PreparedGraph,
        is_ordered: bool,
        hosted: HostedTensors | None,
        key: tuple[object, ...],
    ) -> tuple[LocalStep, tuple[BlockArrays, ...]]:
        if key not in self._steps:
            while len(self._steps) >= _MOST_KEPT:
                del self._steps[next(iter(self._steps))]
            made = step_of(frame, split, source.states, None if is_ordered else source.ready_after, hosted)
            # Without an order of its own a device may run first what much is waiting for.
            in_order = np.zeros(frame.graph.n_ops, dtype=np.bool_)
            orders = (in_order,) if is_ordered else (in_order, source.is_late)
            self._steps[key] = made, tuple(_block_arrays(made, is_late) for is_late in orders)
        return self._steps[key]


def _kinds(graph: OpGraph, stage: IntArray) -> IntArray:
    """int64 [n]: numbers of blocks, as `BlockMap.kind`."""
    one = replace(Derived.identity(graph), micro_batch=np.zeros(graph.n_ops, dtype=np.int64))
    return block_map(one, stage).kind


def _block_arrays(step: LocalStep, is_late: BoolArray) -> BlockArrays:
    """The step in the form of the compiled loops."""
    frame, jobs = step.frame, step.jobs
    n, n_blocks = frame.graph.n_ops, frame.n_stages * GROUPS
    first = np.concatenate([[0], np.cumsum(np.bincount(frame.block, minlength=n_blocks))]).astype(np.int64)
    # Jobs stand by block, then by the op after which they begin; some begin with their block.
    code = jobs.block * (n + 1) + np.where(jobs.after < first[jobs.block], 0, jobs.after + 1)
    block_of = np.repeat(np.arange(n_blocks), np.diff(first))
    begin = np.arange(n_blocks) * (n + 1)
    own = block_of * (n + 1) + np.arange(n) + 1
    start, after = (np.column_stack([np.searchsorted(code, c), np.searchsorted(code, c + 1)]) for c in (begin, own))
    late = np.zeros(n, dtype=np.bool_)
    late[frame.position] = is_late & (frame.group == BACKWARD)
    waits = pointers(jobs.waits_op, n), jobs.waits_job
    return BlockArrays(first, *waits, start.reshape(-1), after.reshape(-1), jobs.block, late)
