"""Operators: one record for each, with its FLOPs, the sizes of its work, and the ways to split it. Loads no torch."""
