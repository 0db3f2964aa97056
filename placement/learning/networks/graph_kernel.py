"""Compiled decoder of the graph policy: list scheduling in which a small network picks the device of every unit.

Ops are placed one after another, always the ready one of highest priority. The decoder keeps its own estimate of the
schedule: idle intervals of devices and of exclusive links, so that unlike in HEFT transfers wait for each other. It
computes `N_FEATURES` numbers of every device that a unit could go to; the logit of a device is

    sharpness * (features @ taste[:F] + relu(features @ w1 + base[op]) @ taste[F:] - feature 0)

so that with a taste of 0 the likeliest device is the one that finishes the unit first.
"""

# Letters
# n, m, e, U, D, L   numbers of ops, tensors, edges (a tensor and a consumer), units, devices and links
# F, H   features of a device, and neurons of the hidden layer; f, h, one of them
# d   a device; t, a tensor; j, k, at, positions; s, a sample of a batch; _s   seconds

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from env.jit import allocating, entry, inner, parallel_entry, prange
from env.simulation.pieces import find_gap, occupy, pop, push

if TYPE_CHECKING:
    from env.problem import BoolArray
    from graphs.opgraph import FloatArray, IntArray

Float32 = NDArray[np.float32]
N_FEATURES = 20
GREEDY, SAMPLE, REPLAY = 0, 1, 2
_GAPS = 128  # idle intervals kept per device or link; beyond that the earliest is forgotten


class Instance(NamedTuple):
    """A problem as the decoder needs it (n ops, m tensors, e (tensor, consumer) pairs, U units, D devices)."""

    op_s: FloatArray  # [n, D]
    mean_op_s: FloatArray  # [n]
    tail_s: FloatArray  # [n], longest mean path behind each op
    unit_of: IntArray  # [n]
    unit_s: FloatArray  # [U, D]
    input_ptr: IntArray  # [n + 1]
    inputs: IntArray  # [e]
    producer: IntArray  # [m]
    output_ptr: IntArray  # [n + 1]
    consumer_ptr: IntArray  # [m + 1]
    consumers: IntArray  # [e]
    transfer_s: FloatArray  # [m], mean over pairs of devices
    tensor_bytes: FloatArray  # [m], 0 where measured
    fixed_s: FloatArray  # [m], measured seconds a hop, 0 where modelled
    latency_s: FloatArray  # [m], 1 where modelled, 0 where measured: multiplies `pair_latency_s`
    pair_latency_s: FloatArray  # [D, D]
    pair_s_per_byte: FloatArray  # [D, D]
    pair_hops: FloatArray  # [D, D]
    route_ptr: IntArray  # [D * D + 1]
    route_link: IntArray  # exclusive links of the routes
    allowed: BoolArray  # [U, D]
    unit_bytes: IntArray  # [U]
    working_bytes: IntArray  # [U]
    capacity: IntArray  # [D]
    scale: FloatArray  # [4]: mean op s, longest mean path s, longest path without transfers s, mean work a device s
    n_links: IntArray  # [1]


class DecoderSchedule(NamedTuple):
    """The decoder's estimate so far."""

    gap_start: FloatArray  # [D, _GAPS], idle intervals of devices
    gap_end: FloatArray  # [D, _GAPS]
    gaps: IntArray  # [D]
    link_start: FloatArray  # [L, _GAPS], idle intervals of links
    link_end: FloatArray  # [L, _GAPS]
    link_gaps: IntArray  # [L]
    own_free_s: FloatArray  # [L], during a trial: when a link has carried what the same op needs too
    arrival_s: FloatArray  # [m, D], when a tensor is on a device; infinite where it is not
    device: IntArray  # [n]
    finish_s: FloatArray  # [n]
    affinity_s: FloatArray  # [n, D], of what an op reads: mean transfer seconds by where it is made
    used_bytes: IntArray  # [D]
    largest_bytes: IntArray  # [D]
    load_s: FloatArray  # [D]
    last_s: FloatArray  # [D], end of the last op
    totals: FloatArray  # [2]: when all will be done at the earliest, sum of loads


