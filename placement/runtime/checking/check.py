"""`check`: before a strategy is advised it runs on a smaller model, or its ops are computed in parts.

Nothing of that is done, nor torch loaded, where the same was found before.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, fields

from env.cluster import Cluster
from env.lanes import without_lanes
from graphs.opgraph import OpGraph
from graphs.origin import step_of
from placement.results.result import Result
from placement.runtime.checking.findings import load, save
from placement.solving.checked import Checked
from placement.solving.strategy_row import cut_as_found

NO_MODEL = "the graph came without its model"
_FIELDS = {one.name for one in fields(Checked)}


def check(graph: OpGraph, cluster: Cluster, result: Result) -> Checked:
    """Whether the strategy of a result can be carried out on the model, and computes what the whole does.

    Args:
        graph: before the strategy, as it was captured.
        cluster: as it was given.
    """
    step = step_of(graph)
    if step is None:
        return Checked(reason=NO_MODEL)
    strategy, cluster = cut_as_found(result), without_lanes(cluster)
    what = repr((step.identity(), graph.hash, strategy.to_json(), cluster.hash))
    key = hashlib.sha256(what.encode()).hexdigest()[:24]
    known = load().get(key, {})
    if set(known) == _FIELDS:
        return Checked(**known)
    from placement.runtime.checking.strategy_check import check_strategy  # loads torch

    found = check_strategy(graph, step, cluster, result, strategy)
    if not found.reason:
        save({key: asdict(found)})
    return found
