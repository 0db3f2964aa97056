"""Operators: one record for each, with its FLOPs, the sizes of its work, and the ways to split it. Loads no torch."""

from graphs.ops import apart, attention, layers, products  # noqa: F401  (they fill the table)
from graphs.ops.table import operator

__all__ = ["operator"]
