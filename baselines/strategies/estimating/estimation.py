"""`Estimation`: the estimate of one strategy, from what an `Estimator` knows of its graph and cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from baselines.strategies.allowed import check_allowed, check_flush
from baselines.strategies.costs import PipelineCosts
from baselines.strategies.devices import leaving_hosts
from baselines.strategies.estimating.block_kernel import (
    LANES,
    PipelineArrays,
    run_blocks,
    run_pipeline,
)
from baselines.strategies.estimating.cuts import AxisCut
from baselines.strategies.estimating.estimate import Estimate
from baselines.strategies.estimating.hosts import Done, HostWay, Offloaded, OnWay, missing_on_hosts
from baselines.strategies.estimating.local_costs import Hops, LocalCosts, Sizes, hops_of, local_costs
from baselines.strategies.estimating.step import (
    ALL_GATHER,
    BACK,
    BACKWARD,
    COPIED_IN,
    FORWARD,
    GROUPS,
    HALO,
    KINDS,
    ONCE,
    SHIFT,
    STATISTICS,
    SUMS,
    THERE,
    WEIGHTS,
    Lives,
    Split,
    States,
)
from baselines.strategies.folding import grid_of
from baselines.strategies.memory_order import MEMORY_ORDER, memory_order
from baselines.strategies.orders import PipelineOrder
from env.times.op_times import launch_seconds
from graphs.arrays import FloatArray, IntArray
from graphs.errors import InfeasibleError, StrategyError
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.axes import STORAGE_AXES
from graphs.transforms.splitting.splitter import in_micro_batches
from graphs.transforms.splitting.storage_ops import sums_of_uses
from graphs.transforms.strategy import Strategy

if TYPE_CHECKING:
    from baselines.strategies.estimating.estimator import Estimator

_LETTERS = {"F": 0, "B": 1, "W": 2, "BW": 3}
_COLLECTIVES = dict(enumerate(KINDS)) | {STATISTICS: "all_reduce", SUMS: "all_gather"}


@dataclass(frozen=True, eq=False)
class HeldMemory:
    """Bytes that a place holds (S virtual stages).

    Attributes:
        held: float64 [S, 2], of one after its forward pass, and between its two backward passes.
        peak: float64 [S, 3], the most that one has in each of its passes.
        late: float64 [S], of one, between its backward pass and what comes late from another stage.
        late_kind: int64 [S], since which of them: 1, or 2 for that for weights.
        once: float64 [S], of all micro-batches together.
        coming: float64 [S], of gradients, which come in the first backward pass that makes them and stay; those of a
            single micro-batch come one by one, and are in `peak`.
    """

    held: FloatArray
    peak: FloatArray
    late: FloatArray
    late_kind: IntArray
    once: FloatArray
    coming: FloatArray


class Estimation:
    """One strategy's estimate."""

    def __init__(self, estimator: Estimator, strategy: Strategy) -> None:
        self.estimator, self.strategy = estimator, strategy
        check_allowed(estimator.graph, estimator.cluster, strategy)
        self.grid = grid_of(estimator.cluster, strategy)
        if strategy.stages > 1:
            self.source, stage, is_late = estimator.staged(strategy, self.grid)
        else:
            self.source = estimator.source(strategy.recompute, strategy.micro_batches > 1)
            n = self.source.graph.n_ops
            stage, is_late = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.bool_)
        self.split, self.sizes, key = self._split()
        chunks = self.split.chunks
        is_chunked = np.ones(self.source.graph.n_ops, np.bool_) if chunks is None else chunks.extent > 0
        joined = None if chunks is None else estimator.joined(self.source, is_chunked, chunks)
        check_flush(strategy, joined)
        self.order = estimator.order(strategy, joined is not None)
        self.n_stages = len(self.order.devices)
        words = {block.kind for sequence in self.order.sequences for block in sequence}
        # The order that fits the memory is not known yet; it does the two backward passes one by one.
        self.is_apart = "W" in words or (strategy.order == MEMORY_ORDER and strategy.micro_batches > 1)
        frame = estimator.frame(self.source, stage, self.n_stages, self.is_apart, is_chunked, is_late & is_chunked)
        patterns = strategy.offloaded_activations
        hosted = estimator.hosted(self.source, patterns, stage)
        is_ordered = strategy.stages > 1 or strategy.micro_batches > 1 or bool(strategy.recompute or patterns)
        known = (is_ordered, self.source, stage.tobytes(), self.n_stages, is_late.tobytes(), self.is_apart, patterns)
        self.step, self.ways = estimator.step(frame, self.split, self.source, is_ordered, hosted, (*known, *key))
        self.network = estimator.network(self.grid, [rule for rule in strategy.mesh if rule.size > 1])

    def _split(self) -> tuple[Split, Sizes, tuple[object, ...]]:
        strategy, cuts = self.strategy, self.source.cuts
        graph = self.estimator.graph
        axes = [axis for axis in (rule.axis() for rule in strategy.mesh) if axis.size > 1]
        if (axes or strategy.micro_batches > 1) and not any(graph.split_rows):
            raise StrategyError(f"graph {graph.name!r} has no split rows, so nothing says how its ops may be cut.")
        chunking = in_micro_batches(strategy.micro_batches, strategy.is_pipeline)
        made: list[AxisCut] = []
        for number, axis in enumerate(axes):
            others = axes[:number] if axis.words else [*axes[:number], *axes[number + 1 :], chunking]
            made.append(cuts.along(axis, others))
        chunks = cuts.along(chunking, axes) if strategy.micro_batches > 1 else None
        names = [axis.name for axis in axes]
        zero_axes = tuple(a for a, name in enumerate(names) if strategy.zero and name in STORAGE_AXES)
        keeps = tuple(not axis.words and not axis.sequence for axis in axes)
        synchronised = strategy.statistics == "sync"
        on_hosts = strategy.offloads_parameters
        is_each = strategy.reduces_each and bool(zero_axes)
        split = Split(tuple(made), keeps, chunks, zero_axes, strategy.zero, synchronised, on_hosts, is_each)
        shares = tuple(rule.shares for rule in strategy.mesh if rule.size > 1)
        sizes = Sizes(tuple(axis.size for axis in axes), strategy.micro_batches, shares)
        key = (
            *(cut.key for cut in made),
            keeps,
            chunks and chunks.key,
            zero_axes,
            strategy.zero,
            synchronised,
            on_hosts,
            is_each,
        )
        return split, sizes, key

    # -- times ------------------------------------------------------------------------------------------------

    def result(self) -> Estimate:
        ranks = np.array(self.order.devices, dtype=np.int64)
        devices = [self.grid[rank].reshape(-1).tolist() for rank in ranks.tolist()]
        local = local_costs(self.step, self.split, self.sizes, self.source.states, self.source.times, devices)
        self.offloaded: Offloaded | None = None
        if self.strategy.offloads_optimizer:
            about = self.step, self.split, self.sizes, self.source.states, self.source.times, devices
            self.offloaded = Offloaded.of(local, *about)
            local = self.offloaded.local
        job_s = self._job_seconds(local, ranks)
        jobs = self.step.jobs
        self.job_lane = leaving_hosts(self.estimator.cluster, self.grid)[ranks[jobs.block // GROUPS], jobs.axis] + 0
        for lane, kind in ((LANES - 2, THERE), (LANES - 1, BACK), (LANES - 1, COPIED_IN)):
            self.job_lane[jobs.kind == kind] = lane
        if self.strategy.fused_updates:
            local = replace(local, op_s=local.op_s - self._saved_s(devices))
        frame = self.step.frame
        by_place = np.empty(len(frame.position))
        by_place[frame.position] = local.op_s
        memory, hops = self._memory(local), hops_of(self.step.frame, local, self.estimator.cluster, self.grid, ranks)
        found = []
        for blocks in self.ways:
            self.blocks = blocks
            pipeline = self._pipeline(local, job_s, by_place, ranks, memory, hops)
            found.append(self._finished(local, job_s, ranks, *pipeline))
        return min(found, key=lambda estimate: estimate.step_time_s)

    def _saved_s(self, devices: Sequence[Sequence[int]]) -> FloatArray:
        """float64 [n]: seconds of each update's launch that it does not pay, since those of a bucket pay one."""
        jobs, graph = self.step.jobs, self.source.graph
        members = int(jobs.is_gradient.sum())
        if not members:
            return np.zeros(graph.n_ops)
        share = 1.0 - int((jobs.is_gradient & self.has_time).sum()) / members
        is_saved = (graph.phase == Phase.UPDATE) & np.isnan(graph.time_s).all(axis=1)
        overhead_s = np.array([launch_seconds(device) for device in self.estimator.cluster.devices])
        least_s = np.array([overhead_s[list(numbers)].min() for numbers in devices])[self.step.frame.stage]
        return np.where(is_saved, share * graph.kernels * least_s, 0.0)

    def _job_seconds(self, local: LocalCosts, ranks: IntArray) -> FloatArray:
        """float64 [j]: seconds of each exchange; of a bucket, the last one has all its time."""
        jobs = self.step.jobs
        result, self.has_time = np.zeros(len(jobs.kind)), np.zeros(len(jobs.kind), dtype=np.bool_)
        if not len(result):
            return result
        rank = ranks[jobs.block // GROUPS]
        self.host_ways = self._host_ways()
        size = self._in_buckets(local.job_bytes.copy())
        # Beside those of states; a graph without any has one, which no job is of.
        outermost = np.append(self.split.outermost(self.source.states), -1)
        for kind, axis, r in {*zip(jobs.kind.tolist(), jobs.axis.tolist(), rank.tolist(), strict=True)}:
            chosen = np.flatnonzero((jobs.kind == kind) & (jobs.axis == axis) & (rank == r) & self.has_time)
            if kind in (THERE, BACK, COPIED_IN):
                result[chosen] = self.host_ways[r].seconds(size[chosen])
            elif kind == HALO:
                result[chosen] = self._border_s(size[chosen], axis, r)
            elif len(chosen):
                result[chosen] = self.network.seconds(
                    _COLLECTIVES[kind], axis, size[chosen], self.strategy.reduce, stage=r
                )
                result[chosen] *= self.sizes.axes[axis] - 1 if kind == SHIFT else 1  # once for each block of others
            is_part = (kind == ALL_GATHER) & (jobs.state[chosen] >= 0) & self.split.on_hosts
            of_parts = chosen[is_part & (outermost[jobs.state[chosen]] == axis)]
            if len(of_parts):  # each part comes from its host, and is gathered then
                part = size[of_parts] / jobs.amount[of_parts] / self.sizes.axes[axis]
                result[of_parts] += self.host_ways[r].seconds(part)
        return self._in_turn(result)

    def _in_turn(self, job_s: FloatArray) -> FloatArray:
        """Seconds of exchanges where parts put their numbers together along one axis after the other."""
        jobs = self.step.jobs
        numbers = np.flatnonzero(np.isin(jobs.kind, (STATISTICS, SUMS)))
        numbers = numbers[np.lexsort((-jobs.axis[numbers], jobs.after[numbers]))]
        total_s = np.cumsum(job_s[numbers])
        is_first = np.append(True, np.diff(jobs.after[numbers]) > 0)[: len(numbers)]
        before_s = np.maximum.accumulate(np.where(is_first, total_s - job_s[numbers], 0.0))
        job_s[numbers] = total_s - before_s
        return job_s

    def _host_ways(self) -> list[HostWay]:
        """The way to its host of each stage; none where nothing waits there."""
        if not self.strategy.offloaded_activations and not self.strategy.offloads_parameters:
            return []
        cluster, devices = self.estimator.cluster, self.grid.reshape(len(self.grid), -1).tolist()
        return [HostWay.of(cluster, cluster.host_devices, numbers, devices) for numbers in devices]

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
        # Parts are added up between groups in the buckets of which they are parts.
        parts = self.split.parts_exchanged(jobs, self.source.states, self.sizes.axes)
        for value in np.unique(group[filling]).tolist():
            members = np.flatnonzero(filling & (group == value))
            total, whole = np.cumsum(size[members]), (size * parts)[members]
            last = np.flatnonzero(np.append(np.diff((np.cumsum(whole) - whole) // limit) > 0, True))
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
        self.job_end, lane_s = np.zeros(len(job_s)), np.zeros(LANES)
        run_blocks(self.blocks, by_place, job_s, self.job_lane, self.job_end, lane_s, ends, lanes)
        return ends.reshape(-1, GROUPS), lanes.reshape(-1, GROUPS)

    def _pipeline(
        self,
        local: LocalCosts,
        job_s: FloatArray,
        by_place: FloatArray,
        ranks: IntArray,
        memory: HeldMemory,
        hops: Hops,
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """``(end of each device's blocks, how much longer its communication takes, peaks)``.

        Args:
            memory: of `_memory`.
        """
        jobs, frame = self.step.jobs, self.step.frame
        is_once = self.split.gathered_once(jobs)
        usual, _ = self._blocks(by_place, np.where(jobs.is_gradient | is_once, -1.0, job_s))
        last, lanes = self._blocks(by_place, job_s)
        # What is gathered once holds up the first micro-batch, on the first stage: others have time until it comes.
        lead_s = max(float(last[0, FORWARD] - usual[0, FORWARD]), 0.0)
        self.block_s = last
        # Exchanges after the last op of a block, on its lanes, delay the end of the step.
        tail = np.maximum(lanes[:, [BACKWARD, WEIGHTS]] - last[:, [BACKWARD, WEIGHTS]], 0.0).max(axis=1)
        slower = np.maximum(last[:, BACKWARD] + last[:, WEIGHTS] - usual[:, BACKWARD] - usual[:, WEIGHTS], 0.0)
        tail += slower
        sums = local.sum_s
        where = WEIGHTS if self.is_apart else BACKWARD
        seconds = usual[:, :3].copy()
        if (jobs.kind == THERE).any():
            on_way = OnWay(self.step, self.blocks.first, by_place, self.live)
            wait_s, most = on_way.of(self.job_end, local.job_bytes, seconds[:, FORWARD])
            seconds[:, FORWARD] += wait_s
            np.maximum(memory.peak[:, [FORWARD, BACKWARD]], most, out=most)
            memory.peak[:, [FORWARD, BACKWARD]] = most
        seconds[:, where] += sums
        seconds = np.column_stack([seconds, seconds[:, BACKWARD] + seconds[:, WEIGHTS]])
        held, peak, stages = memory.held, memory.peak, self.strategy.stages
        kept = _sums(ranks[frame.stage], local.kept, stages) + _sums(ranks, memory.once, stages)
        kept += self._of_tables(local, ranks)
        standing = kept - _sums(ranks[frame.stage], local.coming, stages)
        longer = np.zeros(stages)
        np.maximum.at(longer, ranks, tail)
        full = standing + _sums(ranks, peak.max(axis=1) + memory.coming, stages)
        order = self._sequences(seconds, held, hops.ahead_s, full, ranks)
        arrays = PipelineArrays(*order, seconds, hops, held, peak, memory.late, memory.late_kind, ranks)
        ends, peaks, place = np.zeros(stages), np.zeros(stages), np.zeros(stages, dtype=np.int64)
        size, link_s = (self.n_stages, self.strategy.micro_batches), np.zeros(len(self.estimator.cluster.links))
        is_done, late_s = np.zeros((*size, 3), dtype=np.bool_), np.zeros(self.n_stages)
        ready, way = np.zeros((*size, 2)), np.zeros((self.n_stages, 4), dtype=np.int64)
        scratch = place, ready, is_done, standing, memory.coming.copy(), way, link_s
        if not run_pipeline(arrays, *scratch, late_s, ends, peaks):
            raise StrategyError(f"the order of strategy {self.strategy.text!r} can never be carried out.")
        # Ops that work for another stage run beside the blocks, and for the last micro-batch after them.
        apart_s = _sums(frame.stage, np.where(frame.is_late, local.op_s, 0.0), self.n_stages)
        ends += lead_s + _sums(ranks, apart_s, stages) * self.strategy.micro_batches
        np.maximum.at(ends, ranks, np.where(late_s > 0, late_s + apart_s, 0.0))
        return ends, longer, np.maximum(peaks, kept)

    def _of_tables(self, local: LocalCosts, ranks: IntArray) -> FloatArray:
        """float64 [p]: bytes of tables that are kept twice, and of sums of what their uses make, added once."""
        frame, graph, stages = self.step.frame, self.source.graph, self.strategy.stages
        tables, readers = frame.lookups.elsewhere(ranks[frame.stage])
        copied = np.array([local.kept[graph.colocation == table].sum() for table in tables.tolist()])
        found = _sums(ranks[frame.stage[readers]], copied, stages)
        late = sums_of_uses(graph)
        if self.strategy.is_pipeline and self.strategy.micro_batches > 1 and late.any():
            makers, adds, made = graph.edge_list
            reads = late[adds] & ~late[makers]
            found += _sums(ranks[frame.stage[adds[reads]]], local.tensor_bytes[made[reads]], stages)
        return found

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
        is_once = (frame.group == ONCE) & ~frame.is_late
        once = _sums(ranks[frame.stage[is_once]], local.op_s[is_once], stages)
        gathers = np.zeros(stages)
        if jobs.is_update.any():
            rank = ranks[jobs.block[jobs.is_update] // GROUPS]
            gathers = _sums(rank, job_s[jobs.is_update], stages)
        buckets = np.ones(stages)
        if jobs.is_gradient.any():
            in_time = jobs.is_gradient & self.has_time
            buckets = buckets + np.bincount(ranks[jobs.block[in_time] // GROUPS], minlength=stages)
        all_s = ends + np.maximum(once, longer + once / buckets + gathers)
        if self.offloaded is not None:
            begin_s = np.maximum(ends[ranks] - self.block_s[:, BACKWARD] - self.block_s[:, WEIGHTS], 0.0)
            done = Done(job_s, self.job_end, self.has_time, self.block_s, ends, begin_s)
            all_s = np.maximum(all_s, self.offloaded.ends_s(jobs, done, ranks))
        on_way_s = _sums(jobs.block[jobs.kind == THERE] // GROUPS, job_s[jobs.kind == THERE], self.n_stages)
        if self.split.reduces_each:  # beside the next micro-batch, whose lanes may have no time for it
            lane = (jobs.block // GROUPS) * LANES + self.job_lane
            is_each = ~jobs.is_update & ~self.split.gathered_once(jobs)
            lane_s = _sums(lane, np.where(is_each, job_s, 0.0), self.n_stages * LANES)
            all_s = np.maximum(all_s, self.strategy.micro_batches * float(lane_s.max()) + gathers)
        total = max(float(np.max(all_s)), self.strategy.micro_batches * float(on_way_s.max()))
        capacity = self.estimator.capacity[self.grid.reshape(stages, -1)].min(axis=1)
        over = float(np.max(peaks - capacity))
        over = max(over, self._missing_on_hosts(local.job_bytes, ranks)) if self.strategy.offload else over
        return Estimate(self.strategy, total, int(peaks.max()), max(0, int(np.ceil(over))))

    def _missing_on_hosts(self, job_bytes: FloatArray, ranks: IntArray) -> float:
        """Bytes that the fullest host lacks for states, and what waits there of the micro-batches under way."""
        jobs, strategy = self.step.jobs, self.strategy
        there = jobs.kind == THERE
        under_way = np.minimum(strategy.micro_batches, strategy.stages - ranks)
        kept = _sums(jobs.block[there] // GROUPS, job_bytes[there], self.n_stages) * under_way
        kept = kept if self.offloaded is None else kept + self.offloaded.kept
        devices = [self.grid[rank].reshape(-1).tolist() for rank in ranks.tolist()]
        return missing_on_hosts(self.estimator.cluster, devices, kept)

    def _sequences(
        self, seconds: FloatArray, held: FloatArray, forward_s: FloatArray, full: FloatArray, ranks: IntArray
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """``(ptr, kind, stage, micro-batch)`` of the blocks of every device."""
        m = self.strategy.micro_batches
        order = self.order
        if self.strategy.order == MEMORY_ORDER and m > 1:
            freed = np.column_stack([held[:, 0], held[:, 1] - held[:, 0], -held[:, 1]])
            capacity = self.estimator.capacity[self.grid.reshape(len(self.grid), -1)].min(axis=1)
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

    def _memory(self, local: LocalCosts) -> HeldMemory:
        frame, lives, graph = self.step.frame, self.step.lives, self.source.graph
        n = graph.n_ops
        size = np.where(graph.tensor_in_place, 0.0, local.tensor_bytes)
        if self.split.level >= 2 or self.split.on_hosts:
            size = np.where(_is_gradient(graph, self.source.states), local.tensor_bytes, size)
        sizes = np.concatenate([size, np.where(self.step.jobs.is_gradient, 0.0, local.job_made)])[lives.tensor]
        gathered = np.zeros(self.n_stages)
        if self.strategy.micro_batches > 1:  # what is gathered once is there for all of them
            is_once = self.split.gathered_once(self.step.jobs)
            stays = np.append(np.zeros(graph.n_tensors, np.bool_), is_once)[lives.tensor]
            by_place = np.empty(n, dtype=np.int64)
            by_place[frame.position] = frame.stage
            gathered = _sums(by_place[lives.last[stays]], sizes[stays], self.n_stages)
            sizes = np.where(stays, 0.0, sizes)
        born, gone = _sums(lives.first, sizes, n), _sums(lives.last, sizes, n)
        after: FloatArray = np.cumsum(born - gone)
        live = after + gone
        live[frame.position] += local.workspace
        self.live = live
        first = self.ways[0].first  # the same for all ways
        s = np.arange(self.n_stages) * GROUPS
        coming = _sums(frame.stage, local.coming, self.n_stages)
        if self.strategy.micro_batches == 1:
            come = np.cumsum(_sums(frame.position, local.coming, n))
            live += come - (np.cumsum(coming) - coming)[np.sort(frame.stage)]
        elif self.split.level >= 2 and not self.split.reduces_each:
            coming = np.zeros(self.n_stages)  # when those before they are scattered go, which are larger
        held = np.column_stack([_crossing(lives, sizes, first[s + b], first[s + ONCE]) for b in (BACKWARD, WEIGHTS)])
        peak = np.zeros((self.n_stages, 3))
        for group in range(3):
            for stage in range(self.n_stages):
                at = live[first[stage * GROUPS + group] : first[stage * GROUPS + group + 1]]
                peak[stage, group] = at.max(initial=0.0)
        is_late = np.empty(n, dtype=np.bool_)
        is_late[frame.position] = frame.is_late
        borders = first[s + ONCE], first[s + ONCE] + n
        late = _crossing(lives, np.where(is_late[lives.last], sizes, 0.0), *borders)
        before = _crossing(lives, np.where(is_late[lives.last], sizes, 0.0), first[s + WEIGHTS], n + borders[0])
        kind = np.where(before > 0, 1, 2)  # what is there before the gradients of weights
        once = _crossing(lives, sizes, *borders) - late + self._waiting_sums(local, borders[0]) + gathered
        return HeldMemory(held, peak, late, kind, once, coming)

    def _waiting_sums(self, local: LocalCosts, end: IntArray) -> FloatArray:
        """float64 [S]: bytes of gradients that are added up over micro-batches before any is scattered.

        Args:
            end: int64 [S], the place after each stage's backward pass.
        """
        graph, lives, tensors = self.source.graph, self.step.lives, self.step.summed
        is_released = self.split.level >= 2 or self.split.on_hosts
        if self.strategy.micro_batches == 1 or not is_released or self.split.reduces_each:
            return np.zeros(self.n_stages)
        waits = np.zeros(graph.n_tensors, dtype=np.bool_)
        waits[tensors] = _is_gradient(graph, self.source.states)[tensors]
        chosen = np.flatnonzero(lives.tensor < graph.n_tensors)
        stage = self.step.frame.stage[graph.tensor_producer[lives.tensor[chosen]]]
        is_gone = waits[lives.tensor[chosen]] & (lives.last[chosen] < end[stage])
        return _sums(stage[is_gone], local.tensor_bytes[lives.tensor[chosen[is_gone]]], self.n_stages)


def _sums(where: IntArray, values: FloatArray, size: int) -> FloatArray:
    return np.bincount(where, values, size).astype(np.float64)


def _crossing(lives: Lives, sizes: FloatArray, border: IntArray, end: IntArray) -> FloatArray:
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
