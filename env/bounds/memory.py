"""Proofs that no placement fits into memory, each one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from env.bounds.memory_advice import devices_needed, smaller_op
from graphs.arrays import IntArray, sums
from graphs.formatting import exact_bytes, format_bytes
from graphs.kept import kept_words

if TYPE_CHECKING:
    from env.problem import BoolArray, Problem


def memory_reason(problem: Problem) -> str | None:
    """The reason why provably nothing fits, or None if nothing is proved.

    Three necessary conditions: an op fits, with everything its colocation group keeps, on some device it may run on;
    the kept bytes of all ops that share a choice of devices fit on these devices; all kept bytes and the largest
    working set fit on the whole cluster.
    """
    working = problem.working_bytes
    return _group_too_large(problem, working) or _kinds_too_small(problem) or _cluster_too_small(problem, working)


def is_too_large_for_one(problem: Problem) -> bool:
    """Whether provably no order of a step fits on one device: what is kept and the tensors of one op do not."""
    needed = problem.graph.kept_bytes.sum() + problem.working_bytes.max(initial=0)
    return bool(needed > problem.capacity_bytes.max())


def _group_too_large(problem: Problem, working: IntArray) -> str | None:
    graph, devices = problem.graph, problem.cluster.devices
    by_group = sums(problem.unit_of, graph.kept_bytes, problem.n_units)
    room = np.where(problem.allowed, problem.capacity_bytes, -1)
    largest = room.argmax(axis=1)
    needed = by_group[problem.unit_of] + working
    short = np.flatnonzero(needed > room[np.arange(graph.n_ops), largest])
    if not len(short):
        return None
    i = int(short[np.argmax((needed - room.max(axis=1))[short])])
    with_group = " and the ops that must share its device" if len(problem.units[problem.unit_of[i]]) > 1 else ""
    device = devices[int(largest[i])]
    free = int(problem.capacity_bytes[largest[i]])
    way_out = smaller_op(problem, working, i)
    return (
        f"op {graph.op_names[i]!r}{with_group} need{'' if with_group else 's'} {exact_bytes(needed[i])} on one device, "
        f"where the largest that suits, {device.name}, has {exact_bytes(free)} free: "
        f"{format_bytes(int(needed[i]) - free)} too little, however many such devices there are{way_out}."
    )


def _kinds_too_small(problem: Problem) -> str | None:
    graph = problem.graph
    choices, choice_of = problem.choices
    by_choice = sums(choice_of, graph.kept_bytes, len(choices))
    for choice in choices:
        if choice.all():
            continue  # no restriction: `_cluster_too_small` counts these, and more
        inside = ~(choices & ~choice).any(axis=1)  # ops with no other devices than these
        needed, room = int(by_choice[inside].sum()), problem.room_bytes(choice)
        if needed > room:
            i = _largest(graph.kept_bytes, inside[choice_of])
            names = ", ".join(problem.cluster.devices[d].name for d in np.flatnonzero(choice)[:4])
            more = " ..." if choice.sum() > 4 else ""
            is_pinned = any(graph.pins[op] for op in np.flatnonzero(inside[choice_of]).tolist())
            way_out = "pin fewer of them there, or take" if is_pinned else "take"
            return (
                f"the ops that may run only on {names}{more}, the largest of them {graph.op_names[i]!r}, keep "
                f"{exact_bytes(needed)} for the whole step, where {exact_bytes(room)} are free in all: "
                f"{format_bytes(needed - room)} too little; {way_out} more such devices."
            )
    return None


def _cluster_too_small(problem: Problem, working: IntArray) -> str | None:
    graph = problem.graph
    i = int(working.argmax())
    needed = int(graph.kept_bytes.sum() + working[i])
    room = problem.room_bytes()
    if needed <= room:
        return None
    besides = f" and op {graph.op_names[i]!r} needs {exact_bytes(working[i])} besides while it runs" * bool(working[i])
    name, count = problem.cluster.name, len(np.unique(problem.memory_owner))
    has = f"one device of {name!r} has" if count == 1 else f"{count} devices of {name!r} have"
    return (
        f"the step keeps {kept_words(graph)}{besides}, {exact_bytes(needed)} in all, where the "
        f"{has} {exact_bytes(room)} free{' together' * (count > 1)}: {format_bytes(needed - room)} too little; "
        f"{devices_needed(problem, working)}."
    )


def _largest(values: IntArray, where: BoolArray) -> int:
    return int(np.where(where, values, -1).argmax())
