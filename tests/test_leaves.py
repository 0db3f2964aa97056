"""The core answers without its leaves: rooms that it finds by name, and that may be taken off."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from source_tree import LAYERS, ROOT, import_graph

import placement

LEAVES = ("calibrating", "configurations", "exporters", "fitting", "learning")
# Without the finder of an editable install, which would look in the tree itself for what is not in the copy.
PROGRAM = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import placement
from placement.cli import run
for leaf in sys.argv[1:]:
    try:
        __import__(f"placement.{leaf}")
    except ModuleNotFoundError:
        continue
    sys.exit(f"{leaf} is there")
graph = placement.load_graph("graph.json")
result = placement.optimize(graph, placement.Cluster.preset("4xV100-pcie"), "heft")
assert result.feasible
assert run(["--help"]) == 0
assert run(["optimize", "graph.json", "--cluster", "4xV100-pcie", "--method", "heft"]) == 0
"""


def test_the_core_answers_with_each_leafs_folder_absent(tmp_path: Path) -> None:

    for layer in LAYERS:
        shutil.copytree(ROOT / layer, tmp_path / layer, ignore=shutil.ignore_patterns("__pycache__"))
    for leaf in LEAVES:
        shutil.rmtree(tmp_path / "placement" / leaf)
    model, args = torch.nn.Linear(8, 2), torch.randn(4, 8)
    placement.save_graph(placement.capture(model, args), tmp_path / "graph.json")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, *LEAVES], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert "graph on 4xV100-pcie, method heft" in found.stdout


def test_no_leaf_is_loaded_by_what_is_none() -> None:
    def leaf(module: str) -> str:
        return next((name for name in LEAVES if f"{module}.".startswith(f"placement.{name}.")), "")

    comparing = "placement.comparing."  # configurations beside ours, which only --config loads
    graph = import_graph(at_load=True)
    wrong = [
        f"{module} imports {other}"
        for module, other in graph.edges
        if leaf(other) and leaf(module) != leaf(other) and not leaf(module) and not module.startswith(comparing)
    ]
    assert sorted(wrong) == []
