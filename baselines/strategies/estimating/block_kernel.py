"""Compiled loops of the estimator: ops of a block beside its communication, and blocks of a pipeline.

Letters: ``i``, place of an op; ``j``, a job, that is an exchange; ``b``, a block; ``d``, a device; ``s``, a virtual
stage; ``k``, place of a block in the sequence of its device.
"""

from __future__ import annotations

from typing import NamedTuple

from baselines.strategies.estimating.local_costs import Hops
from env.jit import entry, inner
from graphs.arrays import BoolArray, FloatArray, IntArray

LANES = 4  # for exchanges within a host, and between hosts, and for the ways to the host and back


class BlockArrays(NamedTuple):
    """Input of `run_blocks` (n ops, B blocks, j jobs, w waits).

    Attributes:
        first: int64 [B + 1], place of the first op of each block.
        wait_ptr, wait_job: int64 [n + 1], [w]: jobs for which the op at each place waits.
        start_ptr: int64 [2 B]: first and last job that begin with each block.
        job_ptr: int64 [2 n]: first and last job that begin after each op.
        job_block: int64 [j].
        is_late: bool [n], ops that run when there is nothing else to do: those that make gradients of weights.
    """

    first: IntArray
    wait_ptr: IntArray
    wait_job: IntArray
    start_ptr: IntArray
    job_ptr: IntArray
    job_block: IntArray
    is_late: BoolArray


@inner
def _launch(
    first: int, last: int, now: float, lane_s: FloatArray, job_s: FloatArray, job_lane: IntArray, job_end: FloatArray
) -> None:
    """Put jobs into their lanes, and note in `lane_s` when these are free."""
    for j in range(first, last):
        # One that is left out is there at once.
        job_end[j] = 0.0
        if job_s[j] >= 0.0:
            lane = job_lane[j]
            lane_s[lane] = max(lane_s[lane], now) + job_s[j]
            job_end[j] = lane_s[lane]


@entry
def run_blocks(
    a: BlockArrays,
    op_s: FloatArray,
    job_s: FloatArray,
    job_lane: IntArray,
    job_end: FloatArray,
    lane_s: FloatArray,
    ends: FloatArray,
    lane_ends: FloatArray,
) -> None:
    """Run every block by itself, ops one after the other and jobs beside them, each lane's in their order.

    Args:
        op_s: seconds of the op at each place.
        job_s: seconds of each job; below 0 for one that is left out.
        job_lane: int64 [j], a number below `LANES`.
        job_end, lane_s: scratch [j], [LANES].
        ends, lane_ends: [B], when ops and jobs of each block have come to their end.
    """
    for b in range(len(ends)):
        # The clock of every block begins at 0; some exchanges begin with it.
        now = 0.0
        lane_s[:] = 0.0
        _launch(a.start_ptr[2 * b], a.start_ptr[2 * b + 1], 0.0, lane_s, job_s, job_lane, job_end)
        # Ops that only an update reads are deferred until the device is idle.
        late = a.first[b]
        for i in range(a.first[b], a.first[b + 1]):
            if a.is_late[i]:
                continue
            # Exchanges of other blocks have come to their end long before.
            ready = now
            for w in range(a.wait_ptr[i], a.wait_ptr[i + 1]):
                if a.job_block[a.wait_job[w]] == b:
                    ready = max(ready, job_end[a.wait_job[w]])
            # The time until what it needs is there goes to ops that were put off, whole ops: none is interrupted.
            while late < i and now < ready:
                if a.is_late[late]:
                    now += op_s[late]
                    _launch(a.job_ptr[2 * late], a.job_ptr[2 * late + 1], now, lane_s, job_s, job_lane, job_end)
                late += 1
            now = max(now, ready) + op_s[i]
            _launch(a.job_ptr[2 * i], a.job_ptr[2 * i + 1], now, lane_s, job_s, job_lane, job_end)
        # Ops still deferred run at the end of the block.
        for i in range(late, a.first[b + 1]):
            if a.is_late[i]:
                now += op_s[i]
                _launch(a.job_ptr[2 * i], a.job_ptr[2 * i + 1], now, lane_s, job_s, job_lane, job_end)
        # Where a lane ends later, what follows has to say whether it waits for that.
        ends[b], lane_ends[b] = now, lane_s.max()


