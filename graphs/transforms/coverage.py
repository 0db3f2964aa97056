"""Shares of a graph's work that can be split along each axis, and the ops that cannot be split, with reasons."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from graphs.errors import MismatchError
from graphs.opgraph import OpGraph
from graphs.records import Phase

BATCH = "batch"
# The words of tensor parallelism: one axis of a mesh cuts heads in one op and features in the next.
TENSOR = frozenset(("heads", "features", "channels", "experts", "vocabulary"))
UPDATES = "an update works on parameters, which have no samples"
NO_SAMPLES = "nothing that it reads has samples"
NO_RULE = "it has nothing to split, or there is no rule for its kind"
TOGETHER = "it takes the samples together"


@dataclass(frozen=True)
class Unsplit:
    """Ops of one kind that cannot be split along the batch.

    Attributes:
        kind: of the ops.
        reason: why not.
        ops: how many there are.
        share: of the FLOPs of the graph.
    """

    kind: str
    reason: str
    ops: int
    share: float


@dataclass(frozen=True)
class Coverage:
    """How a graph may be split.

    Attributes:
        shares: of the FLOPs, by axis, the largest first: ops with a row along it; ``"tensor"``: along any of `TENSOR`.
        unsplit: what cannot be split along the batch, the most FLOPs first.
    """

    shares: dict[str, float]
    unsplit: tuple[Unsplit, ...]


def coverage(graph: OpGraph) -> Coverage:
    """The shares of a graph with rows; where it has no FLOPs, shares of its ops.

    Raises:
        MismatchError: no op has rows.
    """
    if not any(graph.split_rows):
        raise MismatchError(
            f"{graph.name} has no split rows, so nothing is known of how its ops may be split; "
            "capture it from a model, op by op, with this version."
        )
    work = graph.flops.tolist() if graph.flops.any() else [1.0] * graph.n_ops
    total = sum(work)
    shares: dict[str, float] = defaultdict(float)
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    axes = [{row.axis for row in rows} for rows in graph.split_rows]
    readers = _with_samples(graph, axes)
    for i, kind in enumerate(graph.kinds):
        for axis in axes[i] | ({"tensor"} if axes[i] & TENSOR else set()):
            shares[axis] += work[i] / total
        if BATCH not in axes[i]:
            entry = found[kind, _reason(graph, i, axes[i], readers[i])]
            entry[0] += 1
            entry[1] += work[i] / total
    listed = [Unsplit(kind, reason, int(ops), share) for (kind, reason), (ops, share) in found.items()]
    return Coverage(
        dict(sorted(shares.items(), key=lambda item: (-item[1], item[0]))),
        tuple(sorted(listed, key=lambda one: (-one.share, -one.ops, one.kind))),
    )


_MUCH = 0.05  # of the FLOPs or bytes: worth a sentence
_SHOWN = 3
_REPEATS = " repeat on every replica: "


def unshared(graph: OpGraph) -> str:
    """A sentence where much of a step cannot be cut by samples because ops have no rule, or take samples together.

    Ops that follow such an op run on every replica, too. "" where all but little can be cut, or no op has rows.
    """
    axes = [{row.axis for row in rows} for rows in graph.split_rows]
    reads, left = _with_samples(graph, axes), _left_whole(graph, axes)
    shares = [
        (sum(amounts[op] for op in left) / total, word)
        for amounts, word in ((graph.flops.tolist(), "FLOPs"), (graph.bytes_moved.tolist(), "bytes moved"))
        if (total := sum(amounts))
    ]
    if max((share for share, _ in shares), default=0.0) < _MUCH:
        return ""
    first: dict[str, dict[str, float]] = {NO_RULE: defaultdict(float), TOGETHER: defaultdict(float)}
    for op in left:
        if reads[op]:
            first[TOGETHER if axes[op] else NO_RULE][graph.kinds[op]] += float(graph.bytes_moved[op])
    most = max(max(found.values(), default=0.0) for found in first.values())
    causes = []
    for reason, text in ((NO_RULE, "no rule to split {} by samples"), (TOGETHER, "{} takes the samples together")):
        listed = sorted(first[reason].items(), key=lambda one: -one[1])
        kinds = [kind for kind, moved in listed if moved * 20 >= most][:_SHOWN]
        causes += [text.format(", ".join(kinds))] if kinds else []
    amount = " and ".join(f"{share:.0%} of the {word}" for share, word in shares)
    return f"{amount}{_REPEATS}{'; '.join(causes)}."


def repeats_first(note: str) -> tuple[str, str]:
    """The sentence of `unshared` that a note begins with, or "", and the rest of the note."""
    sentence, _, rest = note.partition(". ")  # names of kinds have dots, and no blanks
    if _REPEATS not in sentence:
        return "", note
    return f"{sentence.removesuffix('.')}.", rest


def _left_whole(graph: OpGraph, axes: list[set[str]]) -> list[int]:
    """Ops of both passes that have no row of the batch, though what they read depends on samples."""
    depends = [BATCH in words for words in axes]
    ptr, tensors = graph.inputs
    for op in graph.topological_order.tolist():
        depends[op] |= any(depends[p] for p in graph.tensor_producer[tensors[ptr[op] : ptr[op + 1]]].tolist())
    return [
        op
        for op, is_reached in enumerate(depends)
        if is_reached and BATCH not in axes[op] and graph.phase[op] != Phase.UPDATE
    ]


def _with_samples(graph: OpGraph, axes: list[set[str]]) -> list[bool]:
    """Per op, whether it reads a tensor of an op that can be split along the batch."""
    result = [False] * graph.n_ops
    producers, consumers, _ = graph.edge_list
    for producer, consumer in zip(producers.tolist(), consumers.tolist(), strict=True):
        result[consumer] |= BATCH in axes[producer]
    return result


def _reason(graph: OpGraph, op: int, axes: set[str], reads_samples: bool) -> str:
    if graph.phase[op] == Phase.UPDATE:
        return UPDATES
    if not reads_samples:
        return NO_SAMPLES
    return TOGETHER if axes else NO_RULE
