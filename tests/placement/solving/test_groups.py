"""Where ops times devices are too many, groups of ops are placed, and plans are scored op by op all the same."""

from __future__ import annotations

import pytest

import placement
from env.cluster import Cluster
from env.objectives import OBJECTIVES
from graphs.generators import layered
from placement.solving import solver


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("method", ["single_device", "hash", "local_search", "auto"])
def test_groups_are_placed_and_ops_are_scored(method: str, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = layered(60, seed=0, ccr=0.2), Cluster.preset("mixed-gpus")
    given = {"objective": objective} | ({"evaluations": 200} if method in ("local_search", "auto") else {})
    monkeypatch.setattr(solver, "TABLE_ENTRIES", 60)
    found = placement.optimize(graph, cluster, method, **given)
    assert found.note == "placed in 15 groups: on so many devices, 60 ops are too many to weigh one by one"
    assert placement.verify(found).holds
    assert found.lower_bound_s <= (found.objective_s or 0.0)
    monkeypatch.setattr(solver, "TABLE_ENTRIES", 240)
    alone = placement.optimize(graph, cluster, method, **given)
    assert alone.note == ""
    if method == "single_device":
        assert alone.objective_s == pytest.approx(found.objective_s)