class DecoderTrial(NamedTuple):
    """An op on each device, before the decision."""

    ready_s: FloatArray  # [D], all inputs are there
    ready_free_s: FloatArray  # [D], the same if links were idle
    begin_s: FloatArray  # [D]
    key_s: FloatArray  # [D], end, with the other ops of the unit
    added_s: FloatArray  # [D], transfers it takes
    here_s: FloatArray  # [D], mean transfer seconds of inputs that are there already
    fan: FloatArray  # [D], share of readers that are placed there
    beside: FloatArray  # [D], share of what its readers read else that is made there
    placed: BoolArray  # [U], units


@inner
def _earliest(start: FloatArray, end: FloatArray, count: int, ready_s: float, length_s: float) -> float:
    """Earliest start of something of this length in sorted idle intervals, of which the last never ends."""
    return float(max(start[find_gap(start, end, count, ready_s, length_s, np.inf)], ready_s))


@inner
def _take(start: FloatArray, end: FloatArray, count: int, from_s: float, to_s: float) -> int:
    """Take [from_s, to_s), which is idle, out of the intervals; returns their new number."""
    # From the end: schedules grow there.
    gap = count - 1  # most often: schedules grow at their end
    while start[gap] > from_s:
        gap -= 1
    return int(occupy(start, end, count, gap, from_s, to_s))


@inner
def _transfer_start(
    links: IntArray,
    start: FloatArray,
    end: FloatArray,
    count: IntArray,
    own_free_s: FloatArray,
    ready_s: float,
    length_s: float,
) -> float:
    """Earliest start of a transfer on all links of a route at once, after those of the same op (``own_free_s`` [L])."""
    now_s = ready_s
    for link in links:
        now_s = max(now_s, own_free_s[link])
    if len(links) == 0 or length_s <= 0:
        return now_s
    # Until one instant suits every link: a later start on one may not suit another.
    moved = True
    while moved:
        moved = False
        for link in links:
            later_s = _earliest(start[link], end[link], count[link], now_s, length_s)
            if later_s > now_s:
                now_s, moved = later_s, True
    return now_s


@inner
def _squash(value: float) -> float:
    """Logarithmic for large values of either sign."""
    return float(np.log1p(value)) if value >= 0 else -float(np.log1p(-value))


@inner
def _choose(logit: FloatArray, mask: BoolArray, uniform: float) -> int:
    """The device of the largest logit, or one drawn by softmax where ``uniform`` is not negative."""
    best = -1
    for d in range(len(logit)):
        if mask[d] and (best < 0 or logit[d] > logit[best]):
            best = d
    if uniform < 0:
        return best
    # Relative to the best, so that no exponential overflows.
    total = 0.0
    for d in range(len(logit)):
        if mask[d]:
            total += np.exp(logit[d] - logit[best])
    left, chosen = uniform * total, best
    for d in range(len(logit)):
        if mask[d]:
            chosen = d
            left -= np.exp(logit[d] - logit[best])
            if left < 0:
                break
    return chosen


@allocating
def _begin(instance: Instance) -> DecoderSchedule:
    """An empty schedule; inputs are infinitely late."""
    n, n_devices = instance.op_s.shape
    n_links, n_tensors = instance.n_links[0], len(instance.producer)
    return DecoderSchedule(
        np.zeros((n_devices, _GAPS)),
        np.full((n_devices, _GAPS), np.inf),
        np.ones(n_devices, np.int64),
        np.zeros((n_links, _GAPS)),
        np.full((n_links, _GAPS), np.inf),
        np.ones(n_links, np.int64),
        np.zeros(n_links),
        np.full((n_tensors, n_devices), np.inf),
        np.full(n, -1, np.int64),
        np.zeros(n),
        np.zeros((n, n_devices)),
        np.zeros(n_devices, np.int64),
        np.zeros(n_devices, np.int64),
        np.zeros(n_devices),
        np.zeros(n_devices),
        np.array([instance.scale[2], 0.0]),
    )


