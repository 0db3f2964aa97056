"""Stretches: a program cut so that each device of a chain has one part of it, within memory, nearest to a placement."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from graphs.formatting import exact_bytes, format_bytes
from graphs.opgraph import FloatArray, IntArray, OpGraph, Phase


@dataclass(frozen=True, eq=False)
class Needs:
    """Bytes that the parts of a program need, [parts] each, in the order in which the parts run.

    Attributes:
        kept: parameters and buffers; in training also gradients, optimizer state, and what the forward pass leaves for
            the backward pass.
        room: the most that all other tensors and the workspace take while an op of the part runs.
    """

    kept: IntArray
    room: IntArray

    @property
    def n_parts(self) -> int:
        """Number of parts."""
        return len(self.kept)

    @cached_property
    def of_stretches(self) -> FloatArray:
        """float64 [parts + 1, parts + 1]: what one device needs for parts ``begin`` to ``end - 1``, by begin and end.

        0 below the diagonal.
        """
        total = np.concatenate([[0.0], np.cumsum(self.kept)])
        found: FloatArray = np.triu(total[None, :] - total[:, None])
        for end in range(1, self.n_parts + 1):
            found[:end, end] += np.maximum.accumulate(self.room[:end][::-1])[::-1]
        return found


def needs(graph: OpGraph, part: IntArray, kept: IntArray) -> Needs:
    """Needs of the parts when one op runs after the other, in program order.

    Args:
        part: int64 [n_ops]: the part that each op belongs to, -1 for none.
        kept: int64 [parts]: parameters, buffers, gradients and optimizer state.
    """
    n_ops, order = graph.n_ops, graph.topological_order
    position = np.empty(n_ops, dtype=np.int64)
    position[order] = np.arange(n_ops)
    producer, counts = graph.tensor_producer, np.diff(graph.consumer_ptr)
    tensor = np.repeat(np.arange(len(producer)), counts)
    last = position[producer].copy()
    np.maximum.at(last, tensor, position[graph.consumers])
    is_stored = np.zeros(len(producer), dtype=bool)
    is_stored[tensor[graph.phase[graph.consumers] != Phase.FORWARD]] = True
    is_stored &= graph.phase[producer] == Phase.FORWARD
    # Bytes of tensors that live only for a while, at each place of the program.
    change = np.zeros(n_ops + 1, dtype=np.int64)
    np.add.at(change, position[producer][~is_stored], graph.tensor_memory_bytes[~is_stored])
    np.add.at(change, last[~is_stored] + 1, -graph.tensor_memory_bytes[~is_stored])
    live = np.cumsum(change[:-1])[position] + graph.workspace_bytes
    # Tensors stored elsewhere are copied to be read here.
    read = is_stored[tensor] & (part[producer[tensor]] != part[graph.consumers])
    np.add.at(live, graph.consumers[read], graph.tensor_bytes[tensor[read]])
    known = part >= 0
    room, stored = np.zeros(len(kept), dtype=np.int64), np.zeros(len(kept), dtype=np.int64)
    np.maximum.at(room, part[known], live[known])
    own = is_stored & known[producer]
    np.add.at(stored, part[producer[own]], graph.tensor_bytes[own])
    return Needs(kept + stored, room)


def chain(numbers: IntArray) -> list[int]:
    """The devices of ops that are in program order, by the mean place of their ops."""
    place = np.arange(len(numbers))
    used = np.unique(numbers).tolist()
    return sorted(used, key=lambda device: (float(place[numbers == device].mean()), device))


@dataclass(frozen=True)
class Stretches:
    """A program cut up.

    Attributes:
        devices: the chain, in the order in which its devices run.
        bounds: [devices + 1] numbers of parts: where each stretch begins and the last one ends; some may be empty.
        usable: bytes that each device has.
        taken: bytes that each device needs.
        moved_s: seconds of ops that are elsewhere in the placement.
    """

    devices: tuple[int, ...]
    bounds: tuple[int, ...]
    usable: tuple[int, ...]
    taken: tuple[int, ...]
    moved_s: float

    @property
    def missing(self) -> tuple[int, ...]:
        """Bytes that each device lacks."""
        return tuple(max(taken - usable, 0) for taken, usable in zip(self.taken, self.usable, strict=True))

    def device_of_part(self) -> IntArray:
        """int64 [parts]."""
        return np.repeat(np.array(self.devices, dtype=np.int64), np.diff(self.bounds))


def nearest(needed: Needs, moved_s: FloatArray, usable: IntArray, used: Sequence[int]) -> Stretches:
    """The cut with the least time of moved ops among those that fit; where none is found that does, the nearest miss.

    The devices run in the order given, unless an exchange of two neighbours moves less; those that the placement does
    not use come after them, one by one, as long as memory is missing.

    Args:
        moved_s: float64 [devices, parts]: the cost of each part on each device.
        usable: int64 [devices], bytes; devices with none are left out.
        used: the devices that the placement uses.
    """
    spare = [device for device in np.flatnonzero(usable > 0).tolist() if device not in used]
    for n_more in range(len(spare) + 1):
        found = cut(needed, moved_s, usable, (*used, *spare[:n_more]))
        if not any(found.missing):
            break
    swap = 0
    while swap < len(used) - 1:
        devices = list(found.devices)
        devices[swap], devices[swap + 1] = devices[swap + 1], devices[swap]
        other = cut(needed, moved_s, usable, devices)
        is_better = _badness(other) < _badness(found)
        found, swap = (other, 0) if is_better else (found, swap + 1)
    return found


def _badness(found: Stretches) -> tuple[int, float]:
    return sum(found.missing), round(found.moved_s, 15)


def cut(needed: Needs, moved_s: FloatArray, usable: IntArray, devices: Sequence[int]) -> Stretches:
    """The best cut for devices in this order; arguments as of `nearest`.

    Least bytes over what the devices have, which is none where a cut fits; then least time of moved ops. By dynamic
    programming over parts, O(devices x parts^2).
    """
    n = needed.n_parts
    scale = 0.5 / max(float(moved_s.sum()), 1e-300)  # so that all moves together weigh less than one byte
    best = np.where(np.arange(n + 1) == 0, 0.0, np.inf)
    choices = []
    for device in devices:
        moved = np.concatenate([[0.0], np.cumsum(moved_s[device])]) * scale
        over = np.maximum(needed.of_stretches - float(usable[device]), 0.0)
        np.fill_diagonal(over, 0.0)
        cost = np.round(best[:, None] + over + moved[None, :] - moved[:, None], 12)
        cost[np.tril_indices(n + 1, -1)] = np.inf
        choices.append(n - cost[::-1].argmin(axis=0))  # of equals the last, so that devices stay in use
        best = cost.min(axis=0)
    bounds = [n]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    bounds.reverse()
    return Stretches(
        tuple(devices),
        tuple(bounds),
        tuple(int(usable[device]) for device in devices),
        tuple(int(needed.of_stretches[begin, end]) for begin, end in itertools.pairwise(bounds)),
        sum(
            float(moved_s[device, begin:end].sum())
            for device, (begin, end) in zip(devices, itertools.pairwise(bounds), strict=True)
        ),
    )


def no_stretches(what: str, names: Sequence[str], found: Stretches, training: bool) -> str:
    """The sentence for what does not fit: the nearest there is, and what would help."""
    places = [
        f"{name} lacks {exact_bytes(lack)} beside the {format_bytes(max(limit, 0))} that it has"
        for name, limit, lack in zip(names, found.usable, found.missing, strict=True)
        if lack
    ]
    counted = "parameters, gradients, optimizer state and activations" if training else "parameters and activations"
    others = ", another optimizer" if training else ""
    return (
        f"no {what} that gives {', '.join(names)} one stretch of the modules each fits: {counted} counted, "
        f"at best {' and '.join(places)}; use more or larger devices, half precision{others}, or a smaller batch."
    )
