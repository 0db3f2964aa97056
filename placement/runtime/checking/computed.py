"""`computed`: a strategy's programs written, and each kind of call in them computed, whole and in parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from baselines.strategies.applied import applied
from baselines.strategies.folding import LARGE_OPS, expected_ops
from env.cluster import Cluster
from graphs.capture.program import Program
from graphs.errors import PlacementError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.runtime.checking.computing import DIFFERS, NOT_COMPUTED, SAME, verdict
from placement.runtime.checking.uses import uses_of
from placement.runtime.program.functional import functional
from placement.runtime.sharded.plan import StrategyPlan
from placement.runtime.sharded.values import Values
from placement.solving.checked import Checked

_TOO_LARGE = "the programs of its ranks are too many to be written here"


def computed(
    graph: OpGraph, program: Program, cluster: Cluster, strategy: Strategy, known: Mapping[str, str]
) -> tuple[Checked, dict[str, str]]:
    """What is found of a strategy, and the verdicts of the uses that were new.

    Args:
        known: verdicts by the signature of the use.
    """
    new: dict[str, str] = {}
    narrow = _narrowed(graph, strategy)
    if expected_ops(graph, narrow) > LARGE_OPS:
        return Checked(reason=_TOO_LARGE), new
    counts = dict.fromkeys((SAME, NOT_COMPUTED), 0)
    try:
        plan = StrategyPlan(Values(functional(program), applied(graph, cluster, narrow)))
        for signature, name, use in uses_of(plan):
            if signature not in known and signature not in new:
                new[signature] = verdict(use())
            found = known[signature] if signature in known else new[signature]
            if found == DIFFERS:
                return Checked(problem=f"{name} makes other numbers in parts than as a whole"), new
            counts[found] += 1
    except PlacementError as error:
        return Checked(problem=f"it cannot be carried out: {str(error).rstrip('.')}"), new
    except Exception as error:  # which nobody foresaw; it would end the ranks, too
        return Checked(problem=f"its programs cannot be written ({type(error).__name__}: {error})"), new
    return Checked(counts[SAME], counts[NOT_COMPUTED]), new


def _narrowed(graph: OpGraph, strategy: Strategy) -> Strategy:
    """A strategy with fewer replicas where its graph would be too large: one is like another."""
    while expected_ops(graph, strategy) > LARGE_OPS:
        mesh = tuple(
            replace(rule, size=rule.size // 2) if rule.name == "dp" and rule.size % 4 == 0 else rule
            for rule in strategy.mesh
        )
        if mesh == strategy.mesh:
            return strategy
        strategy = replace(strategy, mesh=mesh, device_names=())
    return strategy
