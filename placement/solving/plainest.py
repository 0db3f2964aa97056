"""Plain strategies: those that most frameworks have words for, on few devices; what no prediction tells is not worth
more devices or an unusual strategy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphs.transforms.strategy import Strategy

WITHIN = 0.01  # of the step time: a plainer strategy may take so much longer, or as much as predictions are off
_USUAL_ORDERS = ("1f1b", "gpipe", "interleaved")
_PLAIN = Strategy()


def oddities(strategy: Strategy) -> int:
    """How many things a strategy has that frameworks for training mostly lack."""
    rules = strategy.mesh
    has_tp = any(rule.name == "tp" for rule in rules)
    return sum(
        (
            strategy.bucket_bytes != _PLAIN.bucket_bytes,
            bool(strategy.reduce),
            bool(strategy.device_names),
            bool(strategy.cuts),
            strategy.stages > 1 and strategy.order not in _USUAL_ORDERS,
            any(pattern.startswith(("kind:", "!")) for pattern in strategy.recompute),
            strategy.zero == 1 and has_tp,
            *(bool(rule.shares) for rule in rules),
            *(bool(rule.modules) for rule in rules),
            *(bool(rule.tensor_modules) for rule in rules),
        )
    )


def plainness(strategy: Strategy) -> tuple[int, int]:
    """The plainest strategy has the least: devices first, then what is unusual and kinds of parallelism at once."""
    kinds = sum(rule.size > 1 for rule in strategy.mesh) + (strategy.stages > 1)
    return strategy.devices, oddities(strategy) + kinds


def plainer(strategy: Strategy) -> Iterator[Strategy]:
    """Forms of a strategy with fewer `oddities` and the same sizes, plainest first."""
    whole = tuple(replace(rule, shares=(), tensor_modules=()) for rule in strategy.mesh)
    bare = replace(strategy, bucket_bytes=_PLAIN.bucket_bytes, reduce="", device_names=())
    found = (replace(bare, mesh=whole), bare, replace(strategy, bucket_bytes=_PLAIN.bucket_bytes, reduce=""))
    seen = {strategy}
    for one in found:
        if one not in seen and oddities(one) < oddities(strategy):
            seen.add(one)
            yield one
