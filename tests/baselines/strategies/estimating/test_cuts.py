"""Cuts of a graph with recomputation are those of the graph before, run by run."""

from __future__ import annotations

import numpy as np
import pytest

from baselines.strategies.estimating.cuts import Cuts
from graphs.transforms.recomputing import recompute
from graphs.transforms.strategy import MeshRule
from graphs.zoo.cache import model_graph

FIELDS = (
    *("extent", "whole_flops", "whole_bytes", "whole_time", "written_extent", "written", "read", "state", "halo"),
    *("has_parted_statistics", "sums_bytes"),
)


@pytest.mark.parametrize("patterns", [("*",), ("kind:*scaled_dot_product*",), ("layers.[0-2]",)])
@pytest.mark.parametrize(
    "rule", [MeshRule("dp", 4), MeshRule("tp", 4), MeshRule("tp", 4, sequence=True), MeshRule("cp", 4)]
)
def test_runs_are_cut_as_the_first_one_is(patterns: tuple[str, ...], rule: MeshRule) -> None:
    graph = model_graph("gpt2", train=True)
    runs = recompute(graph, patterns)
    assert runs.graph.n_ops > graph.n_ops
    found = Cuts(runs.graph, runs, Cuts(graph)).along(rule.axis(), [])
    walked = Cuts(runs.graph).along(rule.axis(), [])
    for name in FIELDS:
        assert np.array_equal(getattr(found, name), getattr(walked, name)), name
