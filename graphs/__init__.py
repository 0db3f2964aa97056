"""Operation graphs: what a step computes, and how to capture, read, write, generate and rewrite it.

Capturing from PyTorch is in `graphs.capture`, which imports torch, and the model zoo in `graphs.zoo`.

Names are imported when first used: a registry that stands below loads no numbers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphs.errors import (
        CaptureError,
        ClusterError,
        GraphError,
        GraphFileError,
        InfeasibleError,
        MismatchError,
        PlacementError,
        StrategyError,
        UnknownNameError,
    )
    from graphs.files import load_graph, save_graph
    from graphs.generators import fork_join, layered, random_dag, series_parallel, topcuoglu
    from graphs.opgraph import Op, OpGraph, Origin, Phase, Tensor, Work
    from graphs.rows import Partial, Replicate, Shard, SplitRow, State
    from graphs.transforms.coarsen import by_module, contract, fuse_chains, fuse_elementwise, to_size
    from graphs.transforms.derived import Derived

__all__ = [
    "CaptureError",
    "ClusterError",
    "Derived",
    "GraphError",
    "GraphFileError",
    "InfeasibleError",
    "MismatchError",
    "Op",
    "OpGraph",
    "Origin",
    "Partial",
    "Phase",
    "PlacementError",
    "Replicate",
    "Shard",
    "SplitRow",
    "State",
    "StrategyError",
    "Tensor",
    "UnknownNameError",
    "Work",
    "by_module",
    "contract",
    "fork_join",
    "fuse_chains",
    "fuse_elementwise",
    "layered",
    "load_graph",
    "random_dag",
    "save_graph",
    "series_parallel",
    "to_size",
    "topcuoglu",
]

_HOME = {
    "CaptureError": "graphs.errors",
    "ClusterError": "graphs.errors",
    "Derived": "graphs.transforms.derived",
    "GraphError": "graphs.errors",
    "GraphFileError": "graphs.errors",
    "InfeasibleError": "graphs.errors",
    "MismatchError": "graphs.errors",
    "Op": "graphs.opgraph",
    "OpGraph": "graphs.opgraph",
    "Origin": "graphs.opgraph",
    "Partial": "graphs.rows",
    "Phase": "graphs.opgraph",
    "PlacementError": "graphs.errors",
    "Replicate": "graphs.rows",
    "Shard": "graphs.rows",
    "SplitRow": "graphs.rows",
    "State": "graphs.rows",
    "StrategyError": "graphs.errors",
    "Tensor": "graphs.opgraph",
    "UnknownNameError": "graphs.errors",
    "Work": "graphs.opgraph",
    "by_module": "graphs.transforms.coarsen",
    "contract": "graphs.transforms.coarsen",
    "fork_join": "graphs.generators",
    "fuse_chains": "graphs.transforms.coarsen",
    "fuse_elementwise": "graphs.transforms.coarsen",
    "layered": "graphs.generators",
    "load_graph": "graphs.files",
    "random_dag": "graphs.generators",
    "save_graph": "graphs.files",
    "series_parallel": "graphs.generators",
    "to_size": "graphs.transforms.coarsen",
    "topcuoglu": "graphs.generators",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'graphs' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
