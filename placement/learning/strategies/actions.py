"""The moves of a search over strategies as a fixed list of actions, the same for every graph and cluster.

`baselines.strategies.searching.moves.neighbours` lists what may follow a strategy. An action says what changes in it,
for example ``"mesh: dp to tp x2"``, so that it means the same wherever it is possible. Where many moves are of one kind
and have no other name, such as cuts of stages, they are numbered.
"""

from __future__ import annotations

from dataclasses import replace

from baselines.strategies.searching.patterns import patterns
from env.cluster import Cluster
from graphs.opgraph import OpGraph
from graphs.rows import op_with_statistics
from graphs.transforms.strategy import AXES, ORDERS, Strategy

STAY = "stay"
SYNCHRONOUS = tuple(order for order in ORDERS if order != "pipedream")
MESH = ("pp", *AXES)
NUMBERED = 8  # moves of a kind that have no name
_FACTORS = (2, 3)
_SCALED = (*(f"x{k}" for k in _FACTORS), *(f"/{k}" for k in _FACTORS))


def _vocabulary() -> tuple[str, ...]:
    words = [STAY, *(f"micro-batches: {scaled}" for scaled in _SCALED)]
    words += [f"mesh: {axis} {change}" for axis in MESH for change in (*_SCALED, "+1", "-1")]
    words += [f"mesh: {a} to {b} x{k}" for a in MESH for b in MESH if a != b for k in _FACTORS]
    words += [f"order: {order}" for order in SYNCHRONOUS]
    words += ["chunks: +1", "chunks: -1", "sequence", "buckets: none", "buckets: smaller", "buckets: larger"]
    words += [f"ZeRO: {level}" for level in range(4)]
    for kind in ("recompute", "stages", "modules", "devices", "shares"):
        words += [f"{kind}: {number}" for number in range(NUMBERED)]
    return tuple(words)


ACTIONS = _vocabulary()
_NUMBER = {action: number for number, action in enumerate(ACTIONS)}


def moves(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> dict[int, Strategy]:
    """The strategies that are one move away, by the number of the action in `ACTIONS`; not all of them are legal.

    Of several with the same action, the first counts. `STAY` is always there.
    """
    from baselines.strategies.searching.moves import neighbours  # loads all transforms

    result = {0: strategy}
    count: dict[str, int] = {}
    for kind, after in neighbours(graph, cluster, strategy):
        action = _named(graph, kind, strategy, after)
        if action is None:
            count[kind] = count.get(kind, -1) + 1
            action = f"{kind}: {count[kind]}"
        if action in _NUMBER:
            result.setdefault(_NUMBER[action], _keeping_statistics(graph, after))
    return result


def _keeping_statistics(graph: OpGraph, strategy: Strategy) -> Strategy:
    """Statistics of a batch are those of the whole batch: parts put theirs together, unless asked for otherwise."""
    if strategy.statistics == "local" or not graph.is_training:
        return strategy
    cut = {word for rule in strategy.mesh if rule.size > 1 for word in AXES[rule.name]}
    is_parted = op_with_statistics(graph.kinds, graph.split_rows, cut) is not None
    return replace(strategy, statistics="sync" if is_parted else "exact")


def _named(graph: OpGraph, kind: str, before: Strategy, after: Strategy) -> str | None:
    """The action of a move; None where its kind is numbered."""
    if kind == "micro-batches":
        return f"{kind}: {_scale(before.micro_batches, after.micro_batches)}"
    if kind == "mesh":
        return f"{kind}: {_resized(before, after)}"
    if kind == "order":
        return f"{kind}: {after.order}"
    if kind == "chunks":
        return f"{kind}: {'+1' if after.virtual_stages > before.virtual_stages else '-1'}"
    if kind == "sequence":
        return kind
    if kind == "buckets":
        size = after.bucket_bytes
        return f"{kind}: {'none' if size == 0 else 'smaller' if size < before.bucket_bytes else 'larger'}"
    if kind == "ZeRO":
        return f"{kind}: {after.zero}"
    if kind == "recompute":
        known = patterns(graph).recomputed
        return f"{kind}: {known.index(after.recompute) if after.recompute in known else NUMBERED}"
    return None


def mesh_sizes(strategy: Strategy) -> dict[str, int]:
    """Sizes of `MESH`, 1 where the strategy has none."""
    return dict.fromkeys(MESH, 1) | {"pp": strategy.stages} | {rule.name: rule.size for rule in strategy.mesh}


def _resized(before: Strategy, after: Strategy) -> str:
    old, new = mesh_sizes(before), mesh_sizes(after)
    shrunk = [name for name in MESH if new[name] < old[name]]
    grown = [name for name in MESH if new[name] > old[name]]
    if len(shrunk) == len(grown) == 1:
        return f"{shrunk[0]} to {grown[0]} {_scale(old[grown[0]], new[grown[0]])}"
    return " ".join(f"{name} {_scale(old[name], new[name])}" for name in (*shrunk, *grown))


def _scale(before: int, after: int) -> str:
    """``"x2"``, ``"/3"``, ``"+1"``: twice as many, a third, one more."""
    for large, small, sign in ((after, before, "x"), (before, after, "/")):
        if large % small == 0 and large // small in _FACTORS:
            return f"{sign}{large // small}"
    return f"{after - before:+d}"
