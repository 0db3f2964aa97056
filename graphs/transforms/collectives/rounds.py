"""The rounds of collective algorithms: who sends what to whom.

A collective moves the pieces of one tensor among p ranks. An algorithm is a list of rounds, and in a round a rank sends
what it held before. A reduction is a gather or a broadcast run backwards, adding up: so each algorithm is written down
once, as the way in which results spread. Sources: Thakur, Rabenseifner and Gropp 2005 (doi:10.1177/1094342005051521)
for ring, binomial tree, recursive halving and doubling; Bruck et al. 1997 (doi:10.1109/71.642949) where the number of
ranks is no power of two; Sanders, Speck and Träff 2009 (doi:10.1016/j.parco.2009.09.001) for two trees.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from graphs.errors import UnknownNameError

_HIERARCHICAL, _DIGITS = "hierarchical", "0123456789"
_WITH_GROUP = re.compile(_HIERARCHICAL + "[1-9][0-9]{0,5}")
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "shift")


@dataclass(frozen=True)
class Send:
    """One tensor from rank to rank: pieces ``start .. start + length - 1``, counted round in a circle."""

    source: int
    target: int
    start: int
    length: int

    @property
    def backwards(self) -> Send:
        return Send(self.target, self.source, self.start, self.length)


@dataclass(frozen=True)
class Round:
    """Tensors that are sent side by side; where `adds`, the receivers add them to what they have."""

    sends: tuple[Send, ...]
    adds: bool = False


Rounds = tuple[Round, ...]


def rounds_of(kind: str, algorithm: str, ranks: int) -> Rounds:
    """The rounds of a collective; `algorithm` knows the kind (`carried_out_by`)."""
    group = group_size(algorithm, ranks)
    if kind == "all_to_all":
        return _pairwise(ranks, lambda source, target: source * ranks + target)
    if kind == "shift":
        return _rounds([[Send(r, (r + 1) % ranks, r, 1) for r in range(ranks)]])
    if algorithm == "doubling":
        return _recursive_doubling(ranks)
    spread = _SPREAD[algorithm.rstrip(_DIGITS)](ranks, group)
    collect = tuple(Round(tuple(send.backwards for send in part.sends), True) for part in reversed(spread))
    if kind == "all_reduce":
        return collect + spread
    return spread if kind in ("all_gather", "broadcast") else collect


def own_piece(algorithm: str, rank: int, ranks: int) -> int:
    """The piece that a rank gives to an all-gather and has after a reduce-scatter."""
    group = group_size(algorithm, ranks)
    if not group:
        return rank
    # Pieces that a group holds together after its inner reduce-scatter are neighbours.
    return rank % group * (ranks // group) + rank // group


def carried_out_by(kind: str, algorithm: str) -> str:
    """The algorithm that carries out a collective of that kind where `algorithm` was asked for.

    Every algorithm all-reduces. Tree and central server also broadcast and reduce; ring, butterfly, hierarchical and
    sharded server also reduce-scatter and all-gather. For the rest stands in what libraries take: a ring, a butterfly
    or a tree. An all-to-all is always a pairwise exchange, and a shift one round of a ring.

    Raises:
        UnknownNameError: an unknown kind or algorithm.
    """
    if kind not in KINDS:
        raise UnknownNameError("collective", kind, KINDS)
    if not is_algorithm(algorithm):
        raise UnknownNameError("algorithm", algorithm, ALGORITHMS)
    if kind == "all_to_all":
        return "pairwise"
    if kind == "shift":
        return "ring"
    if kind == "all_reduce":
        return algorithm
    if kind in ("broadcast", "reduce"):
        return algorithm if algorithm == "central" else "tree"
    return {"doubling": "butterfly"}.get(algorithm, "ring" if algorithm in _WHOLE else algorithm)


def is_algorithm(name: str) -> bool:
    """Whether a name is one of `ALGORITHMS`, or the hierarchical one with a number of ranks in a group."""
    return name in ALGORITHMS or _WITH_GROUP.fullmatch(name) is not None


def group_size(algorithm: str, ranks: int) -> int:
    """How many ranks are in a group of ``"hierarchical"``, 0 of any other algorithm.

    ``"hierarchical8"`` asks for 8, and has as many as divide both 8 and the ranks; without a number it is the largest
    divisor of the ranks up to their root.
    """
    if not algorithm.startswith(_HIERARCHICAL):
        return 0
    if algorithm != _HIERARCHICAL:
        return math.gcd(int(algorithm.removeprefix(_HIERARCHICAL)), ranks)
    return max(d for d in range(1, ranks + 1) if ranks % d == 0 and d * d <= ranks)


# -- gathering: every rank has a piece, and in the end all of them ------------------------------------------


def _ring(ranks: int, group: int) -> Rounds:
    """Every rank passes on to the next one what it received last."""
    return _rounds([Send(r, (r + 1) % ranks, (r - t) % ranks, 1) for r in range(ranks)] for t in range(ranks - 1))


def _sharded(ranks: int, group: int) -> Rounds:
    """Every rank serves its piece, to another one in each round."""
    return _pairwise(ranks, lambda source, target: source)


def _butterfly(ranks: int, group: int) -> Rounds:
    """Rounds that double each rank's data: it swaps with a partner; where p is no power of two, along a circle
    (Bruck)."""
    result: list[list[Send]] = []
    held = 1
    while held < ranks:
        if ranks & (ranks - 1):
            length = min(held, ranks - held)
            result.append([Send(r, (r - held) % ranks, r, length) for r in range(ranks)])
        else:
            result.append([Send(r, r ^ held, r // held * held, held) for r in range(ranks)])
        held *= 2
    return _rounds(result)


def _hierarchical(ranks: int, group: int) -> Rounds:
    """Rings across the groups, then a ring inside each."""
    groups = ranks // group

    def rank(g: int, i: int) -> int:
        return g % groups * group + i % group

    places = [(g, i) for g in range(groups) for i in range(group)]
    across = [
        [Send(rank(g, i), rank(g + 1, i), i * groups + (g - t) % groups, 1) for g, i in places]
        for t in range(groups - 1)
    ]
    inside = [
        [Send(rank(g, i), rank(g, i + 1), (i - t) % group * groups, groups) for g, i in places]
        for t in range(group - 1)
    ]
    return _rounds(across + inside)


def _pairwise(ranks: int, piece: Callable[[int, int], int]) -> Rounds:
    """In round k every rank sends one piece to the k-th after it."""
    return _rounds(
        [Send(r, (r + k) % ranks, piece(r, (r + k) % ranks), 1) for r in range(ranks)] for k in range(1, ranks)
    )


# -- broadcasting: rank 0 has all of it, and in the end every rank ------------------------------------------


def _tree(ranks: int, group: int) -> Rounds:
    """A binomial tree: who has it gives it to the first of the larger half of those that it is to reach."""
    result: list[list[Send]] = []
    reach = [(0, ranks)]
    while any(size > 1 for _, size in reach):
        halves = [(root, size // 2, size - size // 2) for root, size in reach if size > 1]
        result.append([Send(root, root + kept, 0, 1) for root, kept, _ in halves])
        reach = [part for root, kept, given in halves for part in ((root, kept), (root + kept, given))]
    return _rounds(result)


def _double_tree(ranks: int, group: int) -> Rounds:
    """Two binary trees, each for one half of the tensor; who has children in one is a leaf of the other."""
    result: list[list[Send]] = []
    level, depth = [(0, ranks)], 0
    while level:
        below = []
        for low, high in level:
            root = _middle(low, high)
            parts = [part for part in ((low, root), (root + 1, high)) if part[0] < part[1]]
            below += parts
            for k, part in enumerate(parts):
                result += [[] for _ in range(2 * depth + k + 1 - len(result))]
                child = _middle(*part)
                result[2 * depth + k] += [
                    Send(root, child, 0, 1),
                    Send(_second_place(root, ranks), _second_place(child, ranks), 1, 1),
                ]
        level, depth = below, depth + 1
    return _rounds(result)


def _middle(low: int, high: int) -> int:
    """The root of the in-order binary tree over ``low .. high - 1``, in which odd numbers have children."""
    return low + (1 << ((high - low).bit_length() - 1)) - 1


def _second_place(rank: int, ranks: int) -> int:
    """The rank in the second tree: the next one, so that parents become leaves.

    If the first tree is complete, as many ranks are parents of leaves, and the second one runs against it: else two
    tensors would compete for one port.
    """
    return (ranks - 2 - rank) % ranks if ranks & (ranks + 1) == 0 else (rank + 1) % ranks


def _central(ranks: int, group: int) -> Rounds:
    """Rank 0 gives it to one rank after the other."""
    return _rounds([Send(0, r, 0, 1)] for r in reversed(range(1, ranks)))


def _recursive_doubling(ranks: int) -> Rounds:
    """All-reduce of whole tensors between partners; ranks beyond a power of two leave theirs with a neighbour."""
    power = 1 << (ranks.bit_length() - 1)
    extra = ranks - power
    active = [2 * i + 1 for i in range(extra)] + list(range(2 * extra, ranks))
    fold = tuple(Send(2 * i, 2 * i + 1, 0, 1) for i in range(extra))
    swaps = [
        Round(tuple(Send(active[i], active[i ^ step], 0, 1) for i in range(power)), True)
        for step in (1 << k for k in range(power.bit_length() - 1))
    ]
    unfold = tuple(send.backwards for send in fold)
    return (*([Round(fold, True)] if fold else []), *swaps, *([Round(unfold)] if fold else []))


def _rounds(sends: Iterable[list[Send]]) -> Rounds:
    return tuple(Round(tuple(part)) for part in sends)


_SPREAD: dict[str, Callable[[int, int], Rounds]] = {
    "ring": _ring,
    "butterfly": _butterfly,
    "hierarchical": _hierarchical,
    "sharded": _sharded,
    "tree": _tree,
    "double_tree": _double_tree,
    "central": _central,
}
_WHOLE = ("tree", "double_tree", "central")  # these send whole tensors from a root, not pieces
ALGORITHMS = ("ring", "tree", "double_tree", "butterfly", "doubling", "hierarchical", "central", "sharded")
