"""Pipelines: contiguous splits of a graph into stages, by PipeDream's partitioners and a dynamic programme."""