@inner
def _inputs_by_finish(op: int, instance: Instance, schedule: DecoderSchedule, result: IntArray) -> int:
    """Write what an op reads by when it exists, the order in which links serve it; returns how many tensors."""
    count = 0
    for j in range(instance.input_ptr[op], instance.input_ptr[op + 1]):
        t, at = instance.inputs[j], count
        while at > 0 and schedule.finish_s[instance.producer[result[at - 1]]] > schedule.finish_s[instance.producer[t]]:
            result[at] = result[at - 1]
            at -= 1
        result[at] = t
        count += 1
    return count


@inner
def _open_devices(unit: int, instance: Instance, schedule: DecoderSchedule, result: BoolArray) -> None:
    """Devices on which a unit may run and has room, or, if none has room (which the score says), may run."""
    count = 0
    for d in range(len(result)):
        needed = instance.unit_bytes[unit] + max(schedule.largest_bytes[d], instance.working_bytes[unit])
        result[d] = instance.allowed[unit, d] and schedule.used_bytes[d] + needed <= instance.capacity[d]
        count += result[d]
    for d in range(len(result)):
        result[d] = result[d] or (count == 0 and instance.allowed[unit, d])


@inner
def _length(tensor: int, source: int, target: int, instance: Instance) -> float:
    """Seconds of a transfer between two devices over idle links."""
    seconds = instance.latency_s[tensor] * instance.pair_latency_s[source, target]
    seconds += instance.tensor_bytes[tensor] * instance.pair_s_per_byte[source, target]
    return float(seconds + instance.fixed_s[tensor] * instance.pair_hops[source, target])


@inner
def _try(
    op: int, d: int, tensors: IntArray, instance: Instance, schedule: DecoderSchedule, trial: DecoderTrial
) -> None:
    """Estimate the op on a device, into ``trial``; the schedule is left as it is."""
    ready_s, ready_free_s, added_s, here_s = 0.0, 0.0, 0.0, 0.0
    own_free_s, n_devices = schedule.own_free_s, instance.op_s.shape[1]
    for t in tensors:
        if schedule.arrival_s[t, d] < np.inf:
            ready_s, ready_free_s = max(ready_s, schedule.arrival_s[t, d]), max(ready_free_s, schedule.arrival_s[t, d])
            here_s += instance.transfer_s[t]
            continue
        source = schedule.device[instance.producer[t]]
        length_s, exists_s = _length(t, source, d, instance), schedule.finish_s[instance.producer[t]]
        pair = source * n_devices + d
        links = instance.route_link[instance.route_ptr[pair] : instance.route_ptr[pair + 1]]
        from_s = _transfer_start(
            links, schedule.link_start, schedule.link_end, schedule.link_gaps, own_free_s, exists_s, length_s
        )
        for link in links:
            own_free_s[link] = from_s + length_s
        ready_s, ready_free_s = max(ready_s, from_s + length_s), max(ready_free_s, exists_s + length_s)
        added_s += length_s
    # Only links that were used, which are few.
    for t in tensors:
        pair = schedule.device[instance.producer[t]] * n_devices + d
        for link in instance.route_link[instance.route_ptr[pair] : instance.route_ptr[pair + 1]]:
            own_free_s[link] = 0.0
    trial.ready_s[d], trial.ready_free_s[d], trial.added_s[d], trial.here_s[d] = ready_s, ready_free_s, added_s, here_s
    trial.begin_s[d] = ready_s
    if instance.op_s[op, d] > 0:  # an op without time needs no room
        gaps = schedule.gap_start[d], schedule.gap_end[d], schedule.gaps[d]
        trial.begin_s[d] = _earliest(gaps[0], gaps[1], gaps[2], ready_s, instance.op_s[op, d])
    trial.key_s[d] = trial.begin_s[d] + instance.unit_s[instance.unit_of[op], d]  # with the other ops of its group


