"""`placement.suite`: a row for each problem, and a file that a stopped suite goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import placement
from env.cluster import Cluster, Device, both_ways
from graphs.errors import PlacementError, UnknownNameError
from graphs.opgraph import Op, OpGraph
from placement.comparing import cases

METHODS = ("heft", "single_device")
CLUSTERS = (Cluster.preset("2xK40-pcie"), Cluster.preset("4xK40-pcie"))
SIDE_BY_SIDE = OpGraph.build([Op(name, time_s={"*": 1e-3}) for name in "abcd"], [], "side_by_side")
ALONE = OpGraph.build([Op("a", time_s={"*": 1e-3})], [], "alone")
TOO_BIG = OpGraph.build([Op("a", kept_bytes=2**50, time_s={"*": 1.0})], [], "too_big")


def test_every_graph_on_every_cluster_has_its_row() -> None:
    found = placement.suite([SIDE_BY_SIDE, ALONE], CLUSTERS, METHODS)
    assert [(row.graph, row.cluster) for row in found.rows] == [
        (graph.name, cluster.name) for graph in (SIDE_BY_SIDE, ALONE) for cluster in CLUSTERS
    ]
    # Four ops of a millisecond that do not depend on each other: two on each of two devices, then one on each of four.
    assert [row.step_time_s for row in found.rows] == pytest.approx([2e-3, 1e-3, 1e-3, 1e-3])
    assert [row.speedup for row in found.rows] == pytest.approx([2, 4, 1, 1])
    assert [(row.best, row.ties) for row in found.rows] == [("heft", ())] * 2 + [("single_device", ("heft",))] * 2
    assert not found.interrupted
    assert len(json.loads(found.to_json())["results"]) == 4


def test_strategies_compete_where_they_are_asked_for() -> None:
    """A batch is trained in two halves, which no placement does."""
    model, inputs = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))), torch.randn(512, 64)
    graph = placement.capture(model, (inputs,), train=True)
    devices = [Device(f"core{k}", "cpu", 2**30, {"float32": 1e8}, 1e12) for k in range(2)]
    cluster = Cluster("pair", tuple(devices), tuple(both_ways("core0", "core1", 1e10, 1e-7)))
    (without,) = placement.suite([graph], [cluster], METHODS, evaluations=300).rows
    (found,) = placement.suite([graph], [cluster], METHODS, strategies=True, evaluations=300).rows
    assert (without.strategies, without.strategy, found.strategies) == (False, "none", True)
    assert found.best == "strategy"
    assert found.step_time_s == placement.optimize(graph, cluster, strategy=found.strategy).step_time_s
    assert found.speedup is not None
    assert found.speedup > 1.5
    suite = placement.Suite((found,))
    assert suite.headline().startswith("a strategy is best, or as good, on 1 of 1 problems")
    assert suite.to_dict()["results"][0]["strategy"] == found.strategy


def test_what_is_wrong_with_one_problem_is_a_row_that_says_why() -> None:
    big, small = placement.suite([TOO_BIG, ALONE], CLUSTERS[:1], METHODS).rows
    assert (big.best, big.step_time_s, big.speedup) == (None, None, None)
    assert big.reason
    assert small.best == "single_device"


def test_a_stopped_suite_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    done: list[str] = []
    whole = placement.suite([SIDE_BY_SIDE, ALONE], CLUSTERS, METHODS)

    def stopped(graph: OpGraph, cluster: Cluster, *rest: Any, **named: Any) -> placement.Comparison:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(graph.name)
        return placement.compare(graph, cluster, *rest, **named)

    monkeypatch.setattr(cases, "compare", stopped)
    first = placement.suite([SIDE_BY_SIDE, ALONE], CLUSTERS, METHODS, file=file)
    assert first.interrupted
    assert first.rows == whole.rows[:2]
    with file.open("a", encoding="utf-8") as lines:
        lines.write('{"graph": "alo')  # what a killed run leaves
    done.clear()
    assert placement.suite([SIDE_BY_SIDE, ALONE], CLUSTERS, METHODS, file=file) == whole
    assert done == ["alone", "alone"]
    assert len(file.read_text(encoding="utf-8").splitlines()) == 4


def test_another_seed_is_another_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for seed in (0, 1, 0):
        (row,) = placement.suite([ALONE], CLUSTERS[:1], METHODS, seed=seed, file=file).rows
        assert row.seed == seed
    assert len(file.read_text(encoding="utf-8").splitlines()) == 2


@pytest.mark.parametrize("text", ["notes\n", "notes", "[]\n", '{"graph": "g"}\n'])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(PlacementError, match="line 1, should be a row of a suite"):
        placement.suite([ALONE], CLUSTERS[:1], METHODS, file=file)
    assert file.read_text(encoding="utf-8") == text


def test_an_unknown_method_is_refused_before_the_work() -> None:
    with pytest.raises(UnknownNameError, match="hefty"):
        placement.suite([ALONE], CLUSTERS[:1], ["hefty"])


def test_names_are_no_graphs_and_no_clusters() -> None:
    wrong: list[Any] = ["4xV100-pcie"]
    with pytest.raises(ValueError, match=r"expected a Cluster, got str '4xV100-pcie': use placement\.Cluster\.preset"):
        placement.suite([ALONE], wrong, METHODS)
    with pytest.raises(ValueError, match="expected an OpGraph, got str"):
        placement.suite(wrong, CLUSTERS, METHODS)
