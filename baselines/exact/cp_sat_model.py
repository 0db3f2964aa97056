"""The constraint programme behind `baselines.exact.cp_sat`: op and transfer intervals on devices and links."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from baselines.exact.symmetry import interchangeable
from env.bounds.heads import Pairs
from env.problem import Problem
from env.simulation.simulator import Schedule
from env.units import Units
from graphs.opgraph import IntArray

# All durations together, in units, stay below 2**BITS: the presolve of CP-SAT 9.15 adds up coefficients of booleans in
# 32 bits and beyond that "proves" what is false (github.com/google/or-tools/issues/5293).
BITS = 30
# Where memory binds, bounds creep up unit by unit, so a proof in fine units may take minutes; coarse ones come first.
COARSE_BITS = 10
_SAFETY = 1 - 1e-12  # heads and tails are sums of rounded numbers
_MOST_NESTED = 64  # ops up to which loads between all pairs of ops are worth their rows


@dataclass(frozen=True, eq=False)
class Scaled:
    """A problem in whole units of time, durations rounded down (n ops, D devices).

    Rounding down keeps every schedule: round each of its instants down, and all the rules below still hold. So the
    optimum of the programme is a lower bound of the true one.
    """

    problem: Problem
    horizon_s: float
    bits: int = BITS

    @cached_property
    def per_second(self) -> float:
        """Units of time in a second, a power of two."""
        problem, graph = self.problem, self.problem.graph
        fits = problem.allowed & (problem.op_s <= self.horizon_s)
        work_s = np.where(fits, problem.op_s, 0.0).max(axis=1).sum()
        devices = range(problem.cluster.n_devices)
        longest_s = np.array(
            [max(problem.transfer_s(t, a, b) for a in devices for b in devices) for t in range(graph.n_tensors)]
        )
        sent_s = np.minimum(longest_s, self.horizon_s).sum() * (len(devices) - 1)
        return 2.0 ** (self.bits - math.frexp(work_s + sent_s + self.horizon_s)[1])

    @property
    def horizon(self) -> int:
        """No schedule of interest is longer."""
        return math.floor(self.horizon_s * self.per_second)

    @cached_property
    def op(self) -> IntArray:
        """int64 [n, D]."""
        return self.floor(self.problem.op_s)

    @cached_property
    def head(self) -> list[int]:
        """n numbers: no op starts earlier."""
        return list(self.floor(self._pairs.heads() * _SAFETY).tolist())

    @cached_property
    def tail(self) -> list[int]:
        """n numbers: no step ends earlier after the end of the op."""
        return list(self.floor(self._pairs.tails() * _SAFETY).tolist())

    @cached_property
    def _pairs(self) -> Pairs:
        return Pairs.of(self.problem)

    def floor(self, seconds: Any) -> IntArray:
        """Whole units of time."""
        return np.floor(np.asarray(seconds, dtype=np.float64) * self.per_second).astype(np.int64)


@dataclass
class CpSatModel:
    """The programme and its variables.

    Attributes:
        model: the `CpModel`.
        where: for each unit a boolean for each device it may run on.
        start, end: of each op.
        sent: boolean, start and end of each possible transfer, by (tensor, receiving device).
        makespan: what is minimised.
        device: int64 [n], the warm start's devices, renamed as the symmetry breaking wants them.
    """

    scaled: Scaled
    model: Any
    makespan: Any
    where: list[dict[int, Any]]
    device: IntArray
    start: list[Any] = field(default_factory=list)
    end: list[Any] = field(default_factory=list)
    sent: dict[tuple[int, int], tuple[Any, Any, Any]] = field(default_factory=dict)
    on_device: dict[tuple[int, int], Any] = field(default_factory=dict)
    on_link: dict[int, list[tuple[Any, int, Any]]] = field(default_factory=lambda: defaultdict(list))

    def literal(self, op: int, device: int) -> Any:
        """The variable that is true if an op is on a device; None where it may not be."""
        return self.where[self.scaled.problem.unit_of[op]].get(device)


def build(problem: Problem, schedule: Schedule, horizon_s: float, lower_bound_s: float, bits: int = BITS) -> CpSatModel:
    """The programme of a problem, hinted with a schedule.

    Args:
        horizon_s: schedules that take longer are of no interest.
        lower_bound_s: no schedule takes less.
        bits: all durations together stay below 2**bits units.
    """
    from ortools.sat.python import cp_model

    scaled = Scaled(problem, horizon_s, bits)
    model = cp_model.CpModel()
    least = min(int(scaled.floor(lower_bound_s)), scaled.horizon)
    makespan = model.new_int_var(least, scaled.horizon, "makespan")
    model.add_hint(makespan, min(scaled.horizon, int(scaled.floor(schedule.step_time_s))))
    where, device = _places(model, problem, schedule, horizon_s)
    made = CpSatModel(scaled, model, makespan, where, device)
    _ops(made, schedule)
    _transfers(made, schedule)
    _redundant(made)
    if memory_may_bind(problem):
        _memory(made)
    model.minimize(makespan)
    return made


def _places(
    model: Any, problem: Problem, schedule: Schedule, horizon_s: float
) -> tuple[list[dict[int, Any]], IntArray]:
    """One device for each unit. Devices that are alike are used in order: one of their renamings is left."""
    units = Units.of(problem)
    placed = schedule.device[units.first_op]
    renamed = np.arange(problem.cluster.n_devices)
    quick = np.logical_and.reduceat(problem.op_s[units.members] <= horizon_s, units.ptr[:-1], axis=0)
    possible = units.allowed & quick  # where one op alone takes longer than the whole step, no better step has it
    where = [
        {d: model.new_bool_var(f"unit {u} on {d}") for d in np.flatnonzero(possible[u]).tolist()}
        for u in range(units.n_units)
    ]
    for literals in where:
        model.add_exactly_one(literals.values())
    for alike in interchangeable(problem):
        used = [d for d in dict.fromkeys(placed.tolist()) if d in alike]
        for new, old in zip(alike, [*used, *(d for d in alike if d not in used)], strict=True):
            renamed[old] = new
        for before, after in itertools.pairwise(alike):
            for u in range(units.n_units):
                if after in where[u]:
                    earlier = [where[v][before] for v in range(u) if before in where[v]]
                    model.add_bool_or([where[u][after].negated(), *earlier])
    for u, literals in enumerate(where):
        for d, literal in literals.items():
            model.add_hint(literal, int(renamed[placed[u]]) == d)
    return where, renamed[schedule.device]


def _ops(made: CpSatModel, schedule: Schedule) -> None:
    """Every op once, on its unit's device; a device runs one at a time."""
    model, scaled = made.model, made.scaled
    started = scaled.floor(schedule.op_start_s).tolist()
    for i, times in enumerate(scaled.op.tolist()):
        literals = made.where[scaled.problem.unit_of[i]]
        shortest = min(times[d] for d in literals)
        latest = scaled.horizon - scaled.tail[i]
        start = model.new_int_var(scaled.head[i], latest - shortest, f"start {i}")
        end = start + shortest
        if any(times[d] != shortest for d in literals):
            end = model.new_int_var(scaled.head[i] + shortest, latest, f"end {i}")
            for d, literal in literals.items():
                model.add(end == start + times[d]).only_enforce_if(literal)
        for d, literal in literals.items():
            made.on_device[i, d] = model.new_optional_fixed_size_interval_var(
                start, times[d], literal, f"op {i} on {d}"
            )
        model.add_hint(start, started[i])
        model.add(made.makespan >= end + scaled.tail[i])
        made.start.append(start)
        made.end.append(end)
    for d in range(scaled.problem.cluster.n_devices):
        model.add_no_overlap([interval for (_, there), interval in made.on_device.items() if there == d])


