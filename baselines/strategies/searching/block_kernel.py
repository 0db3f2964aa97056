"""Compiled loops of the estimator: ops of a block beside its communication, and blocks of a pipeline.

Letters: ``i``, place of an op; ``j``, a job, that is an exchange; ``b``, a block; ``d``, a device; ``s``, a virtual
stage; ``k``, place of a block in the sequence of its device.
"""

from __future__ import annotations

from typing import NamedTuple

from env.jit import entry, inner
from graphs.arrays import BoolArray, FloatArray, IntArray


class BlockArrays(NamedTuple):
    """What `run_blocks` reads (n ops, B blocks, j jobs, w waits).

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
def _launch(first: int, last: int, now: float, lane: float, job_s: FloatArray, job_end: FloatArray) -> float:
    """Put jobs into the lane; returns when it is free."""
    for j in range(first, last):
        # One that is left out is there at once.
        job_end[j] = 0.0
        if job_s[j] >= 0.0:
            lane = max(lane, now) + job_s[j]
            job_end[j] = lane
    return lane


@entry
def run_blocks(
    a: BlockArrays, op_s: FloatArray, job_s: FloatArray, job_end: FloatArray, ends: FloatArray, lane_ends: FloatArray
) -> None:
    """Run every block by itself, ops one after the other and jobs beside them, each in its order.

    Args:
        op_s: seconds of the op at each place.
        job_s: seconds of each job; below 0 for one that is left out.
        job_end: scratch [j].
        ends, lane_ends: [B], when ops and jobs of each block have come to their end.
    """
    for b in range(len(ends)):
        # The clock of every block begins at 0; some exchanges begin with it.
        now = 0.0
        lane = _launch(a.start_ptr[2 * b], a.start_ptr[2 * b + 1], 0.0, 0.0, job_s, job_end)
        # What nothing but an update waits for is put off until the device has nothing else to do.
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
                    lane = _launch(a.job_ptr[2 * late], a.job_ptr[2 * late + 1], now, lane, job_s, job_end)
                late += 1
            now = max(now, ready) + op_s[i]
            lane = _launch(a.job_ptr[2 * i], a.job_ptr[2 * i + 1], now, lane, job_s, job_end)
        # What is still put off runs at the end of the block.
        for i in range(late, a.first[b + 1]):
            if a.is_late[i]:
                now += op_s[i]
                lane = _launch(a.job_ptr[2 * i], a.job_ptr[2 * i + 1], now, lane, job_s, job_end)
        # Where the lane ends later, what follows has to say whether it waits for that.
        ends[b], lane_ends[b] = now, lane


class PipelineArrays(NamedTuple):
    """A pipeline's order, and what its blocks cost (p devices, S virtual stages, K blocks).

    Attributes:
        ptr: int64 [p + 1], blocks of each device.
        kind: int64 [K], 0 forward, 1 backward for inputs, 2 backward for weights, 3 both.
        stage, micro_batch: int64 [K].
        seconds: float64 [S, 4].
        forward_s, back_s: float64 [S], seconds from the stage before, and from the one behind.
        held: float64 [S, 2], bytes that a stage holds for a micro-batch after its forward pass, and between its two
            backward passes.
        peak: float64 [S, 3], bytes of a micro-batch while a block of it runs, those that are held among them.
    """

    ptr: IntArray
    kind: IntArray
    stage: IntArray
    micro_batch: IntArray
    seconds: FloatArray
    forward_s: FloatArray
    back_s: FloatArray
    held: FloatArray
    peak: FloatArray


@entry
def run_pipeline(
    a: PipelineArrays,
    place: IntArray,
    ready: FloatArray,
    is_done: BoolArray,
    held: FloatArray,
    sent: FloatArray,
    busy: FloatArray,
    ends: FloatArray,
    peaks: FloatArray,
) -> bool:
    """Run the blocks in their order; False where they wait for each other.

    Args:
        place: int64 [p], zeros; scratch.
        ready: float64 [S, M, 2], zeros; scratch: when what the forward and the backward pass of a stage need is there.
        is_done: bool [S, M, 2], all False; scratch.
        held: float64 [p], bytes kept; scratch.
        sent: float64 [S, 2], zeros; scratch: when the way to each stage is free again, from before and from behind.
        busy: float64 [p], zeros; scratch: how long each device sends.
        ends, peaks: float64 [p]: results, zeros before.
    """
    # Memory grows and shrinks as micro-batches come and go; `held` is what each device has now.
    n_devices, n_stages = len(ends), len(a.seconds)
    # Devices take turns; each runs as many blocks as it can before the next one has its turn.
    left = a.ptr[n_devices]
    while left > 0:
        moved = False
        for d in range(n_devices):
            while a.ptr[d] + place[d] < a.ptr[d + 1]:
                k = a.ptr[d] + place[d]
                kind, s, m = a.kind[k], a.stage[k], a.micro_batch[k]
                # A block needs what its neighbour sends, a backward pass its own forward pass, too.
                if kind == 0 and s > 0 and not is_done[s - 1, m, 0]:
                    break
                if (
                    kind != 0
                    and kind != 2
                    and (not is_done[s, m, 0] or (s + 1 < n_stages and not is_done[s + 1, m, 1]))
                ):
                    break
                if kind != 2:
                    ends[d] = max(ends[d], ready[s, m, min(kind, 1)])
                ends[d] += a.seconds[s, kind]
                # While a block runs, its peak counts; what the micro-batch holds afterwards stays.
                if kind == 0:
                    peaks[d] = max(peaks[d], held[d] + a.peak[s, 0])
                    held[d] += a.held[s, 0]
                elif kind == 2:
                    peaks[d] = max(peaks[d], held[d] - a.held[s, 1] + a.peak[s, 2])
                    held[d] -= a.held[s, 1]
                else:
                    peaks[d] = max(peaks[d], held[d] - a.held[s, 0] + a.peak[s, 1])
                    held[d] -= a.held[s, 0]
                    # The backward pass for inputs alone leaves what that for weights needs.
                    if kind == 1:
                        held[d] += a.held[s, 1]
                # Results go to the next stage, or to the one before, one after the other.
                if kind != 2:
                    is_done[s, m, min(kind, 1)] = True
                    if kind == 0 and s + 1 < n_stages:
                        sent[s + 1, 0] = max(sent[s + 1, 0], ends[d]) + a.forward_s[s + 1]
                        ready[s + 1, m, 0] = sent[s + 1, 0]
                        busy[d] += a.forward_s[s + 1]
                    elif kind != 0 and s > 0:
                        sent[s - 1, 1] = max(sent[s - 1, 1], ends[d]) + a.back_s[s - 1]
                        ready[s - 1, m, 1] = sent[s - 1, 1]
                        busy[d] += a.back_s[s - 1]
                # The next block of this device.
                place[d] += 1
                left -= 1
                moved = True
        # Nobody can go on: the order waits for itself.
        if not moved:
            return False
    # What is sent ahead and back leaves a device by one way.
    for d in range(n_devices):
        ends[d] = max(ends[d], busy[d])
    return True
