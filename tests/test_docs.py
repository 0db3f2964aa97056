"""The files that docs/files.md shows are read by the real readers, and go together."""

from __future__ import annotations

import re
from pathlib import Path

from env.cluster import Cluster
from graphs.files import load_graph
from placement import optimize

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "files.md").read_text(encoding="utf-8")


def _block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_cluster_and_the_graph_can_be_used_together(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(_block("toml"), encoding="utf-8")
    (tmp_path / "graph.json").write_text(_block("json"), encoding="utf-8")
    cluster = Cluster.from_toml(tmp_path / "mine.toml")
    graph = load_graph(tmp_path / "graph.json")
    assert (cluster.n_devices, graph.n_ops, graph.n_tensors) == (2, 2, 1)
    result = optimize(graph, cluster, seed=0)
    assert result.placement is not None
    assert result.placement["embed"] == "cpu0"