def _transfers(made: CpSatModel, schedule: Schedule) -> None:
    """A tensor goes once to each other device with a consumer; a link carries one at a time."""
    model, problem = made.model, made.scaled.problem
    graph, unit_of = problem.graph, problem.unit_of
    begun = made.scaled.floor(schedule.transfer_start_s).tolist()
    new_device = {int(old): int(new) for old, new in zip(schedule.device, made.device, strict=True)}
    hinted = {
        (t, new_device[target]): at
        for t, target, at in zip(
            schedule.transfer_tensor.tolist(), schedule.transfer_target.tolist(), begun, strict=True
        )
    }
    for t in range(graph.n_tensors):
        i = int(graph.tensor_producer[t])
        readers = sorted(set(graph.consumers_of(t).tolist()))
        for c in readers:
            model.add(made.start[c] >= made.end[i])
        apart = [c for c in readers if unit_of[c] != unit_of[i]]
        if apart:
            _apart(made, t, i, apart)
        for b in range(problem.cluster.n_devices):
            there = [c for c in apart if made.literal(c, b) is not None]
            if there and any(a != b for a in made.where[unit_of[i]]):
                made.sent[t, b] = _transfer(made, t, b, i, there, hinted.get((t, b)))
    for rows in made.on_link.values():
        model.add_no_overlap([interval for _, _, interval in rows])


