"""Contiguous splits of a graph into stages: PipeDream's partitioners and the exact dynamic programmes."""
