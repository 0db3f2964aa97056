"""Transforms: graph in, graph out, without knowing devices or times; a room for each, and a `Strategy` lists them.

Coarsening has its own front door, `graphs.transforms.coarsen`.
"""

from graphs.transforms.collectives import bucketed, reduce
from graphs.transforms.derived import Collective, Derived, MeshAxis
from graphs.transforms.optimizers import with_optimizer
from graphs.transforms.recomputing import recompute, recompute_stretches
from graphs.transforms.sequencing import sequenced
from graphs.transforms.splitting import Axis, Zero, chunk, shard, split
from graphs.transforms.stacks import STACKS, fused, kernels_of, on_stack, stack_of
from graphs.transforms.strategy import Strategy

__all__ = [
    "STACKS",
    "Axis",
    "Collective",
    "Derived",
    "MeshAxis",
    "Strategy",
    "Zero",
    "bucketed",
    "chunk",
    "fused",
    "kernels_of",
    "on_stack",
    "recompute",
    "recompute_stretches",
    "reduce",
    "sequenced",
    "shard",
    "split",
    "stack_of",
    "with_optimizer",
]
