"""`Estimator`: what a strategy takes, without making its graph, for choosing which ones to score exactly.

One place of the mesh stands for all: its ops run one after the other, its communication beside them, block by block;
the blocks of a pipeline follow their order. What the simulator adds is contention between unlike places, and ops that
overtake each other.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from baselines.strategies.allowed import check_allowed
from baselines.strategies.collective_costs import CollectiveCosts
from baselines.strategies.costs import PipelineCosts
from baselines.strategies.devices import are_alike, problem_of, recomputed
from baselines.strategies.folding import grid_of
from baselines.strategies.memory_order import MEMORY_ORDER, memory_order, order_of
from baselines.strategies.orders import PipelineOrder
from baselines.strategies.searching.block_kernel import BlockArrays, PipelineArrays, run_blocks, run_pipeline
from baselines.strategies.searching.cuts import AxisCut, Cuts
from baselines.strategies.searching.local_costs import LocalCosts, OpTimes, Sizes, local_costs
from baselines.strategies.searching.records import Estimate
from baselines.strategies.searching.step import (
    BACKWARD,
    FORWARD,
    GROUPS,
    HALO,
    KINDS,
    ONCE,
    STATISTICS,
    WEIGHTS,
    Frame,
    Lives,
    LocalStep,
    Split,
    States,
    step_of,
)
from baselines.strategies.stage_cuts import equal_cuts, is_overfull, pipeline_stages
from env.cluster import Cluster
from env.collectives import Interconnect
from graphs.arrays import BoolArray, FloatArray, IntArray, pointers
from graphs.errors import InfeasibleError, StrategyError
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.derived import Derived
from graphs.transforms.sequencing import block_map
from graphs.transforms.splitting.sharding import Axis
from graphs.transforms.strategy import VIRTUAL, Strategy

_LETTERS = {"F": 0, "B": 1, "W": 2, "BW": 3}
_COLLECTIVES = dict(enumerate(KINDS)) | {STATISTICS: "all_reduce"}
_MOST_KEPT = 64  # steps and the like that are kept for the next estimate


@dataclass(frozen=True, eq=False)
class _Source:
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
        # What waits for the loss is a gradient.
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
        self._capacity = np.array([device.usable_bytes for device in cluster.devices], dtype=np.float64)
        self._sources: dict[tuple[str, ...], _Source] = {}
        self._stages: dict[tuple[object, ...], IntArray] = {}
        self._equal_cuts: dict[tuple[object, ...], IntArray] = {}
        self._frames: dict[tuple[object, ...], Frame] = {}
        self._steps: dict[tuple[object, ...], tuple[LocalStep, tuple[BlockArrays, ...]]] = {}
        self._orders: dict[tuple[object, ...], PipelineOrder] = {}
        self._networks: dict[tuple[object, ...], CollectiveCosts] = {}

    def estimate(self, strategy: Strategy) -> Estimate:
        """What a strategy takes.

        Raises:
            StrategyError: graph or cluster do not allow it.
        """
        return _Estimation(self, strategy).result()

    # -- what many strategies share ---------------------------------------------------------------------------

    def source(self, patterns: tuple[str, ...]) -> _Source:
        """The graph with recomputation."""
        if patterns not in self._sources:
            runs = recomputed(self.graph, patterns)
            graph = runs.graph
            cuts = Cuts(graph, runs, self.source(()).cuts) if patterns else Cuts(graph)
            self._sources[patterns] = _Source(graph, cuts, States.of(graph), OpTimes(graph, self.cluster))
        return self._sources[patterns]

    def order(self, strategy: Strategy) -> PipelineOrder:
        key = (strategy.order, strategy.stages, strategy.micro_batches, strategy.virtual_stages)
        if key not in self._orders:
            self._orders[key] = order_of(strategy)
        return self._orders[key]

    def network(self, grid: IntArray) -> CollectiveCosts:
        key = (grid.shape, grid.tobytes())
        if key not in self._networks:
            self._networks[key] = CollectiveCosts(self.cluster, grid)
        return self._networks[key]

    def stage(self, strategy: Strategy, grid: IntArray) -> IntArray:
        """int64 [n]: virtual stage of every op."""
        order = strategy.order if strategy.order in VIRTUAL else ""
        key = (strategy.recompute, strategy.stages, order, strategy.virtual_stages, strategy.cuts)
        known = key if self._are_alike else (*key, grid.tobytes(), tuple(rule.shares for rule in strategy.mesh))
        if not strategy.cuts and self._is_overfull(strategy, grid, known):
            mesh = tuple((rule.name, rule.size) for rule in strategy.mesh)
            known = (*known, strategy.order, strategy.micro_batches, strategy.zero, mesh)
        if known not in self._stages:
            graph = self.source(strategy.recompute).graph
            self._stages[known] = pipeline_stages(graph, self.cluster, strategy, grid.reshape(-1))[0]
        return self._stages[known]

    def _is_overfull(self, strategy: Strategy, grid: IntArray, key: tuple[object, ...]) -> bool:
        """Whether stages of equal times do not fit, so that others depend on all that takes memory."""
        source, devices = self.source(strategy.recompute), grid.reshape(-1)
        if key not in self._equal_cuts:
            self._equal_cuts[key] = equal_cuts(problem_of(source.graph, self.cluster), strategy, devices)
        return is_overfull(source.graph, self.cluster, strategy, devices, self._equal_cuts[key])

    def frame(self, strategy: Strategy, stage: IntArray, is_split: bool, is_chunked: BoolArray) -> Frame:
        """Ops in blocks.

        Args:
            is_split: whether the two backward passes are blocks of their own.
        """
        known = (strategy.recompute, stage.tobytes(), is_split, is_chunked.tobytes())
        if known not in self._frames:
            graph = self.source(strategy.recompute).graph
            group = np.where(graph.phase == Phase.FORWARD, FORWARD, BACKWARD)
            if is_split:
                group = np.where(_kinds(graph, stage) == 2, WEIGHTS, group)
            group = np.where((graph.phase == Phase.UPDATE) | ~is_chunked, ONCE, group)
            self._frames[known] = Frame.of(graph, stage, group)
        return self._frames[known]

    def step(
        self, frame: Frame, split: Split, source: _Source, is_ordered: bool, key: tuple[object, ...]
    ) -> tuple[LocalStep, tuple[BlockArrays, ...]]:
        if key not in self._steps:
            while len(self._steps) >= _MOST_KEPT:
                del self._steps[next(iter(self._steps))]
            made = step_of(frame, split, source.states, None if is_ordered else source.ready_after)
            # Without an order of its own a device may run first what much is waiting for.
            in_order = np.zeros(frame.graph.n_ops, dtype=np.bool_)
            orders = (in_order,) if is_ordered else (in_order, source.is_late)
            self._steps[key] = made, tuple(_block_arrays(made, is_late) for is_late in orders)
        return self._steps[key]


class _Estimation:
    """One strategy's estimate."""

    def __init__(self, estimator: Estimator, strategy: Strategy) -> None:
        self.estimator, self.strategy = estimator, strategy
        check_allowed(estimator.graph, estimator.cluster, strategy)
        self.source = estimator.source(strategy.recompute)
        self.split, self.sizes, key = self._split()
        self.order = estimator.order(strategy) if strategy.stages > 1 else None
        self.n_stages = len(self.order.devices) if self.order else 1
        words = {block.kind for sequence in self.order.sequences for block in sequence} if self.order else set()
        self.is_apart = "W" in words
        chunks = self.split.chunks
        is_chunked = np.ones(self.source.graph.n_ops, np.bool_) if chunks is None else chunks.extent > 0
        self.grid = grid_of(estimator.cluster, strategy)
        stage = np.zeros(len(is_chunked), dtype=np.int64)
        if strategy.stages > 1:
            stage = estimator.stage(strategy, self.grid)
        frame = estimator.frame(strategy, stage, self.is_apart, is_chunked)
        key = (strategy.recompute, stage.tobytes(), self.is_apart, *key)
        is_ordered = strategy.stages > 1 or strategy.micro_batches > 1 or bool(strategy.recompute)
        self.step, self.ways = estimator.step(frame, self.split, self.source, is_ordered, (is_ordered, *key))
        self.network = estimator.network(self.grid)

    def _split(self) -> tuple[Split, Sizes, tuple[object, ...]]:
        strategy, cuts = self.strategy, self.source.cuts
        graph = self.estimator.graph
        axes = [axis for axis in (rule.axis() for rule in strategy.mesh) if axis.size > 1]
        if (axes or strategy.micro_batches > 1) and not any(graph.split_rows):
            raise StrategyError(f"graph {graph.name!r} has no split rows, so nothing says how its ops may be cut.")
        chunking = Axis("mb", strategy.micro_batches, ("batch",))
        made: list[AxisCut] = []
        for number, axis in enumerate(axes):
            others = axes[:number] if axis.words else [*axes[:number], *axes[number + 1 :], chunking]
            made.append(cuts.along(axis, others))
        chunks = cuts.along(chunking, axes) if strategy.micro_batches > 1 else None
        names = [axis.name for axis in axes]
        zero_axis = names.index("dp") if strategy.zero and "dp" in names else -1
        keeps = tuple(not axis.words and not axis.sequence for axis in axes)
        synchronised = strategy.statistics == "sync"
        split = Split(tuple(made), keeps, chunks, zero_axis, strategy.zero, synchronised)
        shares = tuple(rule.shares for rule in strategy.mesh if rule.size > 1)
        sizes = Sizes(tuple(axis.size for axis in axes), strategy.micro_batches, shares)
        key = (*(cut.key for cut in made), keeps, chunks and chunks.key, zero_axis, strategy.zero, synchronised)
        return split, sizes, key

    # -- times ------------------------------------------------------------------------------------------------

    def result(self) -> Estimate:
        ranks = np.array(self.order.devices if self.order else (0,), dtype=np.int64)
        devices = [self.grid[rank].reshape(-1).tolist() for rank in ranks.tolist()]
        local = local_costs(self.step, self.split, self.sizes, self.source.states, self.source.times, devices)
        job_s = self._job_seconds(local, ranks)
        frame = self.step.frame
        by_place = np.empty(len(frame.position))
        by_place[frame.position] = local.op_s
        memory, hops = self._memory(local), self._hops(local, ranks)
        found = []
        for blocks in self.ways:
            self.blocks = blocks
            pipeline = self._pipeline(local, job_s, by_place, ranks, memory, hops)
            found.append(self._finished(local, job_s, ranks, *pipeline))
        return min(found, key=lambda estimate: estimate.step_time_s)

    def _job_seconds(self, local: LocalCosts, ranks: IntArray) -> FloatArray:
        """float64 [j]: seconds of each exchange; of a bucket, the last one has all its time."""
        jobs = self.step.jobs
        result = np.zeros(len(jobs.kind))
        if not len(result):
            return result
        rank = ranks[jobs.block // GROUPS]
        size = self._in_buckets(local.job_bytes.copy())
        for kind, axis, r in {*zip(jobs.kind.tolist(), jobs.axis.tolist(), rank.tolist(), strict=True)}:
            chosen = np.flatnonzero((jobs.kind == kind) & (jobs.axis == axis) & (rank == r) & self.has_time)
            if kind == HALO:
                result[chosen] = self._border_s(size[chosen], axis, r)
            elif len(chosen):
                result[chosen] = self.network.seconds(
                    _COLLECTIVES[kind], axis, size[chosen], self.strategy.reduce, stage=r
                )
        return result

    def _in_buckets(self, size: FloatArray) -> FloatArray:
        """float64 [j]: bytes where one member of each bucket has those of all; says which in ``has_time``."""
        jobs, limit = self.step.jobs, self.strategy.bucket_bytes
        self.has_time = np.ones(len(size), dtype=np.bool_)
        if not limit:
            return size
        stage = jobs.block // GROUPS
        # Gradients and updated parameters fill buckets one after the other; the last member begins when all are there.
        group = (jobs.kind * 64 + jobs.axis) * (1 + int(stage.max())) + stage
        filling = jobs.is_gradient | jobs.is_update
        for value in np.unique(group[filling]).tolist():
            members = np.flatnonzero(filling & (group == value))
            total = np.cumsum(size[members])
            last = np.flatnonzero(np.append(np.diff((total - size[members]) // limit) > 0, True))
            self._carry(size, members, members[last], np.diff(total[last], prepend=0.0))
        # A layer's parameters are gathered at a time.
        stored = np.flatnonzero((jobs.state >= 0) & ~jobs.is_update)
        if len(stored):
            turn = (jobs.block[stored] * (self.source.graph.n_ops + 1) + jobs.after[stored] + 1) * 64 + jobs.axis[
                stored
            ]
            _, first, which = np.unique(turn, return_index=True, return_inverse=True)
            self._carry(size, stored, stored[first], np.bincount(which.reshape(-1), size[stored]).astype(np.float64))
        return size

    def _carry(self, size: FloatArray, members: IntArray, carriers: IntArray, sums: FloatArray) -> None:
        size[members] = 0.0
        size[carriers] = sums
        self.has_time[members] = False
        self.has_time[carriers] = True

    def _border_s(self, size: FloatArray, axis: int, rank: int) -> FloatArray:
        line = np.moveaxis(self.grid[rank], axis, -1).reshape(-1, self.sizes.axes[axis])[0]
        routes = self.estimator.cluster.routes
        a, b = int(line[0]), int(line[1])
        return np.asarray(routes.latency_s[a, b] + size / routes.bandwidth_bytes_per_s[a, b])

    def _blocks(self, by_place: FloatArray, job_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        n = self.n_stages * GROUPS
        ends, lanes = np.zeros(n), np.zeros(n)
        run_blocks(self.blocks, by_place, job_s, np.zeros(len(job_s)), ends, lanes)
        return ends.reshape(-1, GROUPS), lanes.reshape(-1, GROUPS)

    def _pipeline(
        self,
        local: LocalCosts,
        job_s: FloatArray,
        by_place: FloatArray,
        ranks: IntArray,
        memory: tuple[FloatArray, FloatArray, FloatArray],
        hops: tuple[FloatArray, FloatArray],
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """``(end of each device's blocks, how much longer its communication takes, peaks)``.

        Args:
            memory, hops: of `_memory` and `_hops`.
        """
        jobs, frame = self.step.jobs, self.step.frame
        usual, _ = self._blocks(by_place, np.where(jobs.is_gradient, -1.0, job_s))
        last, lanes = self._blocks(by_place, job_s)
        # What comes after the last op of a block on its lane delays the end of the step.
        tail = np.maximum(lanes[:, [BACKWARD, WEIGHTS]] - last[:, [BACKWARD, WEIGHTS]], 0.0).max(axis=1)
        slower = np.maximum(last[:, BACKWARD] + last[:, WEIGHTS] - usual[:, BACKWARD] - usual[:, WEIGHTS], 0.0)
        tail += slower
        sums = local.sum_s
        where = WEIGHTS if self.is_apart else BACKWARD
        seconds = usual[:, :3].copy()
        seconds[:, where] += sums
        seconds = np.column_stack([seconds, seconds[:, BACKWARD] + seconds[:, WEIGHTS]])
        if self.strategy.stages == 1 and self.strategy.micro_batches > 1:
            seconds[0, 3] = self._overlapped_s(local, job_s, seconds[0])
            seconds[0, 0] = 0.0 if self.source.graph.is_training else seconds[0, 3]
        held, peak, once = memory
        stages = self.strategy.stages
        kept = _sums(ranks[frame.stage], local.kept, stages) + _sums(ranks, once, stages)
        forward_s, back_s = hops
        order = self._sequences(seconds, held, forward_s, kept + _sums(ranks, peak.max(axis=1), stages), ranks)
        arrays = PipelineArrays(*order, seconds, forward_s, back_s, held, peak)
        ends, peaks, place = np.zeros(stages), np.zeros(stages), np.zeros(stages, dtype=np.int64)
        shape = (self.n_stages, self.strategy.micro_batches, 2)
        is_done, sent, busy = np.zeros(shape, dtype=np.bool_), np.zeros((self.n_stages, 2)), np.zeros(stages)
        if not run_pipeline(arrays, place, np.zeros(shape), is_done, kept.copy(), sent, busy, ends, peaks):
            raise StrategyError(f"the order of strategy {self.strategy.text!r} can never be carried out.")
        longer = np.zeros(stages)
        np.maximum.at(longer, ranks, tail)
        return ends, longer, np.maximum(peaks, kept)

    def _overlapped_s(self, local: LocalCosts, job_s: FloatArray, seconds: FloatArray) -> float:
        """Seconds of a micro-batch among others without a pipeline: while one communicates, the next one computes."""
        jobs, frame, m = self.step.jobs, self.step.frame, self.strategy.micro_batches
        computing = float(local.op_s[frame.group != ONCE].sum() + local.sum_s.sum())
        communicating = float(job_s[~jobs.is_gradient & ~jobs.is_update].sum())
        alone = float(seconds[FORWARD] + seconds[3])
        return (alone + (m - 1) * min(alone, max(computing, communicating))) / m

    def _finished(
        self,
        local: LocalCosts,
        job_s: FloatArray,
        ranks: IntArray,
        ends: FloatArray,
        longer: FloatArray,
        peaks: FloatArray,
    ) -> Estimate:
        frame, jobs, stages = self.step.frame, self.step.jobs, self.strategy.stages
        is_once = frame.group == ONCE
        once = _sums(ranks[frame.stage[is_once]], local.op_s[is_once], stages)
        gathers = np.zeros(stages)
        if jobs.is_update.any():
            rank = ranks[jobs.block[jobs.is_update] // GROUPS]
            gathers = _sums(rank, job_s[jobs.is_update], stages)
        buckets = np.ones(stages)
        if jobs.is_gradient.any():
            in_time = jobs.is_gradient & self.has_time
            buckets = buckets + np.bincount(ranks[jobs.block[in_time] // GROUPS], minlength=stages)
        total = float(np.max(ends + np.maximum(once, longer + once / buckets + gathers)))
        capacity = self.estimator._capacity[self.grid.reshape(stages, -1)].min(axis=1)
        over = float(np.max(peaks - capacity))
        return Estimate(self.strategy, total, int(peaks.max()), max(0, int(np.ceil(over))))

    def _hops(self, local: LocalCosts, ranks: IntArray) -> tuple[FloatArray, FloatArray]:
        """float64 [S] each: seconds from the stage before, and from the one behind."""
        n = self.n_stages
        forward_s, back_s = np.zeros(n), np.zeros(n)
        if n == 1:
            return forward_s, back_s
        flat = self.grid.reshape(len(self.grid), -1)
        ahead, back = _crossings(self.step.frame)
        for (tensor, source, target), result in ((ahead, forward_s), (back, back_s)):
            for s, t in {*zip(source.tolist(), target.tolist(), strict=True)}:
                if ranks[s] == ranks[t]:
                    continue
                size = local.tensor_bytes[tensor[(source == s) & (target == t)]]
                between = Interconnect.busiest(self.estimator.cluster, flat[ranks[s]], flat[ranks[t]])
                result[t] += len(size) * between.latency_s + size.sum() * between.s_per_byte
        return forward_s, back_s

    def _sequences(
        self, seconds: FloatArray, held: FloatArray, forward_s: FloatArray, full: FloatArray, ranks: IntArray
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """``(ptr, kind, stage, micro-batch)`` of the blocks of every device."""
        m = self.strategy.micro_batches
        if self.order is None:
            kinds = np.tile([0, 3], m) if self.source.graph.is_training else np.zeros(m, dtype=np.int64)
            batch = np.repeat(np.arange(m), len(kinds) // m)
            return np.array([0, len(kinds)]), kinds.astype(np.int64), np.zeros(len(kinds), np.int64), batch
        order = self.order
        if self.strategy.order == MEMORY_ORDER and m > 1:
            freed = np.column_stack([held[:, 0], held[:, 1] - held[:, 0], -held[:, 1]])
            capacity = self.estimator._capacity[self.grid.reshape(len(self.grid), -1)].min(axis=1)
            costs = PipelineCosts(
                devices=tuple(ranks.tolist()),
                seconds=tuple((f, b, w) for f, b, w, _ in seconds.tolist()),
                held_bytes=tuple((f, b, w) for f, b, w in freed.tolist()),
                transfer_s=tuple(forward_s[1:].tolist()),
                memory_bytes=tuple((capacity - full).tolist()),
            )
            with contextlib.suppress(InfeasibleError):  # the peak says so
                order = memory_order(costs, m)
        return _encoded(order)

    # -- memory -----------------------------------------------------------------------------------------------

    def _memory(self, local: LocalCosts) -> tuple[FloatArray, FloatArray, FloatArray]:
        """``(held [S, 2], peak [S, 3], once [S])``, bytes of one micro-batch, and of all of them together."""
        frame, lives, graph = self.step.frame, self.step.lives, self.source.graph
        n = graph.n_ops
        size = np.where(graph.tensor_in_place, 0.0, local.tensor_bytes)
        if self.split.zero >= 2 and self.split.zero_axis >= 0:
            size = np.where(_is_gradient(graph, self.source.states), local.tensor_bytes, size)
        sizes = np.concatenate([size, np.where(self.step.jobs.is_gradient, 0.0, local.job_made)])[lives.tensor]
        change = np.bincount(lives.first, sizes, n + 1) - np.bincount(lives.last + 1, sizes, n + 1)
        with_workspace = np.cumsum(change)[:n]
        with_workspace[frame.position] += local.workspace
        first = self.ways[0].first  # the same for all ways
        s = np.arange(self.n_stages) * GROUPS
        held = np.column_stack([_crossing(lives, sizes, first[s + b], first[s + ONCE], n) for b in (BACKWARD, WEIGHTS)])
        peak = np.zeros((self.n_stages, 3))
        for group in range(3):
            for stage in range(self.n_stages):
                at = with_workspace[first[stage * GROUPS + group] : first[stage * GROUPS + group + 1]]
                peak[stage, group] = at.max(initial=0.0)
        return held, peak, _crossing(lives, sizes, first[s + ONCE], first[s + ONCE] + n, n)


def _sums(where: IntArray, values: FloatArray, size: int) -> FloatArray:
    return np.bincount(where, values, size).astype(np.float64)


def _kinds(graph: OpGraph, stage: IntArray) -> IntArray:
    """int64 [n]: numbers of blocks, as `BlockMap.kind`."""
    one = replace(Derived.identity(graph), micro_batch=np.zeros(graph.n_ops, dtype=np.int64))
    return block_map(one, stage).kind


def _crossing(lives: Lives, sizes: FloatArray, border: IntArray, end: IntArray, n: int) -> FloatArray:
    """float64 [S]: bytes of what is there on both sides of a border, and gone before an end."""
    result = np.zeros(len(border))
    for s, (place, last) in enumerate(zip(border.tolist(), end.tolist(), strict=True)):
        chosen = (lives.first < place) & (lives.last >= place) & (lives.last < last)
        result[s] = sizes[chosen].sum()
    return result


def _is_gradient(graph: OpGraph, states: States) -> np.ndarray:
    """bool [m]: tensors that an update of a state reads."""
    _, consumer, tensor = graph.edge_list
    is_update = np.zeros(graph.n_ops, dtype=np.bool_)
    is_update[states.update[states.trained]] = True
    result = np.zeros(graph.n_tensors, dtype=np.bool_)
    result[tensor[is_update[consumer]]] = True
    return result


def _encoded(order: PipelineOrder) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """``(ptr, kind, stage, micro-batch)`` of an order's blocks, one device's after the other's."""
    rows = [(_LETTERS[b.kind], b.stage, b.micro_batch) for sequence in order.sequences for b in sequence]
    table = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    ptr = np.concatenate([[0], np.cumsum([len(sequence) for sequence in order.sequences])]).astype(np.int64)
    return ptr, table[0].copy(), table[1].copy(), table[2].copy()


def _crossings(frame: Frame) -> tuple[tuple[IntArray, IntArray, IntArray], tuple[IntArray, IntArray, IntArray]]:
    """``(tensor, from, to)`` of what goes from stage to stage, ahead in the forward and back in the backward pass."""
    graph = frame.graph
    producer, consumer, tensor = graph.edge_list
    source, target = frame.stage[producer], frame.stage[consumer]
    result = []
    for phase, chosen in ((Phase.FORWARD, target > source), (Phase.BACKWARD, target < source)):
        at = np.flatnonzero(chosen & (graph.phase[producer] == phase) & (graph.phase[consumer] == phase))
        at = at[graph.kernels[producer[at]] > 0]
        key = np.unique(tensor[at] * frame.n_stages + target[at])
        tensors = key // frame.n_stages
        result.append((tensors, frame.stage[graph.tensor_producer[tensors]], key % frame.n_stages))
    return result[0], result[1]


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