def _apart(made: CpSatModel, t: int, i: int, readers: list[int]) -> None:
    """A reader that is not with the producer waits for the quickest transfer at least, wherever the two are."""
    model, problem = made.model, made.scaled.problem
    for c in readers:
        mine, other = made.where[problem.unit_of[i]], made.where[problem.unit_of[c]]
        quickest = min((problem.transfer_s(t, a, b) for a in mine for b in other if a != b), default=0.0)
        same = model.new_bool_var(f"{c} with tensor {t}")
        for d, literal in mine.items():
            if d in other:
                model.add_bool_or([literal.negated(), other[d].negated(), same])
                model.add_bool_or([literal.negated(), other[d], same.negated()])
            else:
                model.add_implication(literal, same.negated())
        model.add(made.start[c] >= made.end[i] + int(made.scaled.floor(quickest))).only_enforce_if(same.negated())


def _transfer(made: CpSatModel, t: int, b: int, i: int, readers: list[int], hint: int | None) -> tuple[Any, Any, Any]:
    model, scaled, problem = made.model, made.scaled, made.scaled.problem
    sources = {a: literal for a, literal in made.where[problem.unit_of[i]].items() if a != b}
    at_home = made.literal(i, b)
    sent = model.new_bool_var(f"tensor {t} to {b}")
    model.add_hint(sent, hint is not None)
    needed = [made.literal(c, b) for c in readers]
    model.add_bool_or([*needed, sent.negated()])
    if at_home is not None:
        model.add_implication(sent, at_home.negated())
    for literal in needed:
        model.add_bool_or([literal.negated(), sent, *([] if at_home is None else [at_home])])
    seconds = {a: min(scaled.horizon + 1, int(scaled.floor(problem.transfer_s(t, a, b)))) for a in sources}
    earliest = scaled.head[i] + int(scaled.op[i].min())
    start = model.new_int_var(earliest, scaled.horizon, f"start of tensor {t} to {b}")
    if hint is not None:
        model.add_hint(start, hint)
    end = start + min(seconds.values())
    if any(length != min(seconds.values()) for length in seconds.values()):
        end = model.new_int_var(earliest, 2 * scaled.horizon, f"end of tensor {t} to {b}")
        for a, literal in sources.items():
            model.add(end == start + seconds[a]).only_enforce_if(literal)
        if at_home is not None:
            model.add(end == start).only_enforce_if(at_home)
    model.add(start >= made.end[i])
    rest = min(scaled.tail[c] + int(scaled.op[c].min()) for c in readers)
    model.add(made.makespan >= end + rest).only_enforce_if(sent)
    for c, literal in zip(readers, needed, strict=True):
        model.add(made.start[c] >= end).only_enforce_if(sent, literal)
    _occupy(made, t, b, start, sent, sources, seconds)
    return sent, start, end


