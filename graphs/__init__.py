"""What is computed: operation graphs, how to capture, read, write, generate and coarsen them."""

from graphs.errors import (
    CaptureError,
    ClusterError,
    GraphError,
    GraphFileError,
    InfeasibleError,
    MismatchError,
    PlacementError,
    UnknownNameError,
)
from graphs.opgraph import Op, OpGraph, Phase, Tensor

__all__ = [
    "CaptureError",
    "ClusterError",
    "GraphError",
    "GraphFileError",
    "InfeasibleError",
    "MismatchError",
    "Op",
    "OpGraph",
    "Phase",
    "PlacementError",
    "Tensor",
    "UnknownNameError",
]
