"""Heuristics that build a schedule op by op: HEFT and its relatives."""
