"""Compiled enumeration of all ideals, the downward-closed sets of atoms; `chains.py` has them as a `Lattice`."""

# Letters
# words   sets of atoms, 64 to a word; w, a word; v, an atom
# here   the ideal whose steps are taken; slot, a place in the hash table

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from env.jit import allocating, entry, inner

if TYPE_CHECKING:
    from graphs.opgraph import IntArray


Bits = NDArray[np.uint64]
Narrow = NDArray[np.int32]


@inner
def holds(words: Bits, atom: int) -> bool:
    """Whether a set of atoms has this one."""
    return bool((words[atom >> 6] >> np.uint64(atom & 63)) & np.uint64(1))


@inner
def find(sets: Bits, table: Narrow, wanted: Bits) -> int:
    """The slot of the hash table that has this set's number, or the free one (-1) where it belongs."""
    # Multiply and shift, word by word; the table is a power of two long, at most a quarter full, and probed one by one.
    code = np.uint64(0x9E3779B97F4A7C15)
    for w in range(len(wanted)):
        code = (code ^ wanted[w]) * np.uint64(0xBF58476D1CE4E5B9)
        code ^= code >> np.uint64(29)
    slot = np.int64(code >> np.uint64(1)) & (len(table) - 1)
    while table[slot] >= 0:
        known = sets[table[slot]]
        equal = True
        for w in range(len(wanted)):
            if known[w] != wanted[w]:
                equal = False
                break
        if equal:
            return int(slot)
        slot = (slot + 1) & (len(table) - 1)
    return int(slot)


@inner
def copy(words: Bits, into: Bits) -> None:
    """Word by word: an assignment of arrays checks their shapes, and its message takes two seconds to compile."""
    for k in range(len(words)):
        into[k] = words[k]


@allocating
def twice_as_long(row: Narrow) -> Narrow:
    """The same numbers with as much room again behind them."""
    result = np.empty(2 * len(row), np.int32)
    for k in range(len(row)):
        result[k] = row[k]
    return result


@allocating
def twice_as_many(sets: Bits) -> Bits:
    """The same sets with as many empty ones behind them."""
    result = np.zeros((2 * len(sets), sets.shape[1]), np.uint64)
    for k in range(len(sets)):
        copy(sets[k], result[k])
    return result


@inner
def open_up(
    added: int, members: Bits, may_follow: Bits, before: tuple[IntArray, IntArray], after: tuple[IntArray, IntArray]
) -> None:
    """Update the set of atoms that may be added to an ideal for one that has just been."""
    before_ptr, before_atom = before
    after_ptr, after_atom = after
    # Only what follows the new atom can have become free.
    may_follow[added >> 6] &= ~(np.uint64(1) << np.uint64(added & 63))
    # An atom is free once all that comes before it is in the set.
    for j in range(after_ptr[added], after_ptr[added + 1]):
        atom = after_atom[j]
        free = True
        for i in range(before_ptr[atom], before_ptr[atom + 1]):
            if not holds(members, before_atom[i]):
                free = False
                break
        if free:
            may_follow[atom >> 6] |= np.uint64(1) << np.uint64(atom & 63)


@entry
def all_ideals(
    before: tuple[IntArray, IntArray], after: tuple[IntArray, IntArray], most: int, most_steps: int
) -> tuple[int, Bits, Narrow, Narrow, Narrow]:
    """All ideals, smaller ones first: ``(count, sets [count, words], from, atom, to)``, the last three by step.

    A step adds an atom to the ideal `from` and gives the ideal `to`. The count is 0 if there are more than `most`
    ideals or `most_steps` steps. O(steps * words).
    """
    n = len(before[0]) - 1
    words = (n + 63) >> 6
    # Room for a few, doubled whenever it is full.
    sets, may_follow = np.zeros((1024, words), np.uint64), np.zeros((1024, words), np.uint64)
    table = np.full(4096, -1, np.int32)
    smaller, added, larger = np.empty(1024, np.int32), np.empty(1024, np.int32), np.empty(1024, np.int32)
    for v in range(n):
        if before[0][v] == before[0][v + 1]:
            may_follow[0, v >> 6] |= np.uint64(1) << np.uint64(v & 63)
    # The empty ideal is number 0.
    table[find(sets, table, sets[0])] = 0
    count, steps, here = 1, 0, 0
    grown = np.empty(words, np.uint64)
    # Breadth first: every ideal is found from one with an atom less, and so after all its subsets.
    while here < count:
        # Every atom that may follow makes a larger ideal.
        for v in range(n):
            if not holds(may_follow[here], v):
                continue
            copy(sets[here], grown)
            grown[v >> 6] |= np.uint64(1) << np.uint64(v & 63)
            slot = find(sets, table, grown)
            if table[slot] < 0:
                if count == most:
                    return 0, sets, smaller, added, larger
                if count == len(sets):
                    sets, may_follow = twice_as_many(sets), twice_as_many(may_follow)
                    # The table grows with the sets, so that it never fills up.
                    table = np.full(4 * len(sets), -1, np.int32)
                    for k in range(count):
                        table[find(sets, table, sets[k])] = k
                    slot = find(sets, table, grown)
                table[slot] = count
                # A new one. The same atoms may follow as follow the ideal before it, but for the one added.
                copy(grown, sets[count])
                copy(may_follow[here], may_follow[count])
                open_up(v, grown, may_follow[count], before, after)
                count += 1
            if steps == len(larger):
                if steps >= most_steps:
                    return 0, sets, smaller, added, larger
                smaller, added, larger = twice_as_long(smaller), twice_as_long(added), twice_as_long(larger)
            # A step of its own even where the ideal was known: an ideal is reached from several.
            smaller[steps], added[steps], larger[steps] = here, v, table[slot]
            steps += 1
        here += 1
    return count, sets[:count], smaller[:steps], added[:steps], larger[:steps]