class PipelineArrays(NamedTuple):
    """A pipeline's order, and what its blocks cost (p devices, S virtual stages, K blocks).

    Attributes:
        ptr: int64 [p + 1], blocks of each device.
        kind: int64 [K], 0 forward, 1 backward for inputs, 2 backward for weights, 3 both.
        stage, micro_batch: int64 [K].
        seconds: float64 [S, 4].
        hops: between stages.
        held: float64 [S, 2], bytes that a stage holds for a micro-batch after its forward pass, and between its two
            backward passes.
        peak: float64 [S, 3], bytes of a micro-batch while a block of it runs, those that are held among them.
        late: float64 [S], bytes of a micro-batch that wait for what comes late.
        late_kind: int64 [S], since which backward pass: 1, or 2 for that for weights.
        device: int64 [S], of each virtual stage.
    """

    ptr: IntArray
    kind: IntArray
    stage: IntArray
    micro_batch: IntArray
    seconds: FloatArray
    hops: Hops
    held: FloatArray
    peak: FloatArray
    late: FloatArray
    late_kind: IntArray
    device: IntArray


@inner
def _sent(hops: Hops, hop: int, seconds: float, now: float, link_s: FloatArray) -> float:
    """Send over the links of a hop, first come, first served; returns when it is there."""
    # A transfer waits for all that was asked for before over any of its links, and then has all of them.
    for k in range(hops.link_ptr[hop], hops.link_ptr[hop + 1]):
        now = max(now, link_s[hops.link[k]])
    there = now + seconds
    for k in range(hops.link_ptr[hop], hops.link_ptr[hop + 1]):
        link_s[hops.link[k]] = there
    return there


@inner
def _begins(a: PipelineArrays, k: int, ready: FloatArray, is_done: BoolArray, end: float) -> float:
    """Time at which a block can begin on its device; below 0 if what it needs has not been made yet."""
    kind, s, m = a.kind[k], a.stage[k], a.micro_batch[k]
    # A block needs what its neighbour sends, a backward pass its own forward pass, too.
    if kind == 2:
        return end
    if kind == 0:
        is_missing = s > 0 and not is_done[s - 1, m, 0]
    else:
        is_missing = not is_done[s, m, 0] or (s + 1 < len(a.seconds) and not is_done[s + 1, m, 1])
    return -1.0 if is_missing else max(end, float(ready[s, m, min(kind, 1)]))


@inner
def _on_way(
    a: PipelineArrays, s: int, m: int, begin: float, end: float, ready: FloatArray, is_done: BoolArray, way: IntArray
) -> float:
    """Bytes beside a block of a stage, from ``begin`` to ``end``: what has not left the stage, and what waits there.

    They are those of other micro-batches: results of forward passes on their way to the next stage, and of backward
    passes to the one before.

    Args:
        way: int64 [S, 4], scratch: the first micro-batch of which the result has not gone ahead, or back, and the first
            one whose forward, and backward, pass has not run here.
    """
    found = 0.0
    n_stages, n = len(a.seconds), ready.shape[1]
    # First forward passes, then backward passes, whose neighbours are the other way round.
    for k in range(2):
        # A result that has not left before the block begins is still here while it runs.
        there = s + 1 - 2 * k
        if 0 <= there < n_stages:
            while way[s, k] < n and is_done[s, way[s, k], k] and ready[there, way[s, k], k] <= begin:
                way[s, k] += 1
            for other in range(way[s, k], n):
                if other != m and is_done[s, other, k] and ready[there, other, k] > begin:
                    found += a.hops.sent[k, there]
                elif not is_done[s, other, k]:
                    break
        # A tensor takes memory where it goes to as soon as it is sent.
        source = s - 1 + 2 * k
        if 0 <= source < n_stages:
            seconds = a.hops.ahead_s[s] if k == 0 else a.hops.back_s[s]
            while way[s, 2 + k] < n and is_done[s, way[s, 2 + k], k]:
                way[s, 2 + k] += 1
            for other in range(way[s, 2 + k], n):
                if not is_done[source, other, k]:
                    break
                if other != m and not is_done[s, other, k] and ready[s, other, k] - seconds < end:
                    found += a.hops.sent[k, s]
    return found