def _occupy(
    made: CpSatModel, t: int, b: int, start: Any, sent: Any, sources: dict[int, Any], seconds: dict[int, int]
) -> None:
    """The transfer's time on the exclusive links of its route, one interval for each link and length."""
    model, cluster = made.model, made.scaled.problem.cluster
    users: dict[tuple[int, int], list[int]] = defaultdict(list)
    for a in sources:
        for link in dict.fromkeys(cluster.routes[a, b].links):
            if cluster.links[link].exclusive:
                users[link, seconds[a]].append(a)
    for (link, length), senders in users.items():
        used = sent
        if len(senders) < len(sources):
            used = model.new_bool_var(f"tensor {t} to {b} over {link} in {length}")
            model.add_implication(used, sent)
            model.add_bool_or([used.negated(), *(sources[a] for a in senders)])
            for a in senders:
                model.add_bool_or([sent.negated(), sources[a].negated(), used])
        interval = model.new_optional_fixed_size_interval_var(start, length, used, f"tensor {t} to {b} on {link}")
        made.on_link[link].append((used, length, interval))


def _redundant(made: CpSatModel) -> None:
    """Redundant constraints that speed up the proof: loads of devices and links, in all and between ops."""
    model, scaled, problem = made.model, made.scaled, made.scaled.problem
    n, devices = problem.graph.n_ops, range(problem.cluster.n_devices)

    def load(ops: Any, d: int) -> Any:
        there = [(int(scaled.op[i, d]), made.literal(i, d)) for i in ops]
        return sum(length * literal for length, literal in there if literal is not None and length)

    for d in devices:
        model.add(load(range(n), d) <= made.makespan)
    for rows in made.on_link.values():
        model.add(sum(length * used for used, length, _ in rows) <= made.makespan)
    if n > _MOST_NESTED:
        return
    after = _descendants(problem)
    for i in range(n):
        below, above = np.flatnonzero(after[i]), np.flatnonzero(after[:, i])
        for d in devices:
            if len(below) > 1:
                model.add(made.makespan >= made.end[i] + load(below, d) + min(scaled.tail[j] for j in below))
            if len(above) > 1:
                model.add(made.start[i] >= load(above, d) + min(scaled.head[j] for j in above))
            for j in below.tolist():
                between = np.flatnonzero(after[i] & after[:, j])
                if len(between) > 1:
                    model.add(made.start[j] >= made.end[i] + load(between, d))


def _descendants(problem: Problem) -> Any:
    """bool [n, n]: whether the second op needs the first."""
    n = problem.graph.n_ops
    producer, consumer, _ = problem.graph.edge_list
    after = np.zeros((n, n), dtype=np.bool_)
    for i in problem.graph.topological_order[::-1].tolist():
        for c in np.unique(consumer[producer == i]).tolist():
            after[i] |= after[c]
            after[i, c] = True
    return after


def packing(problem: Problem) -> Any:
    """A `CpModel` without time, in which every placement that fits is a solution, but others may be.

    Each memory has room for what the units on its devices keep, and for what one op needs beside that while it runs.
    """
    from ortools.sat.python import cp_model

    units, model = Units.of(problem), cp_model.CpModel()
    where = [{d: model.new_bool_var("") for d in np.flatnonzero(row).tolist()} for row in units.allowed]
    for literals in where:
        model.add_exactly_one(literals.values())
    kept, working = units.kept_bytes.tolist(), units.working_bytes.tolist()
    for owner, devices in memories(problem):
        capacity = int(problem.capacity_bytes[owner])
        here = [(u, literals[d]) for d in devices for u, literals in enumerate(where) if d in literals]
        held = sum(kept[u] * literal for u, literal in here if kept[u])
        model.add(held <= capacity)
        for u, literal in here:
            if working[u]:
                model.add(held + working[u] * literal <= capacity)
    return model


def memories(problem: Problem) -> list[tuple[int, list[int]]]:
    """Each device that has a memory of its own, and all that work in it."""
    owner = problem.memory_owner
    return [(d, np.flatnonzero(owner == d).tolist()) for d in np.unique(owner).tolist()]


def serial_s(problem: Problem) -> float:
    """Some schedule takes no longer, if there is any: without a moment when nothing runs and nothing is sent."""
    devices, graph = range(problem.cluster.n_devices), problem.graph
    work_s = np.where(problem.allowed, problem.op_s, 0.0).max(axis=1).sum()
    longest_s = [max(problem.transfer_s(t, a, b) for a in devices for b in devices) for t in range(graph.n_tensors)]
    return float(work_s + sum(longest_s) * (len(devices) - 1))


