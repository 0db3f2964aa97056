"""The path from one strategy to another in single changes, the most helpful first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baselines.strategies.estimating.estimate import Figures
from graphs.errors import PlacementError
from graphs.formatting import format_bytes
from graphs.transforms.axes import AXES, GROUPS
from graphs.transforms.strategy import AFTER_ALL, MeshRule, Strategy

# Parts of a strategy that change together, in the order in which equal gains are told.
DEGREES, GROUPING, ZERO, SEQUENCE, CONTEXT, ORDER, MICRO, RECOMPUTE, OFFLOAD, BUCKET, UPDATES, REDUCE = PARTS = (
    *("degrees", "ZeRO shards", "ZeRO", "sequence parallelism", "context parallelism", "order", "micro-batches"),
    *("recompute", "offload", "buckets", "updates", "collectives"),
)


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes:
        parts: of the strategy that change, of `PARTS`.
        before, after: the strategies.
        words: ``"recompute layers.* -> nothing"``.
    """

    parts: tuple[str, ...]
    before: Strategy
    after: Strategy
    words: str


def parts_of(strategy: Strategy) -> dict[str, Any]:
    """Parts by names of `PARTS`, None where the degrees leave no choice; `strategy_with` makes the strategy again."""
    rules = {rule.name: rule for rule in strategy.mesh}
    inner = rules.get("dp", MeshRule("dp", 1))
    plain = [rule for rule in strategy.mesh if rule.name not in (GROUPS, "dp")]
    degrees = tuple(replace(rule, sequence=False, by_heads=False, is_ring=False) for rule in plain)
    tensor, context = rules.get("tp"), rules.get("cp")
    return {
        DEGREES: (replace(inner, size=strategy.replicas), degrees, strategy.stages, strategy.device_names),
        GROUPING: (inner.size if GROUPS in rules else 0) if strategy.zero else None,
        ZERO: strategy.zero if strategy.storage_parts > 1 else None,
        SEQUENCE: None if tensor is None else tensor.sequence,
        CONTEXT: None if context is None else (context.by_heads, context.is_ring),
        ORDER: (strategy.order, strategy.chunks, strategy.cuts) if strategy.stages > 1 else None,
        MICRO: strategy.micro_batches,
        RECOMPUTE: strategy.recompute,
        OFFLOAD: strategy.offload,
        BUCKET: strategy.bucket_bytes,
        UPDATES: strategy.fused_updates,
        REDUCE: (strategy.reduce, strategy.statistics),
    }


def strategy_with(parts: Mapping[str, Any]) -> Strategy:
    """The strategy of some parts; those that its degrees leave no room for, as ZeRO without replicas, are left out.

    Raises:
        StrategyError: the parts do not go together.
    """
    replicas, degrees, stages, devices = parts[DEGREES]
    rules = [rule for rule in degrees if rule.size > 1]
    rules = [replace(rule, sequence=bool(parts[SEQUENCE])) if rule.name == "tp" else rule for rule in rules]
    by_heads, is_ring = parts[CONTEXT] or (False, False)
    rules = [replace(rule, by_heads=by_heads, is_ring=is_ring) if rule.name == "cp" else rule for rule in rules]
    order, chunks, cuts = parts[ORDER] or (Strategy.order, 1, ())
    if stages == 1:
        order, chunks, cuts = Strategy.order, 1, ()
    found = Strategy(
        mesh=(*([replicas] if replicas.size > 1 else []), *rules),
        stages=stages,
        order=order,
        chunks=chunks,
        micro_batches=parts[MICRO],
        zero=0,
        recompute=parts[RECOMPUTE],
        offload=parts[OFFLOAD],
        reduce=parts[REDUCE][0],
        bucket_bytes=parts[BUCKET],
        fused_updates=parts[UPDATES],
        statistics=parts[REDUCE][1],
        device_names=devices,
    )
    if zero := (parts[ZERO] or 0) if found.storage_parts > 1 else 0:
        is_plain = replicas.size > 1 and replicas == MeshRule("dp", replicas.size)
        found = found.grouped(parts[GROUPING] or 0, zero) if is_plain else replace(found, zero=zero)
    return replace(found, cuts=cuts) if len(cuts) == found.virtual_stages - 1 else found


