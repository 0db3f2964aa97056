"""Placements by human experts that were published with a workload, from `experts.json` beside this file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from env.problem import Problem
from graphs.opgraph import IntArray

_FILE = Path(__file__).with_name("experts.json")


def expert_device(name: str, problem: Problem) -> IntArray | None:
    """int64 [n]: the published placement of a workload on accelerators 0, 1 and so on; None if there is none.

    Args:
        name: of the file without its ending, the model's name before the first underscore.
        problem: its graph on its cluster; ops that the placement does not name run with their colocation group.
    """
    split = json.loads(_FILE.read_text(encoding="utf-8"))["splits"].get(name.partition("_")[0])
    number = {op: i for i, op in enumerate(problem.graph.op_names)}
    if split is None or f"node{split[0][0][0]}" not in number:
        return None
    device = np.full(problem.graph.n_ops, -1, dtype=np.int64)
    for accelerator, runs in enumerate(split):
        for first, last in runs:
            device[[number[f"node{node}"] for node in range(first, last + 1)]] = accelerator
    for members in problem.units:
        device[members] = device[members].max()
    return device if (device >= 0).all() else None