def memory_may_bind(problem: Problem) -> bool:
    """True if some placement might not fit: everything on the smallest device would be too much.

    Devices on one memory may run ops at the same time and receive a tensor once each: there it always might.
    """
    graph = problem.graph
    if len(memories(problem)) < problem.cluster.n_devices:
        return True
    everything = int(graph.kept_bytes.sum() + graph.transfer_bytes.sum() + graph.workspace_bytes.max(initial=0))
    return bool(everything > problem.capacity_bytes.min())


def _memory(made: CpSatModel) -> None:
    """docs/score.md, "Memory": kept bytes, workspace while an op runs, tensors where they are until their last use."""
    model, capacity_bytes = made.model, made.scaled.problem.capacity_bytes.tolist()
    for owner, devices in memories(made.scaled.problem):
        held = [pair for d in devices for pair in _held(made, d, devices) if pair[1]]
        model.add_cumulative([interval for interval, _ in held], [size for _, size in held], capacity_bytes[owner])


def _held(made: CpSatModel, d: int, devices: list[int]) -> Iterator[tuple[Any, int]]:
    """Intervals and bytes of what device ``d`` puts into its memory, in which all of ``devices`` work."""
    model, scaled, problem = made.model, made.scaled, made.scaled.problem
    graph = problem.graph
    for u, ops in enumerate(problem.units):
        if (literal := made.where[u].get(d)) is not None:
            step = model.new_optional_fixed_size_interval_var(0, scaled.horizon, literal, f"unit {u} kept on {d}")
            yield step, int(graph.standing_bytes[ops].sum())
    for i in range(graph.n_ops):
        if (i, d) in made.on_device:
            yield made.on_device[i, d], int(graph.workspace_bytes[i])
        if graph.coming_bytes[i] and (literal := made.literal(i, d)) is not None:
            yield _until_end(made, i, d, literal), int(graph.coming_bytes[i])
    for t in np.flatnonzero(graph.transfer_bytes).tolist():
        i = int(graph.tensor_producer[t])
        if not graph.tensor_in_place[t] and (literal := made.literal(i, d)) is not None:
            yield _stay(made, t, d, devices, literal, made.start[i], made.end[i]), int(graph.tensor_bytes[t])
        if (t, d) in made.sent:
            sent, start, end = made.sent[t, d]
            beside = [home for b in devices if b != d and (home := made.literal(i, b)) is not None]
            if beside:  # what is made on the same memory is sent, but not copied
                copied = model.new_bool_var(f"tensor {t} copied to {d}")
                model.add(copied >= sent - sum(beside))
            else:
                copied = sent
            yield _stay(made, t, d, [d], copied, start, end), int(graph.tensor_bytes[t])


def _until_end(made: CpSatModel, i: int, d: int, present: Any) -> Any:
    """The time from the start of an op to the end of the step."""
    horizon, start = made.scaled.horizon, made.start[i]
    return made.model.new_optional_interval_var(start, horizon - start, horizon, present, f"gradients of {i} on {d}")


def _stay(made: CpSatModel, t: int, d: int, reading: list[int], present: Any, start: Any, end: Any) -> Any:
    """The time a tensor is on a device: until its last reader on ``reading`` ends, and its last transfer from there."""
    model, horizon = made.model, made.scaled.horizon
    last = model.new_int_var(0, horizon, f"tensor {t} leaves {d}")
    model.add(last >= end).only_enforce_if(present)
    for c in set(made.scaled.problem.graph.consumers_of(t).tolist()):
        for b in reading:
            if (literal := made.literal(c, b)) is not None:
                model.add(last >= made.end[c]).only_enforce_if(present, literal)
    for b in range(made.scaled.problem.cluster.n_devices):
        if b != d and (t, b) in made.sent:
            sent, _, arrival = made.sent[t, b]
            # A tensor leaves from its producer's device only; a received copy sends nothing.
            home = made.literal(int(made.scaled.problem.graph.tensor_producer[t]), d)
            if home is not None:
                model.add(last >= arrival).only_enforce_if(present, sent, home)
    length = model.new_int_var(0, horizon, f"tensor {t} stays on {d}")
    return model.new_optional_interval_var(start, length, last, present, f"tensor {t} on {d}")