@entry
def run_pipeline(
    a: PipelineArrays,
    place: IntArray,
    ready: FloatArray,
    is_done: BoolArray,
    held: FloatArray,
    coming: FloatArray,
    way: IntArray,
    link_s: FloatArray,
    late_s: FloatArray,
    ends: FloatArray,
    peaks: FloatArray,
) -> bool:
    """Run the blocks in their order; False where they wait for each other.

    Args:
        place: int64 [p], zeros; scratch.
        ready: float64 [S, M, 2], zeros; scratch: when what the forward and the backward pass of a stage need is there.
        is_done: bool [S, M, 3], all False; scratch: forward and backward pass, and whether something waits after them.
        held: float64 [p], bytes that are there from the beginning; scratch.
        coming: float64 [S], bytes of gradients, which come in the first backward pass of a stage to stay; scratch.
        way: int64 [S, 4], zeros; scratch, as of `_on_way`.
        link_s: float64, zeros; scratch: when each link of the cluster is free again.
        late_s: float64 [S]: result, zeros before: when the last of what comes late to each stage is there.
        ends, peaks: float64 [p]: results, zeros before.
    """
    # Memory grows and shrinks as micro-batches come and go; `held` is what each device has now.
    n_devices, n_stages = len(ends), len(a.seconds)
    # Tensors that wait for nothing are sent at once.
    for m in range(ready.shape[1]):
        for s in range(n_stages):
            if a.hops.early_s[s] > 0.0:
                ready[s, m, 0] = _sent(a.hops, 2 * n_stages + s, a.hops.early_s[s], 0.0, link_s)
    for _ in range(a.ptr[n_devices]):
        # The block that ends first comes next, so that links are asked for in the order of time.
        d, first_end = -1, 0.0
        for other in range(n_devices):
            k = a.ptr[other] + place[other]
            if k < a.ptr[other + 1]:
                begin = _begins(a, k, ready, is_done, ends[other])
                if begin >= 0.0:
                    end = begin + a.seconds[a.stage[k], a.kind[k]]
                    if d < 0 or end < first_end:
                        d, first_end = other, end
        # Nobody can go on: the order waits for itself.
        if d < 0:
            return False
        k = a.ptr[d] + place[d]
        kind, s, m = a.kind[k], a.stage[k], a.micro_batch[k]
        begin, ends[d], beside = first_end - a.seconds[s, kind], first_end, 0.0
        for other in range(n_stages):
            if a.device[other] == d:
                beside += _on_way(a, other, m if other == s else -1, begin, first_end, ready, is_done, way)
        # Gradients of a single micro-batch come during its block, whose peak has them; others' are counted from before.
        made = coming[s] if kind > 1 else 0.0
        if ready.shape[1] > 1:
            held[d] += made
        # While a block runs, its peak counts; what the micro-batch holds afterwards stays.
        if kind == 0:
            peaks[d] = max(peaks[d], beside + held[d] + a.peak[s, 0])
            held[d] += a.held[s, 0]
        elif kind == 2:
            peaks[d] = max(peaks[d], beside + held[d] - a.held[s, 1] + a.peak[s, 2])
            held[d] -= a.held[s, 1]
        else:
            peaks[d] = max(peaks[d], beside + held[d] - a.held[s, 0] + a.peak[s, 1])
            held[d] -= a.held[s, 0]
            # The backward pass for inputs alone leaves what that for weights needs.
            if kind == 1:
                held[d] += a.held[s, 1]
        if made > 0.0:
            held[d] += made if ready.shape[1] == 1 else 0.0
            coming[s] = 0.0
        # Gradients wait for those that other stages add to them.
        t = a.hops.late_at[s]
        if a.late[s] > 0.0 and (kind == a.late_kind[s] or kind == 3):
            is_there = False
            for other in range(n_stages):
                is_there |= a.hops.late_at[other] == s and is_done[other, m, 1]
            if not is_there:
                held[d] += a.late[s]
                is_done[s, m, 2] = True
        if kind != 0 and kind != 2 and t >= 0 and is_done[t, m, 2]:
            held[a.device[t]] -= a.late[t]
            is_done[t, m, 2] = False
        # Results go to the next stage, or to the one before.
        if kind == 0:
            is_done[s, m, 0] = True
            if s + 1 < n_stages:
                there = _sent(a.hops, s + 1, a.hops.ahead_s[s + 1], ends[d], link_s)
                ready[s + 1, m, 0] = max(ready[s + 1, m, 0], there)
        elif kind != 2:
            is_done[s, m, 1] = True
            if s > 0:
                ready[s - 1, m, 1] = _sent(a.hops, n_stages + s - 1, a.hops.back_s[s - 1], ends[d], link_s)
            # Only the end of the step waits for late tensors.
            if t >= 0:
                there = _sent(a.hops, 3 * n_stages + s, a.hops.late_s[s], ends[d], link_s)
                late_s[t] = max(late_s[t], there)
        place[d] += 1
    return True
