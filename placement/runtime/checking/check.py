"""`check`: before a strategy is advised it runs on a smaller model, or its ops are computed in parts.

Nothing of that is done, nor torch loaded, where the same was found before.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

import graphs
from env.cluster import Cluster
from env.lanes import without_lanes
from graphs.disk import read_json, write_atomically
from graphs.errors import GraphFileError
from graphs.opgraph import OpGraph
from graphs.origin import step_of
from graphs.zoo.cache import cache_dir
from placement.results.result import Result
from placement.solving.checked import Checked
from placement.solving.strategy_row import cut_as_found

_NAME = "checked"

Findings = Mapping[
    str, dict[str, Any]
]  # of a step, strategy and cluster: fields of `placement.solving.checked.Checked`


def load() -> Findings:
    """Known findings; none where the file is none of ours."""
    if not _path().is_file():  # a pipe would wait for a writer
        return {}
    try:
        found = dict(read_json(_path()))
    except (GraphFileError, TypeError, ValueError):
        return {}
    return found if all(type(one) is dict for one in found.values()) else {}


def save(more: Findings) -> None:
    """Add what was found; other processes may have added theirs."""
    import json

    both, path = {**load(), **more}, _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f"{_NAME}-*.json"):
            if old != path:
                old.unlink(missing_ok=True)
        write_atomically(path, json.dumps(both))
    except OSError:
        pass


def _path() -> Path:
    return cache_dir() / f"{_NAME}-{_stamp()}.json"


@cache
def _stamp() -> str:
    """Changes with torch and with our own source."""
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    root = Path(graphs.__file__).parents[1]
    for package in ("graphs", "env", "baselines", "placement"):
        for source in sorted((root / package).rglob("*.py")):
            digest.update(str(source.relative_to(root)).encode() + source.read_bytes())
    return digest.hexdigest()[:16]


NO_MODEL = "the graph came without its model"
_FIELDS = {one.name for one in fields(Checked)}


def check(graph: OpGraph, cluster: Cluster, result: Result) -> Checked:
    """Check that the strategy of a result runs on the model, and computes what the whole does.

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
