"""`beside_one_device`: an answer for which no strategies were searched, with what one device takes, so that it can be
judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from env.cluster import Cluster
from env.plan import Priority
from env.resizing import one_of_each
from env.routes import TABLE_DEVICES
from graphs.errors import InfeasibleError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.results.alternatives import ONE_DEVICE, PLACEMENT, Alternative, listed
from placement.results.result import OWN_ORDER, Result
from placement.solving.methods import SINGLE
from placement.solving.solver import Solver


def beside_one_device(result: Result, graph: OpGraph, cluster: Cluster) -> Result:
    """A result with alternatives: itself and the best single device; as it is if it has some, or no answer.

    Args:
        graph, cluster: before the strategy.
    """
    if result.answer is None or result.alternatives:
        return result
    priority = Priority.LONGEST_PATH.value if result.priority == OWN_ORDER else result.priority
    if cluster.n_devices > TABLE_DEVICES:
        cluster = one_of_each(cluster)
    try:
        solver = Solver(graph, cluster, result.seed, result.objective, priority, search=False, bound_s=0.0)
        single = solver.solve(SINGLE)
    except InfeasibleError:
        single = None
    return with_alternatives(result, [result], single)


def with_alternatives(best: Result, results: Iterable[Result], single: Result | None) -> Result:
    """A result beside others for the same graph and cluster that something runs, and one device.

    Args:
        single: None where the graph fits on no device.
    """
    run = (result for result in results if not result.not_run or result.strategy == best.strategy)
    found = (as_alternative(result, _name(result)) for result in run if result.answer is not None)
    one = Alternative(ONE_DEVICE, Strategy(), None, None) if single is None else as_alternative(single, ONE_DEVICE)
    return dataclasses.replace(best, alternatives=listed([*found, one]))


def as_alternative(result: Result, name: str) -> Alternative:
    """A result under the name of an alternative."""
    return Alternative(name, result.strategy, result.objective_s, result.fullest_bytes, _only_device(result, name))


def _only_device(result: Result, name: str) -> str:
    """The device of a result on one, unless all that compute are like it."""
    if name != ONE_DEVICE or result.answer is None or not result.answer.used:
        return ""
    cluster, used = result.cluster, min(result.answer.used)
    alike = cluster.alike[cluster.compute_devices] == cluster.alike[cluster.device_index[used]]
    return "" if alike.all() else used


def _name(result: Result) -> str:
    from baselines.strategies.searching.families import family_of

    return PLACEMENT if result.strategy.is_none else family_of(result.strategy)
