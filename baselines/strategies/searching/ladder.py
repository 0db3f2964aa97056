"""The ladder of a search: replicas, ZeRO, with recompute, with hosts, tensor parallelism; how far each step gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from baselines.strategies.estimating.estimate import Estimate, Figures
from baselines.strategies.searching.records import Pool
from baselines.strategies.searching.saving import Saving, savings
from baselines.strategies.searching.space import EACH_LAYER, Space, may_offload
from graphs.transforms.strategy import OPTIMIZER, PARAMETERS, Strategy

RUNGS = ("replicas", "ZeRO", "ZeRO, recompute", "with offload", "with tensor parallel")


def rung_of(strategy: Strategy) -> str | None:
    """The name among `RUNGS` of a strategy without stages; None for one beside the ladder."""
    axes = {rule.name for rule in strategy.mesh if rule.size > 1}
    if strategy.stages > 1 or any(rule.tensor_modules or rule.modules for rule in strategy.mesh):
        return None
    if strategy.offload:
        return "with offload" if axes <= {"dp"} else None
    if axes == {"dp"}:
        if not strategy.zero:
            return None if strategy.recompute else "replicas"
        return "ZeRO, recompute" if strategy.recompute else "ZeRO"
    return "with tensor parallel" if axes in ({"tp"}, {"dp", "tp"}) else None


def first_rungs(space: Space) -> Iterator[Strategy]:
    """Strategies for each rung but the last, over as many devices as the batch allows; none for inference.

    All steps of `savings` are among them, so that the rung is never worse than all made again, or a part.
    """
    n = min(space.n_devices, space.limit("dp"))
    plain = space.strategy({"dp": n})
    ways = [Saving(EACH_LAYER), *savings(space.graph, space.cluster).all()] if space.graph.is_training else []
    if n > 1 and space.graph.is_training:
        yield plain
        plain = replace(plain, zero=3)
        yield plain
        yield from (replace(plain, recompute=way.recompute) for way in ways if not way.offload)
    if may_offload(space.graph, space.cluster, plain):
        yield replace(plain, offload=(OPTIMIZER,))
        yield from (replace(plain, recompute=way.recompute, offload=way.offload) for way in ways if way.offload)
        yield from (replace(plain, recompute=way.recompute, offload=(OPTIMIZER, *way.offload)) for way in ways)
        yield from (replace(plain, recompute=again, offload=(PARAMETERS,)) for again in ((), EACH_LAYER))


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
