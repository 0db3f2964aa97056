"""The ladder of a search: replicas, ZeRO, ZeRO with recompute, with tensor parallelism; how far each step gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from baselines.strategies.estimating.estimate import Estimate, Figures
from baselines.strategies.searching.records import Pool
from baselines.strategies.searching.space import EACH_LAYER, Space
from graphs.transforms.strategy import Strategy

RUNGS = ("replicas", "ZeRO", "ZeRO, recompute", "with tensor parallel")


def rung_of(strategy: Strategy) -> str | None:
    """The name among `RUNGS` of a strategy without stages; None for one beside the ladder."""
    axes = {rule.name for rule in strategy.mesh if rule.size > 1}
    if strategy.stages > 1 or strategy.offload or any(rule.tensor_modules or rule.modules for rule in strategy.mesh):
        return None
    if axes == {"dp"}:
        if not strategy.zero:
            return None if strategy.recompute else "replicas"
        return "ZeRO, recompute" if strategy.recompute else "ZeRO"
    return "with tensor parallel" if axes in ({"tp"}, {"dp", "tp"}) else None


def first_rungs(space: Space) -> Iterator[Strategy]:
    """A strategy for each rung but the last, over as many devices as the batch allows; none for inference."""
    n = min(space.n_devices, space.limit("dp"))
    if n > 1 and space.graph.is_training:
        plain = space.strategy({"dp": n})
        yield plain
        yield replace(plain, zero=3)
        yield replace(plain, zero=3, recompute=EACH_LAYER)


def ladder_of(pool: Pool) -> Mapping[str, Figures]:
    """The best of each rung, in their order: the fastest that fits, else the one that lacks least.

    Scores of the simulator where one of the rung was scored and fits, else estimates.
    """
    best: dict[str, Figures] = {}
    for strategy, estimate in pool.estimates.items():
        found = pool.scored.get(strategy, estimate)
        if (name := rung_of(strategy)) is not None and (name not in best or _key(found) < _key(best[name])):
            best[name] = found
    return {name: best[name] for name in RUNGS if name in best}


def _key(found: Figures) -> tuple[int, bool, float, int]:
    return found.missing_bytes, isinstance(found, Estimate), found.step_time_s, len(found.strategy.text)
