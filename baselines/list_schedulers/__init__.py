"""List schedulers: heuristics that build a schedule op by op, such as HEFT."""
