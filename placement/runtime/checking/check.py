"""`check`: before a strategy is advised, its programs are written, and each kind of call that they make is computed.

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
from placement.runtime.checking.findings import Findings, load, save
from placement.solving.checked import Checked
from placement.solving.strategy_row import cut_as_found

FROM_FILE = "the graph came from a file"
_FIELDS = {one.name for one in fields(Checked)}


def check(graph: OpGraph, cluster: Cluster, result: Result) -> Checked:
    """Whether the strategy of a result can be carried out on the model, and its parts compute what the whole does.

    Args:
        graph: before the strategy, as it was captured.
        cluster: as it was given.
    """
    step = step_of(graph)
    if step is None:
        return Checked(reason=FROM_FILE)
    strategy, cluster, known = cut_as_found(result), without_lanes(cluster), load()
    what = repr((step.identity(), graph.hash, strategy.to_json(), cluster.hash))
    key = hashlib.sha256(what.encode()).hexdigest()[:24]
    if set(known.strategies.get(key, {})) == _FIELDS:
        return Checked(**known.strategies[key])
    from placement.runtime.checking.strategy_check import check_strategy  # loads torch

    program = step.program()
    if program.graph.op_names != graph.op_names:
        return Checked(reason="the graph is none that was captured here")
    found, verdicts = check_strategy(graph, program, cluster, strategy, known.uses)
    save(Findings(verdicts, {key: asdict(found)}))
    return found
