"""`LocalCosts`: seconds and bytes of one place's step, for given sizes of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from baselines.strategies.estimating.rings import LocalRings
from baselines.strategies.estimating.step import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BACK,
    COPIED_IN,
    HALO,
    REDUCE_SCATTER,
    SHIFT,
    STATISTICS,
    SUMS,
    THERE,
    Frame,
    LocalStep,
    Split,
    States,
)
from env.cluster import Cluster
from env.communication.formulas import Interconnect
from env.times.op_times import OpWork, moving_seconds, op_seconds
from graphs.arrays import FloatArray, IntArray
from graphs.opgraph import ANY_DEVICE, OpGraph, Phase
from graphs.transforms.splitting.copies import scaled, settled, share_of_flops
from graphs.transforms.splitting.cuts import SUM
from graphs.transforms.splitting.exchange import ADD_BYTES_PER_BYTE
from graphs.transforms.splitting.synchronised import added_up
from graphs.transforms.splitting.zero import SPLIT_FROM

if TYPE_CHECKING:
    from baselines.strategies.estimating.cuts import AxisCut

_LATE = 3  # the last kind of `_crossings`


@dataclass(frozen=True, eq=False)
class LocalCosts:
    """Work and memory of the place that has most (n ops, m tensors, j jobs).

    Attributes:
        op_s: float64 [n], of one micro-batch, or once a step for an op that is not chunked.
        tensor_bytes: float64 [m].
        workspace: float64 [n].
        kept: float64 [n], bytes kept by each op.
        coming: float64 [n], of them the gradients that are not there before each op makes them.
        job_bytes: float64 [j], of the whole tensor that is exchanged (as `Collective.bytes`).
        job_made: float64 [j], bytes that a place has afterwards.
        sum_s: float64 [stages], seconds of adding up gradients over micro-batches, each time.
    """

    op_s: FloatArray
    tensor_bytes: FloatArray
    workspace: FloatArray
    kept: FloatArray
    coming: FloatArray
    job_bytes: FloatArray
    job_made: FloatArray
    sum_s: FloatArray


@dataclass(frozen=True)
class Sizes:
    """Into how many parts a step is cut.

    Attributes:
        axes: of each axis of the mesh.
        micro_batches: in time.
        shares: of each axis, in what proportion; () for even parts.
    """

    axes: tuple[int, ...]
    micro_batches: int
    shares: tuple[tuple[int, ...], ...]


class LocalWork(NamedTuple):
    """Work of one place in each op.

    Attributes:
        flops, moved: float64 [n], FLOPs and bytes moved.
        extents: float64 [n, 5], as of `OpGraph`.
    """

    flops: FloatArray
    moved: FloatArray
    extents: FloatArray


class OpTimes:
    """Seconds of local ops on the devices of a cluster."""

    def __init__(self, graph: OpGraph, cluster: Cluster) -> None:
        self.graph, self.cluster = graph, cluster
        self._ops = OpWork.of(graph)
        self._named = set(graph.time_keys)
        self.reads_extents = any(device.rates is not None for device in cluster.devices)

    def seconds(
        self,
        work: LocalWork,
        devices: Sequence[int],
        slower: FloatArray | float = 1.0,
        stream: IntArray | None = None,
    ) -> FloatArray:
        """float64 [n]: on the slowest of some devices, by number.

        Args:
            slower: as of `_slower`.
            stream: int64 [n], hosts that launch the ops; None: as of the graph.
        """
        ops = self._ops.divided(work.flops, work.moved, work.extents)
        ops = ops if stream is None else replace(ops, stream=stream)
        result = np.zeros(len(work.flops))
        for d in self._kinds(devices):
            measured = self._measured(work.flops, work.moved, d, slower) if self._named else None
            np.maximum(result, op_seconds(ops, self.cluster.devices[d], measured), out=result)
        return result

    def _kinds(self, devices: Sequence[int]) -> list[int]:
        """One of each kind of device among these, and all that were measured by name."""
        numbers = np.asarray(devices, dtype=np.int64)
        found = set(numbers[np.unique(self.cluster.alike[numbers], return_index=True)[1]].tolist())
        if self._named:
            found |= {d for d in numbers.tolist() if self.cluster.devices[d].name in self._named}
        return sorted(found)

    def _measured(self, flops: FloatArray, moved: FloatArray, d: int, slower: FloatArray | float) -> FloatArray:
        """Measured times count for the share of the work that is done, but for what every part takes in full."""
        graph, device = self.graph, self.cluster.devices[d]
        column = {key: j for j, key in enumerate(graph.time_keys)}
        work, result = np.ones(len(flops)), np.full(len(flops), np.nan)
        for part, total in ((moved, graph.bytes_moved), (flops, graph.flops)):
            work = np.where(total > 0, part / np.maximum(total, 1e-300), work)
        for key in (ANY_DEVICE, device.kind, device.model, device.name):
            if key in column:
                fixed_s = graph.fixed_s[:, column[key]]
                measured = fixed_s + (graph.time_s[:, column[key]] - fixed_s) * work * slower
                result = np.where(np.isnan(measured), result, measured)
        return result


def local_costs(
    step: LocalStep, split: Split, sizes: Sizes, states: States, times: OpTimes, devices: Sequence[Sequence[int]]
) -> LocalCosts:
    """Costs of a step on a mesh of these sizes.

    Args:
        devices: numbers of the devices that have each virtual stage.
    """
    graph = step.frame.graph
    work = np.ones(graph.n_ops)
    tensor = graph.tensor_bytes.astype(float)
    every = [*zip(split.cuts, sizes.axes, sizes.shares, strict=True)]
    if split.chunks is not None:
        every.append((split.chunks, sizes.micro_batches, ()))
    for cut, size, weights in every:
        work = work * cut.share(size, weights)
        tensor = tensor * cut.written_share(size, weights)
    # Each place does its part of updates, and of casts of what is stored.
    of_state, parts = split.parts(states, sizes.axes), np.ones(graph.n_ops)
    trained = np.flatnonzero(states.trained)
    parts[states.update[trained]] = of_state[trained]
    casts = np.isin(states.casts, split.cast_in_parts(states))
    parts[states.casts[casts]] = of_state[states.cast_state[casts]]
    tensor[graph.output_ptr[states.casts[casts]]] /= parts[states.casts[casts]]
    op_s, rings = np.zeros(graph.n_ops), LocalRings.of(step, sizes, tensor)
    shares = sizes.shares[0] if sizes.shares else ()
    # A micro-batch has a host of its own, and so has what is done once a step (`OpGraph.stream` of split graphs).
    stream = None if split.chunks is None else (split.chunks.extent > 0).astype(np.int64)
    for replica in range(len(shares)) if shares else (None,):
        own_work = local_work(graph, every, replica, sized=times.reads_extents)
        own_work.flops[:] /= parts
        own_work.moved[:] /= parts
        # The axis of replicas is the outermost one.
        own = devices if replica is None else [_stretch(numbers, replica, len(shares)) for numbers in devices]
        slower = _slower(every, replica)
        rings.divide(own_work, times.reads_extents)
        np.maximum(op_s, _seconds(step, times, own_work, own, (slower, stream)), out=op_s)
    op_s[rings.ops] *= rings.parts
    op_s += rings.merge_s(step, times, devices)
    op_s += _sums_s(step, tensor, times, devices, split.synchronised)
    local = [local_states(split, sizes, states, part, level) for part, level in _parts_of(states, split)]
    return LocalCosts(
        op_s=op_s,
        tensor_bytes=tensor,
        workspace=(graph.workspace_bytes * np.minimum(work, 1.0)).astype(np.float64) + rings.held,
        kept=_kept(graph, states, local),
        coming=_coming(step, split, states, local[1]) if len(states.owner) else np.zeros(graph.n_ops),
        **_job_bytes(step, split, sizes, states, tensor, every),
        sum_s=_sum_s(step, _summands(step, split, sizes, tensor), times, devices),
    )


def local_work(
    graph: OpGraph,
    every: Sequence[tuple[AxisCut, int, tuple[int, ...]]],
    replica: int | None = None,
    sized: bool = True,
) -> LocalWork:
    """The work of the place that has most, or of the places of one of uneven replicas.

    Args:
        every: cuts, into how many parts, and their shares of the batch; () for even ones.
        sized: whether extents are divided, which takes as long as all the rest; else they are those of the whole ops.
    """
    flops, moved = graph.flops.astype(float), graph.bytes_moved.astype(float)
    known = np.flatnonzero(graph.work) if sized else np.zeros(0, dtype=np.int64)
    extents, of_known = graph.extents, graph.extents[known]
    for cut, size, weights in every:
        share = cut.share(size, weights, replica if weights else None)
        whole = np.minimum(cut.whole_flops, flops), np.minimum(cut.whole_bytes, moved)
        left = whole[0] + (flops - whole[0]) * share
        if len(known):
            factor = share_of_flops(flops[known], left[known], share[known])
            of_known = scaled(of_known, cut.divided[known], factor)
        flops, moved = left, whole[1] + (moved - whole[1]) * share
    if len(known):
        extents = extents.copy()
        extents[known] = settled(of_known)
    return LocalWork(flops, moved, extents)


def _slower(every: Sequence[tuple[AxisCut, int, tuple[int, ...]]], replica: int | None) -> FloatArray | float:
    """How many times as long as a stretch of the whole op a part measures for its work, as rows say."""
    found: FloatArray | float = 1.0
    for cut, size, weights in every:
        if cut.whole_time.any():
            share = cut.share(size, weights, replica if weights else None)
            found = found * (cut.whole_time + (1.0 - cut.whole_time) * share) / share
    return found


def _stretch(devices: Sequence[int], number: int, parts: int) -> Sequence[int]:
    size = len(devices) // parts
    return devices[number * size : (number + 1) * size]


def _seconds(
    step: LocalStep,
    times: OpTimes,
    work: LocalWork,
    devices: Sequence[Sequence[int]],
    about: tuple[FloatArray | float, IntArray | None],
) -> FloatArray:
    """float64 [n]: seconds of each op on the slowest device of its stage; ``about``: ``slower`` and ``stream``."""
    if all(numbers == devices[0] for numbers in devices):
        return times.seconds(work, devices[0], *about)
    result = np.zeros(len(work.flops))
    for s, numbers in enumerate(devices):
        here = step.frame.stage == s
        result[here] = times.seconds(work, numbers, *about)[here]
    return result


def _sums_s(
    step: LocalStep, tensor: FloatArray, times: OpTimes, devices: Sequence[Sequence[int]], synchronised: bool
) -> FloatArray:
    """float64 [n]: of each op whose parts put numbers together, a first look at what it reads."""
    graph, result = step.frame.graph, np.zeros(step.frame.graph.n_ops)
    parted, of_classes, is_cut = (np.zeros(n, dtype=np.bool_) for n in (graph.n_ops, graph.n_ops, graph.n_tensors))
    for cut in step.cuts:
        parted |= cut.has_parted_statistics & synchronised
        of_classes |= cut.sums_bytes > 0
        is_cut |= cut.written > SUM
    if not (parted | of_classes).any():
        return result
    ptr, tensors = graph.inputs
    consumer = np.repeat(np.arange(graph.n_ops), np.diff(ptr))
    moved = np.bincount(consumer, np.where(is_cut[tensors], tensor[tensors], 0.0), graph.n_ops)
    for op in np.flatnonzero(of_classes).tolist():
        moved[op] = tensor[added_up(graph, op)]
    parted |= of_classes
    for s, numbers in enumerate(devices):
        here = parted & (step.frame.stage == s)
        slowest = [times.cluster.devices[d] for d in numbers]
        seconds = np.max([moving_seconds(d, moved) for d in slowest], axis=0)
        result[here] = seconds[here]
    return result


def _parts_of(states: States, split: Split) -> list[tuple[np.ndarray, bool]]:
    level = split.level
    sizes = states.parameter, states.gradient, states.optimizer
    return [(size, level >= least) for size, least in zip(sizes, SPLIT_FROM, strict=True)]


def local_states(split: Split, sizes: Sizes, states: States, size: np.ndarray, is_split: bool) -> FloatArray:
    """float64 [s]: bytes of each state at one place."""
    value = size.astype(float)
    for a, (cut, k) in enumerate(zip(split.cuts, sizes.axes, strict=True)):
        divided = cut.state > SUM
        if is_split:
            divided = divided | split.stored_along(a, states)
        value = np.where(divided, np.ceil(value / k), value)
    return value


def _kept(graph: OpGraph, states: States, local: list[FloatArray]) -> FloatArray:
    kept = graph.kept_bytes.astype(float)
    sizes = (states.parameter, states.gradient, states.optimizer)
    for value, size in zip(local, sizes, strict=True):
        np.add.at(kept, states.owner, value - size)
    result: FloatArray = np.maximum(kept, 0.0)
    return result


def _coming(step: LocalStep, split: Split, states: States, gradient: FloatArray) -> FloatArray:
    """float64 [n]: gradients at one place, float64 [s], by the ops that make them, as `OpGraph.gradient_maker`.

    Gradients that replicas exchange have buckets for the whole step, but where each replica keeps a part alone.
    """
    graph, jobs = step.frame.graph, step.jobs
    exchanged = np.zeros(graph.n_tensors, dtype=np.bool_)
    exchanged[jobs.tensor[jobs.is_gradient]] = True
    _, consumer, tensor = graph.edge_list
    waits = np.zeros(graph.n_ops, dtype=np.bool_)
    waits[consumer[exchanged[tensor]]] = True
    is_released = split.stored_in_parts(states) & (split.level >= 2)
    maker = graph.gradient_maker[states.owner]
    comes = states.trained & (maker >= 0) & (is_released | ~waits[states.update])
    return np.bincount(maker[comes], gradient[comes], graph.n_ops).astype(np.float64)


def _job_bytes(
    step: LocalStep,
    split: Split,
    sizes: Sizes,
    states: States,
    tensor: FloatArray,
    every: Sequence[tuple[AxisCut, int, tuple[int, ...]]],
) -> dict[str, FloatArray]:
    jobs = step.jobs
    if not len(jobs.kind):
        return {"job_bytes": np.zeros(0), "job_made": np.zeros(0)}
    k = np.array(sizes.axes or (1,), dtype=float)[jobs.axis]
    parameter = local_states(split, sizes, states, states.parameter, False) if len(states.owner) else np.zeros(1)
    local = np.where(jobs.tensor >= 0, tensor[jobs.tensor], parameter[jobs.state] * jobs.amount)
    of_part = (jobs.tensor >= 0) & np.isin(jobs.kind, (ALL_GATHER, ALL_TO_ALL, SHIFT))
    whole = np.where(of_part, local * k, np.where(jobs.kind == HALO, local * k * jobs.amount, local))
    for a, (cut, size, _) in enumerate(every):  # tokens on their way to uneven groups; on the way back it is counted
        most = min(float(cut.load.max(initial=1.0)), float(size))
        if most > 1.0:
            is_to_groups = (jobs.kind == ALL_TO_ALL) & (jobs.axis == a) & (cut.written_load[jobs.tensor] == 1.0)
            whole = np.where(is_to_groups, whole * most, whole)
    whole = np.where(np.isin(jobs.kind, (STATISTICS, SUMS)), jobs.amount, whole)
    if (jobs.kind == SUMS).any():  # one part's numbers for its own samples, of each part
        at = np.flatnonzero(jobs.kind == SUMS)
        op = np.argsort(step.frame.position)[jobs.after[at] + 1]
        for a, (cut, size, weights) in enumerate(every):
            whole[at] *= np.where(jobs.axis[at] == a, size, cut.share(size, weights)[op])
    whole = whole / split.parts_exchanged(jobs, states, sizes.axes)
    is_made = ~jobs.is_update & ~np.isin(jobs.kind, (HALO, STATISTICS, SUMS, THERE, SHIFT))
    made = np.where(np.isin(jobs.kind, (ALL_GATHER, ALL_REDUCE, BACK, COPIED_IN)), whole, whole / k)
    copied = jobs.kind == COPIED_IN
    whole[copied] /= jobs.amount[copied]  # it is cast here
    return {"job_bytes": whole, "job_made": np.where(is_made, made, 0.0)}


def _summands(step: LocalStep, split: Split, sizes: Sizes, tensor: FloatArray) -> FloatArray:
    """float64 [m]: bytes of each tensor as it is added up over micro-batches: parts where each one's are reduced."""
    if not split.reduces_each:
        return tensor
    jobs, result = step.jobs, tensor.copy()
    at = np.flatnonzero(jobs.is_gradient & (jobs.kind == REDUCE_SCATTER))
    np.divide.at(result, jobs.tensor[at], np.array(sizes.axes, dtype=float)[jobs.axis[at]])
    return result


