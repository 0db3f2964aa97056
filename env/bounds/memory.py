"""Proofs that no placement fits into memory, each one sentence, with advice: more devices, half precision, recompute.

Advice is counted, not searched: the kept bytes and the largest working set against the memory there is. Fewer devices
than said cannot do; that so many do is for a search to find.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphs.arrays import IntArray, sums
from graphs.formatting import exact_bytes, format_bytes
from graphs.kept import activation_bytes, fixed_bytes, kept_words

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
    """True if provably no order of a step fits on one device: what is kept and the tensors of one op do not."""
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


_HALVED = ("float32", "float64")


@dataclass(frozen=True, eq=False)
class Variant:
    """The same step done in another way (n ops, G groups of `Problem.units`).

    Attributes:
        name: the way, in words; empty for the graph as it is.
        kept_bytes: int64 [G], by each group.
        working_bytes: int64 [n], of each op.
    """

    name: str
    kept_bytes: IntArray
    working_bytes: IntArray


def variants(problem: Problem, working_bytes: IntArray) -> list[Variant]:
    """The graph as it is, and what would need less memory.

    Args:
        working_bytes: int64 [n], the memory that each op needs while it runs.
    """
    graph = problem.graph
    fixed = fixed_bytes(graph)
    wide = np.isin(np.array(graph.dtypes, dtype=object).astype(str), _HALVED)

    def variant(name: str, is_half: bool, is_stateless: bool) -> Variant:
        def sized(size: IntArray, stays: IntArray | int = 0) -> IntArray:
            return np.where(wide, (size + stays) // 2, size) if is_half else size

        by_op = sized(graph.kept_bytes, fixed) - sized(graph.optimizer_bytes) * is_stateless
        by_group = sums(problem.unit_of, by_op, problem.n_units)
        return Variant(name, by_group, sized(working_bytes))

    found = [variant("", False, False)]
    if wide.any():
        found.append(variant("half precision", True, False))
    if graph.optimizer_bytes.any():
        found.append(variant("sgd as the optimizer", False, True))
    if len(found) == 3:
        found.append(variant("both", True, True))
    return found


def devices_needed(problem: Problem, working_bytes: IntArray) -> str:
    """How many devices it takes by memory alone, as the graph is and otherwise."""
    room = problem.capacity_bytes
    largest, total = int(room.max()), problem.room_bytes()
    is_uniform = bool((room == largest).all())
    device = problem.cluster.devices[int(room.argmax())].name
    words = []
    for variant in variants(problem, working_bytes):
        needed = int(variant.kept_bytes.sum()) + int(variant.working_bytes.max(initial=0))
        more = max(0, _quotient(needed - total, largest))
        number = f"{max(1, _quotient(needed, largest))}" if is_uniform else f"{more} more" if more else "these devices"
        if variant.name:
            words.append(f"{number} with {variant.name} ({format_bytes(int(variant.kept_bytes.sum()))} kept)")
        else:
            kind = "such devices" if is_uniform else f"{'device' if more == 1 else 'devices'} like {device}"
            words.append(f"at least {number} {kind}")
    return f"by memory alone it takes {_either(words)}"


def smaller_op(problem: Problem, working_bytes: IntArray, op: int) -> str:
    """Ways to make an op and its colocation group fit on a device."""
    room = int(np.where(problem.allowed[op], problem.capacity_bytes, -1).max())
    words = []
    for variant in variants(problem, working_bytes):
        needed = int(variant.kept_bytes[problem.unit_of[op]] + variant.working_bytes[op])
        if variant.name and needed <= room:
            words.append(f"with {variant.name} ({format_bytes(needed)})")
    return f"; it would fit {_either(words)}" if words else "; a device with more memory is needed"


def what_would_help(problem: Problem, working_bytes: IntArray) -> str:
    """Advice where a search found no placement that fits."""
    graph = problem.graph
    ways = ["more devices or memory", *(variant.name for variant in variants(problem, working_bytes)[1:3])]
    if size := activation_bytes(graph):
        ways.append(f"recomputing activations ({format_bytes(size)} wait for the backward pass)")
    room = format_bytes(problem.room_bytes())
    return f"The step keeps {kept_words(graph)}, and {room} are free in all; what would help: {', '.join(ways)}."


def _quotient(value: int, by: int) -> int:
    """``value / by`` rounded up."""
    return -(-value // max(1, by))


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
