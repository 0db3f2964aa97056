"""`StepParts`: the step of the device that computes longest, cut into parts that add up to it.

Computing by phase, waiting for launches, each kind of exchange as far as it is exposed, and idling: two strategies
differ in nothing else, so the differences of their parts say why one is faster.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from env.cluster import Cluster
from env.simulation.simulator import Schedule, Score
from env.times.op_times import OpWork, kernel_seconds, measured_seconds
from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.records import Phase
from graphs.transforms.collectives.template import FUSED
from graphs.transforms.derived import Derived

if TYPE_CHECKING:
    from baselines.strategies.applied import Applied

FORWARD, BACKWARD, RECOMPUTED, UPDATE = "forward", "backward", "recomputed", "update"
TRANSFER = "transfer"  # a kind that is no collective, and its axes: of a pipeline, of ops placed one by one, of offload
STAGES, DEVICES, HOST = "pp", "devices", "host"
_OF_HOST = re.compile(r"^.*?\d+/")


@dataclass(frozen=True)
class AxisTraffic:
    """Exchanges of one kind along one axis, in which the device takes part.

    Attributes:
        kind: of collective, or `TRANSFER`.
        axis: of the mesh; of transfers `STAGES`, `DEVICES` where ops are placed one by one, or `HOST` for those to the
            memory of the host and back.
        count: how many there are in a step.
        bytes: of the whole tensors, all together.
        busy_s: seconds in which one of them at least is under way: from when the device begins it until it has the
            result.
        exposed_s: those of them in which the device computes nothing; of several that are under way, the first of
            `StepParts.exchanges` has them.
        link: the narrowest on the way, by its switch; "" for none.
        hosts: on how many hosts the ranks are.
    """

    kind: str
    axis: str
    count: int
    bytes: int
    busy_s: float
    exposed_s: float
    link: str
    hosts: int


@dataclass(frozen=True)
class StepParts:
    """One step of one device; all parts add up to the step time.

    Attributes:
        device: its name; where one place stands for all, that of the first one.
        computing_s: seconds by phase: `FORWARD`, `BACKWARD`, `RECOMPUTED` and `UPDATE`, those that there are.
        host_s: seconds in which its kernels wait for their launches; without rates of kernels launches are a part of
            computing.
        exchanges: by axis and kind.
        idle_s: seconds in which it neither computes nor exchanges anything.
    """

    device: str
    computing_s: Mapping[str, float]
    host_s: float
    exchanges: tuple[AxisTraffic, ...]
    idle_s: float

    @property
    def step_s(self) -> float:
        """The step time, seconds."""
        return sum(self.computing_s.values()) + self.host_s + self.exposed_s + self.idle_s

    @property
    def exposed_s(self) -> float:
        """Seconds in which the device exchanges and computes nothing."""
        return sum(each.exposed_s for each in self.exchanges)


def step_parts(what: Applied, score: Score, schedule: Schedule, used: IntArray, cluster: Cluster) -> StepParts:
    """The parts of a step that was scored. O(n log n) for n ops and transfers.

    Args:
        used: numbers of the devices that compute.
        cluster: before the strategy, with all devices of which one may stand for others.
    """
    device = int(used[np.argmax(score.busy_s[used])])
    computing = (schedule.device == device) & (what.derived.along < 0)
    covered = union(schedule.op_start_s[computing], schedule.op_end_s[computing])
    by_phase, host_s = _computing(what, schedule, computing)
    traffic = _traffic(what, schedule, device)
    size_of = _collective_sizes(what, device)
    exchanges = []
    for key, (ops, transfers) in traffic.items():
        starts, ends = _under_way(what, schedule, ops)
        own = union(
            np.concatenate([starts, schedule.transfer_start_s[transfers]]),
            np.concatenate([ends, schedule.transfer_end_s[transfers]]),
        )
        before_s = length(covered)
        covered = union(*(np.concatenate(both) for both in zip(covered, own, strict=True)))
        exposed_s = length(covered) - before_s
        if length(own) > 0:
            moved = what.derived.graph.tensor_bytes[schedule.transfer_tensor[transfers]]
            count, size = size_of.get(key, (len(transfers), int(moved.sum())))
            link, hosts = _link(what, schedule, device, cluster, key, transfers)
            exchanges.append(AxisTraffic(*key, count, size, length(own), exposed_s, link, hosts))
    return StepParts(
        device=what.problem.cluster.devices[device].name,
        computing_s=by_phase,
        host_s=host_s,
        exchanges=tuple(exchanges),
        idle_s=max(schedule.step_time_s - length(covered), 0.0),
    )


def _computing(what: Applied, schedule: Schedule, computing: BoolArray) -> tuple[dict[str, float], float]:
    """``(seconds by phase, seconds that kernels wait for their launches)`` of one device's ops, bool [n]."""
    derived, ops = what.derived, np.flatnonzero(computing)
    took_s = (schedule.op_end_s - schedule.op_start_s)[ops]
    waited_s = np.zeros(len(ops))
    device = what.problem.cluster.devices[int(schedule.device[ops[0]])] if len(ops) else None
    if device is not None and device.rates is not None:
        waited_s = np.maximum(took_s - kernel_seconds(OpWork.of(derived.graph), device)[ops], 0.0)
        measured = measured_seconds(derived.graph, device)
        waited_s = waited_s if measured is None else np.where(np.isnan(measured[ops]), waited_s, 0.0)
    phase, first = derived.graph.phase[ops], derived.source.phase[derived.origin[ops]]
    again = (phase == Phase.BACKWARD) & (first == Phase.FORWARD)
    chosen = {
        FORWARD: phase == Phase.FORWARD,
        RECOMPUTED: again,
        BACKWARD: (phase == Phase.BACKWARD) & ~again,
        UPDATE: phase == Phase.UPDATE,
    }
    kernels_s = took_s - waited_s
    return {name: float(kernels_s[ours].sum()) for name, ours in chosen.items() if ours.any()}, float(waited_s.sum())