@inner
def _surroundings(
    op: int, tensors: IntArray, choice: IntArray, instance: Instance, schedule: DecoderSchedule, trial: DecoderTrial
) -> tuple[float, float, int]:
    """Write where the op's readers and what they read else are (``fan``, ``beside``, shares of 1).

    Returns mean transfer seconds of inputs and of outputs, and the device of the input that is there last.
    """
    unit = instance.unit_of[op]
    inputs_s, latest_s, critical = 0.0, -1.0, -1
    for t in tensors:
        producer = instance.producer[t]
        inputs_s += instance.transfer_s[t]
        if schedule.finish_s[producer] + instance.transfer_s[t] > latest_s:
            latest_s, critical = schedule.finish_s[producer] + instance.transfer_s[t], schedule.device[producer]
    outputs_s, fan_s, beside_s = 0.0, 0.0, 0.0
    trial.fan[:] = 0.0
    trial.beside[:] = 0.0
    for t in range(instance.output_ptr[op], instance.output_ptr[op + 1]):
        if instance.consumer_ptr[t + 1] > instance.consumer_ptr[t]:
            outputs_s += instance.transfer_s[t]
        for e in range(instance.consumer_ptr[t], instance.consumer_ptr[t + 1]):
            reader = instance.consumers[e]
            fan_s += instance.transfer_s[t]
            other = instance.unit_of[reader]
            if other != unit and trial.placed[other]:
                trial.fan[choice[other]] += instance.transfer_s[t]
            for d in range(len(trial.beside)):
                trial.beside[d] += schedule.affinity_s[reader, d]
    for d in range(len(trial.beside)):
        beside_s += trial.beside[d]
    for d in range(len(trial.fan)):
        trial.fan[d] /= fan_s if fan_s > 0 else 1.0
        trial.beside[d] /= beside_s if beside_s > 0 else 1.0
    return inputs_s, outputs_s, critical


@inner
def _describe(
    op: int,
    tensors: IntArray,
    possible: BoolArray,
    choice: IntArray,
    instance: Instance,
    schedule: DecoderSchedule,
    trial: DecoderTrial,
    rows: Float32,
) -> None:
    """Write the features of every possible device, float32 [D, F]; the others get zeros."""
    unit = instance.unit_of[op]
    inputs_s, outputs_s, critical = _surroundings(op, tensors, choice, instance, schedule, trial)
    typical_s, path_s, _, share_s = instance.scale
    reach_s, total_load_s = schedule.totals
    least_s, least_ready_s, latest_s, fastest_s = np.inf, np.inf, 0.0, np.inf
    for d in range(len(possible)):
        latest_s = max(latest_s, schedule.last_s[d])
        if possible[d]:
            least_s, least_ready_s = min(least_s, trial.key_s[d]), min(least_ready_s, trial.ready_s[d])
            fastest_s = min(fastest_s, instance.unit_s[unit, d])
    own_s, little_s = instance.mean_op_s[op] + 0.25 * typical_s, 0.01 * typical_s
    rows[:] = 0.0
    for d in range(len(possible)):
        if not possible[d]:
            continue
        row, begin_s, ready_s = rows[d], trial.begin_s[d], trial.ready_s[d]
        late_s = trial.key_s[d] - least_s
        beyond_s = begin_s + instance.op_s[op, d] + instance.tail_s[op] - reach_s
        row[0] = _squash(late_s / own_s)
        row[1] = min(5.0, 20.0 * late_s / path_s)
        row[2] = _squash((ready_s - least_ready_s) / own_s)
        row[3] = _squash((begin_s - ready_s) / own_s)
        row[4] = _squash((ready_s - trial.ready_free_s[d]) / own_s)
        row[5] = _squash(trial.added_s[d] / own_s)
        row[6] = 1.0 if critical == d else 0.0
        row[7] = trial.here_s[d] / inputs_s if inputs_s > 0 else 0.0
        row[8] = trial.beside[d]
        row[9] = np.log((instance.unit_s[unit, d] + little_s) / (fastest_s + little_s))
        row[10] = schedule.load_s[d] / total_load_s if total_load_s > 0 else 0.0
        row[11] = (schedule.used_bytes[d] + instance.unit_bytes[unit]) / max(1, instance.capacity[d])
        row[12] = 1.0 if schedule.load_s[d] == 0 else 0.0
        row[13] = trial.fan[d]
        row[14] = _squash(beyond_s / own_s)
        row[15] = max(-5.0, min(5.0, 20.0 * beyond_s / path_s))
        row[16] = _squash(max(0.0, begin_s - schedule.last_s[d]) / own_s)
        row[17] = min(3.0, schedule.load_s[d] / share_s)
        row[18] = _squash((latest_s - schedule.last_s[d]) / own_s)
        row[19] = _squash(outputs_s / own_s) * row[6]