def _sum_s(step: LocalStep, tensor: FloatArray, times: OpTimes, devices: Sequence[Sequence[int]]) -> FloatArray:
    """float64 [stages]: what it takes to add one micro-batch's gradients to those before."""
    graph = step.frame.graph
    result = np.zeros(step.frame.n_stages)
    if not len(step.summed):
        return result
    stage = step.frame.stage[graph.tensor_producer[step.summed]]
    moved = np.bincount(stage, tensor[step.summed], step.frame.n_stages) * ADD_BYTES_PER_BYTE
    count = np.bincount(stage, minlength=step.frame.n_stages)
    for s, numbers in enumerate(devices):
        slowest = [times.cluster.devices[d] for d in numbers]
        result[s] = max(moving_seconds(d, moved[s], int(count[s])) for d in slowest)
    return result


# -- between stages -----------------------------------------------------------------------------------------------


class Hops(NamedTuple):
    """Transfers from stage to stage for each micro-batch (S virtual stages), and their links.

    Attributes:
        ahead_s, back_s: float64 [S], seconds to each stage from the one before, and from the one behind.
        early_s: float64 [S], to each stage from ops of the forward pass that work for it on a later one, as a tied
            embedding does: they have nothing to wait for.
        late_s: float64 [S], from the backward pass of each stage to such ops.
        late_at: int64 [S], their stage; -1 for none.
        sent: float64 [2, S], bytes of what is sent to each stage from the one before, and from the one behind.
        link_ptr, link: int64 [4 S + 1], [l]: exclusive links of these ways, all of one kind after the other.
    """

    ahead_s: FloatArray
    back_s: FloatArray
    early_s: FloatArray
    late_s: FloatArray
    late_at: IntArray
    sent: FloatArray
    link_ptr: IntArray
    link: IntArray


