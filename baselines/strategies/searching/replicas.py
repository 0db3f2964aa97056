"""`placed_replicas` and `score_placed`: meshes of some devices that promise to gain by placing every part on several.

A mesh alone is estimated. Had its part as much to gain by a placement as the graph as it is, the step would take the
product of both shares of one device's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from baselines.budget import Budget
from baselines.strategies.devices import natural_groups, problem_of
from baselines.strategies.estimating.estimate import Estimate
from baselines.strategies.folding import LARGE_OPS, expected_ops
from baselines.strategies.placed import placing_s
from baselines.strategies.searching.records import Pool, Rival
from baselines.strategies.searching.scoring import scoring_s, tried
from baselines.strategies.searching.space import Space, divisors
from env.routes import TABLE_DEVICES
from graphs.transforms.axes import GROUPS
from graphs.transforms.strategy import PLACED, Strategy

Progress = Callable[[str, int, int], None]  # as of a search over strategies
_Estimating = Callable[[Strategy], Estimate | None]


def placed_replicas(space: Space, pool: Pool, estimate: _Estimating, rival: Rival, best_s: float) -> list[Strategy]:
    """Strategies that place every part, the most promising first; none where no placement is known or none may win.

    Args:
        estimate: estimates a strategy, within the budget; None where graph or cluster do not allow it.
        rival: the placement of the graph as it is.
        best_s: step time to beat.
    """
    if math.isinf(rival.known_s):
        return []
    one_s = float(problem_of(space.graph, space.cluster).op_s_on(int(space.cluster.compute_devices[0])).sum())
    found = []
    for strategy, alone_s in _meshes(space, pool, estimate):
        promised_s = alone_s * max(rival.known_s / one_s, 1.0 / strategy.stages)
        if promised_s <= pool.settings.placed_slack * best_s and expected_ops(space.graph, strategy) <= LARGE_OPS:
            found.append((promised_s, strategy))
    found.sort(key=lambda pair: (pair[0], len(pair[1].text), pair[1].text))
    return [strategy for _, strategy in found[: pool.settings.most_placed]]


def score_placed(
    space: Space, pool: Pool, strategies: Sequence[Strategy], budget: Budget, allowed_s: float, progress: Progress
) -> None:
    """Place parts and score them, with updates fused and not, since one placement serves both, in so much work.

    Always in this process, which keeps the placements that it has found for the answer.
    """
    for strategy in strategies:
        begins_s = placing_s(space.graph)
        other = replace(strategy, fused_updates=not strategy.fused_updates)
        for one in (strategy, other) if space.has_launches and strategy.replicas > 1 else (strategy,):
            seconds = begins_s + scoring_s(space.graph, space.cluster, one)
            if budget.over() or seconds > allowed_s or not budget.limit.has_time_for(seconds):
                break
            progress(f"placing {one}", len(pool.scored), len(pool.estimates))
            budget.spend(1, seconds)
            allowed_s, begins_s = allowed_s - seconds, 0.0
            made = tried(space.graph, space.cluster, one).scored
            if made is None:
                break
            pool.scored[one] = made


def _meshes(space: Space, pool: Pool, estimate: _Estimating) -> Iterator[tuple[Strategy, float]]:
    """The best mesh of each number of places on the cluster and its hosts, placed on the rest; and its own step."""
    groups = [(n, names) for n, names in natural_groups(space.cluster) if n <= TABLE_DEVICES]
    for places in sorted({k for n, _ in groups for k in divisors(n)[1:-1]}):
        for axis in ("dp", "tp"):
            if places <= space.limit(axis):
                estimate(space.strategy({axis: places}))
        alone = [
            one
            for one in pool.estimates.values()
            if one.strategy.places == places and one.strategy.stages == 1 and _is_plain(one.strategy)
        ]
        if not alone:
            continue
        best = min(alone, key=lambda one: (one.step_time_s, len(one.strategy.text)))
        for n, names in groups:
            if n % places == 0 and n > places:
                placed = replace(best.strategy, stages=n // places, order=PLACED, device_names=names)
                yield placed, best.step_time_s


def _is_plain(strategy: Strategy) -> bool:
    """Whether nothing is said but a mesh and what its gradients share; the memory of a part is that of several."""
    if strategy.zero:  # without it, two axes of replicas would not be told apart
        return False
    rules = strategy.mesh
    bare = Strategy(rules, fused_updates=strategy.fused_updates, statistics=strategy.statistics)
    return strategy == bare and not any(rule.name == GROUPS or rule.modules or rule.shares for rule in rules)