@inner
def _logit(row: Float32, base: Float32, w1: Float32, taste: FloatArray, sharpness: float) -> float:
    """The logit of a device from its features, float32 [F]; see the module."""
    # By default the device with the earliest finish: feature 0 is how late it is.
    value = -float(row[0])
    for f in range(N_FEATURES):
        value += row[f] * taste[f]
    for h in range(len(base)):
        net = base[h]
        for f in range(N_FEATURES):
            net += row[f] * w1[f, h]
        # relu
        if net > 0:
            value += net * taste[N_FEATURES + h]
    return float(sharpness * value)


@inner
def _place(op: int, d: int, begin_s: float, tensors: IntArray, instance: Instance, schedule: DecoderSchedule) -> None:
    """Put an op on a device, and what it still needs there on the links."""
    n_devices = instance.op_s.shape[1]
    for t in tensors:
        if schedule.arrival_s[t, d] < np.inf:
            continue
        # As `_try` did, but for good: the links are taken.
        source = schedule.device[instance.producer[t]]
        length_s, exists_s = _length(t, source, d, instance), schedule.finish_s[instance.producer[t]]
        pair = source * n_devices + d
        links = instance.route_link[instance.route_ptr[pair] : instance.route_ptr[pair + 1]]
        start, end, count = schedule.link_start, schedule.link_end, schedule.link_gaps
        from_s = _transfer_start(links, start, end, count, schedule.own_free_s, exists_s, length_s)
        if length_s > 0:
            for link in links:
                count[link] = _take(start[link], end[link], count[link], from_s, from_s + length_s)
        schedule.arrival_s[t, d] = from_s + length_s
    op_s = instance.op_s[op, d]
    finish_s = begin_s + op_s
    schedule.device[op], schedule.finish_s[op] = d, finish_s
    if op_s > 0:
        schedule.gaps[d] = _take(schedule.gap_start[d], schedule.gap_end[d], schedule.gaps[d], begin_s, finish_s)
    schedule.load_s[d] += op_s
    schedule.last_s[d] = max(schedule.last_s[d], finish_s)
    # No step can end before the longest path behind this op does.
    schedule.totals[0] = max(schedule.totals[0], finish_s + instance.tail_s[op])
    schedule.totals[1] += op_s
    for t in range(instance.output_ptr[op], instance.output_ptr[op + 1]):
        schedule.arrival_s[t, d] = finish_s
        for e in range(instance.consumer_ptr[t], instance.consumer_ptr[t + 1]):
            schedule.affinity_s[instance.consumers[e], d] += instance.transfer_s[t]


