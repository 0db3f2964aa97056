"""Pipelines: contiguous splits of a graph into stages, by PipeDream's partitioners and exact dynamic programmes."""
