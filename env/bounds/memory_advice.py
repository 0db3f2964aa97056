"""Advice for a step that does not fit into memory: more devices, half precision, another optimizer, recompute.

All of it is counted, not searched: the kept bytes and the largest working set against the memory there is. Fewer
devices than said cannot do; that so many do is for a search to find.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphs.arrays import IntArray, sums
from graphs.formatting import format_bytes
from graphs.kept import activation_bytes, fixed_bytes, kept_words

if TYPE_CHECKING:
    from env.problem import Problem

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