def changes_between(begin: Strategy, end: Strategy, estimate: Callable[[Strategy], Figures]) -> tuple[Change, ...]:
    """Changes from one strategy to another, at each point the one that makes the step shortest.

    A strategy that fits comes before one that does not, and one that lacks less before one that lacks more. Changes
    that nobody gains from are one, the last.

    Args:
        estimate: time and memory of a strategy; raises `PlacementError` where it cannot be.
    """
    target = parts_of(end)
    now, found = begin, list[Change]()
    left = _left(now, target)
    while left and now != end:
        best = min(_candidates(now, target, left, estimate), key=lambda one: one[0], default=None)
        if best is None:
            break
        _, part, after = best
        found.append(_change((part,), now, after))
        now, left = after, [each for each in _left(after, target) if each != part]
    if now != end:
        found.append(_change(tuple(left), now, end))
    return tuple(found)


def together(first: Change, second: Change) -> Change:
    """Merge two consecutive changes into one."""
    parts = tuple(part for part in PARTS if part in (*first.parts, *second.parts))
    return _change(parts, first.before, second.after)


def without_part(begin: Strategy, end: Strategy, part: str) -> Strategy | None:
    """The strategy `end` with one part as in `begin`; None if the rest leaves no choice of it."""
    old, new = parts_of(begin), parts_of(end)
    if None in (old[part], new[part]) or old[part] == new[part]:
        return None
    try:
        found = strategy_with({**new, part: old[part]})
    except PlacementError:
        return None
    return None if found == end else found


def _left(now: Strategy, target: Mapping[str, Any]) -> list[str]:
    """Parts in which the two strategies differ and both have a choice."""
    have = parts_of(now)
    return [part for part in PARTS if None not in (have[part], target[part]) and have[part] != target[part]]


def _candidates(
    now: Strategy, target: Mapping[str, Any], left: Sequence[str], estimate: Callable[[Strategy], Figures]
) -> Iterator[tuple[tuple[int, float, int], str, Strategy]]:
    """Yield a rank, the part and the strategy for each part that can be changed next."""
    for place, part in enumerate(left):
        try:
            have = {name: target[name] if value is None else value for name, value in parts_of(now).items()}
            after = strategy_with({**have, part: target[part]})
            if after == now:
                continue
            figures = estimate(after)
        except PlacementError:
            continue
        yield (figures.missing_bytes, figures.step_time_s, place), part, after


def _change(parts: tuple[str, ...], before: Strategy, after: Strategy) -> Change:
    said = []
    for part in parts:
        old, new = (_value(part, strategy) for strategy in (before, after))
        if old != new and old and new:
            said.append(f"{part} {old} -> {new}")
    return Change(parts, before, after, ", ".join(said) or f"{before.text} -> {after.text}")


def _value(part: str, strategy: Strategy) -> str:
    """A part in words; "" if the degrees leave no choice."""
    value = parts_of(strategy)[part]
    if value is None:
        return ""
    if part == DEGREES:  # "data 4 x tensor 2 x pipeline 2"
        plain = [rule for rule in strategy.mesh if rule.name not in (GROUPS, "dp")]
        sizes = {"data": strategy.replicas} | {AXES[rule.name].label.split()[0]: rule.size for rule in plain}
        sizes["pipeline"] = strategy.stages
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one device"
    if part == GROUPING:
        return f"over {value} of {strategy.replicas} replicas" if value else f"over all {strategy.replicas} replicas"
    if part in (SEQUENCE, UPDATES):
        return {SEQUENCE: ("off", "on"), UPDATES: ("one by one", "fused")}[part][value]
    if part == CONTEXT:
        return {(False, False): "gathered", (True, False): "by heads", (False, True): "in a ring"}[value]
    if part == ORDER:
        each = f" with {value[1]} stages a device" if value[1] > 1 else ""
        return f"{value[0]}{each}{' cut at layers' if value[2] else ''}"
    if part in (RECOMPUTE, OFFLOAD):
        text = "+".join(value) or "nothing"
        return text if len(text) <= 60 else f"{'+'.join(value[:2])} and {len(value) - 2} more"
    if part == BUCKET:
        each = f"of {format_bytes(value)}" if value else "of one gradient each"
        return "after the backward pass" if value >= AFTER_ALL else each
    if part == REDUCE:
        return value[0] or "the quickest"
    return str(value or "none")  # ZeRO, micro-batches