def _traffic(what: Applied, schedule: Schedule, device: int) -> dict[tuple[str, str], tuple[IntArray, IntArray]]:
    """By kind and axis, the ops that exchange on a device or its lanes, and the transfers from it and to it."""
    derived, cluster = what.derived, what.problem.cluster
    home = homes(cluster)
    ops = np.flatnonzero((home[schedule.device] == device) & (derived.along >= 0))
    source, target = home[schedule.transfer_source], home[schedule.transfer_target]
    near = np.flatnonzero((source == device) ^ (target == device))
    producer = derived.graph.tensor_producer[schedule.transfer_tensor[near]]
    other = np.where(source[near] == device, target[near], source[near])
    is_host = np.isin(other, cluster.host_devices) & bool(what.strategy.offload)
    members: dict[tuple[int, str, str], tuple[list[int], list[int]]] = {}
    for op in ops.tolist():
        members.setdefault(_key(derived, op), ([], []))[0].append(op)
    for transfer, op, to_host in zip(near.tolist(), producer.tolist(), is_host.tolist(), strict=True):
        of_axis = derived.along[op] >= 0 and not to_host
        axis = HOST if to_host else DEVICES if what.strategy.is_none or what.strategy.is_placed else STAGES
        key = _key(derived, op) if of_axis else (len(derived.mesh) + (axis != HOST), TRANSFER, axis)
        members.setdefault(key, ([], []))[1].append(transfer)
    arrays = {key: (np.array(a, dtype=np.int64), np.array(b, dtype=np.int64)) for key, (a, b) in members.items()}
    return {key[1:]: arrays[key] for key in sorted(arrays)}


def _under_way(what: Applied, schedule: Schedule, ops: IntArray) -> tuple[FloatArray, FloatArray]:
    """``(starts, ends)`` of a device's collectives: of one that is spelt out from the first of its ops to the last.

    That goes on while others send: the device waits for it, though nothing goes through its port.
    """
    graph = what.derived.graph
    names = []
    for op in ops.tolist():
        algorithm = graph.kinds[op].partition(".")[2]
        name = graph.op_names[op]  # without an algorithm, of the op that has the result
        is_part = algorithm and algorithm != FUSED
        names.append(name.rpartition(f".{algorithm}")[0] if is_part else name)
    found, of = np.unique(np.array(names, dtype=object).astype(str), return_inverse=True)
    starts, ends = np.full(len(found), np.inf), np.zeros(len(found))
    np.minimum.at(starts, of.reshape(-1), schedule.op_start_s[ops])
    np.maximum.at(ends, of.reshape(-1), schedule.op_end_s[ops])
    return starts, ends