def hops_of(frame: Frame, local: LocalCosts, cluster: Cluster, grid: IntArray, ranks: IntArray) -> Hops:
    """The hops of a pipeline.

    Args:
        grid: int64 [stages, ...], devices.
        ranks: int64 [S], row of `grid` of each virtual stage.
    """
    n, flat = frame.n_stages, grid.reshape(len(grid), -1)
    seconds, sent, late_at = np.zeros((4, n)), np.zeros((4, n)), np.full(n, -1)
    links: list[list[int]] = [[] for _ in range(4 * n)]
    exclusive = [link.exclusive for link in cluster.links]
    for kind, (tensor, source, target) in enumerate(_crossings(frame)):
        for s, t in sorted({*zip(source.tolist(), target.tolist(), strict=True)}):
            at = s if kind == _LATE else t
            if kind == _LATE:
                late_at[s] = t
            if ranks[s] == ranks[t]:
                continue
            size = local.tensor_bytes[tensor[(source == s) & (target == t)]]
            between = Interconnect.busiest(cluster, flat[ranks[s]], flat[ranks[t]])
            sent[kind, at] += size.sum()
            seconds[kind, at] += len(size) * between.latency_s + size.sum() * between.s_per_byte
            found = cluster.routes.links_of(flat[ranks[s], :1], flat[ranks[t], :1])[1].tolist()
            links[kind * n + at] += [link for link in found if exclusive[link] and link not in links[kind * n + at]]
    ptr = np.cumsum([0, *map(len, links)]).astype(np.int64)
    ahead_s, back_s, early_s, late_s = seconds
    link = np.array(list(chain.from_iterable(links)), dtype=np.int64)
    return Hops(ahead_s, back_s, early_s, late_s, late_at, sent[:2], ptr, link)


def _crossings(frame: Frame) -> list[tuple[IntArray, IntArray, IntArray]]:
    """``(tensor, from, to)`` of what goes from stage to stage: ahead, back, and what `Hops` calls early and late."""
    graph = frame.graph
    producer, consumer, tensor = graph.edge_list
    source, target = frame.stage[producer], frame.stage[consumer]
    ahead, back = target > source, target < source
    result = []
    for phase, chosen in (
        (Phase.FORWARD, ahead),
        (Phase.BACKWARD, back),
        (Phase.FORWARD, back),
        (Phase.BACKWARD, ahead & frame.is_late[consumer]),
    ):
        at = np.flatnonzero(chosen & (graph.phase[producer] == phase) & (graph.phase[consumer] == phase))
        at = at[graph.kernels[producer[at]] > 0]
        key = np.unique(tensor[at] * frame.n_stages + target[at])
        tensors = key // frame.n_stages
        result.append((tensors, frame.stage[graph.tensor_producer[tensors]], key % frame.n_stages))
    return result