@entry
def decode(
    instance: Instance,
    mode: int,
    priority: FloatArray,
    base: Float32,
    w1: Float32,
    sharpness: float,
    taste: FloatArray,
    uniform: FloatArray,
    choice: IntArray,
    start_s: FloatArray,
    decision_op: IntArray,
    mask: BoolArray,
    features: Float32,
) -> None:
    """Place everything once.

    Args:
        mode: `GREEDY`; `SAMPLE`, with ``uniform`` float64 [U]; or `REPLAY`, which takes ``choice`` as given.
        priority: float64 [n], higher first.
        base: float32 [n, H], w1: [F, H].
        taste: float64 [F + H].
        choice: int64 [U], the device of each unit; written, but for `REPLAY`.
        start_s: float64 [n], written: when each op is estimated to start.
        decision_op: int64 [U], written: the op at which each unit was placed.
        mask: bool [U, D], written: the devices it could go to.
        features: float32 [U, D, F], written (but not where its first axis is empty).
    """
    n, n_devices = instance.op_s.shape
    schedule, record = _begin(instance), features.shape[0] > 0
    fields = np.zeros((8, n_devices))
    placed = np.zeros(len(instance.unit_s), np.bool_)
    trial = DecoderTrial(fields[0], fields[1], fields[2], fields[3], fields[4], fields[5], fields[6], fields[7], placed)
    tensors, possible = np.empty(max(1, len(instance.inputs)), np.int64), np.empty(n_devices, np.bool_)
    rows, logit = np.zeros((n_devices, N_FEATURES), np.float32), np.empty(n_devices)
    heap, missing, size = np.empty(n, np.int64), np.diff(instance.input_ptr), 0
    for op in range(n):
        if missing[op] == 0:
            push(heap, 0, size, priority, 1.0, op)
            size += 1
    while size > 0:
        op = pop(heap, 0, size, priority, 1.0)
        size -= 1
        unit = instance.unit_of[op]
        reads = tensors[: _inputs_by_finish(op, instance, schedule, tensors)]
        # The first op of a unit has decided for all.
        if placed[unit]:
            _try(op, choice[unit], reads, instance, schedule, trial)
        else:
            _open_devices(unit, instance, schedule, possible)
            if mode == REPLAY:
                possible[choice[unit]] = True  # a plan from elsewhere may know better what fits
            placed[unit] = True
            mask[unit], decision_op[unit] = possible, op
            for d in range(n_devices):
                if possible[d]:
                    _try(op, d, reads, instance, schedule, trial)
            # A replay needs features only where they are learned from.
            if mode != REPLAY or record:
                _describe(op, reads, possible, choice, instance, schedule, trial, rows)
            if record:
                features[unit] = rows
            if mode != REPLAY:
                for d in range(n_devices):
                    logit[d] = _logit(rows[d], base[op], w1, taste, sharpness)
                choice[unit] = _choose(logit, possible, uniform[unit] if mode == SAMPLE else -1.0)
            schedule.used_bytes[choice[unit]] += instance.unit_bytes[unit]
            working = max(schedule.largest_bytes[choice[unit]], instance.working_bytes[unit])
            schedule.largest_bytes[choice[unit]] = working
        start_s[op] = trial.begin_s[choice[unit]]
        _place(op, choice[unit], start_s[op], reads, instance, schedule)
        for t in range(instance.output_ptr[op], instance.output_ptr[op + 1]):
            for e in range(instance.consumer_ptr[t], instance.consumer_ptr[t + 1]):
                reader = instance.consumers[e]
                missing[reader] -= 1
                if missing[reader] == 0:
                    push(heap, 0, size, priority, 1.0, reader)
                    size += 1


@parallel_entry
def decode_batch(
    instance: Instance,
    mode: int,
    priority: FloatArray,
    base: Float32,
    w1: Float32,
    sharpness: float,
    taste: FloatArray,
    uniform: FloatArray,
    choice: IntArray,
    start_s: FloatArray,
    decision_op: IntArray,
    mask: BoolArray,
    features: Float32,
) -> None:
    """`decode` k times, on all threads numba may use: everything from ``priority`` on with a leading axis [k], but
    for the network's ``base``, ``w1`` and ``sharpness``."""
    for s in prange(len(priority)):
        decode(
            instance,
            mode,
            priority[s],
            base,
            w1,
            sharpness,
            taste[s],
            uniform[s],
            choice[s],
            start_s[s],
            decision_op[s],
            mask[s],
            features[s],
        )
