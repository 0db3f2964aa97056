"""Coarsening that keeps schedules honest: always acyclic, always expandable back to ops.

Every function gives a `Derived` (see `contraction` for what it promises). Ops of different
phases, or allowed on different device kinds (by their own pins or those of their colocation group), are never merged.
"""

from graphs.op_kinds import ELEMENTWISE
from graphs.transforms.coarsen.contraction import by_module, contract, fuse_chains, fuse_elementwise
from graphs.transforms.coarsen.multilevel import to_size, to_units

__all__ = ["ELEMENTWISE", "by_module", "contract", "fuse_chains", "fuse_elementwise", "to_size", "to_units"]