def _key(derived: Derived, op: int) -> tuple[int, str, str]:
    """Number of the axis along which an op exchanges, kind of the collective that it is a part of, name of the axis."""
    axis = int(derived.along[op])
    return axis, derived.graph.kinds[op].partition(".")[0], derived.mesh[axis].name


def _collective_sizes(what: Applied, device: int) -> dict[tuple[str, str], tuple[int, int]]:
    """By kind and axis of the collectives in which a device takes part, how many they are and their bytes."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    row, part = _place(what, device)
    if what.rewrite is None or row < 0:
        return found
    exchanged = what.exchanged
    mine = set(np.flatnonzero((what.rewrite.row[exchanged.origin] == row) & (exchanged.part == part)).tolist())
    for each in exchanged.collectives:
        if not mine.isdisjoint(each.ops):
            count, size = found.get((each.kind, each.axis), (0, 0))
            found[each.kind, each.axis] = count + 1, size + each.bytes
    return found


def _place(what: Applied, device: int) -> tuple[int, int]:
    """Row of `Rewrite.devices` and place in the mesh of a device that computes; -1 where nothing was rewritten."""
    plain = what.unordered
    op = int(np.argmax(what.plan.device[: plain.graph.n_ops] == device))
    return (-1, 0) if what.rewrite is None else (int(what.rewrite.row[plain.origin[op]]), int(plain.part[op]))


def _link(
    what: Applied, schedule: Schedule, device: int, cluster: Cluster, key: tuple[str, str], transfers: IntArray
) -> tuple[str, int]:
    """``(narrowest link on the way, hosts)`` of the exchanges of a kind along an axis."""
    kind, axis = key
    if kind == TRANSFER:
        inner = what.problem.cluster
        home = homes(inner)
        pairs = np.column_stack([home[schedule.transfer_source[transfers]], home[schedule.transfer_target[transfers]]])
        ends = np.unique(pairs)
        return _narrowest(inner, [tuple(pair) for pair in np.unique(pairs, axis=0).tolist()]), _hosts(inner, ends)
    row, part = _place(what, device)
    if what.rewrite is None or row < 0:
        return "", 1
    sizes = [each.size for each in what.exchanged.mesh]
    number = [each.name for each in what.exchanged.mesh].index(axis)
    line = list(np.unravel_index(part, sizes))
    ranks = what.rewrite.devices[row].reshape(sizes)[(*line[:number], slice(None), *line[number + 1 :])]
    return _narrowest(cluster, zip(ranks.tolist(), np.roll(ranks, -1).tolist(), strict=True)), _hosts(cluster, ranks)


def _hosts(cluster: Cluster, devices: IntArray) -> int:
    return len(np.unique(cluster.host_number[devices]))


def _narrowest(cluster: Cluster, pairs: Iterable[tuple[int, int]]) -> str:
    """The narrowest link of the routes between devices, by its switch, else by both ends; "" where there is none."""
    numbers = {number for a, b in pairs if a != b for number in cluster.routes[a, b].links}
    if not numbers:
        return ""
    link = cluster.links[min(numbers, key=lambda number: (cluster.links[number].bandwidth_bytes_per_s, number))]
    switches = [end for end in (link.dst, link.src) if end not in cluster.device_index]
    return _OF_HOST.sub("", switches[0]) if switches else f"{link.src} - {link.dst}"


def homes(cluster: Cluster) -> IntArray:
    """int64 [D]: of a lane the device beside which it works, of any other device its own number."""
    home = np.arange(cluster.n_devices)
    for lane_of in (cluster.lane_of, cluster.outer_lane_of):
        has_one = np.flatnonzero(lane_of >= 0)
        home[lane_of[has_one]] = has_one
    return home


def union(start: FloatArray, end: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Intervals joined where they touch: ``(starts, ends)``, increasing."""
    if not len(start):
        return np.zeros(0), np.zeros(0)
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > end[:-1]])
    return start[first], end[np.concatenate([first[1:], [True]])]


def length(joined: tuple[FloatArray, FloatArray]) -> float:
    """Seconds that `union` covers."""
    return float((joined[1] - joined[0]).sum())
