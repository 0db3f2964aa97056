"""Published heuristics, one file each: plain functions from a problem and a seed to a plan."""

from __future__ import annotations

from collections.abc import Mapping

from baselines.batch_split import batch_split
from baselines.critical_path import critical_path
from baselines.dfs import dfs
from baselines.divide_path import divide_path
from baselines.expert import expert
from baselines.hash import hash_placement
from baselines.heft import heft
from baselines.mite import mite
from baselines.plan import Method, Plan
from baselines.random import random_placement
from baselines.round_robin import round_robin
from baselines.sequential_fill import sequential_fill
from baselines.single_device import single_device

METHODS: Mapping[str, Method] = {
    "single_device": single_device,
    "random": random_placement,
    "round_robin": round_robin,
    "hash": hash_placement,
    "batch_split": batch_split,
    "critical_path": critical_path,
    "divide_path": divide_path,
    "mite": mite,
    "dfs": dfs,
    "heft": heft,
    "expert": expert,
    "sequential_fill": sequential_fill,
}

__all__ = ["METHODS", "Method", "Plan"]
