"""Operation graphs: what a step computes, and how to capture, read, write, generate and rewrite it.

Capturing from PyTorch is in `graphs.capture`, which imports torch, and the model zoo in `graphs.zoo`.

Names are imported when first used: a registry that stands below loads no numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphs.entry_points import lazy

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
    from graphs.records import Partial, Replicate, Shard, SplitRow, State
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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "graphs.errors": "CaptureError ClusterError GraphError GraphFileError InfeasibleError "
        "MismatchError PlacementError StrategyError UnknownNameError",
        "graphs.transforms.derived": "Derived",
        "graphs.opgraph": "Op OpGraph Origin Phase Tensor Work",
        "graphs.records": "Partial Replicate Shard SplitRow State",
        "graphs.transforms.coarsen": "by_module contract fuse_chains fuse_elementwise to_size",
        "graphs.generators": "fork_join layered random_dag series_parallel topcuoglu",
        "graphs.files": "load_graph save_graph",
    },
)
